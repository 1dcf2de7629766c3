"""Kernels compiled ahead of time: `python -m cute_kernels build` makes them, $CUTE_KERNELS_ARTIFACTS names them."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cute_kernels.runtime import build, cache, toolchain
from cute_kernels.runtime.build import Built
from cute_kernels.runtime.fingerprint import fingerprint, sources
from cute_kernels.runtime.kernel import Kernel

VARIABLE = "CUTE_KERNELS_ARTIFACTS"
COMPILER_BYTES = 1 << 30  # of the machine's memory for each compiler, which takes about half of it


def folder() -> Path | None:
    """The artifacts' folder, or None where the environment names none."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


def load(kernel: Kernel, arch: str) -> Callable[..., Any] | None:
    """The kernel's host function from the artifacts; None where there are none, or not this one, but a compiler is.

    RuntimeError where the artifact can't be used, or is missing on a machine without the compiler.
    """
    where = folder()
    if where is None:
        return None
    built = Built(where, kernel.symbol(), arch)
    if not built.metadata.exists():
        if importlib.util.find_spec("cutlass") is None:
            raise RuntimeError(
                f"{where} (${VARIABLE}) has no {kernel} for {arch}, and nvidia-cutlass-dsl is not installed to compile "
                "it: add it to the artifacts, or install nvidia-cutlass-dsl[cu13]"
            )
        return None
    if not built.intact("so"):
        raise RuntimeError(f"{built.so} is missing or damaged: build the artifacts again")
    metadata = built.read_metadata()
    if metadata.get("sources") != sources(kernel):
        raise RuntimeError(f"{built.so} was built from other sources of cute_kernels: build the artifacts again")
    needed, driver = metadata.get("cuda_major"), toolchain.driver_version()
    if needed and driver and needed > driver // 1000:
        raise RuntimeError(f"{built.so} needs a driver for CUDA {needed}; this one is for CUDA {driver // 1000}")
    return built.load()


def pairs(kernels: Iterable[Kernel], archs: Iterable[str]) -> list[tuple[Kernel, str]]:
    """Every kernel with each of these architectures that it is for."""
    archs = tuple(archs)
    return [(kernel, arch) for kernel in kernels for arch in archs if arch in kernel.archs]


def build_all(kernels: Iterable[Kernel], archs: Iterable[str], out: Path | None, jobs: int) -> Iterator[Built]:
    """Compiles every kernel for every architecture into `out` (None: the cache); yields each as it is done.

    In `jobs` processes, but no more than there are kernels, or GB of memory. What is there already, made from the same
    sources by the same toolchain, is left as it is. RuntimeError names the first kernel that failed; those not yet
    begun are then given up.
    """
    # Fresh processes: a fork would copy the compiler's locks and threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    wanted = pairs(kernels, archs)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jobs = min(jobs, max(1, len(wanted)), max(1, memory // COMPILER_BYTES))
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _end_with_parent) as pool:
        tasks = [pool.submit(_build_one, kernel, arch, out) for kernel, arch in wanted]
        try:
            for task in concurrent.futures.as_completed(tasks):
                yield task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """A worker waits for its next kernel forever, also where its parent was killed."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _build_one(kernel: Kernel, arch: str, out: Path | None) -> Built:
    try:
        if out is None:
            return cache.get(kernel, arch)
        built = Built(out, kernel.symbol(), arch)
        if built.intact(*build.FILES) and built.read_metadata().get("fingerprint") == fingerprint(kernel):
            return built
        return build.build(kernel, arch, out)
    except Exception as error:
        raise RuntimeError(f"{kernel} for {arch} failed: {error}") from error
