"""What compiled kernels are made of: read from cubins, so it needs no GPU."""

from __future__ import annotations

import dataclasses
import os
import re

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cute_kernels.runtime import artifacts
from cute_kernels.runtime.build import Built
from cute_kernels.runtime.inspect import MachineCode, machine_code
from cute_kernels.runtime.kernel import Kernel
from perf.occupancy import blocks_per_sm, occupancy

FP32 = ("FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2")  # on Blackwell also in pairs
HEADER = ["device function", "arch", "registers", "stack", "shared", "threads", "blocks / SM", "occupancy %"]
HEADER += ["instructions", "TMA", "MMA", "MUFU", "fp32", "local"]


@dataclasses.dataclass(frozen=True)
class DeviceFunction:
    """One device function, as its launch has it."""

    arch: str
    code: MachineCode
    dynamic_shared: int | None  # bytes; None where it is not a constant
    threads: int | None  # of a block; None where the PTX doesn't say

    @property
    def shared(self) -> int | None:
        """Bytes of a block."""
        return None if self.dynamic_shared is None else self.code.static_shared + self.dynamic_shared

    def cells(self) -> list[str]:
        """Under HEADER."""
        code, fit = self.code, ("?", "?")
        if self.shared is not None and self.threads is not None:
            use = (code.registers, self.shared, self.threads)
            fit = (blocks_per_sm(*use), f"{100 * occupancy(*use):.0f}")
        name = code.name if len(code.name) <= 40 else code.name[:37] + "..."
        found = [name, self.arch, code.registers, code.stack, _known(self.shared), _known(self.threads), *fit]
        found += [code.instructions, code.tma, code.mma, code.opcodes.get("MUFU", 0)]
        found += [sum(code.opcodes.get(opcode, 0) for opcode in FP32), code.local_memory]
        return [str(cell) for cell in found]


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def device_functions(built: Built) -> list[DeviceFunction]:
    """In the cubin's order."""
    threads = block_sizes(built.ptx.read_text())
    dynamic = {launch["kernel"]: launch["dynamic_shared"] for launch in built.read_metadata()["launches"]}
    return [
        DeviceFunction(built.arch, code, dynamic.get(code.name), threads.get(code.name))
        for code in machine_code(built.cubin)
    ]


def prebuilt_functions(
    kernels: list[Kernel], archs: tuple[str, ...], console: Console
) -> dict[tuple[str, str], list[DeviceFunction]]:
    """Those of each kernel by symbol and architecture, from the cache or the compiler. RuntimeError where it fails."""
    found = {}
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        made = artifacts.build_all(kernels, archs, None, os.cpu_count() or 1)
        for built in progress.track(made, total=len(artifacts.pairs(kernels, archs))):
            found[built.symbol, built.arch] = device_functions(built)
    return found


def block_sizes(ptx: str) -> dict[str, int]:
    """Threads of a block, by kernel, where the PTX demands them."""
    sizes = {}
    for entry in re.finditer(r"\.entry\s+(\w+)\s*\(.*?\)(.*?)\{", ptx, re.DOTALL):
        if match := re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", entry[2]):
            x, y, z = (int(n or 1) for n in match.groups())
            sizes[entry[1]] = x * y * z
    return sizes


def distinction(kernel: Kernel, kernels: list[Kernel]) -> str:
    """Its type, and the fields that tell a kernel from the others of this type."""
    others = [other for other in kernels if type(other) is type(kernel)]
    names = [field.name for field in dataclasses.fields(kernel)]
    differing = [name for name in names if len({getattr(other, name) for other in others}) > 1]
    return f"{type(kernel).__name__}({', '.join(f'{name}={getattr(kernel, name)!r}' for name in differing)})"
