"""The block's second half in one kernel: out_proj, residual, LayerNorm, fc1, GELU, fc2, residual.

A block owns 64 tokens. Two consumer warpgroups compute, each with half of every product's columns; one producer warp
streams the weights through shared memory by TMA. The hidden activations exist only as chunks in shared memory.

With two parts for each operand, a product is lo * hi + hi * lo + hi * hi, in this order into one accumulator (the
small terms lose nothing before the large one arrives), and the accumulator is added to fp32 registers every 64 of K,
because the tensor core's own sums truncate.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Finish
from cute_kernels.hyena.weights import compact, operand_type
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
K_TILE = 64  # one 128-byte swizzle row of 16-bit operands
CONSUMERS_BARRIER = 1


class FinishKernel:
    def __init__(self, config: Finish):
        self.config = config
        self.dtype = operand_type(config.dtype)
        c = config
        self.row_k_tiles = c.width // K_TILE  # K tiles of out_proj and fc1
        self.chunk_k_tiles = c.chunk // K_TILE  # K tiles of one hidden chunk in fc2
        self.chunks = c.inner // c.split // c.chunk

    def mma(self, n: int):
        k = OperandMajorMode.K
        return sm90_utils.make_trivial_tiled_mma(self.dtype, self.dtype, k, k, F32, (1, 1, 1), tiler_mn=(64, n))

    @cute.jit
    def __call__(
        self,
        mP: cute.Tensor,  # (B, D, Lp) fp32: the gated convolution, channels first, rows padded to Lp
        mX: cute.Tensor,  # (T, D) fp32: the block's input, T = B * L
        mWo: cute.Tensor,  # (parts, D, D): operands made by ConvertWeights
        mW1: cute.Tensor,  # (parts, M, D)
        mW2: cute.Tensor,  # (parts, D, M)
        mSo: cute.Tensor,  # (D,) fp32: the scales of their rows
        mS1: cute.Tensor,  # (M,)
        mS2: cute.Tensor,  # (D,)
        mNorm1: cute.Tensor,  # (M,) fp32: L2 norms of fc1's rows
        mBo: cute.Tensor,  # (D,) fp32: biases
        mB1: cute.Tensor,  # (M,)
        mB2: cute.Tensor,  # (D,)
        mNw: cute.Tensor,  # (D,) fp32: norm2
        mNb: cute.Tensor,  # (D,)
        mOut: cute.Tensor,  # (T, D) fp32
        length: I32,  # L
        conv_length: I32,  # tokens of a row that the operator reaches, min(L, l_max)
        eps: F32,
        stream: cuda.CUstream,
    ):
        c = self.config
        row_major = utils.LayoutEnum.ROW_MAJOR
        tile = (c.tile, c.half, K_TILE)
        # Activations: one (64, 64) tile for each K tile and part. Weights: two halves of (D/2, 64) for each stage.
        a_layout = sm90_utils.make_smem_layout_a(row_major, tile, self.dtype, self.row_k_tiles * c.parts)
        h_layout = sm90_utils.make_smem_layout_a(row_major, tile, self.dtype, self.chunk_k_tiles * c.parts)
        w_layout = sm90_utils.make_smem_layout_b(row_major, tile, self.dtype, 2 * c.stages)
        # fc1 gives each warpgroup D/4 columns of a chunk: the same bytes, seen as quarters of a stage.
        q_layout = sm90_utils.make_smem_layout_b(row_major, (c.tile, c.half // 2, K_TILE), self.dtype, 4 * c.stages)

        if cutlass.const_expr(c.multicast > 1):
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        else:
            op = cpasync.CopyBulkTensorTileG2SOp()
        one = cute.slice_(w_layout, (None, None, 0))
        atoms = []
        for w in (mWo, mW1, mW2):
            nkp = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))  # (N, K, parts)
            atom, coords = cpasync.make_tiled_tma_atom(op, nkp, one, (c.half, K_TILE), num_multicast=c.multicast)
            atoms += [atom, coords]

        @cute.struct
        class Storage:
            w_mbar: cute.struct.MemRange[cutlass.Int64, 2 * c.stages]
            sReduce: cute.struct.MemRange[F32, 4 * c.tile]
            sScale: cute.struct.MemRange[F32, c.tile]
            sBound: cute.struct.MemRange[F32, 16]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_layout)], 1024]
            sH: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(h_layout)], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]

        self.Storage = Storage
        tokens = mX.shape[0]
        clusters = cute.ceil_div(cute.ceil_div(tokens, c.tile), c.multicast)
        self.kernel(
            *(mP, mX, *atoms, mSo, mS1, mS2, mNorm1, mBo, mB1, mB2, mNw, mNb, mOut, length, conv_length, eps),
            *(self.mma(c.half), self.mma(c.half), self.mma(c.half // 2), self.mma(c.half // 2)),
            *(a_layout, h_layout, w_layout, q_layout),
        ).launch(
            grid=(clusters * c.multicast * c.split, 1, 1),
            block=(c.consumers + 128, 1, 1),
            cluster=(c.multicast * c.split, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mP: cute.Tensor,
        mX: cute.Tensor,
        atomWo: cute.CopyAtom,
        tWo: cute.Tensor,
        atomW1: cute.CopyAtom,
        tW1: cute.Tensor,
        atomW2: cute.CopyAtom,
        tW2: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
        mBo: cute.Tensor,
        mB1: cute.Tensor,
        mB2: cute.Tensor,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mOut: cute.Tensor,
        length: I32,
        conv_length: I32,
        eps: F32,
        half_new: cute.TiledMma,
        half_add: cute.TiledMma,
        quarter_new: cute.TiledMma,
        quarter_add: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        h_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
    ):
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster = cute.arch.block_idx()[0] // (c.multicast * c.split)
        cta_layout = cute.make_layout((1, c.multicast, c.split, 1))
        peer, part = rank % c.multicast, rank // c.multicast  # token tile in the cluster, part of the hidden width
        token0 = (cluster * c.multicast + peer) * c.tile

        storage = memory.SmemAllocator().allocate(self.Storage)
        sA = storage.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)  # (64, 64, parts * K tiles)
        sH = storage.sH.get_tensor(h_layout.outer, swizzle=h_layout.inner)
        sW = storage.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner)  # (D/2, 64, 2 * stages)
        sQ = storage.sW.get_tensor(q_layout.outer, swizzle=q_layout.inner)  # (D/4, 64, 4 * stages)
        sReduce = storage.sReduce.get_tensor(cute.make_layout((c.tile, 4)))
        sScale = storage.sScale.get_tensor(cute.make_layout(c.tile))
        sBound = storage.sBound.get_tensor(cute.make_layout((8, 2)))

        group = pipeline.CooperativeGroup
        pipe = pipeline.PipelineTmaAsync.create(
            num_stages=c.stages,
            barrier_storage=storage.w_mbar.data_ptr(),
            tx_count=c.width * K_TILE * 2,
            producer_group=group(pipeline.Agent.Thread),
            consumer_group=group(pipeline.Agent.Thread, c.consumers // 32 * c.multicast),
            cta_layout_vmnk=cta_layout,
            mcast_mode_mn=(0, 1),
        )

        if warp_idx >= c.consumers // 32:
            cute.arch.setmaxregister_decrease(40)
            if warp_idx == c.consumers // 32:
                self.produce(pipe, rank, peer, part, cta_layout, atomWo, tWo, atomW1, tW1, atomW2, tW2, sW)
        else:
            cute.arch.setmaxregister_increase(232)
            self.consume(
                *(pipe, tidx, warp_idx, part, token0, mP, mX, mSo, mS1, mS2, mNorm1, mBo, mB1, mB2, mNw, mNb, mOut),
                *(length, conv_length, eps, half_new, half_add, quarter_new, quarter_add),
                *(sA, sH, sW, sQ, sReduce, sScale, sBound),
            )

    @cute.jit
    def produce(
        self,
        pipe: pipeline.PipelineTmaAsync,
        rank: I32,
        peer: I32,
        part: I32,
        cta_layout: cute.Layout,
        atomWo: cute.CopyAtom,
        tWo: cute.Tensor,
        atomW1: cute.CopyAtom,
        tW1: cute.Tensor,
        atomW2: cute.CopyAtom,
        tW2: cute.Tensor,
        sW: cute.Tensor,
    ):
        """Loads the weights in the order in which `consume` uses them, two halves to a stage."""
        c = self.config
        mask = cpasync.create_tma_multicast_mask(cta_layout, cta_layout.get_flat_coord(rank), 1)
        sWg = cute.group_modes(sW, 0, 2)
        peers = cute.make_layout(c.multicast)
        tiles = []
        for atom, t in ((atomWo, tWo), (atomW1, tW1), (atomW2, tW2)):
            g = cute.group_modes(cute.local_tile(t, (c.half, K_TILE), (None, None, None)), 0, 2)
            tiles.append((atom, *cpasync.tma_partition(atom, peer, peers, sWg, g)))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.stages)

        for k in cutlass.range_constexpr(self.row_k_tiles):
            for p in cutlass.range_constexpr(c.parts):
                state = self.load(pipe, state, mask, tiles[0], (0, k, c.parts - 1 - p), (1, k, c.parts - 1 - p))
        for i in cutlass.range(self.chunks, unroll=1):
            n = part * self.chunks + i
            if cutlass.const_expr(c.parts == 1):
                for k in cutlass.range_constexpr(self.row_k_tiles // 2):
                    state = self.load(pipe, state, mask, tiles[1], (n, 2 * k, 0), (n, 2 * k + 1, 0))
            else:
                for k in cutlass.range_constexpr(self.row_k_tiles):
                    state = self.load(pipe, state, mask, tiles[1], (n, k, 1), (n, k, 0))
            for k in cutlass.range_constexpr(self.chunk_k_tiles):
                for p in cutlass.range_constexpr(c.parts):
                    kk = n * self.chunk_k_tiles + k
                    state = self.load(pipe, state, mask, tiles[2], (0, kk, c.parts - 1 - p), (1, kk, c.parts - 1 - p))
        pipe.producer_tail(state)

    @cute.jit
    def load(self, pipe, state, mask, tiles, first, second):
        """Both halves of one stage: (row tile, K tile, part) each."""
        atom, tWsW, tWgW = tiles
        pipe.producer_acquire(state)
        mbar = pipe.producer_get_barrier(state)
        for half in cutlass.range_constexpr(2):
            source = tWgW[(None, *(first if cutlass.const_expr(half == 0) else second))]
            if cutlass.const_expr(self.config.multicast > 1):
                cute.copy(atom, source, tWsW[None, 2 * state.index + half], tma_bar_ptr=mbar, mcast_mask=mask)
            else:
                cute.copy(atom, source, tWsW[None, 2 * state.index + half], tma_bar_ptr=mbar)
        pipe.producer_commit(state)
        state.advance()
        return state

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=self.config.consumers)

    @cute.jit
    def consume(
        self,
        pipe: pipeline.PipelineTmaAsync,
        tidx: I32,
        warp_idx: I32,
        part: I32,
        token0: I32,
        mP: cute.Tensor,
        mX: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
        mBo: cute.Tensor,
        mB1: cute.Tensor,
        mB2: cute.Tensor,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mOut: cute.Tensor,
        length: I32,
        conv_length: I32,
        eps: F32,
        half_new: cute.TiledMma,
        half_add: cute.TiledMma,
        quarter_new: cute.TiledMma,
        quarter_add: cute.TiledMma,
        sA: cute.Tensor,
        sH: cute.Tensor,
        sW: cute.Tensor,
        sQ: cute.Tensor,
        sReduce: cute.Tensor,
        sScale: cute.Tensor,
        sBound: cute.Tensor,
    ):
        c = self.config
        tokens = mX.shape[0]
        wg = warp_idx // 4
        lane = tidx % 32
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.stages)

        # The largest row norm and bias of fc1 bound every hidden activation: |h| <= norm1 |n2| + bias1.
        w_norm, w_bias = F32(0.0), F32(0.0)
        for i in cutlass.range_constexpr(cute.ceil_div(c.inner, c.consumers)):
            j = tidx + i * c.consumers
            if j < c.inner:
                w_norm = cute.arch.fmax(w_norm, mNorm1[j])
                w_bias = cute.arch.fmax(w_bias, cute.arch.fmax(mB1[j], -mB1[j]))
        w_norm, w_bias = numerics.max_over(w_norm, 32), numerics.max_over(w_bias, 32)
        if lane == 0:
            sBound[warp_idx, 0], sBound[warp_idx, 1] = w_norm, w_bias

        self.load_rows(mP, sA, sReduce, sScale, token0, tokens, length, conv_length, tidx)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        for i in cutlass.range_constexpr(c.consumers // 32):
            w_norm, w_bias = cute.arch.fmax(w_norm, sBound[i, 0]), cute.arch.fmax(w_bias, sBound[i, 1])

        # Fragments: A is read by both warpgroups, B by halves.
        thread = tidx % 128
        half, quarter = half_new.get_slice(thread), quarter_new.get_slice(thread)
        # Two of each, which start or go on with a sum: an MMA that is changed inside a loop can't be traced.
        half_new.set(warpgroup.Field.ACCUMULATE, False)
        half_add.set(warpgroup.Field.ACCUMULATE, True)
        quarter_new.set(warpgroup.Field.ACCUMULATE, False)
        quarter_add.set(warpgroup.Field.ACCUMULATE, True)
        mma_half, mma_quarter = (half_new, half_add), (quarter_new, quarter_add)
        fA = half_new.make_fragment_A(half.partition_A(sA))  # (MMA, 1, K blocks, parts * K tiles)
        fH = half_new.make_fragment_A(half.partition_A(sH))
        fW = half_new.make_fragment_B(half.partition_B(sW))  # (MMA, 1, K blocks, 2 * stages)
        fQ = quarter_new.make_fragment_B(quarter.partition_B(sQ))
        accN = cute.make_rmem_tensor(half_new.partition_shape_C((c.tile, c.half)), F32)
        accH = cute.make_rmem_tensor(quarter_new.partition_shape_C((c.tile, c.half // 2)), F32)
        cN = rows_of(half.partition_C(cute.make_identity_tensor((c.tile, c.half))))
        cH = rows_of(quarter.partition_C(cute.make_identity_tensor((c.tile, c.half // 2))))

        # out_proj; r = p Wo^T + bo + x
        r = self.total_of(accN)
        state = self.product(pipe, state, mma_half, accN, r, fA, fW, wg, True, self.row_k_tiles, True)
        rr = rows_of(r)
        rows, cols = cute.size(rr, mode=[0]), cute.size(rr, mode=[1])
        for j in cutlass.range_constexpr(0, cols, 2):
            n = wg * c.half + cN[0, j][1]
            scale, bias = pair(mSo, n), pair(mBo, n)
            for m in cutlass.range_constexpr(rows):
                row = cN[m, 0][0]
                x = cute.make_rmem_tensor(2, F32)
                x.fill(0.0)
                if token0 + row < tokens:
                    x.store(pair(mX, token0 + row, n).load())
                for i in cutlass.range_constexpr(2):
                    rr[m, j + i] = rr[m, j + i] * (sScale[row] * scale[i]) + (bias[i] + x[i])

        # r waits in the output for the end; a split tile keeps only the columns that this block will finish.
        for m in cutlass.range_constexpr(rows):
            token = token0 + cN[m, 0][0]
            if token < tokens:
                for j in cutlass.range_constexpr(0, cols, 2):
                    n = wg * c.half + cN[m, j][1]
                    if n // (c.width // c.split) == part:
                        x = cute.make_rmem_tensor(2, F32)
                        x[0], x[1] = rr[m, j], rr[m, j + 1]
                        set_pair(x, mOut, token, n)

        # LayerNorm over rows of which each warpgroup holds half; then the operand n2 in place of p.
        inverse_n, scale_h, inverse_h = self.normalise(rr, cN, sA, sReduce, mNw, mNb, eps, w_norm, w_bias, wg)

        # The MLP, chunk by chunk.
        total = self.total_of(accN)
        total.fill(0.0)
        hidden = self.total_of(accH)
        for i in cutlass.range(self.chunks, unroll=1):
            state = self.product(pipe, state, mma_quarter, accH, hidden, fA, fQ, wg, False, self.row_k_tiles, True)
            if i > 0:
                self.sync()  # the other warpgroup has read the last chunk
            column0 = (part * self.chunks + i) * c.chunk + wg * (c.half // 2)
            self.activate(rows_of(hidden), cH, sH, mS1, mB1, column0, inverse_n, scale_h, wg)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync()
            state = self.product(
                pipe, state, mma_half, accN, total, fH, fW, wg, True, self.chunk_k_tiles, self.chunks == 1
            )

        tt = rows_of(total)
        if cutlass.const_expr(c.split == 1):
            for j in cutlass.range_constexpr(0, cols, 2):
                n = wg * c.half + cN[0, j][1]
                scale, bias = pair(mS2, n), pair(mB2, n)
                for m in cutlass.range_constexpr(rows):
                    token = token0 + cN[m, 0][0]
                    if token < tokens:
                        x = pair(mOut, token, n)
                        for i in cutlass.range_constexpr(2):
                            x[i] = (tt[m, j + i] * (inverse_h[m] * scale[i]) + bias[i]) + x[i]
                        set_pair(x, mOut, token, n)

    def total_of(self, acc):
        return acc if self.config.parts == 1 else cute.make_rmem_tensor_like(acc)

    @cute.jit
    def product(
        self, pipe, state, mma, acc, total, fA, fB, wg, halves: cutlass.Constexpr, k_tiles: cutlass.Constexpr, fresh
    ):
        """total = A B^T over `k_tiles` tiles of K, added to what was there unless `fresh`.

        `halves`: a stage holds one K tile and part for all output columns, a half for each warpgroup. Otherwise it
        holds two tiles, neighbours along K or the low and high part of one, a quarter of each for each warpgroup.
        With one part the accumulator is the total.
        """
        if cutlass.const_expr(self.config.parts == 1):
            per_stage = 1 if cutlass.const_expr(halves) else 2
            for k in cutlass.range_constexpr(k_tiles // per_stage):
                pipe.consumer_wait(state)
                warpgroup.fence()
                for i in cutlass.range_constexpr(per_stage):
                    a, b = per_stage * k + i, 2 * (per_stage * state.index + i) + wg
                    self.issue(mma, acc, fA, a, fB, b, fresh and a == 0)
                state = self.retire(pipe, state)
        else:
            if cutlass.const_expr(fresh):
                total.fill(0.0)
            # This loop stays one: unrolled, the accumulators of neighbouring steps would be live together.
            for k in cutlass.range(k_tiles, unroll=1):
                pipe.consumer_wait(state)
                warpgroup.fence()
                if cutlass.const_expr(halves):
                    self.issue(mma, acc, fA, k, fB, 2 * state.index + wg, True)
                    state = self.retire(pipe, state)
                    pipe.consumer_wait(state)
                    warpgroup.fence()
                    high = 2 * state.index + wg
                else:
                    self.issue(mma, acc, fA, k, fB, 4 * state.index + wg, True)
                    high = 4 * state.index + wg + 2
                self.issue(mma, acc, fA, k_tiles + k, fB, high, False)
                self.issue(mma, acc, fA, k, fB, high, False)
                state = self.retire(pipe, state)
                total.store(total.load() + acc.load())
        return state

    @cute.jit
    def retire(self, pipe, state):
        """Waits for the products that read this stage, and hands it back."""
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        pipe.consumer_release(state)
        state.advance()
        return state

    @cute.jit
    def issue(self, mma, acc, fA, a, fB, b, fresh: cutlass.Constexpr):
        for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            one = mma[0] if cutlass.const_expr(fresh and kb == 0) else mma[1]
            cute.gemm(one, acc, fA[None, None, kb, a], fB[None, None, kb, b], acc)

    @cute.jit
    def load_rows(self, mP, sA, sReduce, sScale, token0, tokens, length, conv_length, tidx):
        """p, transposed to token rows and scaled row by row: a thread reads a quarter of the channels of one token."""
        c = self.config
        row, quarter = tidx % c.tile, tidx // c.tile
        per = c.width // (c.consumers // c.tile)  # channels of one thread
        token = token0 + row
        b = token // length
        t = token - b * length
        x = cute.make_rmem_tensor((8, per // 8), F32)
        x.fill(0.0)
        if token < tokens and t < conv_length:
            gP = mP[cutlass.min(b, mP.shape[0] - 1), None, t]  # (D,)
            for i in cutlass.range_constexpr(per):
                x[i] = gP[quarter * per + i]
        amax = F32(0.0)
        for i in cutlass.range_constexpr(per):
            amax = cute.arch.fmax(amax, cute.arch.fmax(x[i], -x[i]))
        sReduce[row, quarter] = amax
        self.sync()
        for i in cutlass.range_constexpr(c.consumers // c.tile):
            amax = cute.arch.fmax(amax, sReduce[row, i])
        scale, inverse = numerics.scale_of(amax)
        if quarter == 0:
            sScale[row] = inverse
        x.store(x.load() * scale)
        hi, lo = cute.make_rmem_tensor_like(x, self.dtype), cute.make_rmem_tensor_like(x, self.dtype)
        numerics.split(x, hi, lo)
        for p in cutlass.range_constexpr(c.parts):
            for i in cutlass.range_constexpr(per // 8):
                n = quarter * per + 8 * i
                target = cute.local_tile(sA, (1, 8, 1), (row, (n % K_TILE) // 8, p * self.row_k_tiles + n // K_TILE))
                cute.autovec_copy((hi if cutlass.const_expr(p == 0) else lo)[None, i], target[0, None, 0])

    @cute.jit
    def normalise(self, rr, cN, sA, sReduce, mNw, mNb, eps, w_norm, w_bias, wg):
        """LayerNorm of register rows, in place and into the operand sA.

        Returns, by register row: the operand's inverse scale, the hidden activations' scale and its inverse.
        """
        c = self.config
        rows, cols = cute.size(rr, mode=[0]), cute.size(rr, mode=[1])
        mean, rstd = cute.make_rmem_tensor(rows, F32), cute.make_rmem_tensor(rows, F32)
        inverse_n, scale_h = cute.make_rmem_tensor(rows, F32), cute.make_rmem_tensor(rows, F32)
        inverse_h = cute.make_rmem_tensor(rows, F32)
        for m in cutlass.range_constexpr(rows):
            mean[m] = F32(0.0)
            for j in cutlass.range_constexpr(cols):
                mean[m] = mean[m] + rr[m, j]
        self.row_sums(mean, cN, sReduce, wg, 0)
        for m in cutlass.range_constexpr(rows):
            mean[m] = mean[m] * F32(1.0 / c.width)
            rstd[m] = F32(0.0)
            for j in cutlass.range_constexpr(cols):
                centred = rr[m, j] - mean[m]
                rstd[m] = rstd[m] + centred * centred
        self.row_sums(rstd, cN, sReduce, wg, 2)
        square, amax = cute.make_rmem_tensor(rows, F32), cute.make_rmem_tensor(rows, F32)
        for m in cutlass.range_constexpr(rows):
            rstd[m] = F32(1.0) / cute.math.sqrt(rstd[m] * F32(1.0 / c.width) + eps)
            square[m], amax[m] = F32(0.0), F32(0.0)
            for j in cutlass.range_constexpr(0, cols, 2):
                n = wg * c.half + cN[m, j][1]
                weight, bias = pair(mNw, n), pair(mNb, n)
                for i in cutlass.range_constexpr(2):
                    y = (rr[m, j + i] - mean[m]) * rstd[m] * weight[i] + bias[i]
                    rr[m, j + i] = y
                    square[m] = square[m] + y * y
        self.row_sums(square, cN, sReduce, wg, 0)
        for m in cutlass.range_constexpr(rows):
            # The row's norm bounds its largest element, and so serves for both scales.
            norm = cute.math.sqrt(square[m])
            scale, inverse_n[m] = numerics.scale_of(norm)
            scale_h[m], inverse_h[m] = numerics.scale_of(norm * w_norm + w_bias)
            for j in cutlass.range_constexpr(cols):
                rr[m, j] = rr[m, j] * scale
        self.store_operand(rr, cN, sA, wg * c.half, self.row_k_tiles)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        return inverse_n, scale_h, inverse_h

    @cute.jit
    def row_sums(self, x, cN, sReduce, wg, column: cutlass.Constexpr):
        """Sums over the four lanes that share a row and over both warpgroups, in a fixed order."""
        for m in cutlass.range_constexpr(cute.size(x)):
            x[m] = numerics.sum_over(x[m], 4)
            sReduce[cN[m, 0][0], column + wg] = x[m]
        self.sync()
        for m in cutlass.range_constexpr(cute.size(x)):
            x[m] = sReduce[cN[m, 0][0], column] + sReduce[cN[m, 0][0], column + 1]

    @cute.jit
    def activate(self, hidden, cH, sH, mS1, mB1, column0, inverse_n, scale_h, wg):
        """gelu(h) of one chunk, scaled, into the operand sH. `column0`: this warpgroup's first hidden column."""
        c = self.config
        for m in cutlass.range_constexpr(cute.size(hidden, mode=[0])):
            for j in cutlass.range_constexpr(0, cute.size(hidden, mode=[1]), 2):
                n = column0 + cH[m, j][1]
                scale, bias = pair(mS1, n), pair(mB1, n)
                for i in cutlass.range_constexpr(2):
                    h = hidden[m, j + i] * (inverse_n[m] * scale[i]) + bias[i]
                    hidden[m, j + i] = numerics.gelu_tanh(h) * scale_h[m]
        self.store_operand(hidden, cH, sH, wg * (c.half // 2), self.chunk_k_tiles)

    @cute.jit
    def store_operand(self, x, coords, sX, column0, k_tiles: cutlass.Constexpr):
        """Register rows to a K-major operand, neighbouring columns in pairs."""
        hi, lo = cute.make_rmem_tensor_like(x, self.dtype), cute.make_rmem_tensor_like(x, self.dtype)
        numerics.split(x, hi, lo)
        for p in cutlass.range_constexpr(self.config.parts):
            part = hi if cutlass.const_expr(p == 0) else lo
            for m in cutlass.range_constexpr(cute.size(x, mode=[0])):
                pairs = cute.logical_divide(part[m, None], 2)  # (2, columns / 2)
                for j in cutlass.range_constexpr(cute.size(x, mode=[1]) // 2):
                    row, n = coords[m, 2 * j][0], column0 + coords[m, 2 * j][1]
                    target = cute.local_tile(sX, (1, 2, 1), (row, (n % K_TILE) // 2, p * k_tiles + n // K_TILE))
                    cute.autovec_copy(pairs[None, j], target[0, None, 0])


def pair_at(m: cute.Tensor, *coord):
    """Two neighbours of the last mode, from an even index, as a vector."""
    *outer, n = coord
    tiled = cute.zipped_divide(m, (*(1 for _ in outer), 2))
    return tiled[(*(0 for _ in outer), None), (*outer, n // 2)]


@cute.jit
def pair(m: cute.Tensor, *coord):
    x = cute.make_rmem_tensor(2, m.element_type)
    cute.autovec_copy(pair_at(m, *coord), x)
    return x


@cute.jit
def set_pair(x: cute.Tensor, m: cute.Tensor, *coord):
    cute.autovec_copy(x, pair_at(m, *coord))


def rows_of(acc: cute.Tensor):
    """An accumulator ((2, 2, N/8), 1, 1) as (rows, columns) of this thread."""
    layout = acc.layout
    (pair, row, block), m, n = layout.shape
    (dpair, drow, dblock), dm, dn = layout.stride
    return cute.make_tensor(
        acc.iterator, cute.make_layout(((row, m), (pair, block, n)), stride=((drow, dm), (dpair, dblock, dn)))
    )


def compile_finish(config: Finish, arch: str):
    if arch != "sm_90a":
        raise NotImplementedError(f"this kernel has no {arch} engine yet")
    d, m, p, operand = config.width, config.inner, config.parts, operand_type(config.dtype)
    batch, tokens = cute.sym_int(), cute.sym_int()
    pitch = cute.sym_int(divisibility=4)
    tensors = [compact(F32, batch, d, pitch), compact(F32, tokens, d)]
    tensors += [compact(operand, p, d, d), compact(operand, p, m, d), compact(operand, p, d, m)]
    tensors += [compact(F32, n) for n in (d, m, d, m, d, m, d, d, d)]
    tensors += [compact(F32, tokens, d)]
    scalars = [I32(1), I32(1), F32(1e-5)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(FinishKernel(config), *tensors, *scalars, stream, options=compile_options(arch))
