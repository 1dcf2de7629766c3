"""The implicit filter: a sine MLP over positions, its exponential window, and its bias, all in fp32.

No tensor core: at sine frequencies of 10 a TF32 product here puts percents of error into the filter. A block computes
all three layers for a few positions, in shared memory, and a share of the channels of the last one.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import numpy as np
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Filter
from cute_kernels.hyena.weights import compact
from cute_kernels.runtime.kernel import compile_options

F32, F64, I32, I64 = cutlass.Float32, cutlass.Float64, cutlass.Int32, cutlass.Int64
ORDER = 64  # the MLP's width
GROUPS = 16  # threads along the features, four features each; as many along the positions
SUM = 8  # terms of an inner sum
PAD = 4  # floats after each row of 64 in shared memory


class FilterKernel:
    def __init__(self, config: Filter):
        self.config = config
        bands = (config.emb_dim - 1) // 2
        self.frequencies = [float(f) for f in np.linspace(1e-4, bands - 1, bands, dtype=np.float32)]

    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor,  # (>= L, emb_dim) fp32: stored positions; any tensor where the kernel makes them
        mW1: cute.Tensor,  # (64, emb_dim) fp32
        mB1: cute.Tensor,  # (64,)
        mFreq: cute.Tensor,  # (64,)
        mW2: cute.Tensor,  # (64, 64)
        mB2: cute.Tensor,  # (64,)
        mW3: cute.Tensor,  # (64, 64)
        mB3: cute.Tensor,  # (64,)
        mWf: cute.Tensor,  # (D, 64)
        mBias: cute.Tensor,  # (D,) added to the filter, if configured
        mDeltas: cute.Tensor,  # (D,)
        mK: cute.Tensor,  # (D, Lp) fp32: the filter, rows padded to Lp
        length: I32,
        norm_len: I32,
        shift: F32,
        stream: cuda.CUstream,
    ):
        c = self.config
        floats = cute.struct.MemRange[F32, ORDER * (ORDER + PAD)]

        @cute.struct
        class Storage:
            sW2: cute.struct.Align[floats, 16]
            sW3: cute.struct.Align[floats, 16]
            sWf: cute.struct.Align[floats, 16]
            sW1: cute.struct.Align[cute.struct.MemRange[F32, c.emb_dim * (ORDER + PAD)], 16]
            sZ: cute.struct.Align[cute.struct.MemRange[F32, c.emb_dim * (c.tile + PAD)], 16]
            sX: cute.struct.Align[cute.struct.MemRange[F32, ORDER * (c.tile + PAD)], 16]
            sY: cute.struct.Align[cute.struct.MemRange[F32, ORDER * (c.tile + PAD)], 16]

        self.Storage = Storage
        self.kernel(
            *(mZ, mW1, mB1, mFreq, mW2, mB2, mW3, mB3, mWf, mBias, mDeltas, mK, length, norm_len, shift),
        ).launch(grid=(cute.ceil_div(length, c.tile), c.split, 1), block=(GROUPS * GROUPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        mZ: cute.Tensor,
        mW1: cute.Tensor,
        mB1: cute.Tensor,
        mFreq: cute.Tensor,
        mW2: cute.Tensor,
        mB2: cute.Tensor,
        mW3: cute.Tensor,
        mB3: cute.Tensor,
        mWf: cute.Tensor,
        mBias: cute.Tensor,
        mDeltas: cute.Tensor,
        mK: cute.Tensor,
        length: I32,
        norm_len: I32,
        shift: F32,
    ):
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        t0 = cute.arch.block_idx()[0] * c.tile
        part = cute.arch.block_idx()[1]
        storage = memory.SmemAllocator().allocate(self.Storage)
        rows = cute.make_layout((ORDER, ORDER), stride=(ORDER + PAD, 1))  # (k, feature)
        sW2, sW3, sWf = (s.get_tensor(rows) for s in (storage.sW2, storage.sW3, storage.sWf))
        sW1 = storage.sW1.get_tensor(cute.make_layout((c.emb_dim, ORDER), stride=(ORDER + PAD, 1)))
        sZ = storage.sZ.get_tensor(cute.make_layout((c.emb_dim, c.tile), stride=(c.tile + PAD, 1)))
        sX = storage.sX.get_tensor(cute.make_layout((ORDER, c.tile), stride=(c.tile + PAD, 1)))
        sY = storage.sY.get_tensor(cute.make_layout((ORDER, c.tile), stride=(c.tile + PAD, 1)))

        self.load_positions(mZ, sZ, t0, length, norm_len, tidx)
        for i in cutlass.range_constexpr(cute.ceil_div(ORDER * c.emb_dim, GROUPS * GROUPS)):
            j = tidx + i * GROUPS * GROUPS
            if j < ORDER * c.emb_dim:
                sW1[j // ORDER, j % ORDER] = mW1[j % ORDER, j // ORDER]
        self.load_transposed(mW2, sW2, 0, tidx)
        self.load_transposed(mW3, sW3, 0, tidx)
        self.load_transposed(mWf, sWf, part * (c.width // c.split), tidx)

        f0, p0 = tidx % GROUPS * 4, tidx // GROUPS * (c.tile // GROUPS)  # this thread's features and positions
        freq, bias = cute.make_rmem_tensor(4, F32), cute.make_rmem_tensor((3, 4), F32)
        for i in cutlass.range_constexpr(4):
            freq[i] = mFreq[f0 + i]
            bias[0, i], bias[1, i], bias[2, i] = mB1[f0 + i], mB2[f0 + i], mB3[f0 + i]
        cute.arch.sync_threads()
        self.layer(sZ, sW1, sX, bias[0, None], freq, f0, p0)
        cute.arch.sync_threads()
        self.layer(sX, sW2, sY, bias[1, None], freq, f0, p0)
        cute.arch.sync_threads()
        self.layer(sY, sW3, sX, bias[2, None], freq, f0, p0)
        cute.arch.sync_threads()
        steps = c.width // c.split // ORDER
        for i in cutlass.range(steps, unroll=1):
            d0 = part * (c.width // c.split) + i * ORDER
            if i > 0:
                cute.arch.sync_threads()
                self.load_transposed(mWf, sWf, d0, tidx)
                cute.arch.sync_threads()
            total = cute.make_rmem_tensor((4, c.tile // GROUPS), F32)
            total.fill(0.0)
            self.products(sX, sWf, total, f0, p0)
            self.store_filter(total, mBias, mDeltas, mK, d0 + f0, t0 + p0, length, norm_len, shift)

    @cute.jit
    def load_positions(self, mZ, sZ, t0, length, norm_len, tidx):
        """z for this block's positions: t / (L - 1), cos(-f w), sin(-f w) with w = 2 pi t / L; or the stored ones."""
        c = self.config
        bands = len(self.frequencies)
        if tidx < c.tile:
            t = t0 + tidx
            if cutlass.const_expr(c.stored_z):
                row = cutlass.min(t, length - 1)
                for j in cutlass.range_constexpr(c.emb_dim):
                    sZ[j, tidx] = mZ[row, j]
            else:
                sZ[0, tidx] = position(t, norm_len)
                for j in cutlass.range_constexpr(bands):
                    turns = F64(self.frequencies[j]) * t.to(F64) / norm_len.to(F64)
                    sZ[1 + j, tidx] = numerics.sine_of_turns(turns + F64(0.25))
                    sZ[1 + bands + j, tidx] = -numerics.sine_of_turns(turns)

    @cute.jit
    def load_transposed(self, mW, sW, row0, tidx):
        """64 rows of a weight (feature, k) into shared memory as (k, feature)."""
        gW = cute.zipped_divide(mW, (1, 4))
        for i in cutlass.range_constexpr(ORDER * ORDER // 4 // (GROUPS * GROUPS)):
            j = tidx + i * GROUPS * GROUPS
            feature, k4 = j % ORDER, j // ORDER
            x = cute.make_rmem_tensor(4, F32)
            cute.autovec_copy(gW[(0, None), (row0 + feature, k4)], x)
            for n in cutlass.range_constexpr(4):
                sW[4 * k4 + n, feature] = x[n]

    @cute.jit
    def products(self, sIn, sW, total, f0, p0):
        """total (4 features, positions of this thread) += sum_k sIn[k, position] sW[k, feature]."""
        per = self.config.tile // GROUPS
        depth = sIn.shape[0]
        acc = cute.make_rmem_tensor((4, per), F32)
        w, x = cute.make_rmem_tensor(4, F32), cute.make_rmem_tensor(per, F32)
        # Sums of sums of SUM terms: half the rounding error of one long sum, which the sine's frequency would amplify.
        terms = SUM if depth % SUM == 0 else depth
        for start in cutlass.range(depth // terms, unroll=1):
            acc.fill(0.0)
            for i in cutlass.range_constexpr(terms):
                k = start * terms + i
                cute.autovec_copy(cute.local_tile(sW, (1, 4), (k, f0 // 4))[0, None], w)
                cute.autovec_copy(cute.local_tile(sIn, (1, per), (k, p0 // per))[0, None], x)
                for j in cutlass.range_constexpr(per):
                    for n in cutlass.range_constexpr(4):
                        acc[n, j] = cute.math.fma(w[n], x[j], acc[n, j])
            total.store(total.load() + acc.load())

    @cute.jit
    def layer(self, sIn, sW, sOut, bias, freq, f0, p0):
        per = self.config.tile // GROUPS
        total = cute.make_rmem_tensor((4, per), F32)
        for i in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(per):
                total[i, j] = bias[i]
        self.products(sIn, sW, total, f0, p0)
        row = cute.make_rmem_tensor(per, F32)
        for i in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(per):
                row[j] = numerics.sine_of_product(freq[i], total[i, j])
            cute.autovec_copy(row, cute.local_tile(sOut, (1, per), (f0 + i, p0 // per))[0, None])

    @cute.jit
    def store_filter(self, acc, mBias, mDeltas, mK, d0, t0, length, norm_len, shift):
        """Window, bias, and the layout: k[d, t] = h.flat[d L + t], or h[t, d]."""
        c = self.config
        for j in cutlass.range_constexpr(c.tile // GROUPS):
            t = t0 + j
            if t < length:
                at = position(t, norm_len)
                if cutlass.const_expr(c.layout == "reshape"):
                    flat = t.to(I64) * c.width + d0
                    row = (flat // length).to(I32)
                    column = (flat - row.to(I64) * length).to(I32)
                    for i in cutlass.range_constexpr(4):
                        mK[row, column] = self.window(acc[i, j], at, shift, mBias, mDeltas, d0 + i)
                        column += 1
                        if column == length:
                            row, column = row + 1, I32(0)
                else:
                    for i in cutlass.range_constexpr(4):
                        mK[d0 + i, t] = self.window(acc[i, j], at, shift, mBias, mDeltas, d0 + i)

    @cute.jit
    def window(self, h, at, shift, mBias, mDeltas, d):
        delta = mDeltas[d]
        h = h * (cute.math.exp(-at * cute.arch.fmax(delta, -delta)) + shift)
        if cutlass.const_expr(self.config.bias):
            h += mBias[d]
        return h


@cute.jit
def position(t: I32, norm_len: I32):
    """t / (L - 1), and 0 for L = 1."""
    return t.to(F32) / cutlass.max(norm_len - 1, 1).to(F32)


def compile_filter(config: Filter, arch: str):
    rows, pitch = cute.sym_int(), cute.sym_int(divisibility=4)
    n, d, e = ORDER, config.width, config.emb_dim
    tensors = [compact(F32, rows, e), compact(F32, n, e), compact(F32, n), compact(F32, n)]
    tensors += [compact(F32, n, n), compact(F32, n), compact(F32, n, n), compact(F32, n)]
    tensors += [compact(F32, d, n), compact(F32, d), compact(F32, d), compact(F32, d, pitch)]
    scalars = [I32(1), I32(1), F32(0.05)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(FilterKernel(config), *tensors, *scalars, stream, options=compile_options(arch))
