"""The FFT of the long convolution: 16 points a thread in registers, twiddles from polynomials (device code).

A real sequence a[0..P) is a polynomial of degree below P, and its transform are its values at the roots of x^P = i.
Products modulo x^P - i hold a linear convolution of 2P terms: a + x^P b counts as a + i b, so the real part is what a
causal convolution wants. Nothing has to be untangled as where even and odd samples share one complex transform.

The roots are found by halving: x^M - w^2 = (x^(M/2) - w)(x^(M/2) + w), so one twiddle w serves a whole node. Node
`node` of N at one depth has w = exp(2 pi i (1/4 + reverse(node)) / 2N), and of two neighbouring nodes the second one's
twiddle is i times the first's. Values come out in bit-reversed order, and the inverse goes back up from there.
"""

import math

import cutlass
import cutlass.cute as cute

from cute_kernels.device.math import select

F32, I32 = cutlass.Float32, cutlass.Int32

POINTS = 16  # a thread's points: four levels of halving between two exchanges
LEVELS = 4
TWIDDLES = 8  # of one node: (1, 1, 2, 4) by level, without those that are i times another
FIRST = (0, 1, 2, 4)  # where a level's twiddles start

# sin(2 pi x) = 2 pi x + x^3 S(x^2), cos(2 pi x) = 1 + x^2 C(x^2), to 1e-8 on [0, 1/8]
TWO_PI = (6.2831854820251465, -1.7484556000744883e-07)
SINE = (-41.34170216147419, 81.60520596257469, -76.69799906867927, 41.478281494191236)
COSINE = (-19.73920871643805, 64.93933692650859, -85.44506043993178, 59.29507816327074)


def sincos_of_turns(x):
    """(sin, cos) of 2 pi x for x in [0, 1/8], to 0.6 ulp."""
    z = x * x
    s, c = F32(SINE[3]), F32(COSINE[3])
    for i in (2, 1, 0):
        s = cute.math.fma(s, z, F32(SINE[i]))
        c = cute.math.fma(c, z, F32(COSINE[i]))
    s = cute.math.fma(x, F32(TWO_PI[0]), x * cute.math.fma(s, z, F32(TWO_PI[1])))
    return s, cute.math.fma(c, z, F32(1.0))


@cute.jit
def node_twiddles(
    w: cute.Tensor,  # (2, TWIDDLES): real and imaginary parts, written from `first` level on
    node: I32,
    nodes: cutlass.Constexpr,  # N, a power of two from 2 on
    first: cutlass.Constexpr,
):
    # All angles are multiples of 1/(64 N) turns with exact numerators.
    reverse = cute.arch.brev(node) >> (33 - nodes.bit_length())
    x3 = (4 * (reverse & (nodes - 1)) + 1).to(F32) * F32(1.0 / (64 * nodes))  # below 1/16
    if cutlass.const_expr(first <= 0):
        y = x3 * F32(8.0) - F32(0.25)  # below 1/4 in size
        far = cute.arch.fmax(y, -y)
        near = cutlass.min(far, F32(0.25) - far)
        s, c = sincos_of_turns(near)
        swap = far > F32(0.125)
        sine = select(swap, c, s)
        w[0, 0], w[1, 0] = select(y > F32(0.0), -sine, sine), select(swap, s, c)
    if cutlass.const_expr(first <= 1):
        x = x3 * F32(4.0)
        s, c = sincos_of_turns(cutlass.min(x, F32(0.25) - x))
        swap = x > F32(0.125)
        w[0, 1], w[1, 1] = select(swap, s, c), select(swap, c, s)
    if cutlass.const_expr(first <= 2):
        x = x3 * F32(2.0)
        w[1, 2], w[0, 2] = sincos_of_turns(x)
        w[0, 3], w[1, 3] = sincos_of_turns(F32(0.125) - x)  # 1/8 further
    w[1, 4], w[0, 4] = sincos_of_turns(x3)
    w[0, 5], w[1, 5] = sincos_of_turns(F32(0.125) - x3)  # 1/8, 1/16, 3/16 further
    w[1, 6], w[0, 6] = sincos_of_turns(F32(0.0625) + x3)
    w[0, 7], w[1, 7] = sincos_of_turns(F32(0.0625) - x3)


def root_twiddles():
    """The twiddles of node 0 of 1, as numbers."""
    angles = [1 / 8, 1 / 16, *(1 / 32 + c for c in (0, 1 / 8)), *(1 / 64 + c for c in (0, 1 / 8, 1 / 16, 3 / 16))]
    return [(F32(math.cos(2 * math.pi * a)), F32(math.sin(2 * math.pi * a))) for a in angles]


def twiddle(w, level, q):
    """Of node q at a level below this thread's node; w: None for the root."""
    i = FIRST[level] + q // 2
    c, s = root_twiddles()[i] if w is None else (w[0, i], w[1, i])
    return (c, s) if q % 2 == 0 else (-s, c)


def pairs(level):
    """(node, lower point, upper point) of every butterfly at a level."""
    half = POINTS >> (level + 1)
    return [(q, 2 * half * q + m, 2 * half * q + half + m) for q in range(1 << level) for m in range(half)]


def forward(x: cute.Tensor, w, levels: range) -> None:  # x: (2, POINTS)
    """Those levels downwards: (a, b) -> (a + w b, a - w b). With w None x is real, its imaginary parts unset."""
    fma = cute.math.fma
    for level in levels:
        for q, i, j in pairs(level):
            c, s = twiddle(w, level, q)
            ar, br = x[0, i], x[0, j]
            if w is None and level == 0:
                x[0, i], x[0, j] = fma(c, br, ar), fma(-c, br, ar)
                x[1, i], x[1, j] = s * br, -s * br
            else:
                ai, bi = x[1, i], x[1, j]
                x[0, i], x[1, i] = fma(-s, bi, fma(c, br, ar)), fma(s, br, fma(c, bi, ai))
                x[0, j], x[1, j] = fma(F32(2.0), ar, -x[0, i]), fma(F32(2.0), ai, -x[1, i])


def inverse(x: cute.Tensor, w, levels: range) -> None:  # x: (2, POINTS)
    """Back, without the factor 1/2 of each level: (a, b) -> (a + b, (a - b) / w). With w None only real parts."""
    fma = cute.math.fma
    for level in reversed(levels):
        for q, i, j in pairs(level):
            c, s = twiddle(w, level, q)
            dr, di = x[0, i] - x[0, j], x[1, i] - x[1, j]
            x[0, i], x[0, j] = x[0, i] + x[0, j], fma(s, di, c * dr)
            if w is not None or level > 0:
                x[1, i], x[1, j] = x[1, i] + x[1, j], fma(-s, dr, c * di)


def product(x: cute.Tensor, k: cute.Tensor) -> None:  # (2, POINTS) both
    """x k, point by point, in x's place."""
    fma = cute.math.fma
    for i in range(POINTS):
        xr, xi = x[0, i], x[1, i]
        x[0, i], x[1, i] = fma(-xi, k[1, i], xr * k[0, i]), fma(xi, k[0, i], xr * k[1, i])
