"""The PTX machine: runs compiled CuTe DSL kernels, host code included, on a CPU. See README.md."""

from .launch import GlobalMemory, Options
from .parser import PtxError, parse
from .report import Finding, MachineFault, Report
from .run import run_launch, run_object

__all__ = [
    "Finding",
    "GlobalMemory",
    "MachineFault",
    "Options",
    "PtxError",
    "Report",
    "parse",
    "run_launch",
    "run_object",
]
