"""The products of `cluster_finish` on Blackwell's tensor core."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.pipeline import PipelineState

from cute_kernels.device import tensor_memory
from cute_kernels.hyena import cluster_finish_rows as rows
from cute_kernels.hyena.cluster_finish_stream import F32, I32, WeightStream
from cute_kernels.hyena.config import ClusterFinish

GROUP_BARRIER = 2  # of the first warpgroup, and the next


class StreamSm100(WeightStream):
    """tcgen05: a warpgroup's first warp issues, the sums lie in tensor memory, its half of the lanes of each warp.

    With one part fc2's sums stay there, from column 0, to the last chunk, and fc1's lie beside them. With two, every 64
    of K have sums of their own, which are added up in registers.
    """

    words = 1  # of shared memory: the address of tensor memory
    readers = 2  # arrivals that give a stage back, one of each warpgroup

    def __init__(self, config: ClusterFinish):
        super().__init__(config)
        c = config
        self.beside = c.row_boxes * self.pitch(c.tile)  # fc1's first column
        if c.parts == 1:
            columns = self.beside + self.pitch(c.tile)
        else:
            most = max(c.k_tiles, 2 * c.row_boxes)
            columns = max(c.row_boxes * c.k_tiles * self.pitch(c.tokens), most * self.pitch(c.tile))
        self.allocated = tensor_memory.allocation(columns)
        self.barriers = c.row_boxes  # the products are done; of the last one, the first box, and the next

    def pitch(self, n: int) -> int:
        """Columns from one accumulator of n tokens to the next."""
        return -(-n // 16) * 16

    def mma(self, n: int, tokens_contiguous: bool):
        """64 rows of weights by n tokens, whose operand is K-major or has neighbouring tokens side by side."""
        k = OperandMajorMode.K
        b = OperandMajorMode.MN if tokens_contiguous else k
        return sm100_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, b, F32, tcgen05.CtaGroup.ONE, (64, n))

    def slice(self, mma, thread):
        return mma.get_slice(0)

    @cute.jit
    def begin(self, done: cute.Pointer, address: cute.Pointer):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            tensor_memory.allocate(self.allocated, address)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.barriers):
                    cute.arch.mbarrier_init(done + i, 2)
                cute.arch.mbarrier_init_fence()

    def begin_state(self, done: cute.Pointer, address: cute.Pointer, wg: I32):
        """Of the next stage to wait for, and the phase of `done`. After a barrier behind `begin`."""
        self.done = done
        self.sums = tensor_memory.start(address) + cute.assume(wg * tensor_memory.UPPER_HALF, divby=16)
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages), I32(0)

    @cute.jit
    def end(self, address: cute.Pointer):
        tensor_memory.fence_before()
        rows.sync()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            tensor_memory.free(self.allocated, address)

    @cute.jit
    def product(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        states,
        wg: I32,
        acc: cute.Tensor,  # (n / 2, row boxes) fp32 registers
        mma: cutlass.Constexpr,
        fA: cute.Tensor,
        fB: cute.Tensor,  # (MMA, 1, K blocks, K tiles): the tokens' operand
        k0: I32,  # the first K tile
        k_tiles: cutlass.Constexpr,
        low: cutlass.Constexpr,  # K tiles from a high part to its low one
        adds: cutlass.Constexpr,  # to what `acc` holds
    ):
        """A whole product, which nothing is left of in tensor memory. Two parts: as on Hopper."""
        state, phase = states
        n, boxes = mma[0], acc.shape[1]
        self.sync(wg)
        if self.issues():
            if cutlass.const_expr(self.config.parts == 2):
                self.start_parts(full, empty, state.clone(), wg, mma, fA, fB, k0, k_tiles, low, boxes)
            else:
                self.start(full, empty, state.clone(), wg, mma, fA, fB, k0, k_tiles, boxes, self.first(boxes), False)
            self.commit(self.done)
        state = self.ahead(state, boxes * k_tiles)
        cute.arch.mbarrier_wait(self.done, phase)
        for b in cutlass.range_constexpr(boxes):
            total = acc[None, b]
            if cutlass.const_expr(self.config.parts == 1):
                self.read(self.first(boxes) + b * self.pitch(n), total, n)
            else:
                if cutlass.const_expr(not adds):
                    total.fill(0.0)
                one = cute.make_rmem_tensor_like(total)
                for k in cutlass.range(k_tiles, unroll=1):
                    self.read(cute.assume((b * k_tiles + k) * self.pitch(n), divby=16), one, n)
                    total.store(total.load() + one.load())
        return state, phase ^ 1

    def first(self, boxes: int) -> int:
        """Where a product of one part that isn't fc2 has its sums: out_proj's where fc2's will be."""
        return self.beside if boxes == 1 else 0

    @cute.jit
    def overlapped(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        states,
        wg: I32,
        hidden: cute.Tensor,  # (tile / 2, 1) fp32 registers
        by_block: cute.Tensor,  # the same as (2, 2, tile / 8)
        total: cute.Tensor,
        fA: cute.Tensor,
        fN: cute.Tensor,
        fH: cute.Tensor,
        wH: cute.Tensor,
        i: I32,
        scale1: cute.Tensor,
        bias1: cute.Tensor,
        sFactor: cute.Tensor,
        tidx: I32,
    ):
        """fc1 of the next chunk, fc2 of this one, and under it GELU of the next. With one part."""
        c, kind = self.config, (self.config.tile, True)
        state, phase = states
        self.sync(wg)
        if self.issues():
            self.start(full, empty, state.clone(), wg, kind, fA, fN, 0, c.k_tiles, 1, self.beside, False)
            self.commit(self.done)
        state = self.ahead(state, c.k_tiles)
        cute.arch.fence_proxy("async.shared", space="cta")
        rows.sync()
        if self.issues():
            self.start(full, empty, state.clone(), wg, kind, fA, fH, i % 2 * 2, 2, c.row_boxes, 0, i > 0)
        state = self.ahead(state, 2 * c.row_boxes)
        cute.arch.mbarrier_wait(self.done, phase)
        self.read(self.beside, hidden, c.tile)
        words = self.buffer(wH, (i + 1) % 2)
        rows.activate(by_block, words, scale1, bias1, sFactor, 0, c.tile // 8, self.dtype, tidx)
        return state, phase ^ 1

    @cute.jit
    def start_last(self, full, empty, states, wg, total, kind: cutlass.Constexpr, fA, fH, k0: cutlass.Constexpr):
        """fc2 of the last chunk, of one part: `wait_for` waits for a box of its rows."""
        c = self.config
        state, phase = states
        if self.issues():
            stage = state.clone()
            for n in cutlass.range_constexpr(c.row_boxes):
                column = n * self.pitch(c.tile)
                self.start(full, empty, stage, wg, kind, fA, fH, k0, 2, 1, column, c.chunks > 1)
                self.commit(self.done + n)
                stage = self.ahead(stage, 2)
        return state, phase

    @cute.jit
    def wait_for(self, states, n: cutlass.Constexpr, total: cute.Tensor):
        tile = self.config.tile
        cute.arch.mbarrier_wait(self.done + n, states[1] if cutlass.const_expr(n == 0) else 0)
        self.read(n * self.pitch(tile), total[None, n], tile)

    @cute.jit
    def sync(self, wg: I32):
        """The warpgroup's warps have read what the next sums overwrite, and written their part of an operand."""
        tensor_memory.fence_before()
        cute.arch.barrier(barrier_id=GROUP_BARRIER + wg, number_of_threads=128)
        tensor_memory.fence_after()

    def issues(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0

    def ahead(self, state: PipelineState, stages: int):
        state = state.clone()
        for _ in range(stages):
            state.advance()
        return state

    @cute.jit
    def start(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        state: PipelineState,
        wg: I32,
        mma: cutlass.Constexpr,  # (n, tokens_contiguous)
        fA: cute.Tensor,  # (MMA, 1, K blocks, 2 * stages): 64 rows of weights
        fB: cute.Tensor,  # (MMA, 1, K blocks, K tiles): the tokens' operand
        k0: I32,
        k_tiles: cutlass.Constexpr,
        boxes: cutlass.Constexpr,
        column: cutlass.Constexpr,
        adds,  # to what tensor memory holds
    ):
        """Issues a product of one part."""
        stage = state.clone()
        for b in cutlass.range_constexpr(boxes):
            for k in cutlass.range_constexpr(k_tiles):
                cute.arch.mbarrier_wait(full + stage.index, stage.phase)
                more = k > 0 or adds
                self.issue(mma, column + b * self.pitch(mma[0]), fA, 2 * stage.index + wg, fB, k0 + k, more)
                self.commit(empty + stage.index)
                stage.advance()

    @cute.jit
    def start_parts(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        state: PipelineState,
        wg: I32,
        mma: cutlass.Constexpr,
        fA: cute.Tensor,  # (MMA, 1, K blocks, 4 * stages)
        fB: cute.Tensor,
        k0: I32,
        k_tiles: cutlass.Constexpr,
        low: cutlass.Constexpr,
        boxes: cutlass.Constexpr,
    ):
        """Issues a product of two parts, the sums of every stage to columns of their own."""
        stage = state.clone()
        for u in cutlass.range(boxes * k_tiles, unroll=1):
            k = k0 + u % k_tiles
            cute.arch.mbarrier_wait(full + stage.index, stage.phase)
            column, high = cute.assume(u * self.pitch(mma[0]), divby=16), 4 * stage.index + wg
            self.issue(mma, column, fA, high, fB, low + k, False)
            self.issue(mma, column, fA, high + 2, fB, k, True)
            self.issue(mma, column, fA, high, fB, k, True)
            self.commit(empty + stage.index)
            stage.advance()

    @cute.jit
    def issue(
        self,
        mma: cutlass.Constexpr,
        column: I32,
        fA: cute.Tensor,
        a: I32,
        fB: cute.Tensor,  # (MMA, 1, K blocks, K tiles)
        b: I32,
        adds,
    ):
        """One K tile of 64 rows by n tokens."""
        tiled, acc = self.mma(*mma), self.accumulator(column, mma[0])
        tiled.set(tcgen05.Field.ACCUMULATE, adds)
        for kb in cutlass.range_constexpr(self.config.box[1] // 16):
            cute.gemm(tiled, acc, fA[None, None, kb, a], fB[None, None, kb, b], acc)
            tiled.set(tcgen05.Field.ACCUMULATE, True)

    @cute.jit
    def commit(self, mbar: cute.Pointer):
        """Lets an mbarrier know when all that was issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit(mbar)

    @cute.jit
    def read(self, column: I32, x: cute.Tensor, n: cutlass.Constexpr):
        tensor_memory.read(self.accumulator(column, n), x, n)

    def accumulator(self, column, n: int):
        mma = self.mma(n, False)
        layout = mma.make_fragment_C(mma.partition_shape_C((64, n))).layout
        return cute.make_tensor(self.sums + column, layout)
