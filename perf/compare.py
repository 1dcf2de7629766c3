"""Two runs of the same cases: what moved beyond the spread."""

from __future__ import annotations

from rich.table import Table

from perf.runs import Row, Run
from perf.statistics import Ratio, Sample, moved
from perf.tables import table

MARK = {"faster": "[green]faster[/]", "slower": "[red]slower[/]", "same": "same"}


def rows(old: Run, new: Run) -> list[tuple[str, str, float, float, str]]:
    """(case, what is compared, before, after, verdict) of every case of both runs.

    Machines and days differ, so it is the time as a multiple of the floor that counts where both runs have the floor.
    ValueError: the runs are of different operators.
    """
    if old.op != new.op:
        raise ValueError(f"the earlier run measured {old.op}, but must have measured {new.op}")
    earlier = {row.name: row for row in old.rows if "operator" in row.times}
    found = []
    for row in new.rows:
        if row.name in earlier:
            what, before, after = _quantities(earlier[row.name], row)
            values = [x.value if isinstance(x, Ratio) else x.median for x in (before, after)]
            found.append((row.name, what, *values, moved(before, after)))
    return found


def _quantities(old: Row, new: Row) -> tuple[str, Ratio | Sample, Ratio | Sample]:
    if new.floor and new.floor == old.floor:
        return f"time / {new.floor}", old.over(old.floor), new.over(new.floor)
    return "us", old.times["operator"], new.times["operator"]


def table_of(old: Run, new: Run) -> Table:
    compared = rows(old, new)
    cells = [
        [name, what, f"{a:.3f}", f"{b:.3f}", f"{100 * (b / a - 1):+.1f}%", MARK[v]] for name, what, a, b, v in compared
    ]
    beyond = sum(verdict != "same" for *_, verdict in compared)
    since = f"{old.machine['date']} ({old.machine.get('revision')})"
    title = f"{beyond} of {len(compared)} cases moved beyond the spread since {since}"
    return table(title, ["case", "", "before", "after", "change", ""], cells)
