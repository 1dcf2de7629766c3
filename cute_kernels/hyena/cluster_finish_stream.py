"""The weights of `cluster_finish` as a stream through shared memory, and the products that drink from it.

Weights are the rows of every product and tokens its columns. A stage is a box of 128 rows and 64 of K, with two parts
the high and the low part of one; each of the two warpgroups has 64 of its rows. `produce` loads the stages in the order
in which the products use them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.hyena import cluster_finish_rows as rows
from cute_kernels.hyena.arguments import operand_type
from cute_kernels.hyena.config import ClusterFinish

F32, I32 = cutlass.Float32, cutlass.Int32


class WeightStream:
    """What does not depend on the tensor core; a subclass for each has the rest, under one set of names."""

    def __init__(self, config: ClusterFinish):
        self.config = config
        self.dtype = operand_type(config.dtype)

    @cute.jit
    def load(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        state: PipelineState,
        tiles,  # the atom, the stages' boxes in shared memory, the matrix's by (row box, K tile, part)
        n: I32,
        k: I32,
    ):
        """One stage."""
        parts = self.config.parts
        atom, tWsW, tWgW = tiles
        cute.arch.mbarrier_wait(empty + state.index, state.phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + state.index, self.config.stage_bytes)
        for p in cutlass.range_constexpr(parts):
            target = tWsW[None, parts * state.index + p]
            cute.copy(atom, tWgW[None, n, k, p], target, tma_bar_ptr=full + state.index)
        state.advance()
        return state

    @cute.jit
    def produce(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        chunk0: I32,
        atoms,  # three times (atom, coordinates)
        sW: cute.Tensor,  # (128, 64, parts * stages)
    ):
        c = self.config
        boxes = cute.group_modes(sW, 0, 2)
        w_o, w_1, w_2 = (self.boxes_of(*pair, boxes) for pair in atoms)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.stages)
        for n in cutlass.range_constexpr(c.row_boxes):
            for k in cutlass.range_constexpr(c.k_tiles):
                state = self.load(full, empty, state, w_o, n, k)
        for k in cutlass.range_constexpr(c.k_tiles):
            state = self.load(full, empty, state, w_1, chunk0, k)
        for i in cutlass.range(c.chunks, unroll=1):
            if i + 1 < c.chunks:
                for k in cutlass.range_constexpr(c.k_tiles):
                    state = self.load(full, empty, state, w_1, chunk0 + i + 1, k)
            for n in cutlass.range_constexpr(c.row_boxes):
                for k in cutlass.range_constexpr(2):
                    state = self.load(full, empty, state, w_2, n, 2 * (chunk0 + i) + k)

    def boxes_of(self, atom, coords, sW):
        g = cute.group_modes(cute.local_tile(coords, self.config.box, (None, None, None)), 0, 2)
        return (atom, *cpasync.tma_partition(atom, 0, cute.make_layout(1), sW, g))

    def buffer(self, words: cute.Tensor, buffer):
        """One buffer of the activations, (32 lanes, 16, tile / 8, parts) words."""
        parts = self.config.parts
        start = words.iterator + buffer * (parts * self.config.tile * self.config.box[0] // 2)
        return cute.make_tensor(start, cute.make_layout((*words.shape[:3], parts), stride=words.stride))


class StreamSm90(WeightStream):
    """wgmma: accumulators in registers."""

    words = barriers = 0  # in shared memory
    readers = ClusterFinish.consumers // 32  # arrivals that give a stage back

    def mma(self, n: int, tokens_contiguous: bool):
        """64 rows of weights by n tokens, whose operand is K-major or has neighbouring tokens side by side."""
        k = OperandMajorMode.K
        b = OperandMajorMode.MN if tokens_contiguous else k
        source = warpgroup.OperandSource.SMEM
        return sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, b, F32, (1, 1, 1), (64, n), source)

    def slice(self, mma, thread):
        return mma.get_slice(thread)

    def begin(self, done, address):
        pass

    def begin_state(self, done, address, wg):
        """Of the next stage to wait for."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.stages)

    def end(self, address):
        pass

    @cute.jit
    def start(
        self,
        full: cute.Pointer,
        state: PipelineState,
        wg: I32,
        acc: cute.Tensor,  # (n / 2,) fp32 registers in the accumulator's order
        mma: cutlass.Constexpr,  # (n, tokens_contiguous)
        fA: cute.Tensor,  # (MMA, 1, K blocks, 2 * parts * stages): 64 rows of weights
        fB: cute.Tensor,  # (MMA, 1, K blocks, K tiles): the tokens' operand
        k: I32,
        fresh: cutlass.Constexpr,
    ):
        """One stage of a product of one part, left in flight: acc = or += weights x tokens^T."""
        cute.arch.mbarrier_wait(full + state.index, state.phase)
        warpgroup.fence()
        self.issue(mma, acc, fA, 2 * state.index + wg, fB, k, fresh)
        warpgroup.commit_group()
        state.advance()
        return state

    @cute.jit
    def release(self, empty: cute.Pointer, state: PipelineState, back: cutlass.Constexpr):
        """Hands back the stage so many before the next one; no product reads it any more."""
        index = state.index - back
        if index < 0:
            index += self.config.stages
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + index)

    @cute.jit
    def product(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        state: PipelineState,  # of the next stage to wait for
        wg: I32,
        acc: cute.Tensor,  # (n / 2, row boxes) fp32 registers
        mma: cutlass.Constexpr,
        fA: cute.Tensor,
        fB: cute.Tensor,
        k0: I32,  # the first K tile
        k_tiles: cutlass.Constexpr,
        low: cutlass.Constexpr,  # K tiles from a high part to its low one
        adds: cutlass.Constexpr,  # to what `acc` holds
    ):
        """A whole product. Two parts: low x high, high x low, high x high in this order into one accumulator, which is
        added to `acc` after each 64 of K, because the tensor core's own sums truncate."""
        if cutlass.const_expr(self.config.parts == 2):
            one = cute.make_rmem_tensor(acc.shape[0], F32)
            for n in cutlass.range_constexpr(acc.shape[1]):
                total = acc[None, n]
                if cutlass.const_expr(not adds):
                    total.fill(0.0)
                # This loop stays one: unrolled, the accumulators of neighbouring steps would be live together.
                for k in cutlass.range(k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(full + state.index, state.phase)
                    warpgroup.fence()
                    high = 4 * state.index + wg
                    self.issue(mma, one, fA, high, fB, k0 + low + k, True)
                    self.issue(mma, one, fA, high + 2, fB, k0 + k, False)
                    self.issue(mma, one, fA, high, fB, k0 + k, False)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    state.advance()
                    self.release(empty, state, 1)
                    total.store(total.load() + one.load())
        else:
            for n in cutlass.range_constexpr(acc.shape[1]):
                for k in cutlass.range_constexpr(k_tiles):
                    state = self.start(full, state, wg, acc[None, n], mma, fA, fB, k0 + k, k == 0 and not adds)
                    if cutlass.const_expr(n + k > 0):
                        warpgroup.wait_group(1)
                        self.release(empty, state, 2)
            warpgroup.wait_group(0)
            self.release(empty, state, 1)
        return state

    @cute.jit
    def overlapped(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        state: pipeline.PipelineState,
        wg: I32,
        hidden: cute.Tensor,
        by_block: cute.Tensor,
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
        """fc1 of the next chunk, fc2 of this one, and under it GELU of the next. Two stages are in flight at most."""
        c, now, next_ = self.config, i % 2, (i + 1) % 2
        kind = (c.tile, True)
        for k in cutlass.range_constexpr(c.k_tiles):
            state = self.start(full, state, wg, hidden[None, 0], kind, fA, fN, k, k == 0)
            if cutlass.const_expr(k > 0):
                warpgroup.wait_group(1)
                self.release(empty, state, 2)
        cute.arch.fence_proxy("async.shared", space="cta")
        rows.sync()
        uses = [(n, k) for n in range(c.row_boxes) for k in range(2)]
        (n, k), blocks = uses[0], c.tile // 8
        state = self.start(full, state, wg, total[None, 0], kind, fA, fH, 2 * now, c.chunks == 2)
        warpgroup.wait_group(1)
        self.release(empty, state, 2)
        for u in cutlass.range_constexpr(len(uses)):
            if cutlass.const_expr(u + 1 < len(uses)):
                n, k = uses[u + 1]
                fresh = c.chunks == 2 and k == 0
                state = self.start(full, state, wg, total[None, n], kind, fA, fH, 2 * now + k, fresh)
            first, last = (blocks * v // len(uses) for v in (u, u + 1))
            rows.activate(
                *(by_block, self.buffer(wH, next_), scale1, bias1, sFactor, first, last),
                *(self.dtype, tidx),
            )
            left = 1 if cutlass.const_expr(u + 1 < len(uses)) else 0
            warpgroup.wait_group(left)
            self.release(empty, state, left + 1)
        return state

    @cute.jit
    def start_last(self, full, empty, state, wg, total, kind: cutlass.Constexpr, fA, fH, k0: cutlass.Constexpr):
        """fc2 of the last chunk, of one part: `wait_for` waits for a box of its rows."""
        for n in cutlass.range_constexpr(self.config.row_boxes):
            for k in cutlass.range_constexpr(2):
                fresh = self.config.chunks == 1 and k == 0
                state = self.start(full, state, wg, total[None, n], kind, fA, fH, k0 + k, fresh)
        return state

    def wait_for(self, state, n, total):
        warpgroup.wait_group(2 * (self.config.row_boxes - 1 - n))

    @cute.jit
    def issue(
        self,
        mma: cutlass.Constexpr,
        acc: cute.Tensor,
        fA: cute.Tensor,
        a: I32,
        fB: cute.Tensor,
        b: I32,
        fresh: cutlass.Constexpr,
    ):
        """One K tile of 64 rows by n tokens."""
        tiled = self.mma(*mma)  # its own: the flag set below must not outlive a branch or loop of the caller
        tiled.set(warpgroup.Field.ACCUMULATE, not fresh)
        out = cute.make_tensor(acc.iterator, cute.make_layout(tiled.partition_shape_C((64, mma[0]))))
        for kb in cutlass.range_constexpr(self.config.box[1] // 16):
            cute.gemm(tiled, out, fA[None, None, kb, a], fB[None, None, kb, b], out)
            tiled.set(warpgroup.Field.ACCUMULATE, True)
