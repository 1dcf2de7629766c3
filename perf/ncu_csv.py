"""Nsight Compute's raw CSV (`--csv --page raw --print-units base`) as one record for each kernel of each case."""

from __future__ import annotations

import csv
import dataclasses
import io
import re

MARKER = "spin_kernel"  # of torch.cuda._sleep: separates the cases
METRICS = {  # field: metric
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_write_sectors": "lts__t_sectors_op_write.sum",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "shared": "launch__shared_mem_per_block",
    "threads": "launch__block_size",
    "blocks": "launch__grid_size",
    "occupancy_limit_percent": "sm__maximum_warps_per_active_cycle_pct",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
DURATION = "gpu__time_duration.sum"  # ns
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


@dataclasses.dataclass(frozen=True)
class Profile:
    """One kernel of one case. Numbers that the profiler did not have are NaN."""

    case: str
    kernel: str
    us: float
    dram_read: float
    dram_written: float
    l2_write_sectors: float  # of 32 bytes
    dram_percent: float
    l2_percent: float
    l2_hit_percent: float
    issue_percent: float
    tensor_percent: float
    instructions: float
    registers: float
    shared: float
    threads: float
    blocks: float
    occupancy_limit_percent: float
    occupancy_percent: float
    stalls: dict[str, float]  # shares of a warp's time, by cause; "selected" is the time it issues

    def worst_stalls(self, n: int) -> dict[str, float]:
        causes = {cause: share for cause, share in self.stalls.items() if cause not in ("selected", "not_selected")}
        return dict(sorted(causes.items(), key=lambda item: -item[1])[:n])


def profiles(text: str, cases: list[str]) -> list[Profile]:
    """The kernels of the CSV, in order. The n-th marker begins the n-th case.

    ValueError: it is no such CSV, or its markers are not as many as the cases.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"Nsight Compute wrote no table, but: {text.strip()[:500]}")
    header, _units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    found, n = [], -1
    for row in rows:
        values = dict(zip(header, row, strict=True))
        if MARKER in values["Kernel Name"]:
            n += 1
        elif 0 <= n < len(cases):
            found.append(_profile(cases[n], values))
    if n + 1 != len(cases):
        raise ValueError(f"the profile holds {n + 1} marked cases, but must hold {len(cases)}")
    return found


def _profile(case: str, values: dict[str, str]) -> Profile:
    stalls = {match[1]: _number(v) for name, v in values.items() if (match := STALL.fullmatch(name))}
    total = sum(stalls.values()) or 1.0
    return Profile(
        case,
        values["Kernel Name"],
        _number(values.get(DURATION, "")) / 1000,
        **{field: _number(values.get(metric, "")) for field, metric in METRICS.items()},
        stalls={cause: v / total for cause, v in stalls.items() if v},
    )


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")
