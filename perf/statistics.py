"""Medians, spreads, and whether a number moved."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Sample:
    """Repeated measurements of one quantity: the median, and the quartiles as its spread."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
        return cls(median, low, high, len(values))

    @property
    def spread(self) -> float:
        """Distance between the quartiles."""
        return self.high - self.low


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A quotient of two samples; their relative spreads add up in squares."""

    value: float
    spread: float

    @classmethod
    def of(cls, above: Sample, below: Sample) -> Ratio:
        value = above.median / below.median
        return cls(value, value * math.hypot(above.spread / above.median, below.spread / below.median))


def moved(old: Ratio | Sample, new: Ratio | Sample) -> str:
    """ "faster" or "slower" where the centres lie further apart than the larger of the two spreads, else "same"."""
    before, after = (x.value if isinstance(x, Ratio) else x.median for x in (old, new))
    if abs(after - before) <= max(old.spread, new.spread):
        return "same"
    return "slower" if after > before else "faster"


def geomean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)
