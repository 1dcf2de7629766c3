"""Small CuTe DSL kernels that the machine is tested on: one source for both architectures.

Each is compiled once per process by `compiled`; its object and PTX lie in a temporary folder.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.device.tensor_memory import fence_after

F32, BF16 = cutlass.Float32, cutlass.BFloat16
Agent, Group = pipeline.Agent, pipeline.CooperativeGroup
ARCHS = ("sm_90a", "sm_100a")


# ---- engines: the MMA and its accumulators ----
class Sm90:
    """wgmma: 64 x N accumulators in the registers of one warpgroup."""

    def __init__(self, tile, dtype, stages, threads, majors="KK"):
        self.tile, self.dtype, self.stages, self.threads, self.majors = tile, dtype, stages, threads, majors

    def operand_majors(self):
        return [OperandMajorMode.K if x == "K" else OperandMajorMode.MN for x in self.majors]

    def tiled_mma(self):
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, *self.operand_majors(), F32, (1, 1, 1), tiler_mn=(64, self.tile[1])
        )

    def pipeline(self, mbar, tx):
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            barrier_storage=mbar,
            tx_count=tx,
            producer_group=Group(Agent.Thread),
            consumer_group=Group(Agent.Thread, 4),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )

    def begin(self, tiled_mma, storage, tidx, sA, sB):
        thr = tiled_mma.get_slice(tidx)
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile[:2]), F32)
        return acc, tiled_mma.make_fragment_A(thr.partition_A(sA)), tiled_mma.make_fragment_B(thr.partition_B(sB))

    @cute.jit
    def mma(self, tiled_mma, acc, tCrA, tCrB, pipe, state, warp_idx, k_tiles: cutlass.Constexpr):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for _ in cutlass.range_constexpr(k_tiles):
            pipe.consumer_wait(state)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(tiled_mma, acc, tCrA[None, None, kb, state.index], tCrB[None, None, kb, state.index], acc)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            pipe.consumer_release(state)
            state.advance()

    def read(self, tiled_mma, acc, tidx):
        return acc, tiled_mma.get_slice(tidx).partition_C(cute.make_identity_tensor(self.tile[:2]))

    def end(self):
        pass


class Sm100(Sm90):
    """tcgen05: M x N accumulators in tensor memory, issued by one warp, read by four."""

    def tiled_mma(self):
        return sm100_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, *self.operand_majors(), F32, tcgen05.CtaGroup.ONE, self.tile[:2]
        )

    def pipeline(self, mbar, tx):
        return pipeline.PipelineTmaUmma.create(
            num_stages=self.stages,
            barrier_storage=mbar,
            tx_count=tx,
            producer_group=Group(Agent.Thread),
            consumer_group=Group(Agent.Thread),
        )

    def begin(self, tiled_mma, storage, tidx, sA, sB):
        thr = tiled_mma.get_slice(0)
        retrieve = pipeline.NamedBarrier(barrier_id=1, num_threads=self.threads)
        self.tmem = memory.TmemAllocator(storage.tmem_ptr.ptr, barrier_for_retrieve=retrieve)
        self.tmem.allocate(max(32, self.tile[1]))
        self.done = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            barrier_storage=storage.acc_mbar.data_ptr(),
            producer_group=Group(Agent.Thread),
            consumer_group=Group(Agent.Thread, 128),
        )
        self.tmem.wait_for_alloc()
        self.base = self.tmem.retrieve_ptr(F32)
        layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self.tile[:2])).layout
        fragments = tiled_mma.make_fragment_A(thr.partition_A(sA)), tiled_mma.make_fragment_B(thr.partition_B(sB))
        return cute.make_tensor(self.base, layout), *fragments

    @cute.jit
    def mma(self, tiled_mma, acc, tCrA, tCrB, pipe, state, warp_idx, k_tiles: cutlass.Constexpr):
        if warp_idx == 0:
            done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
            tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range_constexpr(k_tiles):
                pipe.consumer_wait(state)
                for kb in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    cute.gemm(tiled_mma, acc, tCrA[None, None, kb, state.index], tCrB[None, None, kb, state.index], acc)
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                pipe.consumer_release(state)
                state.advance()
            self.done.producer_commit(done)

    def read(self, tiled_mma, acc, tidx):
        self.tmem.relinquish_alloc_permit()
        self.done.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
        fence_after()
        m, n, _ = self.tile
        repeat = tcgen05.Repetition
        op = tcgen05.Ld16x256bOp(repeat(n // 8)) if m == 64 else tcgen05.Ld32x32bOp(repeat(n))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, F32), acc[(None, None), 0, 0])
        thr = copy.get_slice(tidx)
        identity = cute.make_identity_tensor((m, n))
        cC = thr.partition_D(tiled_mma.get_slice(0).partition_C(identity)[(None, None), 0, 0])
        r = cute.make_rmem_tensor(cC.shape, F32)
        cute.copy(copy, thr.partition_S(acc[(None, None), 0, 0]), r)
        cute.arch.fence_view_async_tmem_load()
        return r, cC

    def end(self):
        pipeline.sync(barrier_id=1)
        self.tmem.free(self.base)


def engine(arch, *args, **kwargs):
    return (Sm90 if arch == "sm_90a" else Sm100)(*args, **kwargs)


# ---- kernels ----
class Elementwise:
    """y = exp(x) where x > 1/2, else sin(100 x) + log1p(exp(x))."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        n = cute.size(x)
        self.kernel(x, y, n).launch(grid=[(n + 255) // 256, 1, 1], block=[256, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
        i = cute.arch.block_idx()[0] * 256 + cute.arch.thread_idx()[0]
        if i < n:
            v = x[i]
            if v > 0.5:  # noqa: SIM108 (a branch, not a select)
                v = cute.math.exp(v)
            else:
                v = cute.math.sin(v * 100.0) + cute.math.log1p(cute.math.exp(v))
            y[i] = v


class Gemm:
    """D[i, j] = sum_k A[i, k] B[j, k] for j <= i in the tile, else 0. `ring`: one more warp loads."""

    def __init__(self, e, k_tiles, ring):
        self.e, self.k_tiles, self.ring = e, k_tiles, ring

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, stream: cuda.CUstream):
        e = self.e
        m, n, k = e.tile
        layout = [utils.LayoutEnum.ROW_MAJOR if x == "K" else utils.LayoutEnum.COL_MAJOR for x in e.majors]
        a_layout = sm90_utils.make_smem_layout_a(layout[0], e.tile, e.dtype, e.stages)  # (m, k, stages)
        b_layout = sm90_utils.make_smem_layout_b(layout[1], e.tile, e.dtype, e.stages)
        g2s = cpasync.CopyBulkTensorTileG2SOp()
        atomA, tA = cpasync.make_tiled_tma_atom(g2s, mA, cute.slice_(a_layout, (None, None, 0)), (m, k))
        atomB, tB = cpasync.make_tiled_tma_atom(g2s, mB, cute.slice_(b_layout, (None, None, 0)), (n, k))

        @cute.struct
        class Storage:
            ab_mbar: cute.struct.MemRange[cutlass.Int64, e.stages * 2]
            acc_mbar: cute.struct.MemRange[cutlass.Int64, 2]
            tmem_ptr: cutlass.Int32
            sA: cute.struct.Align[cute.struct.MemRange[e.dtype, cute.cosize(a_layout)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[e.dtype, cute.cosize(b_layout)], 1024]

        self.Storage = Storage
        self.kernel(e.tiled_mma(), atomA, tA, atomB, tB, mD, a_layout, b_layout).launch(
            grid=(cute.size(mD, mode=[0]) // m, 1, 1), block=(e.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        atomA: cute.CopyAtom,
        mA: cute.Tensor,
        atomB: cute.CopyAtom,
        mB: cute.Tensor,
        mD: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        e = self.e
        m, n, k = e.tile
        tidx, bidx = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.Storage)
        sA = storage.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)  # (m, k, stages)
        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)  # (n, k, stages)
        pipe = e.pipeline(storage.ab_mbar.data_ptr(), (m + n) * k * e.dtype.width // 8)
        acc, tCrA, tCrB = e.begin(tiled_mma, storage, tidx, sA, sB)
        one = cute.make_layout(1)
        gA, gB = cute.local_tile(mA, (m, k), (bidx, None)), cute.local_tile(mB, (n, k), (0, None))
        tAsA, tAgA = cpasync.tma_partition(atomA, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        tBsB, tBgB = cpasync.tma_partition(atomB, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
        cute.arch.sync_threads()
        if warp_idx == (4 if self.ring else 0):
            put = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, e.stages)
            for _ in cutlass.range_constexpr(self.k_tiles):
                pipe.producer_acquire(put)
                bar = pipe.producer_get_barrier(put)
                cute.copy(atomA, tAgA[None, put.count], tAsA[None, put.index], tma_bar_ptr=bar)
                cute.copy(atomB, tBgB[None, put.count], tBsB[None, put.index], tma_bar_ptr=bar)
                pipe.producer_commit(put)
                put.advance()
        get = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, e.stages)
        if warp_idx < 4:
            self.consume(tiled_mma, acc, tCrA, tCrB, pipe, get, warp_idx, tidx, bidx, mD)
        e.end()

    @cute.jit
    def consume(self, tiled_mma, acc, tCrA, tCrB, pipe, get, warp_idx, tidx, bidx, mD):
        e = self.e
        m, n, _ = e.tile
        e.mma(tiled_mma, acc, tCrA, tCrB, pipe, get, warp_idx, self.k_tiles)
        rAcc, cAcc = e.read(tiled_mma, acc, tidx)  # registers, and (row, column) of each
        gD = cute.local_tile(mD, (m, n), (bidx, 0))
        for v in cutlass.range_constexpr(cute.size(rAcc)):
            i, j = cAcc[v][0], cAcc[v][1]
            x = rAcc[v]
            if j > i:
                x = cutlass.Float32(0.0)
            gD[i, j] = x.to(gD.element_type)


class Hankel:
    """D[i, c] = sum_k h[i + k] g[c, k], the operand written by threads and read through an aliased descriptor."""

    def __init__(self, e):
        self.e = e

    @cute.jit
    def __call__(self, mH: cute.Tensor, mG: cute.Tensor, mD: cute.Tensor, stream: cuda.CUstream):
        e = self.e
        m, _, k = e.tile
        b_layout = sm90_utils.make_smem_layout_b(utils.LayoutEnum.ROW_MAJOR, e.tile, e.dtype, 1)

        @cute.struct
        class Storage:
            acc_mbar: cute.struct.MemRange[cutlass.Int64, 2]
            ab_mbar: cute.struct.MemRange[cutlass.Int64, 2]
            tmem_ptr: cutlass.Int32
            sH: cute.struct.Align[cute.struct.MemRange[e.dtype, (m + k) * 8], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[e.dtype, cute.cosize(b_layout)], 1024]

        self.Storage = Storage
        self.kernel(e.tiled_mma(), mH, mG, mD, b_layout).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self, tiled_mma: cute.TiledMma, mH: cute.Tensor, mG: cute.Tensor, mD: cute.Tensor, b_layout: cute.ComposedLayout
    ):
        e = self.e
        m, n, k = e.tile
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        st = memory.SmemAllocator().allocate(self.Storage)
        sH = st.sH.get_tensor(cute.make_layout(((m + k) * 8,)))
        sB = st.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        for x in cutlass.range_constexpr((m + k) * 8 // 128):  # core matrix q, row r, column s holds h[8 q + r + s]
            i = tidx + x * 128
            sH[i] = mH[i // 64 * 8 + (i // 8) % 8 + i % 8]
        for x in cutlass.range_constexpr(n * k // 128):
            i = tidx + x * 128
            sB[i // k, i % k, 0] = mG[i // k, i % k]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        sA = cute.make_tensor(
            sH.iterator, cute.make_layout(((8, m // 8), (8, k // 8), 1), stride=((8, 64), (1, 64), 0))
        )
        acc, tA, tB = e.begin(tiled_mma, st, tidx, sA, sB)
        self.go(tiled_mma, acc, tA, tB, warp_idx)
        r, c = e.read(tiled_mma, acc, tidx)
        for v in cutlass.range_constexpr(cute.size(r)):
            mD[c[v][0], c[v][1]] = r[v]
        e.end()

    @cute.jit
    def go(self, tiled_mma, acc, tA, tB, warp_idx):
        if cutlass.const_expr(type(self.e) is Sm90):
            tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(cute.size(tA, mode=[2])):
                cute.gemm(tiled_mma, acc, tA[None, None, kb, 0], tB[None, None, kb, 0], acc)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        elif warp_idx == 0:
            tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
            for kb in cutlass.range_constexpr(cute.size(tA, mode=[2])):
                cute.gemm(tiled_mma, acc, tA[None, None, kb, 0], tB[None, None, kb, 0], acc)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
            self.e.done.producer_commit(pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1))


class Transpose:
    """y = 2 x^T of an fp32 matrix by tiles of 32 x 32: TMA in and out; the tensor maps cut the edges.

    With `tf32` the tensors are typed TFloat32 and nothing is doubled: the tensor map rounds.
    """

    def __init__(self, dtype=F32):
        self.dtype = dtype

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout((32, 32), stride=(32, 1))
        load, tx = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, (32, 32))
        store, ty = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, (32, 32))

        @cute.struct
        class Storage:
            mbar: cute.struct.MemRange[cutlass.Int64, 2]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, 1024], 128]
            sY: cute.struct.Align[cute.struct.MemRange[self.dtype, 1024], 128]

        self.Storage = Storage
        rows, columns = cute.size(x, mode=[0]), cute.size(x, mode=[1])
        self.kernel(load, tx, store, ty, layout).launch(
            grid=((columns + 31) // 32, (rows + 31) // 32, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, mX: cute.Tensor, store: cute.CopyAtom, mY: cute.Tensor, layout: cute.Layout):
        tidx = cute.arch.thread_idx()[0]
        bx, by, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.Storage)
        sX, sY = storage.sX.get_tensor(layout), storage.sY.get_tensor(layout)
        mbar = storage.mbar.data_ptr()
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(mbar, 1)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        one = cute.make_layout(1)
        gX, gY = cute.local_tile(mX, (32, 32), (by, bx)), cute.local_tile(mY, (32, 32), (bx, by))
        tXs, tXg = cpasync.tma_partition(load, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
        tYs, tYg = cpasync.tma_partition(store, 0, one, cute.group_modes(sY, 0, 2), cute.group_modes(gY, 0, 2))
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, 4096)
            cute.copy(load, tXg, tXs, tma_bar_ptr=mbar)
        cute.arch.mbarrier_wait(mbar, 0)
        for v in cutlass.range_constexpr(8):
            i = tidx + v * 128
            x = sX[i // 32, i % 32]
            sY[i % 32, i // 32] = x * 2.0 if cutlass.const_expr(self.dtype is F32) else x
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.copy(store, tYs, tYg)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)


class Cluster:
    """y[rank] = the peer's row of x, sent to this CTA's shared memory by asynchronous stores in clusters of two."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(grid=(2, 1, 1), block=(64, 1, 1), cluster=(2, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tidx, rank = cute.arch.thread_idx()[0], cute.arch.block_idx_in_cluster()
        allocator = memory.SmemAllocator()
        s = allocator.allocate_tensor(cutlass.Int32, cute.make_layout(64), 16)
        mbar = allocator.allocate_tensor(cutlass.Int64, cute.make_layout(1), 8).iterator
        if tidx == 0:
            cute.arch.mbarrier_init(mbar, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(mbar, 256)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cute.arch.store_async_dsmem(s.iterator + tidx, x[rank, tidx], mbar, rank ^ 1)
        cute.arch.mbarrier_wait(mbar, 0)
        y[rank, tidx] = s[tidx]
        cute.arch.cluster_arrive()  # nobody leaves while its peer may still write
        cute.arch.cluster_wait()


class Multicast:
    """y[rank] = x for both CTAs of a cluster: each loads half of the 64 x 32 tile and multicasts it to both."""

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout((64, 32), stride=(32, 1))
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        atom, tx = cpasync.make_tiled_tma_atom(op, x, layout, (64, 32), num_multicast=2)

        @cute.struct
        class Storage:
            mbar: cute.struct.MemRange[cutlass.Int64, 2]
            sX: cute.struct.Align[cute.struct.MemRange[F32, 2048], 128]

        self.Storage = Storage
        self.kernel(atom, tx, y, layout).launch(grid=(2, 1, 1), block=(128, 1, 1), cluster=(2, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, mX: cute.Tensor, mY: cute.Tensor, layout: cute.Layout):
        tidx = cute.arch.thread_idx()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.Storage)
        sX, mbar = storage.sX.get_tensor(layout), storage.mbar.data_ptr()
        if warp_idx == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(mbar, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, 8192)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        gX = cute.local_tile(mX, (64, 32), (0, 0))
        tXs, tXg = cpasync.tma_partition(
            atom, rank, cute.make_layout(2), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        if warp_idx == 0:
            cute.copy(atom, tXg, tXs, tma_bar_ptr=mbar, mcast_mask=cutlass.Int16(3))
        cute.arch.mbarrier_wait(mbar, 0)
        for v in cutlass.range_constexpr(16):
            i = tidx + v * 128
            mY[rank, i // 32, i % 32] = sX[i // 32, i % 32]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


# ---- compiling ----
@dataclass(frozen=True)
class Compiled:
    object: pathlib.Path
    ptx: str
    symbol: str
    arch: str


_FOLDER = tempfile.TemporaryDirectory(prefix="ptx-tests-")


def _fake(dtype, *shape, column_major=False):
    order = range(len(shape)) if column_major else reversed(range(len(shape)))
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(order), assumed_align=16)


@functools.cache
def compiled(name: str, arch: str, *shape) -> Compiled:
    """A kernel by name; gemms take m, n, the number of k tiles, type and operand majors; gemm32 has an fp32 output."""
    if name == "elementwise":
        n = cute.sym_int32()
        kernel, fakes = Elementwise(), [_fake(F32, n), _fake(F32, n)]
    elif name in ("gemm", "gemm32", "ring"):
        m, n, tiles, kind, majors = (*shape, *("BFloat16", "KK")[len(shape) - 3 :])
        ring, dtype = name == "ring", getattr(cutlass, kind)
        k = 1024 // dtype.width
        e = engine(arch, (m, n, k), dtype, 2 if ring else tiles, 160 if ring else 128, majors)
        rows = cute.sym_int(divisibility=m)
        kernel = Gemm(e, tiles, ring)
        a = _fake(dtype, rows, k * tiles, column_major=majors[0] == "M")
        b = _fake(dtype, n, k * tiles, column_major=majors[1] == "M")
        exact = name == "gemm32" or dtype is cutlass.TFloat32
        fakes = [a, b, _fake(F32 if exact else dtype, rows, n)]
    elif name == "hankel":
        kernel, fakes = (
            Hankel(engine(arch, (64, 16, 64), BF16, 1, 128)),
            [_fake(BF16, 256), _fake(BF16, 16, 64), _fake(F32, 64, 16)],
        )
    elif name in ("transpose", "transpose_tf32"):
        rows, columns = cute.sym_int(divisibility=4), cute.sym_int(divisibility=4)
        dtype = F32 if name == "transpose" else cutlass.TFloat32
        kernel, fakes = Transpose(dtype), [_fake(dtype, rows, columns), _fake(dtype, columns, rows)]
    elif name == "multicast":
        kernel, fakes = Multicast(), [_fake(F32, 64, 32), _fake(F32, 2, 64, 32)]
    else:
        kernel, fakes = Cluster(), [_fake(cutlass.Int32, 2, 64), _fake(cutlass.Int32, 2, 64)]
    stem = "_".join(map(str, (name, *shape)))
    options = f"--enable-tvm-ffi --gpu-arch={arch} --keep-ptx --keep-cubin --dump-dir={_FOLDER.name}"
    made = cute.compile(kernel, *fakes, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
    path = pathlib.Path(_FOLDER.name) / f"{stem}.{arch}.o"
    made.export_to_c(object_file_path=str(path), function_name=stem)
    return Compiled(path, made.__ptx__, stem, arch)
