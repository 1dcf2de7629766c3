"""The block's second half in one kernel: out_proj, residual, LayerNorm, fc1, GELU, fc2, residual.

A block owns 64 tokens. Two warpgroups compute. For out_proj each has half of the columns; then each has its own chunks
of the hidden width, whose activations never leave its registers, and a partial sum of all output columns. At the end
the partial sums are added. Another warp, or two, stream weights through shared memory (`finish_stream`); what happens
to rows of tokens is in `finish_rows`.
"""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.hyena import finish_rows as rows
from cute_kernels.hyena import numerics
from cute_kernels.hyena.arguments import compact, operand_type
from cute_kernels.hyena.config import ClusterFinish, Finish
from cute_kernels.hyena.finish_sm100 import StreamSm100
from cute_kernels.hyena.finish_stream import StreamSm90
from cute_kernels.runtime.kernel import compile_options

F32, I32 = cutlass.Float32, cutlass.Int32


class FinishKernel:
    def __init__(self, config: Finish, arch: str):
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
        row_major = utils.LayoutEnum.ROW_MAJOR
        box = (c.tile, c.box, c.box)
        # Tokens: one (64, 64) tile for each K tile and part. Weights: two boxes a stage, also seen as one of 128 rows.
        stages = c.rings * c.stages
        a_layout = sm90_utils.make_smem_layout_a(row_major, box, self.dtype, c.width // c.box * c.parts)
        box_layout = sm90_utils.make_smem_layout_b(row_major, box, self.dtype, 2 * stages)
        wide_layout = sm90_utils.make_smem_layout_b(row_major, (c.tile, 2 * c.box, c.box), self.dtype, stages)

        one = cute.slice_(box_layout, (None, None, 0))
        atoms = []
        for w in (mWo, mW1, mW2):
            nkp = cute.make_tensor(w.iterator, cute.select(w.layout, mode=[1, 2, 0]))  # (N, K, parts)
            atoms += cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), nkp, one, (c.box, c.box))
        # Rows of tokens in fp32, 32 columns a box.
        rows_layout = sm90_utils.make_smem_layout_a(row_major, (c.tile, c.box, 32), F32, c.width // 32)
        one = cute.slice_(rows_layout, (None, None, 0))
        atoms += cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, one, (c.tile, 32))
        atoms += cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mOut, one, (c.tile, 32))

        @cute.struct
        class Storage:
            w_mbar: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            x_mbar: cutlass.Int64
            done: cute.struct.MemRange[cutlass.Int64, self.stream.barriers]
            address: cute.struct.MemRange[I32, self.stream.words]
            sO: cute.struct.Align[cute.struct.MemRange[F32, 2 * c.width], 16]
            sN: cute.struct.Align[cute.struct.MemRange[F32, 2 * c.width], 16]
            s1: cute.struct.Align[cute.struct.MemRange[F32, 2 * c.inner], 16]
            s2: cute.struct.Align[cute.struct.MemRange[F32, 2 * c.width], 16]
            sReduce: cute.struct.MemRange[F32, 4 * c.tile]
            sScale: cute.struct.MemRange[F32, c.tile]
            sBound: cute.struct.MemRange[F32, 4 * c.consumers // 32]
            sRows: cute.struct.Align[cute.struct.MemRange[F32, c.row_elements], 1024]
            sA: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(a_layout)], 1024]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(box_layout)], 1024]

        self.Storage = Storage
        self.kernel.set_name_prefix("hyena_finish", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(mP, mX, *atoms, mSo, mS1, mS2, mNorm1, mBo, mB1, mB2, mNw, mNb, mOut, length, conv_length, eps),
            *(a_layout, box_layout, wide_layout, rows_layout),
        ).launch(
            grid=(cute.ceil_div(mX.shape[0], c.tile), 1, 1),
            block=(c.consumers + 128, 1, 1),
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
        atomX: cute.CopyAtom,
        tX: cute.Tensor,
        atomOut: cute.CopyAtom,
        tOut: cute.Tensor,
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
        a_layout: cute.ComposedLayout,
        box_layout: cute.ComposedLayout,
        wide_layout: cute.ComposedLayout,
        rows_layout: cute.ComposedLayout,
    ):
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = cute.arch.block_idx()[0]
        token0 = block * c.tile

        storage = memory.SmemAllocator().allocate(self.Storage)
        sA = storage.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)  # (64, 64, parts * K tiles)
        sBox = storage.sW.get_tensor(box_layout.outer, swizzle=box_layout.inner)  # (64, 64, 2 * rings * stages)
        sWide = storage.sW.get_tensor(wide_layout.outer, swizzle=wide_layout.inner)  # (128, 64, rings * stages)
        # Partial sums take the place of the weights, a half for each warpgroup.
        sums = cute.make_layout((4, 128, c.half // 8, 2), stride=(1, 4, 512, c.sums_apart))
        sWhole = cute.make_tensor(cute.recast_ptr(storage.sW.data_ptr(), dtype=F32), sums)
        sRows = None
        if cutlass.const_expr(c.rows_in_shared):
            sRows = storage.sRows.get_tensor(rows_layout.outer, swizzle=rows_layout.inner)  # (64, 32, D / 32)
        by_pairs = cute.make_layout((4, c.width // 2))
        sO, sN, s2 = (s.get_tensor(by_pairs) for s in (storage.sO, storage.sN, storage.s2))
        s1 = storage.s1.get_tensor(cute.make_layout((4, c.inner // 2)))
        sReduce = storage.sReduce.get_tensor(cute.make_layout((c.tile, 2, 2)))
        sScale = storage.sScale.get_tensor(cute.make_layout(c.tile))
        sBound = storage.sBound.get_tensor(cute.make_layout((4, c.consumers // 32)))

        x_full = storage.x_mbar.ptr
        if cutlass.const_expr(c.rows_in_shared):  # noqa: SIM102
            if tidx == 0:
                cute.arch.mbarrier_init(x_full, 1)
        ring = self.stream.ring(storage.w_mbar.data_ptr())
        if warp_idx >= c.consumers // 32:
            cute.arch.setmaxregister_decrease(24)
            wg = warp_idx - c.consumers // 32
            if cutlass.const_expr(c.rows_in_shared):  # noqa: SIM102
                if wg == 0:
                    rows.fetch(atomX, tX, sRows, block, x_full)
            if wg < c.rings:
                if cutlass.const_expr(not c.operands_older):
                    cute.arch.griddepcontrol_wait()
                self.stream.produce(ring, wg, ((atomWo, tWo), (atomW1, tW1), (atomW2, tW2)), sBox)
        else:
            cute.arch.setmaxregister_increase(240)
            self.consume(
                *(ring, storage.done.data_ptr(), storage.address.data_ptr(), tidx, warp_idx, block, token0),
                *(mP, mX, mSo, mS1, mS2, mNorm1, mBo, mB1, mB2, mNw, mNb, mOut),
                *(
                    length,
                    conv_length,
                    eps,
                    sA,
                    sBox,
                    sWide,
                    sO,
                    sN,
                    s1,
                    s2,
                    sReduce,
                    sScale,
                    sBound,
                    sWhole,
                ),
                *(sRows, x_full, atomOut, tOut),
            )

    @cute.jit
    def consume(
        self,
        ring: pipeline.PipelineAsync,
        done: cute.Pointer,
        address: cute.Pointer,
        tidx: I32,
        warp_idx: I32,
        block: I32,
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
        sA: cute.Tensor,
        sBox: cute.Tensor,
        sWide: cute.Tensor,
        sO: cute.Tensor,
        sN: cute.Tensor,
        s1: cute.Tensor,
        s2: cute.Tensor,
        sReduce: cute.Tensor,
        sScale: cute.Tensor,
        sBound: cute.Tensor,
        sWhole: cute.Tensor,
        sRows: cute.Tensor | None,  # (64, 32, D / 32)
        x_full: cute.Pointer,
        atomOut: cute.CopyAtom,
        tOut: cute.Tensor,
    ):
        c = self.config
        wg = warp_idx // 4
        self.stream.begin(done, address)
        pair0 = wg * (c.half // 2)  # of this warpgroup's half of the columns

        # The inputs of the call may be read before the launch in front has ended, what kernels made may not.
        x = cute.make_rmem_tensor((2, 2, c.half // 8), F32)
        if cutlass.const_expr(not c.rows_in_shared):
            rows.load_pairs(mX, x, token0, pair0, tidx)
        norm_w, norm_b = rows.load_all(mNw, tidx, c.width), rows.load_all(mNb, tidx, c.width)
        b1, bo, b2 = (
            rows.load_all(mB1, tidx, c.inner),
            rows.load_all(mBo, tidx, c.width),
            rows.load_all(mB2, tidx, c.width),
        )
        p = cute.make_rmem_tensor(c.width * c.tile // c.consumers, F32)
        row, channel0 = tidx % c.tile, tidx // c.tile * cute.size(p)
        if cutlass.const_expr(not c.operands_older):
            cute.arch.griddepcontrol_wait()
            rows.load_channels(mP, p, token0 + row, channel0, length, conv_length, mX.shape[0])
        norm1, scale1 = rows.load_all(mNorm1, tidx, c.inner), rows.load_all(mS1, tidx, c.inner)
        scale_o, scale2 = rows.load_all(mSo, tidx, c.width), rows.load_all(mS2, tidx, c.width)

        # A LayerNorm row's L2 norm is at most sqrt(D), so |n2| <= sqrt(D) max |weight| + |bias|, and with fc1's rows
        # |h| <= |W1_j| |n2| + |b1_j|: two scales that fit every token.
        bounds = (
            numerics.max_over(numerics.largest(norm_w), 32),
            numerics.sum_over(numerics.sum_of_squares(norm_b), 32),
            numerics.max_over(numerics.largest(norm1), 32),
            numerics.max_over(numerics.largest(b1), 32),
        )
        if tidx % 32 == 0:
            for i in cutlass.range_constexpr(4):
                sBound[i, warp_idx] = bounds[i]
        rows.sync()
        weight, bias, w1_norm, b1_max = F32(0.0), F32(0.0), F32(0.0), F32(0.0)
        for i in cutlass.range_constexpr(c.consumers // 32):
            weight, bias = cute.arch.fmax(weight, sBound[0, i]), bias + sBound[1, i]
            w1_norm, b1_max = cute.arch.fmax(w1_norm, sBound[2, i]), cute.arch.fmax(b1_max, sBound[3, i])
        n_bound = F32(math.sqrt(c.width)) * weight + cute.math.sqrt(bias)
        scale_n, inverse_n = numerics.scale_of(n_bound)
        _, inverse_h = numerics.scale_of(n_bound * w1_norm + b1_max)
        rows.store_vector(scale_o, sO, 0, c.width, tidx, 1.0)
        rows.store_vector(bo, sO, 2, c.width, tidx, 1.0)
        rows.store_vector(norm_w, sN, 0, c.width, tidx, scale_n)
        rows.store_vector(norm_b, sN, 2, c.width, tidx, scale_n)
        rows.store_vector(scale1, s1, 0, c.inner, tidx, inverse_n)
        rows.store_vector(b1, s1, 2, c.inner, tidx, 1.0)
        rows.store_vector(scale2, s2, 0, c.width, tidx, inverse_h)
        rows.store_vector(b2, s2, 2, c.width, tidx, 1.0)

        if cutlass.const_expr(c.operands_older):
            cute.arch.griddepcontrol_wait()
            rows.load_channels(mP, p, token0 + row, channel0, length, conv_length, mX.shape[0])
        amax = numerics.largest(p)
        sReduce[row, tidx // c.tile // 2, tidx // c.tile % 2] = amax
        rows.sync()
        for i in cutlass.range_constexpr(4):
            amax = cute.arch.fmax(amax, sReduce[row, i // 2, i % 2])
        scale_p, inverse_p = numerics.scale_of(amax)
        if tidx < c.tile:
            sScale[row] = inverse_p
        rows.store_channels(p, scale_p, sA, row, channel0, c.parts)
        cute.arch.fence_proxy("async.shared", space="cta")
        rows.sync()

        thread = tidx % 128
        fA, fB = self.stream.fragments(sA, sBox, sWide, done, address, wg)
        states = self.stream.begin_states(wg)

        # out_proj: r = p Wo^T + bo + x, which waits in x's place, or in the output.
        r = cute.make_rmem_tensor(c.half // 2, F32)
        states = self.stream.product(ring, states, wg, r, fA, fB, self.stream.out_proj)
        if cutlass.const_expr(c.rows_in_shared):
            cute.arch.mbarrier_wait(x_full, 0)
            rows.read_rows(sRows, x, wg * c.half, tidx)
        rows.add_residual(r, x, sO, sScale, pair0, tidx)
        rows.statistics(r, sReduce, wg, tidx)
        if cutlass.const_expr(c.rows_in_shared):
            rows.write_rows(rows.blocks_of(r), sRows, wg * c.half, tidx)
        else:
            rows.store_pairs(rows.blocks_of(r), mOut, token0, pair0, tidx)
        rows.sync()  # also: nothing reads p any more
        rows.normalise(r, sReduce, sN, pair0, eps, tidx)
        rows.store_pairs_of_operand(r, sA, wg * c.half, c.parts, tidx)
        cute.arch.fence_proxy("async.shared", space="cta")
        rows.sync()

        # The hidden width, a chunk for each warpgroup in turn: while one has the tensor core the other computes GELU.
        total = cute.make_rmem_tensor(c.width // 2, F32)  # own half of the columns first
        total.fill(0.0)
        hidden = cute.make_rmem_tensor(c.chunk // 2, F32)
        sH, fH = self.stream.hidden_operand(sBox, wg)  # what GELU makes, and as the tensor core sees it
        zero = length >> 31  # which the compiler doesn't know
        self.stream.begin_turns(wg, zero)
        for i in cutlass.range(c.chunks, unroll=1):
            states = self.stream.product(ring, states, wg, hidden, fA, fB, self.stream.fc1)
            self.stream.give_turn(wg)
            states = self.stream.end_product(ring, states, wg, i)
            rows.activate(hidden, s1, (2 * i + wg) * (c.chunk // 2), inverse_h, tidx)
            self.stream.keep(hidden, sH, tidx)
            self.stream.take_turn(sH, wg, zero)
            states = self.stream.product(ring, states, wg, total, fH, fB, self.stream.fc2, i)
        self.stream.end_turns(ring, states, total, fB, wg)

        # Each warpgroup gets the other's sums of its own half of the columns.
        mine = cute.make_tensor(total.iterator, cute.make_layout((4, c.half // 8)))
        other = cute.make_tensor(total.iterator + c.half // 2, mine.layout)
        kept = cute.make_rmem_tensor((2, 2, c.half // 8), F32)
        self.stream.sync_weights(wg)  # the last ones are read
        cute.autovec_copy(other, sWhole[None, thread, None, wg])
        if cutlass.const_expr(c.rows_in_shared):
            rows.read_rows(sRows, kept, wg * c.half, tidx)
        else:
            rows.load_pairs(mOut, kept, token0, pair0, tidx)
        rows.sync()
        self.stream.end(address)
        cute.autovec_copy(sWhole[None, thread, None, 1 - wg], other)
        mine.store(mine.load() + other.load())
        rows.add_scaled(kept, total, s2, pair0, tidx)
        if cutlass.const_expr(c.rows_in_shared):
            rows.write_rows(kept, sRows, wg * c.half, tidx)
            cute.arch.fence_proxy("async.shared", space="cta")
            rows.sync()
            if warp_idx == 0:
                rows.send(atomOut, tOut, sRows, block)
        else:
            rows.store_pairs(kept, mOut, token0, pair0, tidx)


def finish_arguments(config: Finish | ClusterFinish):
    """The arguments of FinishKernel but the stream, as compile time sees them."""
    d, m, p, operand = config.width, config.inner, config.parts, operand_type(config.dtype)
    batch, tokens = cute.sym_int(), cute.sym_int()
    pitch = cute.sym_int(divisibility=4)
    tensors = [compact(F32, batch, d, pitch), compact(F32, tokens, d)]
    tensors += [compact(operand, p, d, d), compact(operand, p, m, d), compact(operand, p, d, m)]
    tensors += [compact(F32, n) for n in (d, m, d, m, d, m, d, d, d)]
    return [*tensors, compact(F32, tokens, d), I32(1), I32(1), F32(1e-5)]


def compile_finish(config: Finish, arch: str):
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(FinishKernel(config, arch), *finish_arguments(config), stream, options=compile_options(arch))
