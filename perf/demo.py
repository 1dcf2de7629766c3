"""The operators at work: `make demo`, or `python -m perf.demo` from a checkout.

With a supported GPU: official sizes, judged against float64 and timed; mamba_segsum beside a kernel that only writes
the same bytes. Without: a small size on the CPU against float64, then every prebuilt kernel compiled for Hopper and
Blackwell, and what its machine code is made of.
"""

from __future__ import annotations

import itertools
import statistics
import sys

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cute_kernels import mamba_segsum, operators
from cute_kernels.runtime import artifacts, backend
from cute_kernels.runtime.env import env_report
from perf import calls, cases
from perf.cases import SEGSUM_OFFICIAL
from perf.inspection import distinction, prebuilt_functions
from perf.timing import cold_time, fill_time
from reference import compare, hyena, inputs

ARCHS = ("sm_90a", "sm_100a")

console = Console()


def main() -> int:
    console.print(str(env_report()), highlight=False, soft_wrap=True)
    device = _supported_device()
    if device:
        good = segsum_on_gpu(device) & hyena_on_gpu(device)
        shown = "Shown: at every official size the kernels' outputs are within tolerance of float64."
    else:
        good = segsum_on_cpu() & hyena_on_cpu() and without_gpu()
        shown = (
            "Shown: through PyTorch the operators are within tolerance of float64; every prebuilt kernel compiles for "
            "Hopper and Blackwell, without stack or local memory. Not shown: what the kernels compute. That takes a "
            "GPU, or `make test`, which executes them in software."
        )
    console.print(f"\n{shown}" if good else "\n[red]Something is wrong: see above.[/]", highlight=False)
    return 0 if good else 1


def _supported_device() -> torch.device | None:
    if not torch.cuda.is_available():
        console.print("\nNo GPU here: operators run through plain PyTorch, kernels are compiled and inspected.")
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        backend.current().arch(device)
    except NotImplementedError as error:
        console.print(f"\n{error}: operators run through plain PyTorch on the CPU, kernels are compiled and inspected.")
        return None
    return device


def segsum_on_gpu(device: torch.device) -> bool:
    """Official sizes on the GPU: the worst error as a share of the tolerance, and the time next to the fill's."""
    table = Table("batch", "chunks", "output MB", "error / tolerance", "time us", "fill us", "time / fill")
    table.title = "mamba_segsum against float64, official sizes (an error passes up to 1 of its tolerance)"
    good, ratios = True, []
    for batch, chunks in track(SEGSUM_OFFICIAL, "running", console=console):
        x = inputs.official(0, device, batch=batch, chunks=chunks)
        out = mamba_segsum(*x)
        report = compare.compare(x, out)
        good &= report.ok
        size = sum(t.numel() * t.element_size() for t in out)
        time, floor = cold_time(lambda: mamba_segsum(*x), device), fill_time(size, device)  # noqa: B023
        ratios.append(time / floor)
        error = _share(max(r.max_ratio if r.ok else float("inf") for r in report.outputs.values()))
        table.add_row(
            str(batch), str(chunks), f"{size / 1e6:.1f}", error, f"{time:.1f}", f"{floor:.1f}", f"{ratios[-1]:.2f}"
        )
    console.print(table)
    console.print(f"Geometric mean of time / fill: {statistics.geometric_mean(ratios):.2f}")
    return good


def hyena_on_gpu(device: torch.device) -> bool:
    """Official sizes on the GPU: the worst error against float64 as a share of the official tolerance, and the time."""
    table = Table("batch x length", "high: error / tolerance", "time us", "highest: error / tolerance", "time us")
    table.title = "hyena_block against float64, official sizes (an error passes up to 1 of its tolerance)"
    good, times = True, {"high": [], "highest": []}
    for case in track(cases.cases("hyena_block", "official"), "running", console=console):
        x = calls.arguments(case, 0, device)
        truth = calls.formula(case, {name: t.double() for name, t in x.items()}, {})()
        row = [case.name]
        for precision in times:
            call = calls.operator(case, x, {"precision": precision})
            worst = float(((call().double() - truth).abs() / case.tolerance.of(truth)).max())
            good &= worst <= 1
            times[precision].append(cold_time(call, device))
            row += [_share(worst), f"{times[precision][-1]:.1f}"]
        table.add_row(*row)
    console.print(table)
    means = (f"{name} {statistics.geometric_mean(values):.1f} us" for name, values in times.items())
    console.print(f"Geometric means: {', '.join(means)}")
    return good


