"""Compiled kernels on disk, so that a process after the first compiles nothing and never imports cutlass."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cute_kernels.runtime import build
from cute_kernels.runtime.build import Built
from cute_kernels.runtime.fingerprint import fingerprint
from cute_kernels.runtime.kernel import Kernel

VARIABLE = "CUTE_KERNELS_CACHE"
LOCK_TIMEOUT = 120.0  # seconds; many times the slowest compile


def folder() -> Path:
    """Where the cache lives: $CUTE_KERNELS_CACHE, or cute_kernels in the user's cache folder.

    FileNotFoundError where the user has no home.
    """
    if name := os.environ.get(VARIABLE):
        return Path(name)
    if name := os.environ.get("XDG_CACHE_HOME"):
        return Path(name) / "cute_kernels"
    try:
        return Path.home() / ".cache" / "cute_kernels"
    except RuntimeError:
        raise FileNotFoundError(f"this user has no home folder for the kernel cache; set ${VARIABLE}") from None


def check() -> None:
    """OSError where the cache's folder can't be used as it is; FileNotFoundError where it isn't there yet."""
    _check_owner(folder())


def kernels() -> list[Built]:
    """All kernels in the cache, of this version of the sources and of others."""
    return [built for path in sorted(folder().glob("*/")) for built in build.find(path)]


def _check_owner(path: Path) -> None:
    """PermissionError where another user could put code into `path` for this process to run.

    NotADirectoryError where it is no folder.
    """
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {path}; chmod go-w would end that")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock on a file against other processes.

    The lock only saves work, since files are replaced whole: where it can't be had in time, or the file system has
    none, the block runs without it.
    """
    with open(path, "w") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break
        yield


def get(kernel: Kernel, arch: str) -> Built:
    """The kernel's files in the cache, compiled if any is missing or broken. Loads nothing, and needs no GPU.

    OSError where the cache can't be used; PermissionError where that is because others could write to it.
    """
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    check()
    where = folder() / fingerprint(kernel)
    built = Built(where, kernel.symbol(), arch)
    if where.exists():
        _check_owner(where)
        if built.intact(*build.FILES):
            return built
    where.mkdir(exist_ok=True, mode=0o700)
    with _locked(where / f".{built.symbol}.{arch}.lock"):
        if built.intact(*build.FILES):  # another process made them while this one waited
            return built
        return build.build(kernel, arch, where)


def load(kernel: Kernel, arch: str) -> Callable[..., Any]:
    """The kernel's host function from the cache. Where the disk can't be used: compiled for this process alone."""
    try:
        return get(kernel, arch).load()
    except OSError as error:
        warnings.warn(f"kernels are compiled anew in every process: {error}", RuntimeWarning, stacklevel=2)
    with build.compiler_lock:
        return kernel.compile(arch)
