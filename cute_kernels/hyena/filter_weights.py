"""The implicit filter's weights as operands of the tensor core, in the order in which threads hold them.

A product of the filter takes both operands in two fp16 parts. A unit is 16 rows of weights, a warp's in a product; the
units of the second layer come first, then the third's, then the last's. A lane has 32 words of it, in vectors of four:
the high parts, 16 of k after 16 of k, then the low ones. Behind them lies a record for each row: the factor of its
product (the inverse of its scale and the activations'), its bias, and its frequency or, in the last layer, the
exponential window's exponent over t / (L - 1).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.device.math import LOG2_E
from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Filter
from cute_kernels.hyena.workspace import FILTER_RECORD, ORDER

F16, F32, I32, I64 = cutlass.Float16, cutlass.Float32, cutlass.Int32, cutlass.Int64
STEPS = ORDER // 16  # of k, in a product
SCALE = 2.0**numerics.TARGET_EXPONENT  # of the activations, which are sines
VECTORS = 2 * STEPS  # of four words, a lane's of an item
WORDS = 16 * ORDER  # of a unit
UNIT = WORDS + 16 * FILTER_RECORD  # floats


class FilterWeightsRole:
    """The work of a warp: 16 rows of the second, third and last layers."""

    def __init__(self, config: Filter):
        self.config = config
        self.rows = 2 * ORDER + config.width
        self.units = self.rows // 16

    @cute.jit
    def work(
        self,
        mFreq: cute.Tensor,  # (64,) fp32
        mW2: cute.Tensor,  # (64, 64)
        mB2: cute.Tensor,  # (64,)
        mW3: cute.Tensor,  # (64, 64)
        mB3: cute.Tensor,  # (64,)
        mWf: cute.Tensor,  # (D, 64)
        mBias: cute.Tensor,  # (D,) added to the filter, if configured
        mDeltas: cute.Tensor,  # (D,)
        mOperand: cute.Tensor,  # (128 + D, 68) fp32, written: its units
        unit: I32,
        lane: I32,
    ):
        hidden = ORDER // 16  # units of a layer
        row = unit % hidden * 16  # of the matrix
        matrix, bias = mW2.iterator.toint(), mB2.iterator.toint()
        if unit >= hidden:
            matrix, bias = mW3.iterator.toint(), mB3.iterator.toint()
        if unit >= 2 * hidden:
            matrix, bias, row = mWf.iterator.toint(), mBias.iterator.toint(), (unit - 2 * hidden) * 16
        row += lane // 4
        fresh = cute.make_rmem_tensor((4, STEPS, 2), F32)
        for r in cutlass.range_constexpr(2):
            for s in cutlass.range_constexpr(STEPS):
                source = at_address(matrix + I64((row + 8 * r) * ORDER + 16 * s + lane % 4 * 4) * 4, 4)
                cute.autovec_copy(source, fresh[None, s, r])
        weights = cute.make_rmem_tensor((8, STEPS, 2), F16)  # the operand (value, step, part)
        halves = cute.make_layout((2, 2, STEPS, 2, 2), stride=(1, 4, 8, 2, 8 * STEPS))
        operand = cute.make_tensor(weights.iterator, halves)  # (pair, half of k, step, row, part)
        for r in cutlass.range_constexpr(2):
            scale, back = numerics.scale_of(numerics.max_over(numerics.largest(fresh[None, None, r]), 4))
            scaled = cute.make_rmem_tensor((2, 2, STEPS), F32)
            for i in cutlass.range_constexpr(4 * STEPS):
                scaled[i] = fresh[4 * STEPS * r + i] * scale
            for s in cutlass.range_constexpr(STEPS):
                for h in cutlass.range_constexpr(2):
                    numerics.split(scaled[None, h, s], operand[None, h, s, r, 0], operand[None, h, s, r, 1])
            if lane % 4 == r:
                record = cute.make_rmem_tensor(FILTER_RECORD, F32)
                record.fill(0.0)
                record[0] = back * F32(1.0 / SCALE)
                record[1] = at_address(bias + I64(row + 8 * r) * 4, 1)[0]
                if unit < 2 * hidden:
                    record[2] = mFreq[row + 8 * r]
                else:
                    if cutlass.const_expr(not self.config.bias):
                        record[1] = F32(0.0)
                    delta = mDeltas[row + 8 * r]
                    record[2] = cute.arch.fmax(delta, -delta) * F32(-LOG2_E)
                cute.autovec_copy(record, record_of(unit_of(mOperand, unit), lane // 4 + 8 * r))
        words = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=F32), cute.make_layout((4, VECTORS)))
        target = words_of(unit_of(mOperand, unit), lane)
        for v in cutlass.range_constexpr(VECTORS):
            cute.autovec_copy(words[None, v], target[None, v])


def words_of(start: cute.Pointer, lane: I32):
    """A lane's words of the unit that begins at `start`: (4, vectors)."""
    pointer = start + cute.assume(lane * 4, divby=4)
    return cute.make_tensor(pointer, cute.make_layout((4, VECTORS), stride=(1, 128)))


def record_of(start: cute.Pointer, row: I32):
    """The record of one of the unit's rows."""
    return cute.make_tensor(start + cute.assume(WORDS + row * FILTER_RECORD, divby=4), cute.make_layout(FILTER_RECORD))


def unit_of(mOperand: cute.Tensor, unit: I32):
    return mOperand.iterator + cute.assume(unit * UNIT, divby=4)


def at_address(address: I64, count: cutlass.Constexpr):
    pointer = cute.make_ptr(F32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))
