"""The products of `finish` on Blackwell's tensor core."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cute_kernels.device import tensor_memory
from cute_kernels.hyena import finish_rows as rows
from cute_kernels.hyena.config import Finish
from cute_kernels.hyena.finish_stream import BOX, F32, I32, WeightStream


class StreamSm100(WeightStream):
    """tcgen05: issued by a warpgroup's first warp, the sums in tensor memory, the hidden operand in shared memory.

    The tensor core works in the order in which products were issued, so the warpgroups need no turns. With one part
    fc2's sums stay in tensor memory, columns 0 to D, to the end, and fc1's lie beside them. With two, every 64 of K
    have sums of their own, which are added up in registers.
    """

    words = 1  # of shared memory: the address of tensor memory
    barriers = 2  # one of each warpgroup: its product is done

    def __init__(self, config: Finish):
        # The hidden operands take the place of stages.
        super().__init__(config, config.stages - 2 // config.rings)
        c = config
        most = max(len(product.uses) for product in (self.out_proj, self.fc1, self.fc2))
        self.allocated = tensor_memory.allocation(c.width + c.chunk if c.parts == 1 else BOX * most)

    def mma(self, n: int):
        """64 tokens by n rows of weights."""
        k = OperandMajorMode.K
        return sm100_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, F32, tcgen05.CtaGroup.ONE, (64, n))

    def ring(self, mbar: cute.Pointer):
        """The barriers of all rings, one after the other."""
        group = pipeline.CooperativeGroup
        return pipeline.PipelineTmaUmma.create(
            num_stages=self.config.rings * self.config.stages,
            barrier_storage=mbar,
            tx_count=2 * BOX * BOX * 2,
            producer_group=group(pipeline.Agent.Thread),
            consumer_group=group(pipeline.Agent.Thread),
        )

    @cute.jit
    def begin(self, done: cute.Pointer, address: cute.Pointer):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            tensor_memory.allocate(self.allocated, address)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.barriers):
                    cute.arch.mbarrier_init(done + i, 1)
                cute.arch.mbarrier_init_fence()

    @cute.jit
    def end(self, address: cute.Pointer):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            tensor_memory.free(self.allocated, address)

    def begin_states(self, wg: I32):
        """Of the next stage to wait for, and the phase of `done`."""
        return self.first(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages), wg), I32(0)

    def fragments(self, sA, sBox, sWide, done, address, wg):
        """The tokens (MMA, 1, K blocks, parts * K tiles), and the rings as boxes of 64 rows and of 128, with the start
        of the warpgroup's tensor memory and its `done`."""
        narrow, wide = self.mma(BOX).get_slice(0), self.mma(2 * BOX).get_slice(0)
        start = tensor_memory.start(address) + cute.assume(wg * tensor_memory.UPPER_HALF, divby=16)
        return self.mma(BOX).make_fragment_A(narrow.partition_A(sA)), (
            self.mma(BOX).make_fragment_B(narrow.partition_B(sBox)),
            self.mma(2 * BOX).make_fragment_B(wide.partition_B(sWide)),
            start,
            done + wg,
        )

    def hidden_operand(self, sBox, wg):
        c = self.config
        tiles = c.parts * c.chunk // BOX
        stage = self.stages + wg * (c.stages if c.rings == 2 else 1)
        sH = cute.local_tile(sBox, (c.tile, BOX, tiles), (0, 0, stage * 2 // tiles))
        return sH, self.mma(BOX).make_fragment_A(self.mma(BOX).get_slice(0).partition_A(sH))

    @cute.jit
    def keep(self, hidden: cute.Tensor, sH: cute.Tensor, tidx: I32):
        rows.store_pairs_of_operand(hidden, sH, 0, self.config.parts, tidx)
        cute.arch.fence_proxy("async.shared", space="cta")

    def begin_turns(self, wg, zero):
        pass

    def give_turn(self, wg):
        pass

    def take_turn(self, sH, wg, zero):
        pass

    def end_product(self, ring, states, wg, i):
        """fc1 of chunk i has been waited for: passes over the other warpgroup's stages."""
        state, phase = states
        return (self.behind_turn(state, wg, i), phase) if self.config.rings == 1 else states

    def sync_weights(self, wg):
        """Of those who share a ring."""
        if self.config.rings == 1:
            rows.sync()
        else:
            rows.sync_warpgroup(wg)

    @cute.jit
    def end_turns(self, ring, states, total, fB, wg):
        """fc2's sums."""
        if cutlass.const_expr(self.config.parts == 1):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
                self.commit(fB[3])
            cute.arch.mbarrier_wait(fB[3], states[1])
            tensor_memory.read(self.accumulator(fB[2], 0, self.config.width), total, self.config.width)
        tensor_memory.fence_before()

    @cute.jit
    def product(
        self,
        ring: pipeline.PipelineTmaUmma,
        states,
        wg: I32,
        acc: cute.Tensor,  # (rows / 2,) fp32 registers, 32 for each 64 rows of weights, in the accumulator's order
        fA: cute.Tensor,  # (MMA, 1, K blocks, parts * K tiles): the tokens' or hidden operand, in shared memory
        fB,  # as `fragments` makes it
        spec: cutlass.Constexpr,  # a Product
        nth: I32 = 0,  # how often this product was made before
    ):
        """acc = or += tokens x weights^T, all of K. With one part and `hold` it is only started, and adds in tensor
        memory."""
        state, phase = states
        first = 0  # column
        if cutlass.const_expr(self.config.parts == 1 and spec is self.fc1):
            first = self.config.width
        waits = self.config.parts == 2 or spec is not self.fc2
        # The warps have read what the sums overwrite, and written the operand.
        tensor_memory.fence_before()
        rows.sync_warpgroup(wg)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            tensor_memory.fence_after()
            if cutlass.const_expr(self.config.parts == 2):
                self.start_parts(ring, state.clone(), wg, fA, fB, spec)
            else:
                self.start(ring, state.clone(), wg, fA, fB, spec, first, spec.adds and nth > 0)
            if cutlass.const_expr(waits):
                self.commit(fB[3])
        state = self.skipped(state, spec.step * len(spec.uses))
        if cutlass.const_expr(self.config.rings == 1 and spec is self.out_proj):
            state = self.behind_out_proj(state, wg)
        if cutlass.const_expr(waits):
            cute.arch.mbarrier_wait(fB[3], phase)
            phase ^= 1
        if cutlass.const_expr(self.config.parts == 2):
            one = cute.make_rmem_tensor(BOX // 2, F32)
            for n in cutlass.range_constexpr(spec.rows // BOX):
                total = cute.make_tensor(acc.iterator + n * (BOX // 2), cute.make_layout(BOX // 2))
                if cutlass.const_expr(not spec.adds):
                    total.fill(0.0)
                for k in cutlass.range(spec.k_tiles, unroll=1):
                    column = cute.assume((n * spec.k_tiles + k) * BOX, divby=BOX)
                    tensor_memory.read(self.accumulator(fB[2], column, BOX), one, BOX)
                    total.store(total.load() + one.load())
        elif cutlass.const_expr(waits):
            tensor_memory.read(self.accumulator(fB[2], first, spec.rows), acc, spec.rows)
        return state, phase

    @cute.jit
    def start(self, ring, state, wg, fA, fB, spec: cutlass.Constexpr, first: cutlass.Constexpr, adds):
        """Issues a product whose sums lie from column `first`."""
        for (n, k, _), _second in spec.uses:
            at = state.clone()
            ring.consumer_wait(at)
            more = k > 0 or adds
            if cutlass.const_expr(spec.rows == BOX):
                self.issue(BOX, fB[2], first, fA, k, fB[0], 2 * at.index, more)
                self.issue(BOX, fB[2], first, fA, k + 1, fB[0], 2 * at.index + 1, True)
            else:
                self.issue(2 * BOX, fB[2], first + n * BOX, fA, k, fB[1], at.index, more)
            ring.consumer_release(at)
            for _ in range(spec.step):
                state.advance()

    @cute.jit
    def start_parts(self, ring, state, wg, fA, fB, spec: cutlass.Constexpr):
        """Issues a product of two parts: every stage has 64 columns for its sums."""
        for u in cutlass.range(len(spec.uses), unroll=1):
            k = u % spec.k_tiles
            at = self.of_ring(state, wg)
            ring.consumer_wait(at)
            column = cute.assume(u * BOX, divby=BOX)
            self.issue(BOX, fB[2], column, fA, k, fB[0], 2 * at.index, False)
            self.issue(BOX, fB[2], column, fA, spec.k_tiles + k, fB[0], 2 * at.index + 1, True)
            self.issue(BOX, fB[2], column, fA, k, fB[0], 2 * at.index + 1, True)
            ring.consumer_release(at)
            state.advance()

    @cute.jit
    def commit(self, done: cute.Pointer):
        """Lets `done` know when all products so far are."""
        with cute.arch.elect_one():
            tcgen05.commit(done)

    def accumulator(self, start: cute.Pointer, column: int, n: int):
        mma = self.mma(n)
        return cute.make_tensor(start + column, mma.make_fragment_C(mma.partition_shape_C((Finish.tile, n))).layout)

    @cute.jit
    def issue(
        self,
        n: cutlass.Constexpr,
        start: cute.Pointer,
        column: I32,
        fA: cute.Tensor,
        a: I32,
        fB: cute.Tensor,
        b: I32,
        adds,  # to what the accumulator holds
    ):
        """One K tile of 64 tokens by n rows."""
        mma, acc = self.mma(n), self.accumulator(start, column, n)
        mma.set(tcgen05.Field.ACCUMULATE, adds)
        for kb in cutlass.range_constexpr(BOX // 16):
            cute.gemm(mma, acc, fA[None, None, kb, a], fB[None, None, kb, b], acc)
            mma.set(tcgen05.Field.ACCUMULATE, True)
