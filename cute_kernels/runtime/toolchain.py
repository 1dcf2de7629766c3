"""What is installed: versions, the CUDA flavour of the compiler, its run-time library. Never imports cutlass."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
import sys
from pathlib import Path

_DIST_INFO = re.compile(r"(nvidia_cutlass_dsl\w*|apache_tvm_ffi)-([^-]+)\.dist-info$")
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"


@functools.cache
def versions() -> dict[str, str]:
    """Version of apache-tvm-ffi and of every installed nvidia-cutlass-dsl* distribution, by name.

    Read from the names of the metadata folders: asking importlib for the name of every distribution takes 50 ms.
    """
    found: dict[str, str] = {}
    for entry in sys.path:
        folder = Path(entry or ".")
        for pattern in ("nvidia_cutlass_dsl*.dist-info", "apache_tvm_ffi-*.dist-info"):
            for path in folder.glob(pattern):
                if match := _DIST_INFO.match(path.name):
                    found.setdefault(match[1].replace("_", "-"), match[2])
    return dict(sorted(found.items()))


def version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def driver_version() -> int | None:
    """The CUDA version that the driver supports (13000 for CUDA 13.0), or None without a driver."""
    try:
        from cuda.bindings import driver

        error, number = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError):  # no cuda-python; no libcuda.so
        return None
    return number if error == driver.CUresult.CUDA_SUCCESS else None


@functools.cache
def _packages() -> tuple[Path, ...]:
    """Folders named nvidia_cutlass_dsl on the path (a namespace package: finding it runs none of its code)."""
    return tuple(folder for entry in sys.path if (folder := Path(entry or ".") / "nvidia_cutlass_dsl").is_dir())


@functools.cache
def cuda_major() -> int | None:
    """CUDA major version of the compiler flavour that `import cutlass` picks, or None where none is installed.

    The rule of nvidia-cutlass-dsl 4.6 and later: the newest installed flavour that the driver can run; without a
    driver the newest.
    """
    flavours = sorted(
        int(library.parent.parent.name[2:])
        for package in _packages()
        for library in package.glob(f"cu[0-9]*/lib/{RUNTIME_LIBRARY}")
    )
    driver = driver_version()
    fitting = [major for major in flavours if driver is None or major <= driver // 1000]
    return fitting[-1] if fitting else None


def runtime_library() -> Path | None:
    """The installed run-time library of the compiler's flavour, or None."""
    for package in _packages():
        path = package / f"cu{cuda_major()}" / "lib" / RUNTIME_LIBRARY
        if path.is_file():
            return path
    return None


@functools.cache
def preload() -> None:
    """Loads the libraries that every kernel library names as needed, so that the loader finds them by name.

    No path is baked into a kernel library: an artifact built on one machine runs on another.
    """
    import tvm_ffi  # noqa: F401  loads libtvm_ffi.so

    path = runtime_library() or RUNTIME_LIBRARY  # without the package, the loader's own search path decides
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(
            f"{RUNTIME_LIBRARY} was not found: install nvidia-cutlass-dsl[cu13], "
            f"or put the folder that holds it on LD_LIBRARY_PATH ({error})"
        ) from None
