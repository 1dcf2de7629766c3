"""Compiles one kernel for one architecture into files: library, object, PTX, cubin, metadata."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels.runtime import toolchain
from cute_kernels.runtime.kernel import Kernel

# Threads that trace at once abort the process (nvidia-cutlass-dsl 4.8.1); compile in parallel with processes.
compiler_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Built:
    """The files of one compiled kernel, side by side in one folder."""

    folder: Path
    symbol: str
    arch: str

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.symbol}.{self.arch}.{suffix}"

    @property
    def so(self) -> Path:
        return self._path("so")

    @property
    def object(self) -> Path:
        return self._path("o")

    @property
    def ptx(self) -> Path:
        return self._path("ptx")

    @property
    def cubin(self) -> Path:
        return self._path("cubin")

    @property
    def metadata(self) -> Path:
        return self._path("json")

    def read_metadata(self) -> dict[str, Any]:
        """The metadata file as a dictionary. OSError or ValueError where it is missing or broken."""
        data = json.loads(self.metadata.read_text())
        if not isinstance(data, dict):
            raise ValueError(f"{self.metadata} does not hold a JSON object")
        return data

    def intact(self) -> bool:
        """Whether the library is there, whole, and the one that the metadata speaks of.

        Asked before every load: the loader dies of a bus error on a truncated library.
        """
        try:
            return self.read_metadata()["sha256"] == _sha256(self.so)
        except (OSError, ValueError, KeyError):
            return False

    def load(self) -> Callable[..., Any]:
        """The kernel's host function. Takes raw tensors, ints and floats positionally."""
        import tvm_ffi

        toolchain.preload()
        return tvm_ffi.load_module(str(self.so))[self.symbol]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _linker() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        if name and shutil.which(name):
            return name
    raise RuntimeError("no C compiler was found to link a kernel with: install gcc, or set CC")


def _link(object_file: Path, so: Path) -> None:
    import tvm_ffi.libinfo

    runtime = toolchain.runtime_library()
    if runtime is None:
        raise RuntimeError(f"{toolchain.RUNTIME_LIBRARY} was not found: install nvidia-cutlass-dsl[cu13]")
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    # The objects are compiled for the large code model: their sections may lie anywhere.
    command = [_linker(), "-shared", "-mcmodel=large", "-o", str(so), str(object_file)]
    command += [f"-L{runtime.parent}", "-lcute_dsl_runtime", f"-L{ffi}", "-ltvm_ffi"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"linking {object_file.name} failed: {result.stderr.strip() or result.returncode}")


def build(kernel: Kernel, arch: str, folder: Path) -> Built:
    """Compiles `kernel` for `arch` into `folder`, over whatever an earlier build left there.

    Needs no GPU. The files appear one by one under their final names, the metadata last: a reader that finds
    `Built.intact()` has a whole set. OSError: the folder can't be written. RuntimeError: compiling or linking failed.
    """
    built = Built(Path(folder), kernel.symbol(), arch)
    built.folder.mkdir(parents=True, exist_ok=True)
    with compiler_lock:
        compiled = kernel.compile(arch)
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
        if not isinstance(ptx, str) or not isinstance(cubin, bytes):  # what a flavour without `arch` leaves there
            raise RuntimeError(f"{kernel} was not compiled to machine code for {arch} by this toolchain")
        temporary = Built(built.folder, f".{built.symbol}.{os.getpid()}.{threading.get_ident()}", arch)
        try:
            compiled.export_to_c(object_file_path=str(temporary.object), function_name=built.symbol)
            _link(temporary.object, temporary.so)
            temporary.ptx.write_text(ptx)
            temporary.cubin.write_bytes(cubin)
            temporary.metadata.write_text(json.dumps(_metadata(kernel, arch, temporary.so), indent=1) + "\n")
            for suffix in ("object", "ptx", "cubin", "so", "metadata"):
                os.replace(getattr(temporary, suffix), getattr(built, suffix))
        finally:
            for suffix in ("object", "ptx", "cubin", "so", "metadata"):
                with contextlib.suppress(OSError):
                    getattr(temporary, suffix).unlink()
    return built


def _metadata(kernel: Kernel, arch: str, so: Path) -> dict[str, Any]:
    return {
        "operator": kernel.operator,
        "symbol": kernel.symbol(),
        "kernel": repr(kernel),
        "arch": arch,
        "cuda_major": toolchain.cuda_major(),
        "versions": toolchain.versions(),
        "sha256": _sha256(so),
    }
