"""The block's second half in one kernel: out_proj, residual, LayerNorm, fc1, GELU, fc2, residual.

A cluster has a tile of tokens. Each of its blocks has some of them: it computes out_proj, LayerNorm and the output for
these. For the MLP a block has a part of the hidden width instead, for all tokens of the tile: blocks send each other
their normalised tokens before it and the sums of their tokens after it. Where few tokens leave SMs free, several blocks
compute out_proj and LayerNorm of the same tokens (`copies`), and each makes the output of a part of them: the hidden
width is divided further, and nothing more is exchanged. Two warpgroups compute, each with half of the rows of every box
of weights; a warp streams these through shared memory (`cluster_finish_stream`). What happens to tokens between the
products is in `cluster_finish_rows`.
"""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.device import cluster
from cute_kernels.hyena import cluster_finish_rows as rows
from cute_kernels.hyena import numerics
from cute_kernels.hyena.arguments import operand_type
from cute_kernels.hyena.cluster_finish_sm100 import StreamSm100
from cute_kernels.hyena.cluster_finish_stream import StreamSm90
from cute_kernels.hyena.config import ClusterFinish
from cute_kernels.hyena.finish import finish_arguments
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64


class ClusterFinishKernel:
    def __init__(self, config: ClusterFinish, arch: str):
        self.config = config
        self.stream = (StreamSm90 if arch == "sm_90a" else StreamSm100)(config)
        self.dtype = operand_type(config.dtype)

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
        row_major, box = utils.LayoutEnum.ROW_MAJOR, (64, c.tokens, c.box[1])
        # A stage's boxes of 128 rows, also seen as two of 64, one for each warpgroup.
        w_layout = sm90_utils.make_smem_layout_a(row_major, (c.box[0], 1, c.box[1]), self.dtype, c.parts * c.stages)
        half_layout = sm90_utils.make_smem_layout_a(row_major, box, self.dtype, 2 * c.parts * c.stages)
        p_layout = sm90_utils.make_smem_layout_b(row_major, box, self.dtype, c.parts * c.k_tiles)

        atoms = []
        for w in (mWo, mW1, mW2):
            nkp = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))  # (N, K, parts)
            one = cute.slice_(w_layout, (None, None, 0))
            atoms += cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), nkp, one, c.box)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[I64, c.stages]
            empty: cute.struct.MemRange[I64, c.stages]
            gathered: I64
            freed: I64
            summed: I64
            sBound: cute.struct.Align[cute.struct.MemRange[F32, 4 * c.consumers // 32], 16]
            sFactor: cute.struct.MemRange[F32, 2]
            done: cute.struct.MemRange[I64, self.stream.barriers]
            address: cute.struct.MemRange[I32, self.stream.words]
            sScale: cute.struct.MemRange[F32, c.tokens]
            sStat: cute.struct.Align[cute.struct.MemRange[F32, 2 * c.tokens], 16]
            sExchange: cute.struct.Align[cute.struct.MemRange[self.dtype, c.exchange_bytes // 2], 1024]
            sHidden: cute.struct.Align[cute.struct.MemRange[self.dtype, c.hidden_bytes // 2], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(w_layout)], 1024]

        self.Storage = Storage
        self.kernel.set_name_prefix("hyena_finish", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(mP, mX, *atoms, mSo, mS1, mS2, mNorm1, mBo, mB1, mB2, mNw, mNb, mOut, length, conv_length, eps),
            *(w_layout, half_layout, p_layout),
        ).launch(
            grid=(cute.ceil_div(mX.shape[0], c.tile) * c.split, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.split, 1, 1),
            stream=stream,
            use_pdl=True,
            # without it the assembler may ignore setmaxnreg, and spill; naming the carveout keeps it off the driver
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
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
        w_layout: cute.ComposedLayout,
        half_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
    ):
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        token0 = cute.arch.block_idx()[0] // c.copies * c.tokens  # the block's first

        storage = memory.SmemAllocator().allocate(self.Storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        gathered, freed, summed = storage.gathered.ptr, storage.freed.ptr, storage.summed.ptr
        sW = storage.sW.get_tensor(w_layout.outer, swizzle=w_layout.inner)  # (128, 64, parts * stages)
        if tidx == 0:
            for i in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, self.stream.readers)
            cute.arch.mbarrier_init(gathered, 1)
            cute.arch.mbarrier_init(freed, c.split - 1)
            cute.arch.mbarrier_init(summed, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(gathered, 2 * c.parts * (c.groups - 1) * c.tokens * c.width)
            cute.arch.mbarrier_arrive_and_expect_tx(summed, c.sums_bytes)
        cute.arch.sync_threads()
        cute.arch.cluster_arrive_relaxed()  # other blocks' barriers are needed for the first exchange

        if warp_idx >= c.consumers // 32:
            if cutlass.const_expr(c.moves_registers):
                cute.arch.setmaxregister_decrease(24)
            if warp_idx == c.consumers // 32:
                if cutlass.const_expr(not c.operands_older):
                    cute.arch.griddepcontrol_wait()
                self.stream.produce(full, empty, rank * c.chunks, ((atomWo, tWo), (atomW1, tW1), (atomW2, tW2)), sW)
            cute.arch.cluster_wait()
        else:
            if cutlass.const_expr(c.moves_registers):
                cute.arch.setmaxregister_increase(240)
            sHalf = storage.sW.get_tensor(half_layout.outer, swizzle=half_layout.inner)  # (64, 64, 2 * parts * stages)
            sP = storage.sHidden.get_tensor(p_layout.outer, swizzle=p_layout.inner)  # (tokens, 64, parts * K tiles)
            shape = (4, c.consumers // c.copies, c.tokens // 8, c.row_boxes, c.split - 1)
            sSums = cute.make_tensor(
                cute.recast_ptr(storage.sExchange.data_ptr(), dtype=F32).align(16), cute.make_layout(shape)
            )
            reduce = cute.recast_ptr(storage.sHidden.data_ptr() + c.operand_bytes // 2, dtype=F32).align(16)
            self.consume(
                *(full, empty, gathered, freed, summed, storage.done.data_ptr(), storage.address.data_ptr()),
                *(tidx, warp_idx, rank, token0),
                *(mP, mX, mSo, mS1, mS2, mNorm1, mBo, mB1, mB2, mNw, mNb, mOut, length, conv_length, eps),
                *(sHalf, sP, storage.sExchange.data_ptr(), storage.sHidden.data_ptr(), sSums),
                storage.sBound.get_tensor(cute.make_layout((4, c.consumers // 32))),
                storage.sFactor.get_tensor(cute.make_layout(2)),
                storage.sScale.get_tensor(cute.make_layout(c.tokens)),
                storage.sStat.get_tensor(cute.make_layout((2, c.tokens))),
                cute.make_tensor(reduce, cute.make_layout((8, c.tokens))),
                cute.make_tensor(reduce, cute.make_layout((2, 8, c.tokens))),
            )

    def operand(self, pointer: cute.Pointer, k: int, copies: int):
        """A tile of tokens as an operand: (tile, 64, K tiles of all copies), and its pairs of tokens as words
        (32 lanes, K / 8, tile / 8, copies). It consists of core matrices of 8 of K by 8 tokens."""
        tile = self.config.tile
        blocks = ((8, tile // 8), (8, 8), (k // 64, copies))
        tensor = cute.make_tensor(pointer, cute.make_layout(blocks, stride=((1, 8 * k), (8, 64), (512, tile * k))))
        words = cute.make_layout((32, k // 8, tile // 8, copies))
        return tensor, cute.make_tensor(cute.recast_ptr(pointer, dtype=I32), words)

    @cute.jit
    def consume(
        self,
        full: cute.Pointer,
        empty: cute.Pointer,
        gathered: cute.Pointer,
        freed: cute.Pointer,
        summed: cute.Pointer,
        done: cute.Pointer,
        address: cute.Pointer,
        tidx: I32,
        warp_idx: I32,
        rank: I32,
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
        sW: cute.Tensor,  # (64, 64, 2 * parts * stages)
        sP: cute.Tensor,  # (tokens, 64, parts * K tiles)
        exchange: cute.Pointer,
        hidden_operand: cute.Pointer,
        sSums: cute.Tensor,  # (4, 256 / copies, tokens / 8, row boxes, split - 1)
        sBound: cute.Tensor,  # (4, 8)
        sFactor: cute.Tensor,  # (2,): the inverse scale of the normalised tokens, the scale of the activations
        sScale: cute.Tensor,  # (tokens,)
        sStat: cute.Tensor,  # (2, tokens)
        sLargest: cute.Tensor,  # (8, tokens)
        sReduce: cute.Tensor,  # (2, 8, tokens)
    ):
        c = self.config
        wg, thread = warp_idx // 4, tidx % 128
        self.stream.begin(done, address)
        per_token = cute.make_layout((2, 2, c.tokens // 8, c.row_boxes))

        # The inputs of the call may be read before the launch in front has ended, what kernels made may not. The bounds
        # below are found while p is on its way.
        x = cute.make_rmem_tensor(per_token, F32)
        rows.load_tokens(mX, x, token0, tidx)
        norm_w, norm_b, bias_o = (rows.load_channels(m, tidx, c.row_boxes) for m in (mNw, mNb, mBo))
        all_w, all_b, all_b1 = rows.load_all(mNw, tidx), rows.load_all(mNb, tidx), rows.load_all(mB1, tidx)
        cute.arch.griddepcontrol_wait()
        p = cute.make_rmem_tensor((c.width // 32, c.tokens // 8), F32)
        rows.load_convolved(mP, p, token0, length, conv_length, mX.shape[0], tidx)
        all_norm1, scale_o = rows.load_all(mNorm1, tidx), rows.load_channels(mSo, tidx, c.row_boxes)
        first = rank * c.chunks  # of this block's part of the hidden width
        scale1, bias1 = self.hidden_vectors(mS1, mB1, first, tidx)

        # A LayerNorm row's L2 norm is at most sqrt(D), so |n2| <= sqrt(D) max |weight| + |bias|, and with fc1's rows
        # |h| <= |W1_j| |n2| + |b1_j|: two scales that fit every token.
        bounds = (
            numerics.max_over(numerics.largest(all_w), 32),
            numerics.sum_over(numerics.sum_of_squares(all_b), 32),
            numerics.max_over(numerics.largest(all_norm1), 32),
            numerics.max_over(numerics.largest(all_b1), 32),
        )
        if tidx % 32 == 0:
            for i in cutlass.range_constexpr(4):
                sBound[i, warp_idx] = bounds[i]
        rows.sync()
        # Every warp finds the same from the warps' shares, a lane's four of one warp.
        share = cute.make_rmem_tensor(4, F32)
        cute.autovec_copy(sBound[None, tidx % 8], share)
        weight, w1_norm, b1_max = (numerics.max_over(share[i], 8) for i in (0, 2, 3))
        n_bound = F32(math.sqrt(c.width)) * weight + cute.math.sqrt(numerics.sum_over(share[1], 8), fastmath=True)
        scale_n, inverse_n = numerics.scale_of(n_bound)
        scale_h, _ = numerics.scale_of(n_bound * w1_norm + b1_max)
        if tidx == 0:
            sFactor[0], sFactor[1] = inverse_n, scale_h
        norm_w.store(norm_w.load() * scale_n)
        norm_b.store(norm_b.load() * scale_n)

        rows.store_largest(p, sLargest, tidx)
        rows.sync()
        rows.store_convolved(p, sLargest, sScale, sP, c.parts, tidx)
        cute.arch.fence_proxy("async.shared", space="cta")
        rows.sync()

        mma_o, mma = self.stream.mma(c.tokens, False), self.stream.mma(c.tile, True)
        slice_o, slice_ = self.stream.slice(mma_o, thread), self.stream.slice(mma, thread)
        fA = mma.make_fragment_A(slice_.partition_A(sW))  # (MMA, 1, K blocks, 2 * parts * stages)
        fP = mma_o.make_fragment_B(slice_o.partition_B(sP))  # (MMA, 1, K blocks, parts * K tiles)
        sN, wN = self.operand(exchange, c.width, c.parts)
        sH, wH = self.operand(hidden_operand, c.box[0], c.parts * c.buffers)
        fN = mma.make_fragment_B(slice_.partition_B(sN))  # (MMA, 1, K blocks, (K tiles, parts))
        fH = mma.make_fragment_B(slice_.partition_B(sH))  # (MMA, 1, K blocks, (2, parts * buffers))
        state = self.stream.begin_state(done, address, wg)

        # out_proj of the block's tokens, and LayerNorm
        r = cute.make_rmem_tensor(per_token, F32)
        flat = cute.make_tensor(r.iterator, cute.make_layout((c.tokens // 2, c.row_boxes)))
        state = self.stream.product(
            full, empty, state, wg, flat, (c.tokens, False), fA, fP, 0, c.k_tiles, c.k_tiles, False
        )
        rows.add_residual(r, x, scale_o, bias_o, sScale, tidx)
        rows.statistics(r, sReduce, sStat, eps, tidx)
        group, member = rank // c.copies, rank % c.copies
        rows.store_normalised(r, sStat, norm_w, norm_b, wN, group * (c.tokens // 8), self.dtype, tidx)
        cute.arch.fence_proxy("async.shared", space="cta")
        rows.sync()
        cute.arch.cluster_wait()
        own = c.tokens * c.width  # elements
        if tidx < (c.groups - 1) * c.parts:  # to one block of each other group
            source = exchange + (tidx % c.parts * (c.tile * c.width) + group * own)
            peer = (group + 1 + tidx // c.parts) % c.groups * c.copies + member
            cluster.copy_to_peer(source.align(16), gathered, peer, 2 * own)
        cute.arch.mbarrier_wait(gathered, 0)

        # the hidden width, a chunk at a time
        one = cute.make_layout((c.tile // 2, 1))
        hidden = cute.make_rmem_tensor(one, F32)
        by_block = cute.make_tensor(hidden.iterator, cute.make_layout((2, 2, c.tile // 8)))
        total = cute.make_rmem_tensor((c.tile // 2, c.row_boxes), F32)
        state = self.stream.product(
            full, empty, state, wg, hidden, (c.tile, True), fA, fN, 0, c.k_tiles, c.k_tiles, False
        )
        if cutlass.const_expr(c.chunks > 2):
            total.fill(0.0)
        rows.activate(by_block, self.stream.buffer(wH, 0), scale1, bias1, sFactor, 0, c.tile // 8, self.dtype, tidx)
        for i in cutlass.range(c.chunks - 1, unroll=1):
            scale1, bias1 = self.hidden_vectors(mS1, mB1, first + i + 1, tidx)
            now, next_ = i % 2, (i + 1) % 2
            if cutlass.const_expr(c.parts == 2):
                state = self.stream.product(
                    full, empty, state, wg, hidden, (c.tile, True), fA, fN, 0, c.k_tiles, c.k_tiles, False
                )
                cute.arch.fence_proxy("async.shared", space="cta")
                rows.sync()
                state = self.stream.product(
                    *(full, empty, state, wg, total, (c.tile, True), fA, fH, 2 * c.parts * now, 2, 2),
                    c.chunks > 2,
                )
                rows.activate(
                    *(by_block, self.stream.buffer(wH, next_), scale1, bias1, sFactor, 0, c.tile // 8),
                    *(self.dtype, tidx),
                )
            else:
                state = self.stream.overlapped(
                    *(full, empty, state, wg, hidden, by_block, total, fA, fN, fH, wH, i),
                    *(scale1, bias1, sFactor, tidx),
                )
        cute.arch.fence_proxy("async.shared", space="cta")
        rows.sync()
        # nothing here reads the normalised tokens any more: the other blocks may send sums to their place
        if tidx < c.split - 1:
            cute.arch.mbarrier_arrive(freed, (rank + 1 + tidx) % c.split)
        scale2, bias2 = rows.load_channels(mS2, tidx, c.row_boxes), rows.load_channels(mB2, tidx, c.row_boxes)
        last = (c.chunks - 1) % 2

        # Each block gets the others' sums of those tokens whose output it makes; the first box's while the next is
        # computed.
        blocks, kind = c.tokens // 8, (c.tile, True)
        sums = cute.make_tensor(total.iterator, cute.make_layout((4, blocks, c.groups, c.row_boxes)))
        if cutlass.const_expr(c.parts == 1):
            state = self.stream.start_last(full, empty, state, wg, total, kind, fA, fH, 2 * last)
        for n in cutlass.range_constexpr(c.row_boxes):
            if cutlass.const_expr(c.parts == 2):
                box = cute.make_tensor(total[None, n].iterator, one)
                state = self.stream.product(
                    full, empty, state, wg, box, kind, fA, fH, 2 * c.parts * last, 2, 2, c.chunks > 1
                )
            else:
                self.stream.wait_for(state, n, total)
            if cutlass.const_expr(n == 0):
                cute.arch.mbarrier_wait(freed, 0)
            for g in cutlass.range_constexpr(c.groups):
                owner = g * c.copies + rows.copy_of(tidx, c.copies)
                if owner != rank:
                    rows.send_sums(sums[None, None, g, n], sSums, summed, rank, owner, n, c.split, tidx)
        self.stream.end(address)
        cute.arch.mbarrier_wait(summed, 0)
        scale2.store(scale2.load() * numerics.inverse_of(sFactor[1]))
        for g in cutlass.range_constexpr(c.groups):
            if g * c.copies + rows.copy_of(tidx, c.copies) == rank:
                mine = cute.make_rmem_tensor((4, blocks, c.row_boxes), F32)
                mine.store(sums[None, None, g, None].load())
                rows.add_sums(mine, sSums, tidx)
                rows.add_scaled(r, cute.make_tensor(mine.iterator, per_token), scale2, bias2)
                if cutlass.const_expr(c.copies > 1):
                    rows.store_tokens(r, mOut, token0, tidx)
        if cutlass.const_expr(c.copies == 1):  # one g is this block's, for every thread
            rows.store_tokens(r, mOut, token0, tidx)

    @cute.jit
    def hidden_vectors(self, mS1: cute.Tensor, mB1: cute.Tensor, chunk: I32, tidx: I32):
        """Scales and biases of a chunk's rows of fc1."""
        rows0 = chunk * self.config.box[0]
        scale = rows.load_channels(cute.domain_offset((rows0,), mS1), tidx, 1)
        bias = rows.load_channels(cute.domain_offset((rows0,), mB1), tidx, 1)
        return scale[None, 0], bias[None, 0]


def compile_finish(config: ClusterFinish, arch: str):
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = ClusterFinishKernel(config, arch)
    return cute.compile(kernel, *finish_arguments(config), stream, options=compile_options(arch))
