"""Command line: `python -m cute_kernels info` and `python -m cute_kernels build`."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cute_kernels import operators
from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import artifacts, build, cache
from cute_kernels.runtime.env import env_report

app = typer.Typer(
    help="Kernels of cute_kernels: what is here, and making them ahead of time.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console()


@app.command()
def info() -> None:
    """Shows every compiled kernel that is here, then versions, devices, and where kernels come from."""
    table = Table("from", "architecture", "size", "kernel", title="Compiled kernels")
    folder, cached = artifacts.folder(), []
    with contextlib.suppress(FileNotFoundError):  # of a user without a home
        cached = cache.kernels()
    for source, kernels in (("artifacts", build.find(folder) if folder else []), ("cache", cached)):
        for kernel in kernels:
            table.add_row(source, kernel.arch, *_describe(kernel))
    console.print(table if table.row_count else "No compiled kernels yet.")
    console.print(str(env_report()), highlight=False, soft_wrap=True)  # last, where hundreds of kernels don't hide it


def _describe(built: build.Built) -> tuple[str, str]:
    if not built.intact("so"):
        return "", f"{built.symbol} (damaged)"
    return f"{built.so.stat().st_size / 1024:.0f} KiB", str(built.read_metadata().get("kernel"))


@app.command("build")
def build_(
    out: Annotated[Path, typer.Option(help="Folder for the kernels; $CUTE_KERNELS_ARTIFACTS names it later.")],
    arch: Annotated[list[str], typer.Option(help=f"Repeatable: {', '.join(arch_.NAMES)}.")],
    jobs: Annotated[
        int, typer.Option(min=1, help="Compilers at a time, of about 0.5 GB each; at most one for each GB of memory.")
    ] = os.cpu_count() or 1,
) -> None:
    """Compiles the official and model configurations of every operator ahead of time. Needs no GPU."""
    for name in arch:
        try:
            arch_.check(name)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--arch") from None
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        message = f"{out} can't be a folder for kernels: {error.strerror}"
        raise typer.BadParameter(message, param_hint="--out") from None
    kernels = operators.prebuilt_kernels()
    count = len(artifacts.pairs(kernels, arch))
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=count)
        try:
            for built in artifacts.build_all(kernels, arch, out, jobs):
                progress.update(task, advance=1, description=f"{built.symbol} {built.arch}")
        except (OSError, RuntimeError) as error:
            console.print(f"[red]error:[/] {error}", highlight=False)
            raise typer.Exit(1) from None
    console.print(
        f"{count} kernels in {out}, {time.monotonic() - start:.0f} s. To use them: {artifacts.VARIABLE}={out}"
    )


if __name__ == "__main__":
    app(prog_name="python -m cute_kernels")