def _share(worst: float) -> str:
    """An error as a share of what is allowed."""
    return f"{worst:.2g}" if worst <= 1 else f"[red]{worst:.4g} WRONG[/]"


def segsum_on_cpu() -> bool:
    """One official chunk through plain PyTorch on the CPU, every element against float64."""
    with console.status("mamba_segsum on the CPU"):
        x = inputs.official(0)
        report = compare.compare(x, mamba_segsum(*x))
    table = Table("output", "elements", "largest error", "error / tolerance")
    table.title = "mamba_segsum against float64, one official chunk, CPU"
    table.caption = "an error passes up to 1 of its tolerance"
    for r in report.outputs.values():
        verdict = _share(r.max_ratio) if r.ok else f"[red]{r.wrong} elements WRONG[/]"
        table.add_row(r.name, f"{r.elements:,}", f"{r.max_error:.2g}", verdict)
    console.print(table)
    return report.ok


def hyena_on_cpu() -> bool:
    """A small official size through plain PyTorch on the CPU, against float64."""
    with console.status("hyena_block on the CPU"):
        (case,) = (c for c in cases.cases("hyena_block", "official") if c.name == "2x128")
        x = calls.arguments(case, 0, torch.device("cpu"))
        truth = torch.from_numpy(hyena.block({name: t.numpy() for name, t in x.items()})["out"])
        error = (calls.operator(case, x, {"precision": "highest"})().double() - truth).abs()
        worst = float((error / case.tolerance.of(truth)).max())
    table = Table("batch x length", "largest error", "error / tolerance")
    table.title = "hyena_block against float64, one official size, CPU"
    table.add_row(case.name, f"{float(error.max()):.2g}", _share(worst))
    console.print(table)
    return worst <= 1


def without_gpu() -> bool:
    """Every prebuilt kernel for each architecture, from the cache or the compiler: what its machine code is."""
    kernels = operators.prebuilt_kernels()
    console.print(f"\n{len(kernels)} kernels for Hopper (sm_90a) and Blackwell (sm_100a), cached once compiled:")
    try:
        found = prebuilt_functions(kernels, ARCHS, console)
    except RuntimeError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return False

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title="Their machine code, by kind: least to most")
    table.caption = (
        "n: kernels; regs: registers of a thread; KiB: shared memory of a block\n"
        "instr: instructions; TMA: copies by that unit; MMA: tensor-core products"
    )
    table.add_column("kernel", no_wrap=True)
    table.add_column("arch", no_wrap=True)
    for name in ("n", "regs", "KiB", "instr", "TMA", "MMA"):
        table.add_column(name, justify="right", no_wrap=True)
    operator = None
    for kind in dict.fromkeys(map(type, kernels)):
        if kind.operator != operator:
            operator = kind.operator
            table.add_row(f"[bold]{operator}[/]")
        for arch in (arch for arch in ARCHS if arch in kind.archs):
            made = [found[kernel.symbol(), arch] for kernel in kernels if type(kernel) is kind]
            functions = list(itertools.chain(*made))
            codes = [f.code for f in functions]
            shared = [f.shared / 1024 for f in functions if f.shared is not None]
            ranges = ([c.registers for c in codes], shared, [c.instructions for c in codes], [c.tma for c in codes])
            mma = sorted({opcode for code in codes for opcode in code.opcodes if opcode.endswith("MMA")})
            table.add_row(kind.__name__, arch, str(len(made)), *map(_range, ranges), " ".join(mma) or "-")
    console.print(table)
    good = True
    for kernel, arch in artifacts.pairs(kernels, ARCHS):
        if any(function.code.stack or function.code.local_memory for function in found[kernel.symbol(), arch]):
            good = False
            console.print(f"[red]{distinction(kernel, kernels)}, {arch}[/]", highlight=False)
    if not good:
        console.print("[red]These use their stack or local memory.[/]")
    console.print(f"Each by itself: `{sys.executable} -m perf report`", highlight=False, soft_wrap=True)
    return good


def _range(values: list[float]) -> str:
    """Least and most."""
    if not values:
        return "?"
    least, most = (f"{edge(values):.0f}" for edge in (min, max))
    return least if least == most else f"{least}-{most}"


if __name__ == "__main__":
    sys.exit(main())
