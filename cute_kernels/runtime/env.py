"""What a report of a problem should say about the machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from pathlib import Path

import torch

import cute_kernels
from cute_kernels.runtime import arch, artifacts, build, cache, toolchain


@dataclasses.dataclass(frozen=True)
class EnvReport:
    """Name and value of everything that decides which machine code runs here. `str` lays it out in lines."""

    entries: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.entries))
        return "\n".join(f"{name:{width}}  {value}" for name, value in self.entries.items())


def env_report() -> EnvReport:
    """Versions, devices, compiler, and where kernels come from. Needs no GPU, and imports no compiler."""
    entries = {
        "cute_kernels": f"{cute_kernels.__version__} in {Path(cute_kernels.__file__).parent}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'the CPU'}",
        "cuda-python": toolchain.version("cuda-python") or toolchain.version("cuda-bindings") or "not installed",
        **toolchain.versions(),
        "compiler": _compiler(),
        "linker": build.linker() or "not found: kernels are compiled anew in every process",
        "driver": _cuda(toolchain.driver_version()) if toolchain.driver_version() else "none",
    }
    if toolchain.driver_version():
        for index in range(torch.cuda.device_count()):
            entries[f"cuda:{index}"] = _device(index)
    entries["artifacts"] = _artifacts()
    entries["cache"] = _cache()
    return EnvReport(entries)


def _cuda(version: int) -> str:
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _compiler() -> str:
    if toolchain.cuda_major() is None:
        return "none: kernels come from artifacts alone"
    if "cutlass" in sys.modules:  # not worth its import otherwise
        version = sys.modules["cutlass"].CUDA_VERSION
        return f"CUDA {version.major}.{version.minor}"
    return f"CUDA {toolchain.cuda_major()}"


def _device(index: int) -> str:
    name = torch.cuda.get_device_name(index)
    try:
        return f"{name}, {arch.of_device(index)}, {arch.sm_count(index)} SMs"
    except NotImplementedError as error:
        return f"{name}: {error}"


def _artifacts() -> str:
    folder = artifacts.folder()
    if folder is None:
        return f"none (${artifacts.VARIABLE} is not set)"
    if not os.path.isdir(folder):
        return f"{folder}, {'not a folder' if os.path.exists(folder) else 'no such folder'}"
    return f"{folder}, {_count(build.find(folder))}"


def _cache() -> str:
    try:
        folder = cache.folder()
    except FileNotFoundError as error:
        return f"none: {error}"
    try:
        cache.check()
    except FileNotFoundError:  # not made yet
        pass
    except OSError as error:
        return f"{folder}, not used: {error}"
    return f"{folder}, {_count(cache.kernels())}"


def _count(kernels: list[build.Built]) -> str:
    damaged = sum(not kernel.intact("so") for kernel in kernels)
    return f"{len(kernels)} kernels" + (f", {damaged} of them damaged" if damaged else "")
