"""`python -m perf report`: everything that is stored in perf/results, and the kernels' machine code, as one page."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from perf import cases, counts, inspection, model, ncu, pages, plot, tables
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
        predictions=[prediction(found, runs) for found in counted],
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


def prediction(found: dict, runs: list[Run]) -> dict[str, Any]:
    """What the counts of one operator say: the least time of every case on both GPUs; and where a run on an H200 is
    stored, times on a B200 by a model fitted to it."""
    known = {case.name: case for case in cases.cases(found["op"], "official", found["options"])}
    chosen = [case for name, case in known.items() if name in found["sm_90a"] and name in found["sm_100a"]]
    moved = [{"dram_bytes": case.bytes} for case in chosen]
    here, there = ([found[a][c.name] | m for c, m in zip(chosen, moved, strict=True)] for a in ARCHS)
    header = ["case", "M instr sm_90a", "M instr sm_100a", "H200 least us", "by", "B200 least us", "by"]
    rows = []
    for case, h, t in zip(chosen, here, there, strict=True):
        instructions = (f"{work['instructions'] / 1e6:.2f}" for work in (h, t))
        rows.append([case.name, *instructions, *_least(model.H200, h), *_least(model.B200, t)])
    text = (
        "Counts: PTX instructions of the PTX machine, and the least DRAM bytes. Least: the slowest resource at its "
        f"data sheet's peak. Counts of revision {found['revision']}."
    )
    options = ", ".join(f"{k} {v}" for k, v in found["options"].items())
    shown = {"title": f"{found['op']}, {options}" if options else found["op"], "header": header, "rows": rows}
    if any(t["launches"] < h["launches"] for h, t in zip(here, there, strict=True)):
        return shown | {"text": f"{text} Not every stage has a kernel for sm_100a yet."}
    times = _times_on_h200(found, runs)
    if not all(case.name in times for case in chosen) or len(chosen) < 4:
        return shown | {"text": f"{text} No time on an H200 is stored to fit a model to."}
    us = [times[case.name] for case in chosen]
    fitted, errors = model.fit(model.H200, here, us), model.errors_left_out(model.H200, here, us)
    header += ["H200 us", "H200 predicted", "error", "B200 predicted us"]
    for row, t, measured, error in zip(rows, there, us, errors, strict=True):
        row += [f"{measured:.1f}", f"{measured * (1 + error):.1f}", f"{100 * error:+.0f}%"]
        row.append(f"{fitted.us(model.B200, t):.1f}")
    text += (
        f" Fitted to the H200: {fitted.fixed_us:.1f} us fixed, then {100 * fitted.efficiency:.0f}% of the slowest "
        f"resource's peak. Predicting each H200 case from the others is off by {100 * model.typical(errors):.0f}% "
        f"(geometric mean), at most {100 * max(map(abs, errors)):.0f}%."
    )
    return shown | {"text": text}


def _least(peaks: model.Peaks, work: dict) -> tuple[str, str]:
    """Microseconds of the slowest resource, and its name."""
    seconds = peaks.seconds(work)
    name = max(seconds, key=seconds.get)
    return f"{1e6 * seconds[name]:.1f}", name.replace("_", " ")


def _times_on_h200(found: dict, runs: list[Run]) -> dict[str, float]:
    """By case: of the official run of the same operator and options."""
    wanted = (found["op"], "official", found["options"], model.H200.name)
    for run in runs:
        if (run.op, run.set, run.options, run.machine.get("gpu")) == wanted:
            return {row.name: row.times["operator"].median for row in run.rows}
    return {}


def machine_code() -> list[list[str]]:
    """The prebuilt kernels' device functions on each architecture, compiled where the cache lacks them."""
    from cute_kernels import operators
    from cute_kernels.runtime import artifacts

    prebuilt, rows = operators.prebuilt_kernels(), []
    found = inspection.prebuilt_functions(prebuilt, ARCHS, console)
    for kernel, arch in artifacts.pairs(prebuilt, ARCHS):
        label = inspection.distinction(kernel, prebuilt)
        rows += [[label, *function.cells()] for function in found[kernel.symbol(), arch]]
    return rows
