"""The implicit filter: a sine MLP over positions, its exponential window, and its bias, to fp32's accuracy.

Sines of frequencies of 10 and more turn a rounded operand into percents of error, so a product of the MLP takes both
operands in two fp16 parts, scaled by powers of two, in three products of the tensor core (mma.sync), and adds up in
fp32. A warpgroup computes a few positions, all layers, and a share of the channels of the last one. Features or
channels are the rows of every product and positions its columns. A warp has 16 rows at a time; its threads copy the
weights of the next ones to shared memory, each what it will turn into its own registers of the operand. Activations go
from layer to layer through shared memory, as operands.

Layers, and the last one's rows 64 at a time, are turns of one loop: code that is executed once is fetched more slowly
than it is executed.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import numpy as np
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.device.copy import prefetch
from cute_kernels.device.pin import pin
from cute_kernels.hyena import numerics
from cute_kernels.hyena.arguments import compact
from cute_kernels.hyena.config import Filter
from cute_kernels.runtime.kernel import compile_options

F16, F32, F64 = cutlass.Float16, cutlass.Float32, cutlass.Float64
I32, I64, U32 = cutlass.Int32, cutlass.Int64, cutlass.Uint32
ORDER = Filter.ORDER  # the MLP's width
THREADS = 128
BARRIER = 2
STEPS = ORDER // 16  # of k, in a product
SCALE = 2.0**numerics.TARGET_EXPONENT  # of the activations, which are sines


class FilterRole:
    """The work of one warpgroup, in a kernel of its own or beside another role of one."""

    def __init__(self, config: Filter):
        self.config = config
        bands = (config.emb_dim - 1) // 2
        self.frequencies = [float(f) for f in np.linspace(1e-4, bands - 1, bands, dtype=np.float32)]
        self.items = 3 + config.channels // ORDER  # three layers with sines, then the last one's rows

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
        # What belongs to the task is made here, and not kept in registers from one to the next.
        norm_len = pin(norm_len)
        t0, channel0 = task // c.split * c.tile, task % c.split * c.channels
        sH = cute.make_tensor(  # activations (position, row of k, part, buffer)
            cute.recast_ptr(sFloats, dtype=F16),
            cute.make_layout((c.tile, ORDER, 2, 2), stride=(1, c.pitch, c.pitch * ORDER, c.pitch * ORDER * 2)),
        )
        floats = sFloats + 2 * ORDER * c.pitch
        sTime = cute.make_tensor(floats, cute.make_layout(c.tile))  # t / (L - 1)
        floats += c.tile
        sZ = cute.make_tensor(floats, cute.make_layout((c.tile, c.emb_dim)))
        floats += c.tile * c.emb_dim
        sW1 = cute.make_tensor(floats, cute.make_layout((ORDER, c.emb_dim), stride=(c.emb_dim, 1)))
        floats += ORDER * c.emb_dim
        # What a thread has loaded of coming rows: (4, vector, stage), 8 vectors of weights and one of the rows' own.
        copies = cute.make_layout((4, 9, c.stages, THREADS), stride=(1, 4 * THREADS, 36 * THREADS, 4))
        sFresh = cute.make_tensor(floats, copies)[None, None, None, thread]
        lane = thread % 32
        row = thread // 32 * 16 + lane // 4  # of this thread in every 64, and the one 8 further
        for i, (w, b) in enumerate(((mW2, mB2), (mW3, mB3))[: c.stages]):
            self.fetch(sFresh[None, None, i], start(w), start(mFreq), start(b), pin(row), lane)
        weights = cute.make_rmem_tensor((8, STEPS, 2), F16)  # the operand (value, step, part)
        inverse = cute.make_rmem_tensor(2, F32)  # of its rows' scales and the activations'
        vectors = cute.make_rmem_tensor((2, 2), F32)  # (row, frequency and bias, or decay and bias)
        self.positions(mZ, mW1, sZ, sW1, sTime, t0, length, norm_len, pin(thread))
        at = pin(row)
        for r in cutlass.range_constexpr(2):
            inverse[r], vectors[r, 0], vectors[r, 1] = F32(0.0), mFreq[at + 8 * r], mB1[at + 8 * r]
        columns = cute.make_rmem_tensor((4, c.at_once), F32)
        for n in cutlass.range(self.items, unroll=1):
            item = pin(n)  # addresses are made from it, in place of a register for each that goes along
            if item <= 3:
                self.sync()  # the positions are there, or the last layer's activations
            for first in cutlass.range(0, c.tile, 8 * c.at_once, unroll=1):
                if item == 0:
                    self.dot(columns, sW1, sZ, row, first, lane)
                else:
                    old = pin(item)
                    sOld = sH[None, None, None, (old + 1) % 2 if old < 3 else 0]
                    self.product(columns, weights, inverse, sOld, first, lane)
                if item < 3:
                    sNew = sH[None, None, None, pin(item) % 2]  # made here, not kept in a register
                    self.activate(columns, vectors, sNew, row, first, lane)
                else:
                    channel = channel0 + ORDER * (item - 3) + row
                    reciprocal = U32(0xFFFFFFFF) // pin(length).to(U32)
                    self.store(columns, vectors, mK, sTime, channel, t0, first, length, reciprocal, shift, lane)
            if item + 1 < self.items:
                cute.arch.cp_async_wait_group(c.stages - 1)
                stage = sFresh[None, None, item % c.stages]
                self.convert(stage, weights, inverse, vectors)
                following = item + 1 + c.stages
                if following < self.items:
                    channel = channel0 + ORDER * (following - 3)
                    starts = (
                        chosen(following == 2, start(hidden), start(last, channel * size))
                        for hidden, last, size in ((mW3, mWf, ORDER), (mFreq, mDeltas, 1), (mB3, mBias, 1))
                    )
                    self.fetch(stage, *starts, row, lane)
                else:
                    cute.arch.cp_async_commit_group()
        self.sync()  # before the next task overwrites what is read here

    @cute.jit
    def bring_ahead(self, mW3, mB3, mWf, mBias, mDeltas, task: I32, thread: I32):
        """Starts to bring to the L2 cache what a task reads later; the tasks share the large weights."""
        c = self.config
        channel0, part = task % c.split * c.channels, task // c.split % 16
        rows = c.channels // 16
        if thread == 0:
            prefetch(mW3.iterator + part * (ORDER // 16) * ORDER, ORDER * ORDER // 4)
            prefetch(mWf.iterator + (channel0 + part * rows) * ORDER, rows * ORDER * 4)
        elif thread == 32:
            prefetch(mB3.iterator, ORDER * 4)
            prefetch(mDeltas.iterator + channel0, c.channels * 4)
            prefetch(mBias.iterator + channel0, c.channels * 4)

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)

    @cute.jit
    def fetch(self, sFresh, w: I64, first: I64, second: I64, row, lane):
        """Starts copies of this thread's part of 64 rows of weights, 4 of every 16 of k, and of what belongs to its
        rows: frequency and bias, or decay and bias. All by address."""
        vector = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=128)
        word = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=32)
        m = at_address(w, cute.make_ordered_layout((ORDER, ORDER), order=(1, 0)))
        pair = [at_address(v, cute.make_layout(ORDER)) for v in (first, second)]
        for r in cutlass.range_constexpr(2):
            for s in cutlass.range_constexpr(STEPS):
                source = cute.local_tile(m[row + 8 * r, None], (4,), (4 * s + lane % 4,))
                cute.copy(vector, source, sFresh[None, STEPS * r + s])
            for v in cutlass.range_constexpr(2):
                source = cute.local_tile(pair[v], (1,), (row + 8 * r,))
                cute.copy(word, source, cute.local_tile(sFresh[None, 2 * STEPS], (1,), (2 * v + r,)))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def convert(self, sFresh, weights, inverse, vectors):
        """This thread's copies to the operand, a row scaled by its largest."""
        halves = cute.make_layout((2, 2, STEPS, 2, 2), stride=(1, 4, 8, 2, 8 * STEPS))
        operand = cute.make_tensor(weights.iterator, halves)  # (pair, half of k, step, row, part)
        fresh = cute.make_rmem_tensor((4, STEPS), F32)
        for r in cutlass.range_constexpr(2):
            for s in cutlass.range_constexpr(STEPS):
                cute.autovec_copy(sFresh[None, STEPS * r + s], fresh[None, s])
            scale, back = numerics.scale_of(numerics.max_over(numerics.largest(fresh), 4))
            inverse[r] = back * F32(1.0 / SCALE)
            fresh.store(fresh.load() * scale)
            x = cute.make_tensor(fresh.iterator, cute.make_layout((2, 2, STEPS)))
            for s in cutlass.range_constexpr(STEPS):
                for h in cutlass.range_constexpr(2):
                    numerics.split(x[None, h, s], operand[None, h, s, r, 0], operand[None, h, s, r, 1])
        cute.autovec_copy(sFresh[None, 2 * STEPS], cute.make_tensor(vectors.iterator, cute.make_layout(4)))

    @cute.jit
    def product(self, columns, weights, inverse, sH, first, lane):
        """Rows of the weights by activations: columns (4, at_once).

        A thread has two rows of two neighbouring positions of every 8. Small products go to accumulators of their own,
        and large ones of every 16 of k: the tensor core's sums are cut, not rounded.
        """
        c = self.config
        mma = cute.make_tiled_mma(warp_ops.MmaF16BF16Op(F16, F32, (16, 8, 16)))
        atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), F16)
        a = cute.make_tensor(weights.iterator, cute.make_layout(((2, 2, 2), 1, 1, STEPS, 2)))
        for q in cutlass.range_constexpr(c.at_once):
            small = cute.make_rmem_tensor(((2, 2), 1, 1, 2), F32)
            large = cute.make_rmem_tensor(((2, 2), 1, 1, STEPS), F32)
            small.fill(0.0)
            large.fill(0.0)
            for s in cutlass.range_constexpr(STEPS):
                b = cute.make_rmem_tensor(((2, 2), 1, 1, 2), F16)
                source = cute.local_tile(sH[None, 16 * s + lane % 16, lane // 16], (8,), (first // 8 + q,))
                target = cute.make_tensor(b.iterator, cute.make_layout((8, 1)))
                cute.copy(atom, cute.make_tensor(source.iterator, cute.make_layout((8, 1))), target)
                for part in cutlass.range_constexpr(2):
                    acc = small[None, None, None, part]
                    cute.gemm(mma, acc, a[None, None, None, s, part], b[None, None, None, 1 - part], acc)
                acc = large[None, None, None, s]
                cute.gemm(mma, acc, a[None, None, None, s, 0], b[None, None, None, 0], acc)
            for i in cutlass.range_constexpr(4):
                total = (large[i] + large[4 + i]) + (large[8 + i] + large[12 + i])
                total += small[i] + small[4 + i]
                columns[i, q] = total * inverse[i // 2]

    @cute.jit
    def dot(self, columns, sW1, sZ, row, first, lane):
        """The first layer's sums, in fp32."""
        c = self.config
        z = cute.make_rmem_tensor(2, F32)
        for q in cutlass.range_constexpr(c.at_once):
            for i in cutlass.range_constexpr(4):
                columns[i, q] = F32(0.0)
            for j in cutlass.range_constexpr(c.emb_dim):
                cute.autovec_copy(cute.local_tile(sZ[None, j], (2,), (first // 2 + 4 * q + lane % 4,)), z)
                for i in cutlass.range_constexpr(4):
                    columns[i, q] = cute.math.fma(sW1[row + i // 2 * 8, j], z[i % 2], columns[i, q])

    @cute.jit
    def activate(self, columns, vectors, sH, row, first, lane):
        """Sines of the columns, as operands, to shared memory.

        Rows of k are stored in the order in which the weights' registers have them: four neighbours belong to a thread.
        """
        k = lane // 4
        at = row - k + k % 4 // 2 * 8 + k // 4 * 2 + k % 2
        for q in cutlass.range_constexpr(self.config.at_once):
            for r in cutlass.range_constexpr(2):
                x = cute.make_rmem_tensor(2, F32)
                for i in cutlass.range_constexpr(2):
                    total = columns[2 * r + i, q] + vectors[r, 1]
                    x[i] = numerics.sine_of_product(vectors[r, 0], total) * F32(SCALE)
                parts = cute.make_rmem_tensor((2, 2), F16)
                numerics.split(x, parts[None, 0], parts[None, 1])
                for part in cutlass.range_constexpr(2):
                    target = cute.local_tile(sH[None, at + 4 * r, part], (2,), (first // 2 + 4 * q + lane % 4,))
                    cute.autovec_copy(parts[None, part], target)

    @cute.jit
    def store(self, columns, vectors, mK, sTime, channel, t0, first, length, reciprocal, shift, lane):
        """Window, bias, and the layout: k[d, t] = h.flat[d L + t], or h[t, d]."""
        c = self.config
        times = cute.make_rmem_tensor(2, F32)
        for q in cutlass.range_constexpr(c.at_once):
            p = first + 8 * q + lane % 4 * 2
            t = t0 + p
            cute.autovec_copy(cute.local_tile(sTime, (2,), (p // 2,)), times)
            for r in cutlass.range_constexpr(2):
                values = cute.make_rmem_tensor(2, F32)
                decay = cute.arch.fmax(vectors[r, 0], -vectors[r, 0]) * F32(-numerics.LOG2_E)
                addend = vectors[r, 1] if cutlass.const_expr(c.bias) else F32(0.0)
                for i in cutlass.range_constexpr(2):
                    window = cute.math.exp2(times[i] * decay, fastmath=True) + shift
                    values[i] = cute.math.fma(columns[2 * r + i, q], window, addend)
                d = channel + 8 * r
                if cutlass.const_expr(c.layout == "reshape"):
                    for i in cutlass.range_constexpr(2):
                        # Less than 2^32 elements, and pinned so that nothing but the store depends on the condition.
                        quotient, rest = divided((t + i) * c.width + d, length, reciprocal)
                        at = pin(quotient * I32(mK.stride[0]) + rest).to(U32)
                        if t + i < length:
                            cute.make_tensor(mK.iterator + at.to(I64), cute.make_layout(1))[0] = values[i]
                elif t + 1 < length:
                    cute.autovec_copy(values, cute.local_tile(mK[d, None], (2,), (t // 2,)))
                elif t < length:
                    mK[d, t] = values[0]

    @cute.jit
    def positions(self, mZ, mW1, sZ, sW1, sTime, t0, length, norm_len, thread):
        """z of the task's positions: t / (L - 1), cos(-f w), sin(-f w) with w = 2 pi t / L; or the stored ones. And the
        first layer's weight, to shared memory."""
        c = self.config
        loads = cute.ceil_div(ORDER * c.emb_dim, THREADS)
        w = cute.make_rmem_tensor(loads, F32)
        gW1, tW1 = (cute.make_tensor(m.iterator, cute.make_layout(ORDER * c.emb_dim)) for m in (mW1, sW1))
        for i in cutlass.range_constexpr(loads):
            w[i] = gW1[cutlass.min(thread + THREADS * i, ORDER * c.emb_dim - 1)]
        if thread < c.tile:
            time = position(t0 + thread, norm_len)
            sTime[thread] = time
            if cutlass.const_expr(not c.stored_z):
                sZ[thread, 0] = time
        if cutlass.const_expr(c.stored_z):
            for i in cutlass.range(thread, c.tile * c.emb_dim, THREADS, unroll=1):
                p, j = i // c.emb_dim, i % c.emb_dim
                sZ[p, j] = mZ[cutlass.min(t0 + p, length - 1), j]
        else:
            turn = inverse_in_double(norm_len)
            bands = len(self.frequencies)
            for i in cutlass.range(thread, c.tile * 2 * bands, THREADS, unroll=1):
                p, j = i % c.tile, i // c.tile
                frequency = F64(0.0)
                for n in cutlass.range_constexpr(bands):
                    if j % bands == n:
                        frequency = F64(self.frequencies[n])
                quarter = F64(0.25) if j < bands else F64(0.5)  # cos(a), or -sin(a) = sin(a + pi)
                sZ[p, 1 + j] = numerics.sine_of_turns(frequency * ((t0 + p).to(F64) * turn) + quarter)
        for i in cutlass.range_constexpr(loads):
            if thread + THREADS * i < ORDER * c.emb_dim:
                tW1[thread + THREADS * i] = w[i]


def start(tensor: cute.Tensor, offset=0):
    """The address of an element of fp32."""
    return tensor.iterator.toint() + I64(offset) * 4


def chosen(condition, a: I64, b: I64):
    """``a if condition else b`` without a branch."""
    return I64(cutlass.select_(condition, a, b))


def at_address(address: I64, layout: cute.Layout):
    return cute.make_tensor(cute.make_ptr(F32, address, cute.AddressSpace.gmem, assumed_align=16), layout)


@cute.jit
def divided(n: I32, divisor: I32, reciprocal: U32):
    """Quotient and remainder of a number from 0 on; `reciprocal` is (2^32 - 1) // divisor."""
    quotient = cute.arch.mul_hi(n.to(U32), reciprocal).to(I32)
    rest = n - quotient * divisor  # the quotient is right or one too small
    over = rest >= divisor
    return quotient + over.to(I32), rest - (divisor if over else 0)


@cute.jit
def position(t: I32, norm_len: I32):
    """t / (L - 1), and 0 for L = 1."""
    divisor = cutlass.max(norm_len - 1, 1).to(F32)
    inverse = cute.arch.rcp_approx(divisor)
    q = t.to(F32) * inverse
    return cute.math.fma(cute.math.fma(-q, divisor, t.to(F32)), inverse, q)


@cute.jit
def inverse_in_double(n: I32):
    """1 / n to double's precision."""
    d = n.to(F64)
    r = cute.arch.rcp_approx(n.to(F32)).to(F64)
    for _ in cutlass.range_constexpr(2):
        r = r * (F64(2.0) - d * r)
    return r


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
        task, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        self.role.bring_ahead(mW3, mB3, mWf, mBias, mDeltas, task, thread)
        self.role.work(
            *(mZ, mW1, mB1, mFreq, mW2, mB2, mW3, mB3, mWf, mBias, mDeltas, mK, length, norm_len, shift),
            *(storage.floats.data_ptr(), task, thread),
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
