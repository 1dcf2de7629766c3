"""Run as rows of text, and as tables for a terminal."""

from __future__ import annotations

from rich.table import Table

from perf.runs import Run
from perf.statistics import geomean

RIVALS = ("fill", "copy", "launch", "torch", "compile", "cufft")
ERRORS = {
    "bar": "error / bar",
    "l2": "relative L2",
    "torch_l2": "PyTorch's L2",
    "max": "largest",
    "torch_max": "PyTorch's largest",
    "tolerance": "largest / official tolerance",
}


def time_rows(run: Run) -> tuple[list[str], list[list[str]]]:
    """Header and rows: bytes, times, quotients, host times."""
    rivals = [name for name in RIVALS if any(name in row.times for row in run.rows)]
    compared = [name for name in rivals if name != "launch"]
    header = ["case", "MB", "us", "spread", *(f"{name} us" for name in rivals), *(f"/ {name}" for name in compared)]
    header += ["TB/s", "host us"]
    rows = []
    for row in run.rows:
        t = row.times["operator"]
        cells = [row.name, f"{(row.read + row.written) / 1e6:.1f}", f"{t.median:.2f}", f"{t.low:.1f}-{t.high:.1f}"]
        cells += [f"{row.times[n].median:.2f}" if n in row.times else "failed" for n in rivals]
        cells += [f"{row.over(n).value:.3f}" if row.over(n) else "" for n in compared]
        cells += [f"{(row.read + row.written) / t.median / 1e6:.2f}", f"{row.host.get('operator', float('nan')):.1f}"]
        rows.append(cells)
    return header, rows


def error_rows(run: Run) -> tuple[list[str], list[list[str]]]:
    keys = [key for key in ERRORS if any(key in row.errors for row in run.rows)]
    header = ["case", *(ERRORS[key] for key in keys)]
    return header, [[row.name, *(f"{row.errors.get(key, float('nan')):.3g}" for key in keys)] for row in run.rows]


def times(run: Run) -> Table:
    return table(run.title(), *time_rows(run))


def failures(run: Run) -> list[str]:
    """Rivals that did not run, and why."""
    return [f"{row.name}, {name}: {reason}" for row in run.rows for name, reason in row.failed.items()]


def errors(run: Run) -> Table:
    return table(f"Errors of {run.title()}", *error_rows(run))


def summary(run: Run) -> str:
    """Geometric means over the cases."""
    text = [f"Geometric means of {len(run.rows)}: {geomean(r.times['operator'].median for r in run.rows):.2f} us"]
    for name in RIVALS:
        quotients = [row.over(name).value for row in run.rows if row.over(name)]
        if quotients and name != "launch":
            mean = geomean(row.times[name].median for row in run.rows if name in row.times)
            text.append(f"{geomean(quotients):.3f} x {name} ({mean:.2f} us)")
    empty = [row.times["empty"].median for row in run.rows if "empty" in row.times]
    if empty:
        text.append(f"an empty pair of events reads {sorted(empty)[len(empty) // 2]:.2f} us")
    clocks = [row.sm_mhz for row in run.rows if row.sm_mhz]
    if clocks:
        text.append(f"SM clock {min(clocks)} to {max(clocks)} MHz")
    return "; ".join(text)


def table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    made = Table(title=title)
    for n, name in enumerate(header):
        made.add_column(name, justify="right" if n else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
