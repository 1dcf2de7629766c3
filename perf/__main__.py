"""`python -m perf bench|ncu|counts|report|solexecbench`, from a checkout; each has `--help`."""

import typer

from perf.bench import bench
from perf.counts import counts
from perf.ncu import ncu
from perf.report import report
from perf.solexecbench import solexecbench

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measures the operators.")
for command in (bench, ncu, counts, report, solexecbench):
    app.command()(command)

if __name__ == "__main__":
    app(prog_name="python -m perf")
