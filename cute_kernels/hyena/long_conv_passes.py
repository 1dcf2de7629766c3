"""The passes of an FFT whose points change hands through shared memory (device code)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.hyena import long_conv_fft as fft
from cute_kernels.hyena.long_conv_fft import POINTS

F32 = cutlass.Float32


class Passes:
    """A transform of `points`, 2^n or 3 * 2^n, as passes over groups of a thread's points.

    Pass n handles nodes of `sizes[n]` points, `counts[n]` of each `sizes[n] / counts[n]` apart; the last one several
    smaller nodes. A first pass of 12 points finds the three nodes of a third, and halves these twice.

    Shared memory has a gap of one point after every `count`, which makes each access free of bank conflicts (nearly,
    with groups of 8).
    """

    def __init__(self, points: int, count: int = POINTS):
        self.count = count
        self.thirds = points % 3 == 0
        self.sizes, self.counts = [points], [fft.THIRDS_POINTS if self.thirds else count]
        while self.sizes[-1] > self.counts[-1]:
            self.sizes.append(self.sizes[-1] // self.counts[-1])
            self.counts.append(count)
        self.last = len(self.sizes) - 1
        self.slots = points + points // count

    def levels(self, n: int) -> range:
        """Of pass n, but for a first one of 12 points."""
        depth = self.count.bit_length() - 1
        return range(depth - min(self.sizes[n], self.count).bit_length() + 1, depth)

    def slot(self, n: int, j: int) -> int:
        """Where point j of a group in pass n is in shared memory, counted from the first."""
        distance = j * max(self.sizes[n] // self.counts[n], 1)
        return distance + distance // self.count

    @cute.jit
    def first_slot(self, points, group, n: cutlass.Constexpr):
        """Shared memory from a group's first point of pass n on."""
        stride = max(self.sizes[n] // self.counts[n], 1)
        at = (group // stride) * (stride * self.counts[n]) + group % stride
        return cute.domain_offset((0, at + at // self.count), points)

    @cute.jit
    def move(self, x, points, group, n: cutlass.Constexpr, to_shared: cutlass.Constexpr):
        """A group's points of pass n, to or from shared memory."""
        mine = self.first_slot(points, group, n)
        for j in cutlass.range_constexpr(self.counts[n]):
            if cutlass.const_expr(to_shared):
                cute.autovec_copy(x[None, j], mine[None, self.slot(n, j)])
            else:
                cute.autovec_copy(mine[None, self.slot(n, j)], x[None, j])


class TeamPasses(Passes):
    """A transform by a team of threads, each with one group of a pass."""

    def sync(self, exchange: int) -> None:
        """Between the writes and reads of an exchange."""
        raise NotImplementedError

    def crosses_warps(self, exchange: int) -> bool:
        """Whether a node of that pass has more points than a warp; a group of three's neighbours are elsewhere."""
        return self.sizes[exchange] > 32 * self.count or (self.thirds and exchange == 0)

    @cute.jit
    def make_twiddles(self, unit):
        """Of each pass, for a thread's group from the second pass on."""
        twiddles = [None]
        for n in cutlass.range_constexpr(1, len(self.sizes)):
            w = cute.make_rmem_tensor((2, fft.twiddle_count(self.levels(n))), F32)
            node = unit // max(self.sizes[n] // self.count, 1)
            fft.node_twiddles(w, node, self.sizes[0] // max(self.sizes[n], self.count), self.levels(n))
            twiddles.append(w)
        return twiddles

    @cute.jit
    def enter(self, x, points, group):
        """The first pass, of real values, and its points to shared memory."""
        if cutlass.const_expr(self.thirds):
            fft.forward_thirds(x)
        else:
            fft.forward(x, None, self.levels(0))
        if cutlass.const_expr(self.last > 0):
            self.move(x, points, group, 0, True)
            self.sync(0)

    @cute.jit
    def leave(self, x, points, group):
        """The last pass back, to real values."""
        if cutlass.const_expr(self.last > 0):
            self.move(x, points, group, 0, False)
        if cutlass.const_expr(self.thirds):
            fft.inverse_thirds(x)
        else:
            fft.inverse_root(x)

    @cute.jit
    def descend(self, x, twiddles, points, unit):
        """The passes behind the first."""
        for n in cutlass.range_constexpr(1, len(self.sizes)):
            if cutlass.const_expr(n > 1):
                self.move(x, points, unit, n - 1, True)
                self.sync(n - 1)
            self.move(x, points, unit, n, False)
            fft.forward(x, self.in_registers(twiddles[n], n), self.levels(n))

    @cute.jit
    def ascend(self, x, twiddles, points, unit):
        """Back, to the points of the first pass in shared memory."""
        for m in cutlass.range_constexpr(self.last):
            n = self.last - m
            if cutlass.const_expr(m > 0):
                self.sync(n)
                self.move(x, points, unit, n, False)
            fft.inverse(x, self.in_registers(twiddles[n], n), self.levels(n))
            self.move(x, points, unit, n, True)

    def in_registers(self, w, n: int):
        """The twiddles of pass n."""
        return w
