"""What an operator's kernels execute at each official size, on each architecture, counted by the PTX machine.

`python -m perf counts` stores them in perf/results: they need no GPU, but minutes. The report predicts times from them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from perf import bench, runs
from perf import cases as cases_

console = Console()
SCHEMA = "perf/counts/1"
ARCHS = ("sm_90a", "sm_100a")


def counts(
    op: Annotated[bench.Operator, typer.Option(help="The operator.")],
    precision: Annotated[bench.Precision, typer.Option(help="Of the Hyena operators.")] = bench.Precision.high,
    g_layout: Annotated[bench.GLayout, typer.Option(help="Of mamba_segsum.")] = bench.GLayout.per_head,
    only: Annotated[str, typer.Option(help="Sizes by name and comma, in place of the official set.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the JSON.")] = runs.FOLDER,
) -> None:
    """Counts what the kernels execute at the official sizes, on the PTX machine, for Hopper and Blackwell."""
    options = bench.operator_options(op.value, precision.value, g_layout.value)
    try:
        found = cases_.cases(op.value, "official", options)
        chosen = bench.choose(found, only)
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    data: dict[str, Any] = {"schema": SCHEMA, "op": op.value, "options": options}
    data["revision"] = runs.machine()["revision"]
    data |= {arch: {} for arch in ARCHS}
    path = out / ("_".join(["counts", op.value + bench.part(found, chosen), *options.values()]) + ".json")
    out.mkdir(parents=True, exist_ok=True)
    pairs = [(case, arch) for case in chosen for arch in ARCHS]
    try:
        for case, arch in track(pairs, "counting", console=console, transient=True):
            data[arch][case.name] = count(case, options, arch)
            path.write_text(json.dumps(data, indent=1) + "\n")
    except KeyboardInterrupt:
        console.print("Stopped; what was counted is kept.")
    console.print(f"Written: {path}", highlight=False, soft_wrap=True)


def load(path: Path) -> dict[str, Any]:
    """ValueError where the file holds something else."""
    data = json.loads(Path(path).read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} holds no results of `perf counts` ({SCHEMA})")
    return data


def count(case: cases_.Case, options: dict[str, Any], arch: str) -> dict[str, int]:
    """Launches, warp instructions, matrix and special operations, and the bytes that pass between SMs and L2."""
    import torch

    from perf import calls
    from reference.ptx.machine import SM_COUNTS, ptx_machine

    sizes, sms, times = dict(case.sizes), SM_COUNTS[arch], 1
    if case.op == "mamba_segsum":
        # Chunks are alike: as few are run as have the same kernel, on so many SMs that the blocks an SM are the same.
        chunks = sizes["batch"] * sizes["chunks"]
        run, sms = _alike(case, options, chunks, sms)
        sizes |= {"batch": run, "chunks": 1}
        times = chunks / run
    small = cases_.Case(case.op, case.name, sizes, 0, 0, 0, 0)
    x = calls.arguments(small, 0, torch.device("cpu"))
    with ptx_machine(arch, sm_count=sms, check=False) as machine:
        calls.operator(small, x, options)()
    total: Counter[str] = Counter()
    for report in machine.reports:
        total.update(report.counts)
    moved = ("global_load_bytes", "global_store_bytes", "tma_load_bytes", "tma_store_bytes", "cpasync_bytes")
    return {
        "launches": len(machine.reports),
        "instructions": round(times * total["instructions"]),
        "mma": round(times * sum(n for name, n in total.items() if name.startswith("mma_"))),
        "special": round(times * total["transcendentals"]),
        "l2_bytes": round(times * sum(total[name] for name in moved)),
    }


def _alike(case: cases_.Case, options: dict[str, Any], chunks: int, sms: int) -> tuple[int, int]:
    """The fewest chunks, and SMs for them, that the segment sum's kernel for `chunks` on `sms` is chosen for."""
    import torch

    from cute_kernels.mamba import segsum
    from perf import calls

    one = cases_.Case(case.op, case.name, dict(case.sizes) | {"batch": 1, "chunks": 1}, 0, 0, 0, 0)
    x = calls.arguments(one, 0, torch.device("meta"))
    problem = segsum.check_inputs(x["dt"], x["A_log"], x["B"], x["C"], x.get("dt_bias"), options["g_layout"])
    kernel = segsum.kernel(problem, chunks, sms)
    fewer = ((n, max(1, sms * n // chunks)) for n in range(1, chunks + 1))
    return next(pair for pair in fewer if segsum.kernel(problem, *pair) == kernel)
