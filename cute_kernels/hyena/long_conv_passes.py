"""The passes of an FFT whose points change hands through shared memory (device code)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.hyena import long_conv_fft as fft
from cute_kernels.hyena.long_conv_fft import POINTS


class Passes:
    """A transform of `points` as passes over groups of 16 points.

    Pass n handles nodes of `sizes[n]` points, 16 of each `sizes[n] / 16` apart; the last one several smaller nodes.
    Shared memory has a gap of one point after every 16, which makes each access free of bank conflicts.
    """

    def __init__(self, points: int):
        self.sizes = [points]
        while self.sizes[-1] > POINTS:
            self.sizes.append(self.sizes[-1] // POINTS)
        self.slots = points + points // POINTS

    def levels(self, n: int) -> range:
        """Of pass n."""
        return range(fft.LEVELS - min(self.sizes[n], POINTS).bit_length() + 1, fft.LEVELS)

    def slot(self, n: int, j: int) -> int:
        """Where point j of a group's 16 in pass n is in shared memory, counted from the first."""
        distance = j * max(self.sizes[n] // POINTS, 1)
        return distance + distance // POINTS

    @cute.jit
    def first_slot(self, points, group, n: cutlass.Constexpr):
        """Shared memory from a group's first point of pass n on."""
        stride = max(self.sizes[n] // POINTS, 1)
        at = (group // stride) * (stride * POINTS) + group % stride
        return cute.domain_offset((0, at + at // POINTS), points)

    @cute.jit
    def move(self, x, points, group, n: cutlass.Constexpr, to_shared: cutlass.Constexpr):
        """A group's points of pass n, to or from shared memory."""
        mine = self.first_slot(points, group, n)
        for j in cutlass.range_constexpr(POINTS):
            if cutlass.const_expr(to_shared):
                cute.autovec_copy(x[None, j], mine[None, self.slot(n, j)])
            else:
                cute.autovec_copy(mine[None, self.slot(n, j)], x[None, j])
