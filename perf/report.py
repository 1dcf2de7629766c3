"""`python -m perf report`: everything that is stored in perf/results, and the kernels' machine code, as one page."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from perf import counts, inspection, model, ncu, pages, plot, tables
from perf.runs import FOLDER, Run, machine_text

console = Console()
ARCHS = ("sm_90a", "sm_100a")
PEAKS = {peaks.name: peaks for peaks in (model.H200, model.B200)}
FP32_PEAK = 2 * 128  # operations an SM and cycle


def report(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("build/perf.html"),
    folder: Annotated[Path, typer.Option("--results", help="Folder of the stored results.")] = FOLDER,
    kernels: Annotated[bool, typer.Option(help="Compile the prebuilt kernels and show their machine code.")] = True,
) -> None:
    """Writes one page that stands alone: times, errors, rooflines, profiles, and what is known of Blackwell."""
    try:
        runs, profiles, counted = stored(folder)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    if not runs and not kernels:
        raise typer.BadParameter(f"{folder} holds no results: run `python -m perf bench` on a GPU first")
    page = pages.render(
        "report.html.j2",
        title="cute_kernels: measurements",
        date=date.today().isoformat(),
        overview=overview(runs),
        benches=[bench_section(run) for run in runs],
        profiles=[ncu.section(data) for data in profiles],
        predictions=[p for run in runs if (p := prediction(run, counted))],
        machine_code=(["kernel", *inspection.HEADER], machine_code()) if kernels else None,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page)
    console.print(f"Written: {out}", highlight=False, soft_wrap=True)


def stored(folder: Path) -> tuple[list[Run], list[dict], list[dict]]:
    """The newest run of each operator, set, options and GPU; the newest profiles likewise; all counts."""
    runs, profiles, counted = {}, {}, []
    for path in sorted(Path(folder).glob("*.json")):
        if path.name.startswith("counts_"):
            counted.append(counts.load(path))
        elif path.name.startswith("ncu_"):
            data = ncu.load(path)
            _keep_newest(profiles, data["op"], data["set"], data["options"], data["machine"], data)
        else:
            run = Run.load(path)
            _keep_newest(runs, run.op, run.set, run.options, run.machine, run)
    return list(runs.values()), list(profiles.values()), counted


def _keep_newest(found: dict, op: str, set_name: str, options: dict, machine: dict, item: Any) -> None:
    key = (op, set_name, *options.values(), machine.get("gpu"))
    old = found.get(key)
    if old is None or (old["machine"] if isinstance(old, dict) else old.machine)["date"] <= machine["date"]:
        found[key] = item


def overview(runs: list[Run]) -> tuple[list[str], list[list[str]]]:
    """What ran where."""
    header = ["run", "cases", "GPU", "driver", "torch", "DSL", "revision", "date", "geometric means"]
    rows = []
    for run in runs:
        m = run.machine
        dsl = m.get("toolchain", {}).get("nvidia-cutlass-dsl", "")
        cells = [run.title(), str(len(run.rows)), m.get("gpu"), m.get("driver"), m.get("torch"), dsl, m.get("revision")]
        rows.append([str(cell or "") for cell in (*cells, m["date"], tables.summary(run))])
    return header, rows


def bench_section(run: Run) -> dict[str, Any]:
    shown = [(run.title(), *tables.time_rows(run))]
    if any(row.errors for row in run.rows):
        shown.append(("Errors", *tables.error_rows(run)))
    figures = [plot.times_figure(run)]
    if (peaks := PEAKS.get(run.machine.get("gpu", ""))) and (bandwidth := measured_bandwidth(run)):
        fp32 = peaks.sms * peaks.clock * FP32_PEAK
        for unit, peak in (("mma", peaks.mma), ("fp32", fp32)):
            if any(getattr(row, unit) for row in run.rows):
                figures.append(plot.roofline_figure(run, bandwidth, peak, unit))
    return {
        "title": run.title(),
        "machine": machine_text(run.machine),
        "timing": run.timing,
        "summary": tables.summary(run),
        "tables": shown,
        "failed": tables.failures(run),
        "figures": [plot.embedded(figure) for figure in figures],
    }


def measured_bandwidth(run: Run) -> float | None:
    """Bytes a second of the run's floor at its largest case."""
    rows = [row for row in run.rows if row.floor]
    if not rows:
        return None
    row = max(rows, key=lambda r: r.read + r.written)
    moved = row.written if row.floor == "fill" else row.read + row.written
    return 1e6 * moved / row.times[row.floor].median


def prediction(run: Run, counted: list[dict]) -> dict[str, Any] | None:
    """Times on a B200, from counts on both architectures and a model fitted to this run; None without them."""
    found = next((c for c in counted if (c["op"], c["options"]) == (run.op, run.options)), None)
    rows = [row for row in run.rows if found and row.name in found["sm_90a"]]
    if run.set != "official" or run.machine.get("gpu") != model.H200.name or len(rows) < 4:
        return None
    if any(found["sm_100a"][row.name]["launches"] < found["sm_90a"][row.name]["launches"] for row in rows):
        text = "No prediction: not every stage has a kernel for sm_100a yet."
        return {"title": run.title(), "text": text, "header": [], "rows": []}
    moved = [{"dram_bytes": row.read + row.written} for row in rows]
    here = [found["sm_90a"][row.name] | m for row, m in zip(rows, moved, strict=True)]
    there = [found["sm_100a"][row.name] | m for row, m in zip(rows, moved, strict=True)]
    us = [row.times["operator"].median for row in rows]
    fitted = model.fit(model.H200, here, us)
    errors = model.errors_left_out(model.H200, here, us)
    cells = []
    for row, h, t, measured, error in zip(rows, here, there, us, errors, strict=True):
        seconds = model.B200.seconds(t)
        bound = max(seconds, key=seconds.get)
        cells.append(
            [row.name, f"{h['instructions'] / 1e6:.2f}", f"{t['instructions'] / 1e6:.2f}", f"{measured:.1f}",
             f"{measured * (1 + error):.1f}", f"{100 * error:+.0f}%", f"{1e6 * seconds[bound]:.1f}",
             bound.replace("_", " "), f"{fitted.us(model.B200, t):.1f}"]
        )  # fmt: skip
    header = ["case", "M instr sm_90a", "M instr sm_100a", "H200 us", "H200 predicted", "error", "B200 least us"]
    text = (
        f"Fitted to the H200: {fitted.fixed_us:.1f} us fixed, then {100 * fitted.efficiency:.0f}% of the slowest "
        f"resource's peak. Predicting each H200 case from the others is off by {100 * model.typical(errors):.0f}% "
        f"(geometric mean), at most {100 * max(map(abs, errors)):.0f}%. Counts: PTX instructions of the PTX machine, "
        f"and the least DRAM bytes. Times of revision {run.machine.get('revision')}, counts of {found['revision']}."
    )
    return {"title": run.title(), "text": text, "header": [*header, "by", "B200 predicted us"], "rows": cells}


def machine_code() -> list[list[str]]:
    """The prebuilt kernels' device functions on each architecture, compiled where the cache lacks them."""
    from cute_kernels import operators
    from cute_kernels.runtime import artifacts, cache

    prebuilt, rows = operators.prebuilt_kernels(), []
    with Progress(console=console, transient=True) as progress:
        for kernel, arch in progress.track(artifacts.pairs(prebuilt, ARCHS), description="compiling"):
            label = f"{kernel.operator} {inspection.distinction(kernel, prebuilt)}"
            rows += [[label, *f.cells()] for f in inspection.device_functions(cache.get(kernel, arch))]
    return rows
