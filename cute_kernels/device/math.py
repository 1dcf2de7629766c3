"""Scalar fp32 functions for kernels, each with its error bound.

The hardware's ``ex2.approx`` and ``rcp.approx`` are good to about 2 ulp; what a sum of 256 terms needs is better than
that, so the exponential and log1p below are polynomials (about 1 ulp each).
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = math.log2(math.e)
LOG2_E_LO = 1.92596298909e-08  # log2(e) minus its fp32 rounding
LN2_HI = 0.693359375  # 9 bits, so that n * LN2_HI is exact for |n| < 2^15
LN2_LO = -2.12194440e-4
ROUND_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer in the low bits
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2
EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# (atanh(s) / s - 1) / s^2 in powers of s^2, on s^2 <= 1/9
ATANH_POLY = (0.104004957, 0.087305039, 0.111325338, 0.142851457, 0.2000000477, 0.3333333433)


def select(condition, a, b):
    """``a if condition else b`` without a branch; both sides are evaluated."""
    return Float32(cutlass.select_(condition, Float32(a), Float32(b)))


def tree_sum(values):
    """The sum of a list, in pairs: exact where all are equal and their number is a power of two."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + values[len(values) // 2 * 2 :]
    return values[0]


def horner(x, coefficients):
    """Polynomial with ``coefficients`` from the highest power down."""
    acc = Float32(coefficients[0])
    for c in coefficients[1:]:
        acc = cute.math.fma(acc, x, Float32(c))
    return acc


def exp2_approx(x):
    """2^x by the special-function unit: 2 ulp, down to subnormals; NaN kept, 1 at exactly 0."""
    return cute.math.exp2(x, approx=True)


def min_nan(a, b):
    """Minimum that keeps a NaN (``min.f32`` drops it)."""
    return cute.arch.fmin(a, b, nan=True)


def max_nan(a, b):
    """Maximum that keeps a NaN."""
    return cute.arch.fmax(a, b, nan=True)


def exp(x):
    """e^x to about 1 ulp over the whole range, with gradual underflow; exp(-inf) is 0, exp(inf) inf, exp(nan) nan."""
    bounded = max_nan(min_nan(x, Float32(128.0)), Float32(-128.0))  # keeps n an exact small integer
    n = cute.math.fma(bounded, Float32(LOG2_E), Float32(ROUND_MAGIC)) - ROUND_MAGIC
    r = cute.math.fma(n, Float32(-LN2_LO), cute.math.fma(n, Float32(-LN2_HI), bounded))
    p = cute.math.fma(horner(r, EXP_POLY) * r, r, r) + 1.0
    half = cute.math.fma(n, Float32(0.5), Float32(ROUND_MAGIC)) - ROUND_MAGIC  # 2^n in two steps: n reaches +-185
    return (p * exp2_approx(half)) * exp2_approx(n - half)


def log1p_unit(t):
    """log(1 + t) for t in [0, 1], to about 1.5 ulp relative at any size of t: 2 atanh(t / (2 + t))."""
    d = t + 2.0
    d_lo = t - (d - 2.0)
    rcp = cute.arch.rcp_approx(d)
    s = t * rcp
    s = cute.math.fma(cute.math.fma(-s, d_lo, cute.math.fma(-s, d, t)), rcp, s)
    s2 = s * s
    twice = s + s
    return cute.math.fma(twice, s2 * horner(s2, ATANH_POLY), twice)


def softplus(x, x_lo=None):
    """log(1 + e^x) at any x: +inf gives +inf, -inf gives 0, NaN stays. ``x_lo``: a small addend of x."""
    positive = cute.arch.fmax(x, Float32(0.0))
    t = exp(-cute.math.abs(x))
    value = positive + log1p_unit(t)
    if x_lo is not None:  # the derivative is 1 / (1 + e^-x)
        value = value + x_lo * (select(x > 0.0, Float32(1.0), t) * cute.arch.rcp_approx(1.0 + t))
    return value


def two_sum(a, b):
    """(s, e) with s = fl(a + b) and s + e = a + b exactly."""
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)
