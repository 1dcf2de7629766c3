"""The implicit filter: a sine MLP over positions, its exponential window, and its bias, all in fp32.

No tensor core: at sine frequencies of 10 a TF32 product here puts percents of error into the filter. A warpgroup
computes a few positions, all layers, and a share of the channels of the last one. Each layer is a small matrix product
from shared memory in register tiles, several features of several positions a thread; where there are fewer tiles than
threads, neighbouring lanes divide the sum over k of one tile.

Weights go through a ring of buffers in shared memory: the two 64-wide layers', then the last one's in pieces of k.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import numpy as np
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.device.copy import prefetch
from cute_kernels.device.math import select
from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Filter, Tiles
from cute_kernels.hyena.weights import compact
from cute_kernels.runtime.kernel import compile_options

F32, F64, I32, U32 = cutlass.Float32, cutlass.Float64, cutlass.Int32, cutlass.Uint32
ORDER = Filter.ORDER  # the MLP's width
THREADS = Tiles.THREADS
BARRIER = 2


class Product:
    """A small matrix product from shared memory, in register tiles."""

    def __init__(self, tiles: Tiles):
        self.tiles = tiles

    @cute.jit
    def place(self, thread: I32):
        """A thread's first row, which the others follow `groups` apart, its first position, and its lane of k."""
        t = self.tiles
        tile = cutlass.min(thread // t.lanes, t.count - 1)
        return tile % t.groups, tile // t.groups * t.at_once, thread % t.lanes

    @cute.jit
    def add(
        self,
        acc: cute.Tensor,  # (each, at_once) fp32
        sW: cute.Tensor,  # (rows, k) fp32
        sH: cute.Tensor,  # (positions, k) fp32
        row: I32,
        p: I32,
        w4: I32,  # where four values of k start in sW, as a multiple of 4
        h4: I32,  # and in sH
    ):
        """Adds four terms to every sum."""
        t = self.tiles
        w, h = cute.make_rmem_tensor((4, t.each), F32), cute.make_rmem_tensor((4, 2), F32)
        cute.autovec_copy(cute.local_tile(sH[p, None], (4,), (h4,)), h[None, 0])
        for i in cutlass.range_constexpr(t.each):
            cute.autovec_copy(cute.local_tile(sW[row + t.groups * i, None], (4,), (w4,)), w[None, i])
        for q in cutlass.range_constexpr(t.at_once):
            if cutlass.const_expr(q + 1 < t.at_once):  # read while this one is multiplied
                cute.autovec_copy(cute.local_tile(sH[p + q + 1, None], (4,), (h4,)), h[None, (q + 1) % 2])
            for j in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(t.each):
                    acc[i, q] = cute.math.fma(w[j, i], h[j, q % 2], acc[i, q])

    @cute.jit
    def reduce(self, acc: cute.Tensor, lane: I32):
        """Adds up the lanes' parts. The sums of `kept` positions remain, in the first of `acc`, lane after lane."""
        left, apart = self.tiles.at_once, self.tiles.lanes
        while cutlass.const_expr(apart > 1):
            left, apart = left // 2, apart // 2
            upper = lane & apart != 0
            for q in cutlass.range_constexpr(left):
                for i in cutlass.range_constexpr(self.tiles.each):
                    low, high = acc[i, q], acc[i, q + left]
                    received = cute.arch.shuffle_sync_bfly(select(upper, low, high), offset=apart)
                    acc[i, q] = select(upper, high, low) + received

    @cute.jit
    def shift(self, acc: cute.Tensor):
        """The next position's sums to the front: a loop over them is a fraction of the code without one, which would
        be read from memory more slowly than it is executed."""
        for q in cutlass.range_constexpr(1, self.tiles.kept):
            for i in cutlass.range_constexpr(self.tiles.each):
                acc[i, q - 1] = acc[i, q]


class FilterRole:
    """The work of one warpgroup, in a kernel of its own or beside another role of one."""

    def __init__(self, config: Filter):
        self.config = config
        bands = (config.emb_dim - 1) // 2
        self.frequencies = [float(f) for f in np.linspace(1e-4, bands - 1, bands, dtype=np.float32)]
        self.hidden, self.final = Product(config.hidden), Product(config.final)

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
        t0, channel0 = task // c.split * c.tile, task % c.split * c.channels
        sW = cute.make_tensor(  # (buffer, feature, k)
            sFloats, cute.make_layout((c.buffers, ORDER, ORDER), stride=(c.buffer_floats, c.hidden.pitch(ORDER), 1))
        )
        sFinal = cute.make_tensor(  # (buffer, channel, k)
            sFloats,
            cute.make_layout((c.buffers, c.channels, c.depth), stride=(c.buffer_floats, c.final.pitch(c.depth), 1)),
        )
        floats = sFloats + c.buffers * c.buffer_floats
        sH = cute.make_tensor(floats, cute.make_layout((c.tile, ORDER), stride=(c.PITCH, 1)))  # (position, feature)
        floats += c.tile * c.PITCH
        sWindow = cute.make_tensor(floats, cute.make_layout((2, c.channels), stride=(c.channels, 1)))  # decay, bias
        floats += 2 * c.channels
        sZ = cute.make_tensor(floats, cute.make_layout((c.tile, c.emb_dim), stride=(c.emb_dim, 1)))
        if thread == 0:  # some of the last weight, which many tasks read
            rows = c.channels // 16
            first = channel0 + task // c.split % 16 * rows
            prefetch(mWf.iterator + first * ORDER, rows * ORDER * 4)
        for i, m in ((0, mW2), (1, mW3)):
            self.fetch(m, sW[i, None, None], 0, 0, thread)
            cute.arch.cp_async_commit_group()
        for i in cutlass.range_constexpr(c.buffers - 2):
            self.fetch_piece(mWf, sFinal, i, channel0, thread)

        inverse = F32(1.0) / cutlass.max(norm_len - 1, 1).to(F32)
        self.first_layer(mZ, mW1, mB1, mFreq, sZ, sH, t0, length, norm_len, inverse, thread)
        for i in cutlass.range(thread, c.channels, THREADS, unroll=1):
            delta = mDeltas[channel0 + i]
            sWindow[0, i] = -cute.arch.fmax(delta, -delta)
            if cutlass.const_expr(c.bias):
                sWindow[1, i] = mBias[channel0 + i]
        self.hidden_layers(mB2, mB3, mFreq, mWf, sW, sFinal, sH, channel0, thread)
        self.last_layer(mWf, mK, sFinal, sH, sWindow, channel0, t0, length, norm_len, inverse, shift, thread)
        self.sync()  # before the next task overwrites what is read here

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)

    @cute.jit
    def fetch(self, mW: cute.Tensor, sW: cute.Tensor, row0: I32, k0: I32, thread: I32):
        """Starts the copy of a piece of a weight, sW (rows, k)."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=128)
        gW, tW = cute.zipped_divide(mW, (1, 4)), cute.zipped_divide(sW, (1, 4))
        vectors = sW.shape[1] // 4
        for i in cutlass.range(sW.shape[0] * vectors // THREADS, unroll=2):
            row, k4 = (thread + THREADS * i) // vectors, thread % vectors
            cute.copy(atom, gW[(0, None), (row0 + row, k0 // 4 + k4)], tW[(0, None), (row, k4)])

    @cute.jit
    def fetch_piece(self, mWf: cute.Tensor, sFinal: cute.Tensor, piece: I32, channel0: I32, thread: I32):
        """Starts the copy of a piece of the last weight, if there is one, as a group of its own."""
        c = self.config
        if piece < c.pieces:
            self.fetch(mWf, sFinal[(2 + piece) % c.buffers, None, None], channel0, piece * c.depth, thread)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def arrived(self):
        """Waits for the oldest group of copies in flight, and for the other threads."""
        cute.arch.cp_async_wait_group(self.config.buffers - 1)
        self.sync()

    @cute.jit
    def first_layer(self, mZ, mW1, mB1, mFreq, sZ, sH, t0, length, norm_len, inverse, thread):
        """A thread has one feature of half of the positions."""
        c = self.config
        feature, half = thread % ORDER, thread // ORDER
        freq, bias = mFreq[feature], mB1[feature]
        w = cute.make_rmem_tensor(c.emb_dim, F32)
        for j in cutlass.range_constexpr(c.emb_dim):
            w[j] = mW1[feature, j]
        self.positions(mZ, sZ, t0, length, norm_len, inverse, thread)
        self.sync()
        for i in cutlass.range(c.tile // 2, unroll=2):
            p = half * (c.tile // 2) + i
            total = bias
            for j in cutlass.range_constexpr(c.emb_dim):
                total = cute.math.fma(w[j], sZ[p, j], total)
            sH[p, feature] = numerics.sine_of_product(freq, total)

    @cute.jit
    def hidden_layers(self, mB2, mB3, mFreq, mWf, sW, sFinal, sH, channel0, thread):
        """Sums of sums of eight terms: half the rounding error of one long sum, which the sine amplifies."""
        c, tiles = self.config, self.hidden.tiles
        row, p, lane = self.hidden.place(thread)
        freq, biases = cute.make_rmem_tensor(tiles.each, F32), cute.make_rmem_tensor((tiles.each, 2), F32)
        for i in cutlass.range_constexpr(tiles.each):
            feature = row + tiles.groups * i
            freq[i], biases[i, 0], biases[i, 1] = mFreq[feature], mB2[feature], mB3[feature]
        total = cute.make_rmem_tensor((tiles.each, tiles.at_once), F32)
        part = cute.make_rmem_tensor_like(total)
        for layer in cutlass.range(2, unroll=1):
            self.arrived()
            total.fill(0.0)
            for n in cutlass.range(ORDER // (8 * tiles.lanes), unroll=1):
                part.fill(0.0)
                for j in cutlass.range_constexpr(2):
                    k4 = (2 * n + j) * tiles.lanes + lane
                    self.hidden.add(part, sW[layer, None, None], sH, row, p, k4, k4)
                total.store(total.load() + part.load())
            self.hidden.reduce(total, lane)
            self.sync()  # nobody reads the old activations and these weights any more
            for q in cutlass.range(tiles.kept, unroll=1):
                for i in cutlass.range_constexpr(tiles.each):
                    bias = select(layer == 0, biases[i, 0], biases[i, 1])
                    value = numerics.sine_of_product(freq[i], total[i, 0] + bias)
                    sH[p + tiles.kept * lane + q, row + tiles.groups * i] = value
                self.hidden.shift(total)
            self.fetch_piece(mWf, sFinal, layer + c.buffers - 2, channel0, thread)

    @cute.jit
    def last_layer(self, mWf, mK, sFinal, sH, sWindow, channel0, t0, length, norm_len, inverse, shift, thread):
        """The product in pieces of k; then window, bias, and the layout: k[d, t] = h.flat[d L + t], or h[t, d]."""
        c, tiles = self.config, self.final.tiles
        row, p, lane = self.final.place(thread)
        acc = cute.make_rmem_tensor((tiles.each, tiles.at_once), F32)
        acc.fill(0.0)
        for piece in cutlass.range(c.pieces, unroll=1):
            self.arrived()
            for n in cutlass.range(c.depth // (4 * tiles.lanes), unroll=1):
                k4 = n * tiles.lanes + lane
                self.final.add(
                    acc, sFinal[(2 + piece) % c.buffers, None, None], sH, row, p, k4, piece * (c.depth // 4) + k4
                )
            if piece + c.buffers < c.pieces:
                self.sync()
            self.fetch_piece(mWf, sFinal, piece + c.buffers, channel0, thread)
        self.final.reduce(acc, lane)

        decay, addend = cute.make_rmem_tensor(tiles.each, F32), cute.make_rmem_tensor(tiles.each, F32)
        addend.fill(0.0)
        for i in cutlass.range_constexpr(tiles.each):
            decay[i] = sWindow[0, row + tiles.groups * i]
            if cutlass.const_expr(c.bias):
                addend[i] = sWindow[1, row + tiles.groups * i]
        t = t0 + p + tiles.kept * lane
        # Where a value goes, what the next channel adds to that, and what the next position adds.
        at, across, along = (channel0 + row, t), (I32(tiles.groups), I32(0)), (I32(0), I32(1))
        if cutlass.const_expr(c.layout == "reshape"):
            flat = t * c.width + channel0 + row
            first = (flat.to(U32) // length.to(U32)).to(I32)
            at = first, flat - first * length
            across, along = ((I32(n) // length, I32(n) % length) for n in (tiles.groups, c.width))
        owner = thread < tiles.count * tiles.lanes
        for q in cutlass.range(tiles.kept, unroll=1):
            if owner and t + q < length:
                time = position(t + q, norm_len, inverse)
                self.store_position(acc[None, 0], mK, decay, addend, time, at, across, length, shift)
            self.final.shift(acc)
            at = self.moved(at, along, length)

    @cute.jit
    def store_position(self, sums, mK, decay, addend, time, at, step, length, shift):
        for i in cutlass.range_constexpr(cute.size(sums)):
            window = cute.math.exp(time * decay[i], fastmath=True) + shift
            mK[at[0], at[1]] = cute.math.fma(sums[i], window, addend[i])
            at = self.moved(at, step, length)

    @cute.jit
    def moved(self, at, step, length: I32):
        """A row and a column, and a step on, in the layout's order."""
        row, column = at[0] + step[0], at[1] + step[1]
        if cutlass.const_expr(self.config.layout == "reshape"):
            over = column >= length
            row, column = row + over.to(I32), column - (length if over else 0)
        return row, column

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
            grid=(self.role.tasks(length), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,  # without it ptxas spills, for more blocks than shared memory has room for
            stream=stream,
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
