"""A predicted time from counts: a fixed part, and the slowest resource's time over one efficiency.

    t = t0 + max over resources (work / peak) / efficiency

t0 and the efficiency are fitted on measured times and counts of one GPU, and carried over to another with its own
counts and peaks. That is a guess in two places: that the fixed part stays, and that the kernels come as close to the
other GPU's limits. The error on the GPU of the fit is stated, for every case predicted from the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy.optimize import least_squares

from perf.statistics import geomean


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What a GPU can do in a second, by its data sheet. `mma`: 16-bit operands; `special`: 16 an SM and cycle."""

    name: str
    sms: int
    clock: float
    dram_bytes: float
    mma: float

    def seconds(self, work: Mapping[str, float]) -> dict[str, float]:
        """The least time each resource needs."""
        cycles = self.sms * self.clock
        peaks = {"dram_bytes": self.dram_bytes, "mma": self.mma, "instructions": 4 * cycles, "special": 16 * cycles}
        return {name: work[name] / peak for name, peak in peaks.items()}


H200 = Peaks("NVIDIA H200", 132, 1.98e9, 4.8e12, 989e12)
B200 = Peaks("NVIDIA B200", 148, 1.85e9, 8.0e12, 2250e12)


@dataclasses.dataclass(frozen=True)
class Model:
    fixed_us: float
    efficiency: float

    def us(self, peaks: Peaks, work: Mapping[str, float]) -> float:
        return self.fixed_us + 1e6 * max(peaks.seconds(work).values()) / self.efficiency


def fit(peaks: Peaks, work: list[Mapping[str, float]], us: list[float]) -> Model:
    """The model with the least relative errors. ValueError: fewer than three cases."""
    if len(us) < 3:
        raise ValueError(f"a model of two numbers needs three cases or more, not {len(us)}")
    least = np.array([1e6 * max(peaks.seconds(w).values()) for w in work])
    measured = np.array(us)

    def errors(x):
        return np.log((x[0] + least / x[1]) / measured)

    x = least_squares(errors, [0.5 * measured.min(), 0.7], bounds=([0.0, 1e-3], [np.inf, 1.0])).x
    return Model(float(x[0]), float(x[1]))


def errors_left_out(peaks: Peaks, work: list[Mapping[str, float]], us: list[float]) -> list[float]:
    """Relative error of each case, predicted by a model of the others."""
    found = []
    for n in range(len(us)):
        model = fit(peaks, work[:n] + work[n + 1 :], us[:n] + us[n + 1 :])
        found.append(model.us(peaks, work[n]) / us[n] - 1)
    return found


def typical(errors: list[float]) -> float:
    """Geometric mean of the factors by which predictions are off, less one."""
    return geomean(1 + abs(e) for e in errors) - 1
