"""The two tensor cores behind one interface: wgmma on Hopper, tcgen05 on Blackwell.

An engine multiplies K-major tiles in shared memory, ``D[m, n] = sum_k A[m, k] B[n, k]`` with fp32 accumulators, and
hands every accumulator value to a thread together with its coordinates. Shared-memory layouts, TMA atoms and partitions
are the same on both, so kernels are written once. Kernels use the coordinates and never assume which thread holds what.

A product's operands are all of K, in ``k_tiles`` swizzled pieces that arrive together on one mbarrier. They lie in a
ring of ``stages``: those of the n-th product in stage n % stages.

Order of calls in a kernel: ``ring`` and ``begin`` by all threads, a barrier, ``accumulator`` by all; then for each
product ``multiply`` and ``read`` by the engine's threads alone; a barrier, ``end`` by all.
"""

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warpgroup
from cutlass.pipeline import Agent, CooperativeGroup, PipelineState
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import tensor_memory
from cute_kernels.device.tensor_memory import fence_after, fence_before

K = OperandMajorMode.K


def ring_state(n, stages, producer=False):
    """State of the n-th use of a ring: its stage, and the parity of the phase to wait for."""
    return PipelineState(stages, Int32(n), Int32(n % stages), Int32((n // stages + producer) % 2))


class _Engine:
    """``tile`` = (M, N, K of one piece)."""

    def __init__(self, tile, k_tiles, dtype, stages):
        self.tile, self.k_tiles, self.dtype, self.stages = tile, k_tiles, dtype, stages

    def smem_layouts(self):
        """Swizzled layouts (m, k, stage and piece) and (n, k, stage and piece), which both tensor cores read."""
        args = (LayoutEnum.ROW_MAJOR, self.tile, self.dtype, self.stages * self.k_tiles)
        return sm90_utils.make_smem_layout_a(*args), sm90_utils.make_smem_layout_b(*args)

    @property
    def stage_bytes(self):
        m, n, k = self.tile
        return (m + n) * k * self.k_tiles * self.dtype.width // 8

    @cute.jit
    def sync(self):
        """A barrier of the engine's threads."""
        cute.arch.barrier(barrier_id=2, number_of_threads=self.threads)

    @cute.jit
    def _issue(
        self,
        accumulate: cutlass.Constexpr,
        acc: cute.Tensor,
        tCrA: cute.Tensor,  # (mma, m, k block, stage and piece)
        tCrB: cute.Tensor,  # (mma, n, k block, stage and piece)
        stage: Int32,
    ):
        tiled_mma = self.tiled_mma()  # its own: the flag set below must not outlive a branch or loop of the caller
        tiled_mma.set(accumulate, False)
        for k in cutlass.range_constexpr(self.k_tiles):
            piece = stage * self.k_tiles + k
            for kb in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(tiled_mma, acc, tCrA[None, None, kb, piece], tCrB[None, None, kb, piece], acc)
                tiled_mma.set(accumulate, True)


class MmaSm90(_Engine):
    """wgmma: a warpgroup for each 64 rows of M, accumulators in its registers."""

    def __init__(self, tile, k_tiles, dtype, stages):
        super().__init__(tile, k_tiles, dtype, stages)
        self.threads = 128 * (tile[0] // 64)

    def tiled_mma(self):
        m, n, _ = self.tile
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, K, K, Float32, (m // 64, 1, 1), tiler_mn=(64, n)
        )

    def ring(self, mbar):
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            barrier_storage=mbar,
            tx_count=self.stage_bytes,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, self.threads // 32),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def begin(self, storage):
        pass

    def accumulator(self, tiled_mma):
        return cute.make_rmem_tensor(tiled_mma.partition_shape_C(self.tile[:2]), Float32)

    def operands(self, tiled_mma, sA, sB):
        thr = tiled_mma.get_slice(cute.arch.thread_idx()[0])
        return tiled_mma.make_fragment_A(thr.partition_A(sA)), tiled_mma.make_fragment_B(thr.partition_B(sB))

    @cute.jit
    def multiply(
        self,
        acc: cute.Tensor,
        tCrA: cute.Tensor,  # (mma, m, k block, stage and piece)
        tCrB: cute.Tensor,  # (mma, n, k block, stage and piece)
        ring: pipeline.PipelineAsync,
        n: Int32,
    ):
        """The n-th product."""
        state = ring_state(n, self.stages)
        ring.consumer_wait(state)
        warpgroup.fence()
        self._issue(warpgroup.Field.ACCUMULATE, acc, tCrA, tCrB, state.index)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        ring.consumer_release(state)

    def read(self, tiled_mma, acc, n):
        """Accumulator values and their (m, n) coordinates, indexed alike."""
        coords = tiled_mma.get_slice(cute.arch.thread_idx()[0]).partition_C(cute.make_identity_tensor(self.tile[:2]))
        return acc, coords

    def end(self, acc):
        pass


class MmaSm100(_Engine):
    """tcgen05: M = 64 or 128, accumulators in tensor memory, issued by warp 0, read by the first warpgroup."""

    threads = 128

    def tiled_mma(self):
        return sm100_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, K, K, Float32, tcgen05.CtaGroup.ONE, self.tile[:2]
        )

    def ring(self, mbar):
        return pipeline.PipelineTmaUmma.create(
            num_stages=self.stages,
            barrier_storage=mbar,
            tx_count=self.stage_bytes,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread),
            defer_sync=True,
        )

    def begin(self, storage):
        self.tmem = memory.TmemAllocator(
            storage.tmem_ptr.ptr, barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=self.threads)
        )
        self.tmem.allocate(tensor_memory.allocation(self.tile[1]))
        self.tmem.relinquish_alloc_permit()
        self.done = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            barrier_storage=storage.acc_mbar.data_ptr(),
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, self.threads),
            defer_sync=True,
        )

    def accumulator(self, tiled_mma):
        layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self.tile[:2])).layout
        return cute.make_tensor(self.tmem.retrieve_ptr(Float32), layout)

    def operands(self, tiled_mma, sA, sB):
        thr = tiled_mma.get_slice(0)
        return tiled_mma.make_fragment_A(thr.partition_A(sA)), tiled_mma.make_fragment_B(thr.partition_B(sB))

    @cute.jit
    def multiply(
        self,
        acc: cute.Tensor,
        tCrA: cute.Tensor,  # (mma, m, k block, stage and piece)
        tCrB: cute.Tensor,  # (mma, n, k block, stage and piece)
        ring: pipeline.PipelineAsync,
        n: Int32,
    ):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            state, accumulator = ring_state(n, self.stages), ring_state(n, 1, producer=True)
            self.done.producer_acquire(accumulator)
            fence_after()
            ring.consumer_wait(state)
            self._issue(tcgen05.Field.ACCUMULATE, acc, tCrA, tCrB, state.index)
            ring.consumer_release(state)
            self.done.producer_commit(accumulator)

    def read(self, tiled_mma, acc, n):
        rows, columns, _ = self.tile
        self.done.consumer_wait(ring_state(n, 1))
        fence_after()
        # M = 64 lies in lanes 0-15 of each warp's quarter, M = 128 in all 32
        if rows == 64:
            op = tcgen05.Ld16x256bOp(tcgen05.Repetition(columns // 8))
        else:
            op = tcgen05.Ld32x32bOp(tcgen05.Repetition(columns))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), acc[(None, None), 0, 0])
        thr = copy.get_slice(cute.arch.thread_idx()[0])
        identity = cute.make_identity_tensor((rows, columns))
        coords = thr.partition_D(tiled_mma.get_slice(0).partition_C(identity)[(None, None), 0, 0])
        values = cute.make_rmem_tensor(coords.shape, Float32)
        cute.copy(copy, thr.partition_S(acc[(None, None), 0, 0]), values)
        cute.arch.fence_view_async_tmem_load()
        fence_before()
        self.done.consumer_release(ring_state(n, 1))
        return values, coords

    def end(self, acc):
        self.tmem.free(acc.iterator)


def mma_engine(arch, tile, k_tiles, dtype, stages):
    """The engine of ``arch`` ("sm_90a", "sm_100a" or "sm_103a")."""
    return (MmaSm90 if arch == "sm_90a" else MmaSm100)(tile, k_tiles, dtype, stages)
