"""Reads a cubin: registers, stack, shared memory, and which instructions it is made of.

What counts is the machine code. PTX has local arrays that the assembler removes and none of the spills that it adds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_TMA = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")  # tensor copies, and bulk copies without a descriptor
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """One kernel of a cubin."""

    name: str
    registers: int  # per thread at launch; with setmaxregister the warps redistribute them later
    stack: int  # bytes per thread: spills and local arrays; a good kernel has none
    static_shared: int  # bytes per block, beyond the dynamic ones that the launch asks for
    local: int  # bytes per thread
    opcodes: Mapping[str, int]  # occurrences of each opcode, without its modifiers

    @property
    def instructions(self) -> int:
        """All but the padding."""
        return sum(count for opcode, count in self.opcodes.items() if opcode != "NOP")

    @property
    def tma(self) -> int:
        """Copies by the tensor memory accelerator, both ways."""
        return sum(self.opcodes.get(opcode, 0) for opcode in _TMA)

    @property
    def mma(self) -> int:
        """Tensor-core instructions: HMMA of a warp, HGMMA of a warp group, UTCHMMA into tensor memory, and so on."""
        return sum(count for opcode, count in self.opcodes.items() if opcode.endswith("MMA"))

    @property
    def local_memory(self) -> int:
        """Loads from and stores to local memory: spills and local arrays; a good kernel has none."""
        return self.opcodes.get("LDL", 0) + self.opcodes.get("STL", 0)


def machine_code(cubin: str | os.PathLike[str]) -> list[MachineCode]:
    """The kernels of a cubin file, in its own order.

    RuntimeError where cuobjdump or nvdisasm is not installed, or can't read the file.
    """
    path = Path(cubin)
    opcodes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    section = ""
    for line in _run("nvdisasm", "-c", str(path)).splitlines():
        if match := _SECTION.match(line):
            section = match[1]
        elif match := _INSTRUCTION.match(line):
            opcodes[section][match[1]] += 1
    usage = _USAGE.findall(_run("cuobjdump", "--dump-resource-usage", str(path)))
    if not usage:
        raise RuntimeError(f"{path} holds no kernel")
    return [MachineCode(name, *map(int, numbers), dict(opcodes[name])) for name, *numbers in usage]


def _run(tool: str, *arguments: str) -> str:
    result = subprocess.run([_find(tool), *arguments], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{tool} could not read {arguments[-1]}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


@functools.cache
def _find(tool: str) -> str:
    """The tool from its package, or else from the search path: a toolkit there may be older than the compiler."""
    try:
        for file in importlib.metadata.files(f"nvidia-cuda-{tool}") or ():
            if file.name == tool:
                return str(file.locate())
    except importlib.metadata.PackageNotFoundError:
        pass
    if found := shutil.which(tool):
        return found
    raise RuntimeError(f"{tool} was not found: install nvidia-cuda-{tool}")
