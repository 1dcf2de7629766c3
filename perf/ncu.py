"""`python -m perf ncu`: an operator's kernels under Nsight Compute, as a table and a page."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from perf import bench, pages, plot, runs
from perf import cases as cases_
from perf.ncu_csv import METRICS, Profile, profiles
from perf.tables import table

console = Console()
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "WarpStateStats", "SchedulerStats")
SECTIONS += ("LaunchStats", "Occupancy")
SCHEMA = "perf/ncu/1"
NOTE = (
    "Kernels run one at a time, each with a cold L2 and at the clocks as they are; so the durations hold no overlap of "
    "dependent launches and do not add up to the call's time. What a kernel leaves in the L2 is written to the DRAM "
    "after it ended, and not counted there."
)


def ncu(
    op: Annotated[bench.Operator, typer.Option(help="The operator.")],
    set_: Annotated[bench.Set, typer.Option("--set", help="The sizes.")] = bench.Set.official,
    precision: Annotated[bench.Precision, typer.Option(help="Of the Hyena operators.")] = bench.Precision.high,
    g_layout: Annotated[bench.GLayout, typer.Option(help="Of mamba_segsum.")] = bench.GLayout.per_head,
    only: Annotated[str, typer.Option(help="Sizes by name and comma, in place of the whole set.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the report, the JSON and the page.")] = runs.FOLDER,
    revision: Annotated[str | None, typer.Option(help="Where git can't tell; also $PERF_REVISION.")] = None,
) -> None:
    """Profiles the kernels of a set's sizes: the stored report, a table of every kernel, and one page with plots."""
    try:
        options = bench.operator_options(op.value, precision.value, g_layout.value)
        whole = cases_.cases(op.value, set_.value, options)
        chosen = bench.choose(whole, only)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    tool = shutil.which("ncu")
    if tool is None:
        raise typer.BadParameter("ncu was not found on the search path: install Nsight Compute")
    machine = runs.machine(bench.gpu(), revision)
    set_name = set_.value + bench.part(whole, chosen)
    path = out / ("ncu_" + runs.default_path(op.value, set_name, options, machine).name)
    out.mkdir(parents=True, exist_ok=True)
    spec = {"op": op.value, "set": set_.value, "only": only, "options": options}
    with console.status(f"profiling {len(chosen)} sizes of {op.value}"):
        raw = profile(tool, path.with_suffix(".ncu-rep"), spec)
    found = profiles(raw, [case.name for case in chosen])
    data = {"schema": SCHEMA, "op": op.value, "set": set_name, "options": options, "machine": machine}
    data["cases"] = {case.name: {"read": case.read, "written": case.written} for case in chosen}
    data["kernels"] = [dataclasses.asdict(p) for p in found]
    path.write_text(json.dumps(data, indent=1) + "\n")
    for caption, header, rows in sections(data):
        console.print(table(f"{op.value}, {caption}", header, rows))
    page = path.with_suffix(".html")
    page.write_text(pages.render("ncu.html.j2", **section(data)))
    console.print(f"Written: {path.with_suffix('.ncu-rep')}, {path}, {page}", highlight=False, soft_wrap=True)


def profile(tool: str, report: Path, spec: dict) -> str:
    """Runs the target under Nsight Compute, stores the report, returns its raw page as CSV. RuntimeError: it failed."""
    sections = [part for name in SECTIONS for part in ("--section", name)]
    command = [tool, "--clock-control", "none", "--profile-from-start", "off", *sections]
    command += ["--metrics", ",".join(METRICS.values()), "--force-overwrite", "--export", str(report)]
    command += [sys.executable, "-m", "perf.ncu_target", json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not report.exists():
        raise RuntimeError(f"ncu ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
    command = [tool, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def load(path: Path) -> dict:
    """ValueError where the file holds something else."""
    data = json.loads(Path(path).read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} holds no results of `perf ncu` ({SCHEMA})")
    return data


def use_rows(found: list[Profile]) -> tuple[list[str], list[list[str]]]:
    """Where the time goes."""
    header = ["case", "kernel", "us", "DRAM %", "L2 %", "L2 hit %", "tensor %", "issue %", "stalls, % of a warp's time"]
    rows = []
    for p in found:
        stalls = ", ".join(f"{cause} {100 * share:.0f}" for cause, share in p.worst_stalls(4).items())
        numbers = (p.us, p.dram_percent, p.l2_percent, p.l2_hit_percent, p.tensor_percent, p.issue_percent)
        rows.append([p.case, p.kernel[:40], *(f"{v:.1f}" for v in numbers), stalls])
    return header, rows


def launch_rows(found: list[Profile]) -> tuple[list[str], list[list[str]]]:
    header = [
        "case",
        "kernel",
        "blocks",
        "threads",
        "registers",
        "shared",
        "occupancy %",
        "at most %",
        "M instructions",
    ]
    rows = []
    for p in found:
        numbers = (p.blocks, p.threads, p.registers, p.shared, p.occupancy_percent, p.occupancy_limit_percent)
        rows.append([p.case, p.kernel[:40], *(f"{v:.0f}" for v in numbers), f"{p.instructions / 1e6:.2f}"])
    return header, rows


def byte_rows(data: dict) -> tuple[list[str], list[list[str]]]:
    """Bytes of the whole call against the least."""
    rows = []
    for name, least in data["cases"].items():
        mine = [k for k in data["kernels"] if k["case"] == name]
        read, to_dram = (sum(k[f"dram_{what}"] for k in mine) for what in ("read", "written"))
        to_l2 = 32 * sum(k["l2_write_sectors"] for k in mine)
        cells = [least["read"] / 1e6, read / 1e6, read / least["read"], least["written"] / 1e6, to_l2 / 1e6]
        rows.append([name, *(f"{v:.2f}" for v in (*cells, to_l2 / least["written"], to_dram / 1e6))])
    return ["case", "least MB", "read from DRAM", "x", "least MB", "written to L2", "x", "written to DRAM"], rows


def sections(data: dict) -> list[tuple[str, list[str], list[list[str]]]]:
    found = [Profile(**kernel) for kernel in data["kernels"]]
    return [
        ("Kernels: use of the GPU", *use_rows(found)),
        ("Kernels: launches", *launch_rows(found)),
        ("Bytes of the call, MB", *byte_rows(data)),
    ]


def section(data: dict) -> dict:
    """What a page shows of one profile."""
    found = [Profile(**kernel) for kernel in data["kernels"]]
    title = f"{data['op']}, {data['set']} sizes, {', '.join(f'{k} {v}' for k, v in data['options'].items())}"
    figures = []
    for kernel in dict.fromkeys(p.kernel for p in found):
        mine = [p for p in found if p.kernel == kernel]
        causes = list(dict.fromkeys(cause for p in mine for cause in p.worst_stalls(5)))
        parts = {cause: [100 * p.stalls.get(cause, 0.0) for p in mine] for cause in causes}
        labels = [p.case for p in mine]
        figures.append(plot.embedded(plot.bars_figure(labels, parts, f"{kernel[:60]}: stalls", "% of a warp's time")))
        shares = {n: [getattr(p, f"{n}_percent") for p in mine] for n in ("dram", "l2", "issue", "tensor", "occupancy")}
        figures.append(plot.embedded(plot.lines_figure(labels, shares, f"{kernel[:60]}: use", "% of peak")))
    machine = runs.machine_text(data["machine"])
    return {"title": title, "machine": machine, "note": NOTE, "tables": sections(data), "figures": figures}
