"""The implicit filter: a sine MLP over positions, its exponential window, and its bias, to fp32's accuracy.

Sines of frequencies of 10 and more turn a rounded operand into percents of error, so a product of the MLP takes both
operands in two fp16 parts, scaled by powers of two, in three products of the tensor core (`filter_product.py`), and
adds up in fp32. A task is a few positions, all layers, and a share of the channels of the last one. Features or
channels are the rows of every product and positions its columns. A warp has 16 rows at a time. Weights come as
operands, in the order of the threads' registers (`filter_weights.py`), and ahead of time, so that a turn is what
depends on the turn before it: the activations' operand, the products, sines, stores. Activations go from layer to layer
through shared memory.

Other warpgroups may `help` one in the last layer. Of two that have it all each has half of the first layer's
positions, one the second layer and the other the third, and then every other 64 channels. Layers, and the last one's
rows 64 at a time, are turns of one loop: code that is executed once is fetched more slowly than it is executed.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import numpy as np
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.device.copy import invalidate, load, store_one_if
from cute_kernels.device.pin import pin
from cute_kernels.hyena import numerics
from cute_kernels.hyena.arguments import compact
from cute_kernels.hyena.config import Filter
from cute_kernels.hyena.filter_product import activations, filter_product
from cute_kernels.hyena.filter_weights import (
    SCALE,
    STEPS,
    UNIT,
    VECTORS,
    FilterWeightsRole,
    record_of,
    unit_of,
    words_of,
)
from cute_kernels.hyena.workspace import FILTER_RECORD, ORDER
from cute_kernels.runtime.kernel import compile_options

F16, F32, F64 = cutlass.Float16, cutlass.Float32, cutlass.Float64
I32, I64, U32 = cutlass.Int32, cutlass.Int64, cutlass.Uint32
GROUP = Filter.GROUP  # threads that share an item
FIRST = 8  # of up to six named barriers


class FilterRole:
    """The work of one or two warpgroups, in a kernel of their own or beside other roles of one."""

    def __init__(self, config: Filter, arch: str):
        self.config, self.product = config, filter_product(arch, config.tile)
        self.saves_registers = arch == "sm_90a"  # makes values again that it could keep
        bands = (config.emb_dim - 1) // 2
        self.frequencies = [float(f) for f in np.linspace(1e-4, bands - 1, bands, dtype=np.float32)]

    @property
    def items(self):
        """Of the last layer: 64 channels each."""
        return self.config.channels // ORDER

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
        mOperand: cute.Tensor,  # (128 + D, 68) fp32: see filter_weights.py; may be made by the launch in front
        mK: cute.Tensor,  # (D, Lp) fp32: the filter, rows padded to Lp
        length: I32,
        norm_len: I32,
        shift: F32,
        sFloats: cute.Pointer,  # the config's `shared_floats`, 128-byte aligned
        task: I32,
        thread: I32,
        own: I32,  # of the last layer's items of 64 channels, the first ones; others do the rest with `help`
        ready: cute.Pointer | None = None,  # for them: an mbarrier on which each warp arrives
    ):
        c = self.config
        # What belongs to the task is made here, and not kept in registers from one to the next.
        norm_len = pin(norm_len)
        t0, channel0 = self.place(task)
        sH, sTime, sAhead, sZ, sW1 = self.shared(sFloats)
        full = cute.recast_ptr(sAhead + c.slots * c.warps * UNIT, dtype=I64)
        warp = cute.arch.make_warp_uniform(thread // 32)
        # This warp's slots for units on their way, and their barriers.
        sAhead += cute.assume(warp * (c.slots * UNIT), divby=4)
        full += warp * c.slots
        if thread % 32 == 0:
            for i in cutlass.range_constexpr(c.slots):
                cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
        group = I32(0)
        if cutlass.const_expr(c.groups == 2):
            group = cute.arch.make_warp_uniform(thread // GROUP)
        reciprocal = pin((U32(0xFFFFFFFF) // length.to(U32)).to(I32)).to(U32)  # here, and not where it is used
        self.fetch_first(mW1, sW1, thread)
        self.positions(mZ, sZ, sTime, t0, length, norm_len, thread)
        self.first_layer(mB1, mFreq, sH[None, None, None, 0], sZ, sW1, group, thread)
        if group == 1:
            signal(FIRST, c.threads)
        cute.arch.griddepcontrol_wait()  # the operand
        rest = (channel0, t0, length, reciprocal, shift, group, thread, own, ready)
        self.later_layers(mOperand, mK, sH, sTime, sAhead, full, *rest)
        meet(FIRST + 5, c.threads)  # before the next task overwrites what is read here
        if thread % 32 == 0:
            for i in cutlass.range_constexpr(c.slots):
                invalidate(full + i)

    @cute.jit
    def help(
        self,
        mOperand: cute.Tensor,  # as in `work`
        mK: cute.Tensor,
        length: I32,
        shift: F32,
        sFloats: cute.Pointer,
        task: I32,
        thread: I32,  # of its warpgroup
        count: cutlass.Constexpr,  # of its items
        start: I32,  # the first of them, if there are so many
        ready: cute.Pointer,
    ):
        """A warpgroup's share of the last layer of a block's only task."""
        c = self.config
        t0, channel0 = self.place(task)
        sH, sTime, *_ = self.shared(sFloats)
        lane, row = thread % 32, row_of(thread)
        reciprocal = U32(0xFFFFFFFF) // length.to(U32)
        columns = self.product.columns
        weights = cute.make_rmem_tensor((8, STEPS, 2), F16)  # (value, step, part)
        constants = cute.make_rmem_tensor((2, 3), F32)
        sums = cute.make_rmem_tensor((4, columns // 8), F32)
        cute.arch.griddepcontrol_wait()  # the operand
        for i in cutlass.range_constexpr(count):
            item = start + i
            if item < self.items:
                unit = unit_of(mOperand, (2 + channel0 // ORDER + item) * 4 + row // 16)
                copy_words(weights, unit, lane)
                take_records(constants, unit, lane)
                cute.arch.mbarrier_wait(ready, 0)
                for first in cutlass.range(0, c.tile, columns, unroll=1):
                    self.product.multiply(sums, weights, sH[None, None, None, 0], first, lane)
                    channel = channel0 + ORDER * item + row
                    self.store(sums, constants, mK, sTime, channel, t0, first, length, reciprocal, shift, lane)

    def place(self, task):
        """A task's first position, and its first channel."""
        c = self.config
        return task // c.split * c.tile, task % c.split * c.channels

    def shared(self, floats):
        """What lies in shared memory from `floats` on; each warp's slots for units on their way have barriers behind
        the last of them."""
        c = self.config
        sH = activations(cute.recast_ptr(floats, dtype=F16), c.tile)  # (positions, k, part, buffer)
        sAhead = floats + 2 * ORDER * c.tile
        floats = sAhead + c.slots * c.warps * (UNIT + 2)
        sTime = cute.make_tensor(floats, cute.make_layout(c.tile))  # t / (L - 1)
        floats += c.tile
        sZ = cute.make_tensor(floats, cute.make_layout((c.tile, c.emb_dim)))
        floats += c.tile * c.emb_dim
        sW1 = cute.make_tensor(floats, cute.make_layout((ORDER, c.emb_dim), stride=(c.emb_dim, 1)))
        return sH, sTime, sAhead, sZ, sW1

    @cute.jit
    def first_layer(self, mB1, mFreq, sH, sZ, sW1, group, thread):
        """Of this group's positions."""
        c = self.config
        lane, row = thread % 32, row_of(thread)
        constants = cute.make_rmem_tensor((2, 3), F32)  # (row, factor of the product, bias, frequency)
        for r in cutlass.range_constexpr(2):
            constants[r, 0], constants[r, 1], constants[r, 2] = F32(1.0), mB1[row + 8 * r], mFreq[row + 8 * r]
        cute.arch.cp_async_wait_group(0)
        meet(FIRST, c.threads)
        sums = cute.make_rmem_tensor((4, 1), F32)
        own = max(c.tile // c.groups, 8)
        for first in cutlass.range(group * own, cutlass.min((group + 1) * own, c.tile), 8, unroll=1):
            self.dot(sums, sW1, sZ, row, first, lane)
            self.activate(sums, constants, sH, row, first, lane)
        self.product.publish()

    @cute.jit
    def later_layers(
        self,
        mOperand,  # as in `work`
        mK,
        sH,  # (positions, k, part, buffer) fp16
        sTime,  # (positions,) fp32
        sAhead,  # this warp's slots
        full,  # and their mbarriers
        channel0,
        t0,
        length,
        reciprocal,
        shift,
        group,
        thread,
        own,
        ready,
    ):
        """Turn n of a group is item `group` + groups n: the second layer, the third, 64 channels after the other, `own`
        times."""
        c = self.config
        lane, row, columns = thread % 32, row_of(thread), self.product.columns
        turns = (2 + own - group + c.groups - 1) // c.groups
        weights = cute.make_rmem_tensor((8, STEPS, 2), F16)  # (value, step, part)
        # (row, factor of the product, bias, frequency or the window's exponent)
        constants = cute.make_rmem_tensor((2, 3), F32)
        first_unit = unit_of(mOperand, group * 4 + row // 16)
        copy_words(weights, first_unit, lane)
        take_records(constants, first_unit, lane)
        for n in cutlass.range_constexpr(1, 1 + c.slots):
            self.fetch(mOperand, sAhead, full, n, turns, channel0, group, row, lane)
        sums = cute.make_rmem_tensor((4, columns // 8), F32)
        for n in cutlass.range(turns, unroll=1):
            item = group + c.groups * n
            if item < 2:
                sOld, sNew = sH[None, None, None, item], sH[None, None, None, 1 - item]
                if group == 0:
                    meet(FIRST, c.threads)
                for first in cutlass.range(0, c.tile, columns, unroll=1):
                    handed = FIRST + 1 + first // columns  # barrier: positions go from the second to the third layer
                    if group == 1:
                        meet(handed, c.threads)
                    self.product.multiply(sums, weights, sOld, first, lane)
                    if first == c.tile - columns:
                        self.take_words(weights, sAhead, full, n, turns, lane)
                    self.activate(sums, constants, sNew, row, first, lane)
                    self.product.publish()
                    if group == 0 and cutlass.const_expr(c.groups == 2):
                        signal(handed, c.threads)
                if group == 1:
                    signal(FIRST, c.threads)
                if cutlass.const_expr(ready is not None):
                    cute.arch.sync_warp()
                    if item == 1 and lane == 0:
                        cute.arch.mbarrier_arrive(ready)
            else:
                if item == 2:
                    meet(FIRST, c.threads)
                elif item == 3 and group == 1:
                    meet(FIRST + 1, GROUP)
                # made again what a register would hold for the next turn
                again = pin(thread) if cutlass.const_expr(self.saves_registers) else thread
                channel = channel0 + ORDER * (item - 2) + row_of(again)
                for first in cutlass.range(0, c.tile, columns, unroll=1):
                    self.product.multiply(sums, weights, sH[None, None, None, 0], first, lane)
                    if first == c.tile - columns:
                        self.take_words(weights, sAhead, full, n, turns, lane)
                    self.store(sums, constants, mK, sTime, channel, t0, first, length, reciprocal, shift, again % 32)
            if n + 1 < turns:
                take_records(constants, sAhead + cute.assume(n % c.slots * UNIT, divby=4), lane)
                if n + 1 + c.slots < turns:
                    cute.arch.sync_warp()
                    self.fetch(mOperand, sAhead, full, n + 1 + c.slots, turns, channel0, group, row, lane)

    @cute.jit
    def take_words(self, weights, sAhead, full, n, turns, lane):
        """The next turn's words, if there is one: this turn has no use for its own any more."""
        c = self.config
        if n + 1 < turns:
            cute.arch.mbarrier_wait(full + n % c.slots, n // c.slots % 2)
            copy_words(weights, sAhead + cute.assume(n % c.slots * UNIT, divby=4), lane)

    @cute.jit
    def fetch_first(self, mW1, sW1, thread):
        """Starts copies of the first layer's weight."""
        count = ORDER * self.config.emb_dim
        word = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=32)
        source, target = (cute.make_tensor(m.iterator, cute.make_layout(count)) for m in (mW1, sW1))
        for i in cutlass.range_constexpr(cute.ceil_div(count, self.config.threads)):
            at = thread + self.config.threads * i
            if at < count:
                cute.copy(word, cute.local_tile(source, (1,), (at,)), cute.local_tile(target, (1,), (at,)))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch(self, mOperand, sAhead, full, n, turns, channel0, group, row, lane):
        """Starts the copy of this warp's unit of its group's turn `n`, if there is one."""
        c = self.config
        if n < turns and lane == 0:
            item, slot = group + c.groups * n, (n - 1) % c.slots
            if item >= 2:
                item += channel0 // ORDER
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, 4 * UNIT)
            target = sAhead + cute.assume(slot * UNIT, divby=4)
            load(target, unit_of(mOperand, item * 4 + row // 16), 4 * UNIT, full + slot)

    @cute.jit
    def dot(self, sums, sW1, sZ, row, first, lane):
        """The first layer's sums of eight positions, in fp32: (4, 1)."""
        z = cute.make_rmem_tensor(2, F32)
        for i in cutlass.range_constexpr(4):
            sums[i] = F32(0.0)
        for j in cutlass.range_constexpr(self.config.emb_dim):
            cute.autovec_copy(cute.local_tile(sZ[None, j], (2,), (first // 2 + lane % 4,)), z)
            for i in cutlass.range_constexpr(4):
                sums[i] = cute.math.fma(sW1[row + i // 2 * 8, j], z[i % 2], sums[i])

    @cute.jit
    def activate(
        self,
        sums: cute.Tensor,  # (4, n) fp32: this thread's of n times eight positions
        constants: cute.Tensor,  # (2, 3) fp32: a row's factor, bias and frequency
        sH: cute.Tensor,  # (positions, k, part) fp16, written
        row: I32,  # this thread's first
        first: I32,  # of the positions
        lane: I32,
    ):
        """Sines, as operands, to shared memory.

        Rows of k are stored in the order in which the weights' registers have them: four neighbours belong to a thread.
        """
        k = lane // 4
        at = row - k + k % 4 // 2 * 8 + k // 4 * 2 + k % 2
        for j in cutlass.range_constexpr(sums.shape[1]):
            for r in cutlass.range_constexpr(2):
                x = cute.make_rmem_tensor(2, F32)
                for i in cutlass.range_constexpr(2):
                    total = cute.math.fma(sums[2 * r + i, j], constants[r, 0], constants[r, 1])
                    x[i] = numerics.sine_of_product(constants[r, 2], total) * F32(SCALE)
                parts = cute.make_rmem_tensor((2, 2), F16)
                numerics.split(x, parts[None, 0], parts[None, 1])
                for part in cutlass.range_constexpr(2):
                    target = cute.local_tile(sH[(None, first // 8 + j), at + 4 * r, part], (2,), (lane % 4,))
                    cute.autovec_copy(parts[None, part], target)

    @cute.jit
    def store(
        self,
        sums: cute.Tensor,  # (4, n) fp32: this thread's of n times eight positions
        constants: cute.Tensor,  # (2, 3) fp32: a row's factor, bias, and the window's exponent
        mK: cute.Tensor,  # (D, Lp) fp32, written
        sTime: cute.Tensor,  # (positions,) fp32: t / (L - 1)
        channel: I32,  # of this thread's first row
        t0: I32,
        first: I32,  # of the positions, which count from t0
        length: I32,
        reciprocal: U32,
        shift: F32,
        lane: I32,
    ):
        """Window, bias, and the layout: k[d, t] = h.flat[d L + t], or h[t, d]."""
        c = self.config
        times = cute.make_rmem_tensor(2, F32)
        pitch = I32(mK.stride[0])
        for j in cutlass.range_constexpr(sums.shape[1]):
            p = first + 8 * j + lane % 4 * 2
            t = t0 + p
            cute.autovec_copy(cute.local_tile(sTime, (2,), (p // 2,)), times)
            if cutlass.const_expr(c.layout == "transpose"):
                start = pin(channel * pitch + t)  # of the first row; unpinned, a register of either row counts along
            for r in cutlass.range_constexpr(2):
                values = cute.make_rmem_tensor(2, F32)
                for i in cutlass.range_constexpr(2):
                    window = cute.math.exp2(times[i] * constants[r, 2], fastmath=True) + shift
                    values[i] = cute.math.fma(sums[2 * r + i, j], window * constants[r, 0], constants[r, 1])
                for i in cutlass.range_constexpr(2):
                    if cutlass.const_expr(c.layout == "reshape"):
                        quotient, rest = divided((t + i) * c.width + channel + 8 * r, length, reciprocal)
                        at = quotient * pitch + rest
                    else:
                        at = start + (8 * r * pitch + i)
                    store_one_if(t + i < length, values[i], mK.iterator + at.to(U32).to(I64))  # less than 2^32 elements

    @cute.jit
    def positions(self, mZ, sZ, sTime, t0, length, norm_len, thread):
        """z of the task's positions: t / (L - 1), cos(-f w), sin(-f w) with w = 2 pi t / L; or the stored ones."""
        c = self.config
        if thread < c.tile:
            time = position(t0 + thread, norm_len)
            sTime[thread] = time
            if cutlass.const_expr(not c.stored_z):
                sZ[thread, 0] = time
        if cutlass.const_expr(c.stored_z):
            for i in cutlass.range(thread, c.tile * c.emb_dim, c.threads, unroll=1):
                p, j = i // c.emb_dim, i % c.emb_dim
                sZ[p, j] = mZ[cutlass.min(t0 + p, length - 1), j]
        else:
            turn = inverse_in_double(norm_len)
            bands = len(self.frequencies)
            for i in cutlass.range(thread, c.tile * 2 * bands, c.threads, unroll=1):
                p, j = i % c.tile, i // c.tile
                frequency = F64(0.0)
                for n in cutlass.range_constexpr(bands):
                    if j % bands == n:
                        frequency = F64(self.frequencies[n])
                quarter = F64(0.25) if j < bands else F64(0.5)  # cos(a), or -sin(a) = sin(a + pi)
                sZ[p, 1 + j] = numerics.sine_of_turns(frequency * ((t0 + p).to(F64) * turn) + quarter)


@cute.jit
def copy_words(weights, unit: cute.Pointer, lane: I32):
    words = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=F32), cute.make_layout((4, VECTORS)))
    source = words_of(unit, lane)
    for v in cutlass.range_constexpr(VECTORS):
        cute.autovec_copy(source[None, v], words[None, v])


@cute.jit
def take_records(constants, unit: cute.Pointer, lane: I32):
    """Of this thread's two rows."""
    record = cute.make_rmem_tensor((FILTER_RECORD, 2), F32)
    for r in cutlass.range_constexpr(2):
        cute.autovec_copy(record_of(unit, lane // 4 + 8 * r), record[None, r])
        for i in cutlass.range_constexpr(3):
            constants[r, i] = record[i, r]


def row_of(thread):
    """The first row of this thread in every item; the other is 8 further."""
    return thread // 32 % 4 * 16 + thread % 32 // 4


@cute.jit
def meet(barrier: I32, threads: cutlass.Constexpr):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


@cute.jit
def signal(barrier: I32, threads: cutlass.Constexpr):
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


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
    """The filter alone: a launch that converts the weights, and one with a block for each task."""

    def __init__(self, config: Filter, arch: str):
        self.role, self.weights = FilterRole(config, arch), FilterWeightsRole(config)

    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor,  # as in FilterRole.work and FilterWeightsRole.work
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
        mOperand: cute.Tensor,
        mK: cute.Tensor,
        length: I32,
        norm_len: I32,
        shift: F32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class Storage:
            floats: cute.struct.Align[cute.struct.MemRange[F32, self.role.config.shared_floats], 128]

        self.Storage = Storage
        self.convert.set_name_prefix("hyena_filter_weights", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.convert(mFreq, mW2, mB2, mW3, mB3, mWf, mBias, mDeltas, mOperand).launch(
            grid=(self.weights.units, 1, 1), block=(32, 1, 1), stream=stream
        )
        self.kernel.set_name_prefix("hyena_filter", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mZ, mW1, mB1, mFreq, mOperand, mK, length, norm_len, shift).launch(
            grid=(self.role.tasks(length), 1, 1),
            block=(self.role.config.threads, 1, 1),
            min_blocks_per_mp=1,  # without it ptxas spills, for more blocks than shared memory has room for
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def convert(
        self,
        mFreq: cute.Tensor,
        mW2: cute.Tensor,
        mB2: cute.Tensor,
        mW3: cute.Tensor,
        mB3: cute.Tensor,
        mWf: cute.Tensor,
        mBias: cute.Tensor,
        mDeltas: cute.Tensor,
        mOperand: cute.Tensor,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        unit, lane = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        self.weights.work(mFreq, mW2, mB2, mW3, mB3, mWf, mBias, mDeltas, mOperand, unit, lane)

    @cute.kernel
    def kernel(
        self,
        mZ: cute.Tensor,
        mW1: cute.Tensor,
        mB1: cute.Tensor,
        mFreq: cute.Tensor,
        mOperand: cute.Tensor,
        mK: cute.Tensor,
        length: I32,
        norm_len: I32,
        shift: F32,
    ):
        storage = memory.SmemAllocator().allocate(self.Storage)
        task, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        rest = (length, norm_len, shift, storage.floats.data_ptr(), task, thread, self.role.items)
        self.role.work(mZ, mW1, mB1, mFreq, mOperand, mK, *rest)


def filter_arguments(config: Filter):
    """The tensors of FilterKernel, as compile time sees them: weights, the operand, the filter."""
    rows, pitch = cute.sym_int(), cute.sym_int(divisibility=4)
    n, d, e = ORDER, config.width, config.emb_dim
    tensors = [compact(F32, rows, e), compact(F32, n, e), compact(F32, n), compact(F32, n)]
    tensors += [compact(F32, n, n), compact(F32, n), compact(F32, n, n), compact(F32, n)]
    tensors += [compact(F32, d, n), compact(F32, d), compact(F32, d)]
    return [*tensors, compact(F32, *config.operand_shape), compact(F32, d, pitch)]


def compile_filter(config: Filter, arch: str):
    scalars = [I32(1), I32(1), F32(0.05)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        FilterKernel(config, arch), *filter_arguments(config), *scalars, stream, options=compile_options(arch)
    )
