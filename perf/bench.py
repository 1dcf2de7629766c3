"""`python -m perf bench`: an operator's sizes against their floor and its rivals, in one run."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from perf import cases as cases_
from perf import compare, plot, rivals, runs, tables
from perf.runs import Row, Run
from perf.statistics import Sample

console = Console()
Operator = enum.Enum("Operator", {name: name for name in cases_.OPERATORS}, type=str)
Set = enum.Enum("Set", {name: name for name in cases_.SETS}, type=str)
Precision = enum.Enum("Precision", {name: name for name in ("highest", "high", "medium")}, type=str)
GLayout = enum.Enum("GLayout", {name: name for name in ("per_head", "per_group")}, type=str)
ROTATION = 3  # input sets that calls take turns on
TIMING = (
    "CUDA events around the whole call (an empty pair is in every number, and measured as `empty`), 256 MB written "
    "before each call, calls interleaved, inputs rotated; medians and quartiles"
)


def bench(
    op: Annotated[Operator, typer.Option(help="The operator.")],
    set_: Annotated[Set, typer.Option("--set", help="The sizes.")] = Set.official,
    against: Annotated[str, typer.Option(help=f"Rivals, by comma: {', '.join(rivals.NAMES)}.")] = "",
    precision: Annotated[Precision, typer.Option(help="Of the Hyena operators and their rivals.")] = Precision.high,
    g_layout: Annotated[GLayout, typer.Option(help="Of mamba_segsum.")] = GLayout.per_head,
    only: Annotated[str, typer.Option(help="Sizes by name and comma, in place of the whole set.")] = "",
    repeats: Annotated[int, typer.Option(min=30, help="Rounds.")] = 40,
    check: Annotated[bool, typer.Option(help="Also judge every output.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON; default: a name in perf/results.")] = None,
    compare_with: Annotated[Path | None, typer.Option("--compare", help="An earlier run's JSON.")] = None,
    revision: Annotated[str | None, typer.Option(help="Where git can't tell; also $PERF_REVISION.")] = None,
) -> None:
    """Times an operator with a cold L2 against floor and rivals, to JSON and a plot. Ctrl-C keeps what is done."""
    names = [name for name in against.split(",") if name]
    try:
        rivals.check(names, op.value)
        options = operator_options(op.value, precision.value, g_layout.value)
        found = cases_.cases(op.value, set_.value, options)
        chosen = choose(found, only)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    device = gpu()
    before = Run.load(compare_with) if compare_with else None
    run = Run(op.value, set_.value + part(found, chosen), options, runs.machine(device, revision), TIMING)
    out = out or runs.default_path(op.value, run.set, options, run.machine)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(op.value, total=len(chosen))
            for case in chosen:
                progress.update(task, description=f"{op.value} {case.name}")
                run.rows.append(measure(case, names, options, repeats, check, device))
                run.save(out)
                progress.advance(task)
    except KeyboardInterrupt:
        console.print("Stopped; what was measured is kept.")
    if not run.rows:
        raise typer.Exit(1)
    console.print(tables.times(run))
    if check:
        console.print(tables.errors(run))
    for line in tables.failures(run):
        console.print(f"Did not run: {line}", highlight=False, markup=False)
    console.print(tables.summary(run), highlight=False)
    console.print(f"Written: {out}, {plot.times(run, out.with_suffix('.png'))}", highlight=False, soft_wrap=True)
    if before:
        console.print(compare.table_of(before, run))


def gpu():
    """The current CUDA device. BadParameter where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("this needs an NVIDIA GPU; `python -m perf report` shows stored results without one")
    return torch.device("cuda", torch.cuda.current_device())


def operator_options(op: str, precision: str, g_layout: str) -> dict[str, str]:
    """Those options that the operator has."""
    if op == "mamba_segsum":
        return {"g_layout": g_layout}
    return {} if op == "hyena_filter" else {"precision": precision}


def choose(found: list[cases_.Case], only: str) -> list[cases_.Case]:
    """The cases that `only` names, by comma; all where it is empty. ValueError: no such case."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    by_name = {case.name: case for case in found}
    for name in names:
        if name not in by_name:
            raise ValueError(f"only names {name!r}, but must name some of {', '.join(by_name)}")
    return [by_name[name] for name in names] or found


def part(found: list[cases_.Case], chosen: list[cases_.Case]) -> str:
    """What a name says of the chosen cases, so that a part takes the place of no whole set; of all: nothing."""
    names = [case.name for case in chosen]
    return "" if {*names} == {case.name for case in found} else "".join(f"-{name}" for name in names)


def measure(case: cases_.Case, names: list[str], options: dict, repeats: int, check: bool, device) -> Row:
    """One case: the operator, its rivals and the fixed costs, interleaved; host times; errors."""
    import torch

    from perf import calls, errors
    from perf.timing import cold_times, host_time, rotating

    torch.backends.cuda.matmul.allow_tf32 = options.get("precision", "highest") != "highest"
    row = Row(case.name, case.sizes, case.read, case.written, case.mma, case.fp32)
    inputs = [calls.arguments(case, seed, device) for seed in range(ROTATION)]
    one = torch.empty(1, device=device)
    measured = {"empty": lambda: None, "launch": lambda: one.fill_(1.0)}
    for name in names:
        try:
            sets = inputs[:1] if name in rivals.FLOORS else inputs
            measured[name] = rotating([rivals.build(name, case, x, options, device) for x in sets])
            measured[name]()
            torch.cuda.synchronize(device)
        except Exception as e:  # a rival that can't run is a result too
            measured.pop(name, None)
            row.failed[name] = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200] if str(e).strip() else ''}"
    measured["operator"] = rotating([calls.operator(case, x, options) for x in inputs])
    for name, times in cold_times(measured, device, repeats).items():
        row.times[name] = Sample.of([round(t, 3) for t in times])
    row.sm_mhz = runs.sm_clock(device)
    for name, call in measured.items():
        if name not in ("empty", "launch"):
            row.host[name] = round(host_time(call, device), 2)
    if check:
        row.errors = errors.errors(case, inputs[0], options, calls.operator(case, inputs[0], options)())
    return row
