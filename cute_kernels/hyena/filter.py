"""The implicit filter: a sine MLP over positions, its exponential window, and its bias, all in fp32.

No tensor core: at sine frequencies of 10 a TF32 product here puts percents of error into the filter. A warpgroup
computes a few positions, all layers, and a share of the channels of the last one. A thread owns one feature: its row of
a weight is in registers, while activations are read from shared memory by all lanes of a warp at once.

The 64-wide weights (two layers, then the last one in pieces of 64 channels) go through two buffers in shared memory.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import numpy as np
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Filter
from cute_kernels.hyena.weights import compact
from cute_kernels.runtime.kernel import compile_options

F32, F64, I32, U32 = cutlass.Float32, cutlass.Float64, cutlass.Int32, cutlass.Uint32
ORDER = 64  # the MLP's width
THREADS = 128  # two for each feature, with half of the positions each
SUM = 8  # terms of an inner sum
AT_ONCE = 4  # positions whose sums are in flight together
PITCH = Filter.PITCH
BARRIER = 2


class FilterRole:
    """The work of one warpgroup, in a kernel of its own or beside another role of one."""

    def __init__(self, config: Filter):
        self.config = config
        bands = (config.emb_dim - 1) // 2
        self.frequencies = [float(f) for f in np.linspace(1e-4, bands - 1, bands, dtype=np.float32)]
        self.weights = ORDER * PITCH  # floats of a buffer
        self.activations = config.tile * PITCH
        self.pieces = config.width // config.split // ORDER  # of the last weight

    @cute.jit
    def tasks(self, length: I32):
        return cute.ceil_div(length, self.config.tile) * self.config.split

    @cute.jit
    def work(
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
        sFloats: cute.Pointer,  # the config's `shared_floats`, 16-byte aligned
        task: I32,
        thread: I32,
    ):
        c = self.config
        t0, part = task // c.split * c.tile, task % c.split
        channel0 = part * (c.width // c.split)
        buffers = cute.make_layout((2, ORDER, ORDER), stride=(self.weights, PITCH, 1))
        activations = cute.make_layout((2, c.tile, ORDER), stride=(self.activations, PITCH, 1))
        sW = cute.make_tensor(sFloats, buffers)  # (buffer, feature, k)
        sH = cute.make_tensor(sFloats + 2 * self.weights, activations)  # (layer % 2, position, feature)
        sZ = cute.make_tensor(
            sFloats + 2 * self.weights + 2 * self.activations,
            cute.make_layout((c.tile, c.emb_dim), stride=(c.emb_dim, 1)),
        )
        self.fetch(mW2, sW[0, None, None], 0, thread)
        self.fetch(mW3, sW[1, None, None], 0, thread)

        feature, half = thread % ORDER, cute.arch.make_warp_uniform(thread // ORDER)
        p0 = half * (c.tile // 2)
        freq = mFreq[feature]
        first = cute.make_rmem_tensor(c.emb_dim, F32)
        for j in cutlass.range_constexpr(c.emb_dim):
            first[j] = mW1[feature, j]
        bias1, bias2, bias3 = mB1[feature], mB2[feature], mB3[feature]

        inverse = F32(1.0) / cutlass.max(norm_len - 1, 1).to(F32)
        self.positions(mZ, sZ, t0, length, norm_len, inverse, thread)
        self.sync()
        for p in cutlass.range(c.tile // 2, unroll=2):
            total = bias1
            for j in cutlass.range_constexpr(c.emb_dim):
                total = cute.math.fma(first[j], sZ[p0 + p, j], total)
            sH[0, p0 + p, feature] = numerics.sine_of_product(freq, total)

        step = (I32(0), I32(1))
        if cutlass.const_expr(c.layout == "reshape"):
            step = c.width // length, c.width % length
        w = cute.make_rmem_tensor(ORDER, F32)
        for layer in cutlass.range(2 + self.pieces, unroll=1):
            cute.arch.cp_async_wait_group(0)
            self.sync()  # the weights of this layer, the last one's activations; nobody reads older ones any more
            if layer >= 1 and layer <= self.pieces:
                self.fetch(mWf, sW[(layer + 1) % 2, None, None], channel0 + (layer - 1) * ORDER, thread)
            cute.autovec_copy(sW[layer % 2, feature, None], w)
            self.sync()
            bias = bias2 if layer == 0 else bias3
            d = channel0 + (layer - 2) * ORDER + feature
            delta, addend = F32(0.0), F32(0.0)
            row, column = d, t0 + p0
            if layer >= 2:
                bias, delta = F32(0.0), mDeltas[d]
                delta = -cute.arch.fmax(delta, -delta)
                if cutlass.const_expr(c.bias):
                    addend = mBias[d]
                if cutlass.const_expr(c.layout == "reshape"):
                    flat = (t0 + p0) * c.width + d
                    row = (flat.to(U32) // length.to(U32)).to(I32)
                    column = flat - row * length
            source = cutlass.min(layer, 2) % 2
            for p in cutlass.range(p0, p0 + c.tile // 2, AT_ONCE, unroll=1):
                total = self.sums(sH, source, p, w, bias)
                if layer < 2:
                    for i in cutlass.range_constexpr(AT_ONCE):
                        total[i] = numerics.sine_of_product(freq, total[i])
                    for i in cutlass.range_constexpr(AT_ONCE):
                        sH[1 - source, p + i, feature] = total[i]
                else:
                    row, column = self.store(
                        *(total, mK, d, t0 + p, row, column, step, length, norm_len, inverse, delta, shift, addend)
                    )
        self.sync()  # before the next task overwrites what is read here

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)

    @cute.jit
    def fetch(self, mW: cute.Tensor, sW: cute.Tensor, row0: I32, thread: I32):
        """Starts the copy of 64 rows."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=128)
        gW, tW = cute.zipped_divide(mW, (1, 4)), cute.zipped_divide(sW, (1, 4))
        for i in cutlass.range(ORDER * ORDER // 4 // THREADS, unroll=2):
            row, k4 = (thread + THREADS * i) // (ORDER // 4), thread % (ORDER // 4)
            cute.copy(atom, gW[(0, None), (row0 + row, k4)], tW[(0, None), (row, k4)])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def positions(self, mZ, sZ, t0, length, norm_len, inverse, thread):
        """z of the task's positions: t / (L - 1), cos(-f w), sin(-f w) with w = 2 pi t / L; or the stored ones."""
        c = self.config
        bands = len(self.frequencies)
        for item in cutlass.range(thread, c.tile * c.emb_dim, THREADS, unroll=1):
            p, j = item // c.emb_dim, item % c.emb_dim
            t = t0 + p
            if cutlass.const_expr(c.stored_z):
                sZ[p, j] = mZ[cutlass.min(t, length - 1), j]
            else:
                value = position(t, norm_len, inverse)
                if j > 0:
                    frequency = F64(0.0)
                    for n in cutlass.range_constexpr(bands):
                        if (j - 1) % bands == n:
                            frequency = F64(self.frequencies[n])
                    quarter = F64(0.25) if j <= bands else F64(0.5)  # cos(a), or -sin(a) = sin(a + pi)
                    value = numerics.sine_of_turns(frequency * (t.to(F64) / norm_len.to(F64)) + quarter)
                sZ[p, j] = value

    @cute.jit
    def sums(self, sH: cute.Tensor, source: I32, p: I32, w: cute.Tensor, bias: F32):
        """bias + sum_k w[k] h[position, k] for neighbouring positions.

        Sums of sums of SUM terms: half the rounding error of one long sum, which the sine's frequency would amplify.
        """
        total, acc = cute.make_rmem_tensor(AT_ONCE, F32), cute.make_rmem_tensor(AT_ONCE, F32)
        h = cute.make_rmem_tensor(4, F32)
        total.fill(bias)
        for start in cutlass.range_constexpr(0, ORDER, SUM):
            acc.fill(0.0)
            for k in cutlass.range_constexpr(start, start + SUM, 4):
                for i in cutlass.range_constexpr(AT_ONCE):
                    cute.autovec_copy(cute.local_tile(sH[source, p + i, None], (4,), (k // 4,)), h)
                    for j in cutlass.range_constexpr(4):
                        acc[i] = cute.math.fma(w[k + j], h[j], acc[i])
            total.store(total.load() + acc.load())
        return total

    @cute.jit
    def store(self, total, mK, d, t, row, column, step, length, norm_len, inverse, delta, shift, addend):
        """Window, bias, and the layout: k[d, t] = h.flat[d L + t], or h[t, d].

        `row` and `column` are where the first value goes, `step` is what the next position adds to them.
        """
        c = self.config
        for i in cutlass.range_constexpr(AT_ONCE):
            at = position(t + i, norm_len, inverse)
            total[i] = total[i] * (cute.math.exp(at * delta, fastmath=True) + shift) + addend
        for i in cutlass.range_constexpr(AT_ONCE):
            if t + i < length:
                mK[row, column] = total[i]
            row, column = row + step[0], column + step[1]
            over = column >= length  # never in the other layout, before the last position
            if cutlass.const_expr(c.layout == "reshape"):
                row, column = row + over.to(I32), column - (length if over else 0)
        return row, column


@cute.jit
def position(t: I32, norm_len: I32, inverse: F32):
    """t / (L - 1), and 0 for L = 1; `inverse` of the divisor is at hand, and what its rounding costs is made good."""
    q = t.to(F32) * inverse
    return cute.math.fma(cute.math.fma(-q, cutlass.max(norm_len - 1, 1).to(F32), t.to(F32)), inverse, q)


class FilterKernel:
    """The filter alone: a block for each task."""

    def __init__(self, config: Filter):
        self.role = FilterRole(config)

    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor,  # as in FilterRole.work
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
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Storage:
            floats: cute.struct.Align[cute.struct.MemRange[F32, self.role.config.shared_floats], 16]

        self.Storage = Storage
        self.kernel.set_name_prefix("hyena_filter", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mZ, mW1, mB1, mFreq, mW2, mB2, mW3, mB3, mWf, mBias, mDeltas, mK, length, norm_len, shift).launch(
            grid=(self.role.tasks(length), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

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
        storage = memory.SmemAllocator().allocate(self.Storage)
        self.role.work(
            *(mZ, mW1, mB1, mFreq, mW2, mB2, mW3, mB3, mWf, mBias, mDeltas, mK, length, norm_len, shift),
            *(storage.floats.data_ptr(), cute.arch.block_idx()[0], cute.arch.thread_idx()[0]),
        )


def filter_arguments(config: Filter):
    """The tensors of FilterRole.work, as compile time sees them."""
    rows, pitch = cute.sym_int(), cute.sym_int(divisibility=4)
    n, d, e = ORDER, config.width, config.emb_dim
    tensors = [compact(F32, rows, e), compact(F32, n, e), compact(F32, n), compact(F32, n)]
    tensors += [compact(F32, n, n), compact(F32, n), compact(F32, n, n), compact(F32, n)]
    return [*tensors, compact(F32, d, n), compact(F32, d), compact(F32, d), compact(F32, d, pitch)]


def compile_filter(config: Filter, arch: str):
    scalars = [I32(1), I32(1), F32(0.05)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        FilterKernel(config), *filter_arguments(config), *scalars, stream, options=compile_options(arch)
    )
