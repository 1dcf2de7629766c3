"""Builds the C core with gcc on first use; the library is kept under a name made of the sources' hash."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

_HERE = pathlib.Path(__file__).parent
_FLAGS = [
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-frounding-math",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-std=gnu17",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-misleading-indentation",
    "-Wno-sign-compare",
]


def cache_folder() -> pathlib.Path:
    folder = pathlib.Path(
        os.environ.get("PTX_MACHINE_CACHE", pathlib.Path(tempfile.gettempdir()) / f"ptx-machine-{os.getuid()}")
    )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compiler() -> str:
    """$CC, gcc or whatever C compiler there is."""
    for name in filter(None, (os.environ.get("CC"), "gcc", "cc", "clang")):
        if shutil.which(name):
            return name
    raise FileNotFoundError("the PTX machine needs a C compiler: install gcc, or set CC")


def build(sources: list[pathlib.Path], flags: list[str], stem: str, libraries: list[str] = ()) -> pathlib.Path:
    """Compiles and links once per content; safe when several processes start at the same time."""
    digest = hashlib.sha256()
    for s in sources:
        digest.update(s.read_bytes())
    digest.update(repr((flags, libraries)).encode())
    if "-march=native" in flags:
        flags_line = next(
            (s for s in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if s.startswith("flags")), ""
        )
        digest.update(flags_line.encode())
    out = cache_folder() / f"{stem}-{digest.hexdigest()[:20]}.so"
    if not out.exists():
        temporary = out.with_suffix(f".{os.getpid()}.tmp")
        inputs = [str(s) for s in sources if s.suffix != ".h"]
        done = subprocess.run(
            [_compiler(), *flags, "-o", str(temporary), *inputs, *libraries], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"the C compiler failed on {', '.join(s.name for s in sources)}:\n{done.stderr}")
        os.replace(temporary, out)
    return out


class Core:
    def __init__(self):
        sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
        self.library = ctypes.CDLL(str(build(sources, _FLAGS, "core", ["-lm"])))

    def handler(self, op: str) -> int:
        return ctypes.cast(getattr(self.library, f"op_{op}"), ctypes.c_void_p).value


@functools.cache
def core() -> Core:
    return Core()
