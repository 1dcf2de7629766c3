"""The weights of `finish` as a stream through shared memory, and the products that drink from it.

A stage is two boxes of [64 rows, 64 of K], 8 KB each:

- with two parts, the low and the high part of one box;
- otherwise 128 rows of one K tile, or, for a product of 64 rows, two neighbours along K.

`Product.uses` lists a product's stages in order; producer and consumer both follow it. With two parts each warpgroup
has its own ring, filled by its own warp. With one part the warpgroups take turns at the tensor core, so there is one
ring of both, in the order of the turns: out_proj stage by stage, then a chunk's fc1 of each, then turns of a chunk's
fc2 and the next one's fc1. All of it is ahead of whoever has the turn.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import PipelineState

from cute_kernels.hyena import finish_rows as rows
from cute_kernels.hyena.arguments import operand_type
from cute_kernels.hyena.config import Finish

F32, I32 = cutlass.Float32, cutlass.Int32
BOX = Finish.box


@dataclasses.dataclass(frozen=True)
class Product:
    """Tokens times `rows` rows of weights, over `k_tiles` of 64."""

    parts: int
    rows: int
    k_tiles: int
    registers: bool = False  # the tokens' operand is in registers, not in shared memory
    adds: bool = False  # to what the accumulator holds
    held: bool = False  # the product in front ended with "wait" or "hold"
    end: str = "wait"  # for the last stage, or "hold" it, still in flight; with one part
    step: int = 1  # stages of the ring from one of its uses to the next

    @property
    def uses(self) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """The stages in order: two boxes each, as (64 rows, K tile, part)."""
        boxes, k_tiles = self.rows // BOX, self.k_tiles
        if self.parts == 2:
            return [((n, k, 1), (n, k, 0)) for n in range(boxes) for k in range(k_tiles)]
        if boxes == 1:
            return [((0, k, 0), (0, k + 1, 0)) for k in range(0, k_tiles, 2)]
        return [((n, k, 0), (n + 1, k, 0)) for n in range(0, boxes, 2) for k in range(k_tiles)]


class WeightStream:
    """What does not depend on the tensor core; a subclass for each has the rest, under one set of names."""

    def __init__(self, config: Finish, stages: int):
        self.config, self.stages = config, stages  # stages of each ring
        self.dtype = operand_type(config.dtype)
        c, k_tiles = config, config.width // BOX
        self.out_proj = Product(c.parts, c.half, k_tiles, step=3 - c.rings)
        self.fc1 = Product(c.parts, c.chunk, k_tiles, held=True, end="hold")
        self.fc2 = Product(c.parts, c.width, c.chunk // BOX, registers=True, adds=c.chunks > 1, end="hold")

    def of_ring(self, state: PipelineState, wg: I32):
        """The state of a warpgroup's ring among the barriers of all."""
        if self.config.rings == 1:
            return state
        stages = self.config.stages
        return PipelineState(2 * stages, state.count, wg * stages + state.index, state.phase)

    def skipped(self, state: PipelineState, n):
        """The state `n` stages on."""
        index = state.index + n
        wraps = index // self.stages
        return PipelineState(self.stages, state.count + n, index - wraps * self.stages, state.phase ^ (wraps & 1))

    def first(self, state: PipelineState, wg: I32):
        """The warpgroup's first stage."""
        return self.skipped(state, wg) if self.config.rings == 1 else state

    def behind_out_proj(self, state: PipelineState, wg: I32):
        """From behind out_proj to the first fc1."""
        return self.skipped(state, wg * (len(self.fc1.uses) - 1))

    def behind_turn(self, state: PipelineState, wg: I32, i: I32):
        """From behind fc1 of chunk i to its fc2, over the other's turn: fc2 of the chunk before and fc1 of this one, or
        fc2 of this chunk and fc1 of the next."""
        if self.config.rings == 2:
            return state
        fc1, fc2 = len(self.fc1.uses), len(self.fc2.uses)
        first = fc1 + cutlass.min(i, 1) * fc2
        second = fc2 + cutlass.min(self.config.chunks - 1 - i, 1) * fc1
        return self.skipped(state, first + wg * (second - first))

    @cute.jit
    def load(
        self,
        ring: pipeline.PipelineAsync,
        state: PipelineState,
        wg: I32,
        tiles,  # the atom, the boxes in shared memory, the boxes of the matrix by (64 rows, K tile, part)
        use: cutlass.Constexpr,
        row0: I32,
        k0: I32,
        rows: cutlass.Constexpr,
    ):
        """One stage. `row0` and `k0`: where the product starts, in boxes; `rows`: boxes after which the rows wrap."""
        atom, tWsW, tWgW = tiles
        s = self.of_ring(state, wg)
        ring.producer_acquire(s)
        mbar = ring.producer_get_barrier(s)
        (n0, ka, pa), (n1, kb, pb) = use
        cute.copy(atom, tWgW[None, (row0 + n0) % rows, k0 + ka, pa], tWsW[None, 2 * s.index], tma_bar_ptr=mbar)
        cute.copy(atom, tWgW[None, (row0 + n1) % rows, k0 + kb, pb], tWsW[None, 2 * s.index + 1], tma_bar_ptr=mbar)
        ring.producer_commit(s)
        state.advance()
        return state

    @cute.jit
    def produce(
        self,
        ring: pipeline.PipelineAsync,
        wg: I32,  # the ring's, where each has one
        atoms,  # three times (atom, coordinates)
        sBox: cute.Tensor,  # (64, 64, 2 * rings * stages)
    ):
        """Loads the weights of a ring in the order in which `consume` uses them."""
        c = self.config
        sBox = cute.group_modes(sBox, 0, 2)
        w_o, w_1, w_2 = (self.boxes_of(*pair, sBox) for pair in atoms)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        row_boxes, chunk_boxes = c.width // BOX, c.chunk // BOX
        half_boxes, hidden_boxes = c.half // BOX, c.inner // BOX

        if cutlass.const_expr(c.rings == 2):
            half0 = wg * half_boxes
            for use in self.out_proj.uses:
                state = self.load(ring, state, wg, w_o, use, half0, 0, row_boxes)
            for i in cutlass.range(c.chunks, unroll=1):
                hidden0 = (2 * i + wg) * chunk_boxes
                for use in self.fc1.uses:
                    state = self.load(ring, state, wg, w_1, use, hidden0, 0, hidden_boxes)
                for use in self.fc2.uses:
                    state = self.load(ring, state, wg, w_2, use, half0, hidden0, row_boxes)
        else:
            for use in self.out_proj.uses:
                for half in range(2):
                    state = self.load(ring, state, wg, w_o, use, half * half_boxes, 0, row_boxes)
            for half in range(2):
                for use in self.fc1.uses:
                    state = self.load(ring, state, wg, w_1, use, half * chunk_boxes, 0, hidden_boxes)
            for turn in cutlass.range(2 * c.chunks, unroll=1):
                hidden0, half0 = turn * chunk_boxes, turn % 2 * half_boxes
                for use in self.fc2.uses:
                    state = self.load(ring, state, wg, w_2, use, half0, hidden0, row_boxes)
                if turn + 2 < 2 * c.chunks:
                    for use in self.fc1.uses:
                        state = self.load(ring, state, wg, w_1, use, hidden0 + 2 * chunk_boxes, 0, hidden_boxes)

    def boxes_of(self, atom, coords, sBox):
        g = cute.group_modes(cute.local_tile(coords, (BOX, BOX), (None, None, None)), 0, 2)
        return (atom, *cpasync.tma_partition(atom, 0, cute.make_layout(1), sBox, g))


