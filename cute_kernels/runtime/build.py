"""Compiles one kernel for one architecture into files: library, object, PTX, cubin, metadata."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels.runtime import toolchain
from cute_kernels.runtime.fingerprint import fingerprint, sources
from cute_kernels.runtime.kernel import Kernel, dump_folder

# Threads that trace at once abort the process (nvidia-cutlass-dsl 4.8.1); compile in parallel with processes.
compiler_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Built:
    """The files of one compiled kernel, side by side in one folder."""

    folder: Path
    symbol: str
    arch: str

    def path(self, suffix: str) -> Path:
        """One of the files: "so", "o", "ptx", "cubin" or "json"."""
        return self.folder / f"{self.symbol}.{self.arch}.{suffix}"

    @property
    def so(self) -> Path:
        return self.path("so")

    @property
    def object(self) -> Path:
        return self.path("o")

    @property
    def ptx(self) -> Path:
        return self.path("ptx")

    @property
    def cubin(self) -> Path:
        return self.path("cubin")

    @property
    def metadata(self) -> Path:
        return self.path("json")

    def read_metadata(self) -> dict[str, Any]:
        """The metadata. OSError or ValueError where the file is missing or broken."""
        data = json.loads(self.metadata.read_text())
        if not isinstance(data, dict):
            raise ValueError(f"{self.metadata} does not hold a JSON object")
        return data

    def intact(self, *suffixes: str) -> bool:
        """Whether the named files are there, whole, and those that the metadata speaks of.

        Asked before every load: the loader dies of a bus error on a truncated library.
        """
        try:
            hashes = self.read_metadata()["sha256"]
            return all(hashes[suffix] == _sha256(self.path(suffix)) for suffix in suffixes)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def load(self) -> Callable[..., Any]:
        """The kernel's host function. It takes raw tensors, ints and floats positionally."""
        import tvm_ffi

        toolchain.preload()
        return tvm_ffi.load_module(str(self.so))[self.symbol]


FILES = ("o", "ptx", "cubin", "so")  # what `build` writes beside the metadata


def build(kernel: Kernel, arch: str, folder: Path) -> Built:
    """Compiles `kernel` for `arch` into `folder`, over whatever an earlier build left there. Needs no GPU.

    The files appear whole, one by one, the metadata last: a reader for whom they are `intact` has one build's set.
    OSError: there is no linker, or the folder can't be written. RuntimeError: the toolchain can't compile for `arch`.
    """
    if linker() is None:  # before the compiler spends its seconds
        raise FileNotFoundError("no C compiler was found to link kernels with: install gcc, or set CC")
    built = Built(Path(folder), kernel.symbol(), arch)
    built.folder.mkdir(parents=True, exist_ok=True)
    with compiler_lock, tempfile.TemporaryDirectory(dir=built.folder, prefix=".build-") as work:
        made = Built(Path(work), built.symbol, arch)
        compiled = _compile(kernel, arch)
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
        if not isinstance(ptx, str) or not isinstance(cubin, bytes):  # so a toolchain that doesn't know `arch` ends
            raise RuntimeError(f"{kernel} was not compiled to machine code for {arch} by this toolchain")
        compiled.export_to_c(object_file_path=str(made.object), function_name=built.symbol)
        _link(made.object, made.so)
        made.ptx.write_text(ptx)
        made.cubin.write_bytes(cubin)
        metadata = {
            "operator": kernel.operator,
            "symbol": built.symbol,
            "kernel": repr(kernel),
            "arch": arch,
            "launches": _launches(compiled),
            "sources": sources(kernel),
            "fingerprint": fingerprint(kernel),
            "cuda_major": toolchain.cuda_major(),
            "versions": toolchain.versions(),
            "sha256": {suffix: _sha256(made.path(suffix)) for suffix in FILES},
        }
        made.metadata.write_text(json.dumps(metadata, indent=1) + "\n")
        for suffix in (*FILES, "json"):
            os.replace(made.path(suffix), built.path(suffix))
    return built


def find(folder: Path) -> list[Built]:
    """The kernels in a folder, whole or not, by name."""
    names = (path.stem.rpartition(".") for path in sorted(Path(folder).glob("*.json")))
    return [Built(Path(folder), symbol, arch) for symbol, _, arch in names]


def _compile(kernel: Kernel, arch: str) -> Any:
    # Not in the kernel's folder: the compiler's own option parser fails on quotes in a path.
    with tempfile.TemporaryDirectory(prefix="cute_kernels-") as dump:
        token = dump_folder.set(dump)
        try:
            return kernel.compile(arch)
        finally:
            dump_folder.reset(token)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def linker() -> str | None:
    """The C compiler that links kernels, or None where there is none."""
    names = (os.environ.get("CC"), "gcc", "cc", "clang")
    return next((name for name in names if name and shutil.which(name)), None)


def _link(object_file: Path, so: Path) -> None:
    import tvm_ffi.libinfo

    runtime = toolchain.runtime_library()
    if runtime is None:
        raise FileNotFoundError(f"{toolchain.RUNTIME_LIBRARY} was not found: install nvidia-cutlass-dsl[cu13]")
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent
    # The objects are compiled for the large code model: their sections may lie anywhere.
    command = [linker(), "-shared", "-mcmodel=large", "-o", str(so), str(object_file)]
    command += [f"-L{runtime.parent}", "-lcute_dsl_runtime", f"-L{ffi}", "-ltvm_ffi"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"linking {object_file.name} failed: {result.stderr.strip() or result.returncode}")


# The host code's struct cudaLaunchConfig_t, and the third of its fields, the dynamic shared memory.
_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_SHARED = re.compile(
    rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {_CONFIG}\s+llvm\.store (%\w+), \1 :"
)


def _launches(compiled: Any) -> list[dict[str, Any]]:
    """Kernel name and dynamic shared memory (None where it isn't a constant) of each launch in the host code.

    The machine code doesn't say how much shared memory a launch asks for; the compiler's last form of the host
    function does.
    """
    launches = []
    for function in re.split(r"\n  llvm\.func ", str(compiled.ir_module)):
        values = [match[2] for match in _SHARED.finditer(function)]
        kernels = re.findall(r"llvm\.mlir\.addressof @kernels_(\w+) ", function)
        if "llvm.call @_cudaLaunchKernelEx(" not in function or len(values) != len(kernels):
            continue
        for name, value in zip(kernels, values, strict=True):
            constant = re.search(rf"{value} = llvm\.mlir\.constant\((\d+) : i64\)", function)
            launch = {"kernel": name, "dynamic_shared": int(constant[1]) if constant else None}
            if launch not in launches:  # the host function stands there once for each way to call it
                launches.append(launch)
    return launches
