"""Kernels compiled ahead of time: `python -m cute_kernels build` writes them, $CUTE_KERNELS_ARTIFACTS names them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels.runtime import toolchain
from cute_kernels.runtime.build import Built
from cute_kernels.runtime.kernel import Kernel

VARIABLE = "CUTE_KERNELS_ARTIFACTS"


def folder() -> Path | None:
    """The artifacts' folder, or None where the environment names none."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


def load(kernel: Kernel, arch: str) -> Callable[..., Any] | None:
    """The kernel's host function from the artifacts, or None where the compiler must make it.

    RuntimeError where the artifact can't be used, or is missing on a machine without the compiler.
    """
    where = folder()
    if where is None:
        return None
    built = Built(where, kernel.symbol(), arch)
    if not built.metadata.exists():
        if importlib.util.find_spec("cutlass") is None:
            raise RuntimeError(
                f"${VARIABLE}={where} has no {kernel} for {arch}, and nvidia-cutlass-dsl is not installed to compile "
                f"it: build the artifacts again with this version of cute_kernels and --arch {arch}"
            )
        return None
    if not built.intact():
        raise RuntimeError(f"{built.so} is broken (it does not match its metadata): build the artifacts again")
    needs, driver = built.read_metadata()["cuda_major"], toolchain.driver_version()
    if driver is not None and needs is not None and needs > driver // 1000:
        raise RuntimeError(f"{built.so} needs a driver for CUDA {needs}; this one supports CUDA {driver // 1000}")
    return built.load()
