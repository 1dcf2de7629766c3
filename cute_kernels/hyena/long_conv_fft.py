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
THIRDS_POINTS = 12  # of a first pass that divides by three: 3 times 4
FIRST = (0, 1, 2, 4)  # where a level's twiddles start: there are (1, 1, 2, 4), and others are i times these

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


def node_twiddles(
    w: cute.Tensor,  # (2, n), n as twiddle_count(levels): real and imaginary parts, written for `levels`
    node: I32,
    nodes: int,  # of that size, from 2 on: N, or 3 N under a root of three
    levels: range,
) -> None:
    # Angles are (root + reverse(node)) / 2N turns, halved for each further level; root 1/4, or 1/12, 5/12, 9/12.
    thirds = 3 if nodes % 3 == 0 else 1
    halvings = nodes // thirds
    reverse = cute.arch.brev(node) >> (33 - halvings.bit_length())
    numerator = 4 * thirds * (reverse & (halvings - 1)) + 1
    if thirds == 3:
        numerator += 4 * (node // halvings)
    x3 = numerator.to(F32) * F32(1.0 / (64 * nodes))  # below 1/16; exact but for thirds
    if 0 in levels:
        y = x3 * F32(8.0) - F32(0.25)  # below 1/4 in size
        far = cute.arch.fmax(y, -y)
        near = cutlass.min(far, F32(0.25) - far)
        s, c = sincos_of_turns(near)
        swap = far > F32(0.125)
        sine = select(swap, c, s)
        w[0, 0], w[1, 0] = select(y > F32(0.0), -sine, sine), select(swap, s, c)
    if 1 in levels:
        x = x3 * F32(4.0)
        s, c = sincos_of_turns(cutlass.min(x, F32(0.25) - x))
        swap = x > F32(0.125)
        w[0, 1], w[1, 1] = select(swap, s, c), select(swap, c, s)
    if 2 in levels:
        x = x3 * F32(2.0)
        w[1, 2], w[0, 2] = sincos_of_turns(x)
        w[0, 3], w[1, 3] = sincos_of_turns(F32(0.125) - x)  # 1/8 further
    if 3 in levels:
        w[1, 4], w[0, 4] = sincos_of_turns(x3)
        w[0, 5], w[1, 5] = sincos_of_turns(F32(0.125) - x3)  # 1/8, 1/16, 3/16 further
        w[1, 6], w[0, 6] = sincos_of_turns(F32(0.0625) + x3)
        w[0, 7], w[1, 7] = sincos_of_turns(F32(0.0625) - x3)


def twiddle_count(levels: range) -> int:
    """Of a node, up to the last of these levels."""
    return FIRST[levels.stop - 1] + max(1, (1 << levels.stop) // 4)


def root_twiddles():
    """The twiddles of node 0 of 1, as numbers."""
    angles = [1 / 8, 1 / 16, *(1 / 32 + c for c in (0, 1 / 8)), *(1 / 64 + c for c in (0, 1 / 8, 1 / 16, 3 / 16))]
    return [(F32(math.cos(2 * math.pi * a)), F32(math.sin(2 * math.pi * a))) for a in angles]


def twiddle(w, level, q):
    """Of node q at a level below this thread's node; w: None for the root."""
    i = FIRST[level] + q // 2
    c, s = root_twiddles()[i] if w is None else (w[0, i], w[1, i])
    return (c, s) if q % 2 == 0 else (-s, c)


def pairs(level, count):
    """(node, lower point, upper point) of every butterfly of `count` points at a level."""
    half = count >> (level + 1)
    return [(q, 2 * half * q + m, 2 * half * q + half + m) for q in range(1 << level) for m in range(half)]


def down(x: cute.Tensor, i: int, j: int, w) -> None:
    """(a, b) -> (a + w b, a - w b) for two points of x."""
    fma = cute.math.fma
    (c, s), ar, ai, br, bi = w, x[0, i], x[1, i], x[0, j], x[1, j]
    x[0, i], x[1, i] = fma(-s, bi, fma(c, br, ar)), fma(s, br, fma(c, bi, ai))
    x[0, j], x[1, j] = fma(F32(2.0), ar, -x[0, i]), fma(F32(2.0), ai, -x[1, i])


def up(x: cute.Tensor, i: int, j: int, w) -> None:
    """Back, without the factor 1/2: (a, b) -> (a + b, (a - b) / w)."""
    fma = cute.math.fma
    (c, s), dr, di = w, x[0, i] - x[0, j], x[1, i] - x[1, j]
    x[0, i], x[1, i] = x[0, i] + x[0, j], x[1, i] + x[1, j]
    x[0, j], x[1, j] = fma(s, di, c * dr), fma(-s, dr, c * di)


def forward(x: cute.Tensor, w, levels: range) -> None:  # x: (2, n)
    """Those levels downwards. With w None x is real, its imaginary parts unset."""
    for level in levels:
        for q, i, j in pairs(level, cute.size(x, mode=[1])):
            c, s = twiddle(w, level, q)
            if w is None and level == 0:
                a, b = x[0, i], x[0, j]
                x[0, i], x[0, j] = cute.math.fma(c, b, a), cute.math.fma(-c, b, a)
                x[1, i], x[1, j] = s * b, -s * b
            else:
                down(x, i, j, (c, s))


def inverse(x: cute.Tensor, w, levels: range) -> None:  # x: (2, n)
    """Back, without the factor 1/2 of each level."""
    for level in reversed(levels):
        for q, i, j in pairs(level, cute.size(x, mode=[1])):
            up(x, i, j, twiddle(w, level, q))


def inverse_root(x: cute.Tensor) -> None:  # (2, n)
    """Back from the nodes below the root to real values n times as large: a discrete Fourier transform by constants.

    Value m is Re(exp(-2 pi i m / 4n) sum over v of x[v] exp(-2 pi i reverse(v) m / n)).
    """
    fma, n = cute.math.fma, cute.size(x, mode=[1])
    power = lambda m: (F32(math.cos(2 * math.pi * m / (4 * n))), F32(-math.sin(2 * math.pi * m / (4 * n))))  # noqa: E731
    half = 1
    while 2 * half < n:
        for i in range(0, n, 2 * half):
            for m in range(half):
                combine(x, i + m, i + m + half, 4 * m * n // (2 * half), power)
        half *= 2
    for m in range(half):
        ar, ai, br, bi = x[0, m], x[1, m], x[0, m + half], x[1, m + half]
        if m == 0:
            x[0, 0] = ar + br
        else:
            (c, s), (cb, sb) = power(m), power(5 * m)
            x[0, m] = fma(-sb, bi, fma(cb, br, fma(-s, ai, c * ar)))
        (c, s), (cb, sb) = power(m + half), power(5 * m + half)
        x[0, m + half] = fma(sb, bi, fma(-cb, br, fma(-s, ai, c * ar)))


def combine(x: cute.Tensor, i: int, j: int, m: int, power) -> None:
    """(a, b) -> (a + w b, a - w b), w the m-th power of a root: 1, -i or another."""
    n = 4 * cute.size(x, mode=[1])
    ar, ai, br, bi = x[0, i], x[1, i], x[0, j], x[1, j]
    if m == 0:
        x[0, i], x[1, i], x[0, j], x[1, j] = ar + br, ai + bi, ar - br, ai - bi
    elif 4 * m == n:
        x[0, i], x[1, i], x[0, j], x[1, j] = ar + bi, ai - br, ar - bi, ai + br
    else:
        down(x, i, j, power(m))


def thirds_pairs(level: int):
    """(lower point, upper point, twiddle) of each butterfly of two levels below a root of three, 12 points."""
    half, found = 2 >> level, []
    for third in range(3):
        angle = 2 * math.pi * (1 + 4 * third) / 12 / (2 << level)
        c, s = F32(math.cos(angle)), F32(math.sin(angle))
        for q in range(1 << level):
            first = 4 * third + 2 * half * q
            found += [(first + m, first + half + m, (-s, c) if q else (c, s)) for m in range(half)]
    return found


def forward_thirds(x: cute.Tensor) -> None:  # (2, 12)
    """From real values modulo x^12 - i to the three cube roots r of i, x^4 - r, then two levels of halving."""
    fma, high, half = cute.math.fma, F32(math.sqrt(0.75)), F32(0.5)
    for j in range(4):
        a, b, c = x[0, j], x[0, 4 + j], x[0, 8 + j]
        real, imaginary = fma(half, c, a), half * b
        x[0, j], x[1, j] = fma(high, b, real), fma(high, c, imaginary)
        x[0, 4 + j], x[1, 4 + j] = fma(-high, b, real), fma(-high, c, imaginary)
        x[0, 8 + j], x[1, 8 + j] = a - c, -b
    for level in range(2):
        for i, j, w in thirds_pairs(level):
            down(x, i, j, w)


def inverse_thirds(x: cute.Tensor) -> None:  # (2, 12)
    """Back, to real values 12 times as large."""
    fma, high, half = cute.math.fma, F32(math.sqrt(0.75)), F32(0.5)
    for level in reversed(range(2)):
        for i, j, w in thirds_pairs(level):
            up(x, i, j, w)
    for j in range(4):
        real, difference = x[0, j] + x[0, 4 + j], x[0, j] - x[0, 4 + j]
        imaginary, turned = x[1, j] + x[1, 4 + j], x[1, j] - x[1, 4 + j]
        last, low = x[0, 8 + j], x[1, 8 + j]
        x[0, j] = real + last
        x[0, 4 + j] = fma(high, difference, fma(half, imaginary, -low))
        x[0, 8 + j] = fma(high, turned, fma(half, real, -last))


def product(x: cute.Tensor, k: cute.Tensor) -> None:  # (2, n) both
    """x k, point by point, in x's place."""
    fma = cute.math.fma
    for i in range(cute.size(x, mode=[1])):
        xr, xi = x[0, i], x[1, i]
        x[0, i], x[1, i] = fma(-xi, k[1, i], xr * k[0, i]), fma(xi, k[0, i], xr * k[1, i])
