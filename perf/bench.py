"""Times the operators on the official sizes against their floor: `python -m perf.bench OUT.json`.

`mamba_segsum` only writes, so its floor is one fp32 fill of its output bytes, measured beside it: every round times the
floor and the operator once each, with a cold L2 (256 MB written before each), and the medians are compared.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cute_kernels
from cute_kernels.runtime import toolchain
from perf.demo import OFFICIAL_CASES
from perf.timing import cold_times
from reference import inputs

app = typer.Typer()


def machine() -> dict:
    """What the numbers belong to."""
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "date": date.today().isoformat(),
        "gpu": subprocess.run(smi, capture_output=True, text=True).stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "toolchain": toolchain.versions(),
        "revision": revision.stdout.strip() or None,
    }


def host_time(call, repeats: int = 30, calls: int = 20) -> float:
    """Microseconds of host time of a call, of few enough that the launches never wait for the GPU."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return 1e6 * statistics.median(times)


def segsum_case(batch: int, chunks: int, g_layout: str, repeats: int) -> dict:
    x = inputs.official(0, "cuda", batch=batch, chunks=chunks, heads=16, groups=1, d_state=256, chunk_size=256)
    call = lambda: cute_kernels.mamba_segsum(x.dt, x.A_log, x.B, x.C, g_layout=g_layout)  # noqa: E731
    num_bytes = sum(t.numel() * t.element_size() for t in call())
    target = torch.empty(num_bytes // 4, dtype=torch.float32, device="cuda")
    times = cold_times({"fill": lambda: target.fill_(1.0), "operator": call}, x.dt.device, repeats)
    fill, operator = (statistics.median(times[name]) for name in ("fill", "operator"))
    return {
        "batch": batch,
        "chunks": chunks,
        "g_layout": g_layout,
        "bytes": num_bytes,
        "fill_us": round(fill, 2),
        "us": round(operator, 2),
        "spread_us": [round(q, 2) for q in statistics.quantiles(times["operator"], n=4)[::2]],
        "ratio": round(operator / fill, 3),
    }


@app.command()
def main(out: Path, repeats: int = 40) -> None:
    """Writes OUT as JSON and prints a table."""
    cases = [(b, c, layout) for layout in ("per_head", "per_group") for b, c in OFFICIAL_CASES]
    rows = [segsum_case(*case, repeats) for case in track(cases, "mamba_segsum", transient=True)]
    x = inputs.official(0, "cuda", batch=1, chunks=1, heads=16, groups=1, d_state=256, chunk_size=256)
    summary = {"host_us": round(host_time(lambda: cute_kernels.mamba_segsum(x.dt, x.A_log, x.B, x.C)), 2)}
    for layout in ("per_head", "per_group"):
        mine = [row for row in rows if row["g_layout"] == layout]
        for key in ("fill_us", "us", "ratio"):
            summary[f"{layout}_geomean_{key}"] = round(statistics.geometric_mean(row[key] for row in mine), 3)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), "summary": summary, "mamba_segsum": rows}, indent=1) + "\n")
    table = Table("batch", "chunks", "G", "MB", "fill us", "us", "ratio")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            str(row["chunks"]),
            row["g_layout"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['fill_us']:.1f}",
            f"{row['us']:.1f}",
            f"{row['ratio']:.2f}",
        )
    console = Console(width=100)
    console.print(table)
    console.print(summary)


if __name__ == "__main__":
    app()
