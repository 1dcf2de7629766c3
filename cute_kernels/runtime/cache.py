"""Compiled kernels on disk, so that a process after the first compiles nothing and never imports cutlass."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cute_kernels
from cute_kernels.runtime import build, toolchain
from cute_kernels.runtime.kernel import Kernel

VARIABLE = "CUTE_KERNELS_CACHE"


def folder() -> Path:
    """Where the cache lives: $CUTE_KERNELS_CACHE, or the user's cache folder."""
    if name := os.environ.get(VARIABLE):
        return Path(name)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cute_kernels"


@functools.cache
def _source_hash(path: Path) -> str:
    """Hash of a Python file, or of all of them in a folder."""
    digest = hashlib.sha256()
    for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        content = source.read_bytes()
        digest.update(f"{source.relative_to(path.parent)}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def fingerprint(kernel: Kernel) -> str:
    """Everything outside the kernel's fields that can change its machine code, as a short hash.

    The sources of cute_kernels (and of the kernel's own file where that is elsewhere), the versions of the compiler's
    packages and of apache-tvm-ffi, and the compiler's CUDA flavour, which follows the driver.
    """
    package = Path(cute_kernels.__file__).parent
    parts = [_source_hash(package), str(toolchain.versions()), f"cu{toolchain.cuda_major()}"]
    file = getattr(sys.modules[type(kernel).__module__], "__file__", None)
    if file and package not in Path(file).parents:
        parts.append(_source_hash(Path(file)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _checked_folder() -> Path:
    """The cache's folder, made if need be. PermissionError where loading code from it would not be safe."""
    path = folder()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be written by other users (mode {status.st_mode & 0o777:o})")
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file: between processes, and between threads that open it on their own."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def get(kernel: Kernel, arch: str) -> build.Built:
    """The kernel's files in the cache, compiled if they are missing or broken. Loads nothing.

    OSError where the cache can't be used (PermissionError: others can write to it).
    """
    where = _checked_folder() / fingerprint(kernel)
    built = build.Built(where, kernel.symbol(), arch)
    if built.intact():
        return built
    where.mkdir(exist_ok=True, mode=0o700)
    with _locked(where / f".{built.symbol}.{arch}.lock"):
        if built.intact():  # another process made it while this one waited
            return built
        return build.build(kernel, arch, where)


def load(kernel: Kernel, arch: str) -> Callable[..., Any]:
    """The kernel's host function from the cache. Where the disk can't be used, compiled for this process alone."""
    try:
        return get(kernel, arch).load()
    except OSError as error:
        warnings.warn(
            f"the kernel cache can't be used, so every process compiles anew: {error}; "
            f"set ${VARIABLE} to a folder that only you can write",
            RuntimeWarning,
            stacklevel=2,
        )
    with build.compiler_lock:
        return kernel.compile(arch)
