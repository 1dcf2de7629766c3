"""Device arithmetic that the Hyena kernels share: scaling by powers of two, hi/lo splits, GELU, row sums."""

import math

import cutlass
import cutlass.cute as cute

from cute_kernels.device.math import LOG2_E

F32, F64, I32 = cutlass.Float32, cutlass.Float64, cutlass.Int32

GELU_C0, GELU_C1 = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and the cubic term's factor

# pi / 2 in three fp32 parts. On [-pi/4, pi/4], to 4e-9: sin(r) = r + r^3 S(r^2), cos(r) = 1 - r^2 / 2 + r^4 C(r^2).
HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
SINE = (-0.16666655242443085, 0.008332155644893646, -0.0001951463200384751)
COSINE = (0.04166664555668831, -0.0013887309469282627, 2.443241282890085e-05)
ROUNDING = 1.5 * 2.0**23  # added to a number below 2^22, leaves it rounded, its last bits those of the sum

# Values are brought into [2^14, 2^15): as far up in fp16's range as is safe, so that the low parts stay normal.
TARGET_EXPONENT = 14


@cute.jit
def scale_of(amax: F32):
    """The power of two that brings |x| <= amax below 2^15, and its inverse. 0, tiny, Inf and NaN get a finite one."""
    # Inf and NaN have the exponent 255: both results stay normal numbers.
    exponent = cutlass.max((amax.bitcast(I32) >> 23) & 0xFF, 40)
    scale = ((254 + TARGET_EXPONENT - exponent) << 23).bitcast(F32)
    inverse = ((exponent - TARGET_EXPONENT) << 23).bitcast(F32)
    return scale, inverse


def normalised_scale(width: int) -> float:
    """The power of two for what LayerNorm makes of `width` elements before its weight: at most sqrt(width)."""
    return 2.0 ** (TARGET_EXPONENT - math.ceil(math.log2(width) / 2))


def inverse_of(scale: F32):
    """1 / scale of a power of two."""
    return ((254 << 23) - scale.bitcast(I32)).bitcast(F32)


@cute.jit
def split(x: cute.Tensor, hi: cute.Tensor, lo: cute.Tensor):
    """hi = x rounded to the operand type, lo = what is left, rounded again. Register tensors of one layout."""
    hi.store(x.load().to(hi.element_type))
    lo.store((x.load() - hi.load().to(F32)).to(lo.element_type))


@cute.jit
def inverse_root(x: F32):
    """1 / sqrt(x) to an ulp, for normal positive x; 0 for Inf, NaN for NaN."""
    r = cute.math.rsqrt(x, fastmath=True)
    return r if x > F32(3e38) else cute.math.fma(r * F32(0.5), cute.math.fma(-x * r, r, F32(1.0)), r)


@cute.jit
def gelu_tanh_over(x: F32, divisor: F32):
    """gelu(x) / divisor as x / (divisor (1 + exp(-2 z))), z = c0 (x + c1 x^3): the tanh form without its cancellation
    for negative x."""
    z = x * (F32(-2.0 * LOG2_E * GELU_C0) + F32(-2.0 * LOG2_E * GELU_C0 * GELU_C1) * (x * x))
    e = cute.math.exp2(z, fastmath=True)
    return x * cute.arch.rcp_approx(cute.math.fma(e, divisor, divisor))


@cute.jit
def gelu_tanh_two(a: F32, b: F32, factor: F32):
    """gelu(a) and gelu(b) times `factor`, with one reciprocal for both: 1 / a' and 1 / b' from 1 / (a' b')."""
    da, db = _one_plus_exp(a), _one_plus_exp(b)
    r = cute.arch.rcp_approx(da * db) * factor
    return a * (r * db), b * (r * da)


@cute.jit
def _one_plus_exp(x: F32):
    """1 + exp(-2 z) as in gelu_tanh_over, at most 2^30, so that the product of two keeps clear of fp32's range."""
    z = x * (F32(-2.0 * LOG2_E * GELU_C0) + F32(-2.0 * LOG2_E * GELU_C0 * GELU_C1) * (x * x))
    return F32(1.0) + cute.math.exp2(cute.arch.fmin(z, F32(30.0)), fastmath=True)


@cute.jit
def sum_over(x: F32, lanes: cutlass.Constexpr):
    """The sum over groups of `lanes` neighbouring lanes, in every lane."""
    offset = lanes // 2
    while cutlass.const_expr(offset > 0):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
        offset //= 2
    return x


@cute.jit
def max_over(x: F32, lanes: cutlass.Constexpr):
    """The largest over groups of `lanes` neighbouring lanes, in every lane."""
    offset = lanes // 2
    while cutlass.const_expr(offset > 0):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
        offset //= 2
    return x


@cute.jit
def _sine_of(r: F32, quarters: I32):
    """sin(r + quarters * pi / 2) for |r| <= pi/4."""
    square = r * r
    s, c = F32(SINE[2]), F32(COSINE[2])
    for i in cutlass.range_constexpr(2):
        s = s * square + F32(SINE[1 - i])
        c = c * square + F32(COSINE[1 - i])
    s = (r * square) * s + r
    c = (c * square - F32(0.5)) * square + F32(1.0)
    value = s if quarters & 1 == 0 else c
    # The sign bit, flipped in the third and fourth quarter.
    return (value.bitcast(I32) ^ ((quarters & 2) << 30)).bitcast(F32)


@cute.jit
def sine_of_product(a: F32, b: F32):
    """sin(a b) to 1e-7 of the exact product, reduced by multiples of pi/2; beyond 2^22 or so it is only finite."""
    x = a * b
    shifted = cute.math.fma(x, F32(1.0 / HALF_PI[0]), F32(ROUNDING))
    n = shifted - F32(ROUNDING)
    low = cute.math.fma(n, F32(-HALF_PI[2]), cute.math.fma(a, b, -x))
    r = cute.math.fma(n, F32(-HALF_PI[1]), cute.math.fma(n, F32(-HALF_PI[0]), x)) + low
    # Arguments too large to be reduced must not leave the polynomials' range; Inf and NaN end as NaN.
    r = r if cute.arch.fmax(r, -r) < F32(0.8) else x - x
    return _sine_of(r, shifted.bitcast(I32))


@cute.jit
def sine_of_turns(turns: F64):
    """sin(2 pi turns), the turns reduced in double."""
    n = cute.math.floor(turns * F64(4.0) + F64(0.5))
    return _sine_of((turns * F64(4.0) - n).to(F32) * F32(HALF_PI[0]), n.to(I32))


@cute.jit
def largest(x: cute.Tensor):
    """max |x| over registers; a NaN doesn't count."""
    amax = F32(0.0)
    for i in cutlass.range_constexpr(cute.size(x)):
        amax = cute.arch.fmax(amax, cute.arch.fmax(x[i], -x[i]))
    return amax


@cute.jit
def sum_of_squares(x: cute.Tensor):
    """Over registers."""
    total = F32(0.0)
    for i in cutlass.range_constexpr(cute.size(x)):
        total = total + x[i] * x[i]
    return total