class StreamSm90(WeightStream):
    """wgmma: accumulators and the hidden operand in registers, and the warpgroups take turns at the tensor core."""

    words = barriers = 0  # in shared memory

    def __init__(self, config: Finish):
        super().__init__(config, config.stages)

    def mma(self, n: int, registers: bool = False):
        """64 tokens by n rows of weights; the tokens' operand in shared memory or in registers."""
        k = OperandMajorMode.K
        source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
        return sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, F32, (1, 1, 1), (64, n), source)

    def ring(self, mbar: cute.Pointer):
        """The barriers of all rings, one after the other."""
        group = pipeline.CooperativeGroup
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.config.rings * self.config.stages,
            barrier_storage=mbar,
            tx_count=2 * BOX * BOX * 2,
            producer_group=group(pipeline.Agent.Thread),
            consumer_group=group(pipeline.Agent.Thread, 4),
        )

    def begin(self, done, address):
        pass

    def end(self, address):
        pass

    def begin_states(self, wg: I32):
        """Of the next stage to wait for, and of the one in use."""
        state = self.first(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages), wg)
        return state, state.clone()

    def fragments(self, sA, sBox, sWide, done, address, wg):
        """The tokens (MMA, 1, K blocks, parts * K tiles), and the rings as boxes of 64 rows and of 128."""
        thread = cute.arch.thread_idx()[0] % 128
        narrow, wide = self.mma(BOX).get_slice(thread), self.mma(2 * BOX).get_slice(thread)
        return self.mma(BOX).make_fragment_A(narrow.partition_A(sA)), (
            self.mma(BOX).make_fragment_B(narrow.partition_B(sBox)),
            self.mma(2 * BOX).make_fragment_B(wide.partition_B(sWide)),
        )

    def hidden_operand(self, sBox, wg):
        c = self.config
        frag = cute.make_rmem_tensor(((2, 2, 2), 1, 4, c.parts * c.chunk // BOX), self.dtype)
        return frag, frag

    def keep(self, hidden, frag, tidx):
        rows.keep_as_operand(hidden, frag, self.config.parts)

    @property
    def turns(self) -> bool:
        """With two parts products wait so often that the warpgroups interleave by themselves."""
        return self.config.rings == 1

    @cute.jit
    def begin_turns(self, wg: I32, zero: I32):
        if cutlass.const_expr(self.turns):  # noqa: SIM102
            if wg == 1:
                rows.take_turn(wg, None, zero)

    @cute.jit
    def give_turn(self, wg: I32):
        if cutlass.const_expr(self.turns):
            rows.give_turn(wg)

    @cute.jit
    def take_turn(self, frag: cute.Tensor, wg: I32, zero: I32):
        if cutlass.const_expr(self.turns):
            rows.take_turn(wg, frag, zero)

    @cute.jit
    def end_turns(self, ring, states, total, fB, wg: I32):
        """Waits for the last product."""
        if cutlass.const_expr(self.turns):
            if wg == 0:
                rows.give_turn(wg)
            warpgroup.wait_group(0)

    @cute.jit
    def product(
        self,
        ring: pipeline.PipelineTmaAsync,
        states,
        wg: I32,
        acc: cute.Tensor,  # (rows / 2,) fp32 registers, 32 for each 64 rows of weights, in the accumulator's order
        fA: cute.Tensor,  # (MMA, 1, K blocks, parts * K tiles): the tokens' operand, in shared memory or in registers
        fB: tuple[cute.Tensor, cute.Tensor],  # the rings as boxes of 64 rows, and as boxes of 128
        spec: cutlass.Constexpr,  # a Product
        nth: I32 = 0,  # how often this product was made before
    ):
        """acc = or += tokens x weights^T, all of K. Two parts: low x high, high x low, high x high in this order into
        one accumulator, which is added to `acc` after each 64 of K, because the tensor core's own sums truncate; each
        stage is then returned at once."""
        state, behind = states
        if cutlass.const_expr(self.config.parts == 2):
            one = cute.make_rmem_tensor(BOX // 2, F32)
            for n in cutlass.range_constexpr(spec.rows // BOX):
                total = cute.make_tensor(acc.iterator + n * (BOX // 2), cute.make_layout(BOX // 2))
                if cutlass.const_expr(not spec.adds):
                    total.fill(0.0)
                # This loop stays one: unrolled, the accumulators of neighbouring steps would be live together.
                for k in cutlass.range(spec.k_tiles, unroll=1):
                    s = self.of_ring(state, wg)
                    ring.consumer_wait(s)
                    warpgroup.fence()
                    self.issue(BOX, one, fA, k, fB[0], 2 * s.index, spec.registers, True)
                    self.issue(BOX, one, fA, spec.k_tiles + k, fB[0], 2 * s.index + 1, spec.registers, False)
                    self.issue(BOX, one, fA, k, fB[0], 2 * s.index + 1, spec.registers, False)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    ring.consumer_release(s)
                    state.advance()
                    total.store(total.load() + one.load())
        else:
            n_mma = min(spec.rows, 2 * BOX)
            for u, ((n, k, _), _second) in enumerate(spec.uses):
                s = state.clone()
                ring.consumer_wait(s)
                warpgroup.fence()
                out = cute.make_tensor(acc.iterator + n * (BOX // 2), cute.make_layout(n_mma // 2))
                start = k == 0 and not spec.adds
                if cutlass.const_expr(n_mma == BOX):
                    self.issue(BOX, out, fA, k, fB[0], 2 * s.index, spec.registers, start)
                    self.issue(BOX, out, fA, k + 1, fB[0], 2 * s.index + 1, spec.registers, False)
                else:
                    self.issue(2 * BOX, out, fA, k, fB[1], s.index, spec.registers, start)
                warpgroup.commit_group()
                for _ in range(spec.step):
                    state.advance()
                if cutlass.const_expr(spec.held or u > 0):
                    warpgroup.wait_group(1)
                    ring.consumer_release(behind)
                behind = s
            if cutlass.const_expr(spec.end == "wait"):
                warpgroup.wait_group(0)
            if cutlass.const_expr(spec is self.out_proj):
                state = self.behind_out_proj(state, wg)
        return state, behind

    @cute.jit
    def end_product(self, ring: pipeline.PipelineTmaAsync, states, wg: I32, i: I32):
        """Waits for fc1 of chunk i, and passes over the other's turn."""
        state, behind = states
        if cutlass.const_expr(self.turns):
            warpgroup.wait_group(0)
            ring.consumer_release(behind)
            state = self.behind_turn(state, wg, i)
        return state, behind

    @cute.jit
    def sync_weights(self, wg: I32):
        """Of those who share a ring."""
        if cutlass.const_expr(self.config.rings == 1):
            rows.sync()
        else:
            rows.sync_warpgroup(wg)

    @cute.jit
    def issue(
        self,
        n: cutlass.Constexpr,
        acc: cute.Tensor,
        fA: cute.Tensor,
        a: I32,
        fB: cute.Tensor,
        b: I32,
        registers: cutlass.Constexpr,
        start: cutlass.Constexpr,
    ):
        """One K tile of 64 tokens by n rows."""
        mma = self.mma(n, registers)  # its own: the flag set below must not outlive a branch or loop of the caller
        mma.set(warpgroup.Field.ACCUMULATE, not start)
        out = cute.make_tensor(acc.iterator, cute.make_layout(mma.partition_shape_C((Finish.tile, n))))
        for kb in cutlass.range_constexpr(BOX // 16):
            cute.gemm(mma, out, fA[None, None, kb, a], fB[None, None, kb, b], out)
            mma.set(warpgroup.Field.ACCUMULATE, True)
