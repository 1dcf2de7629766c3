"""What a compiled kernel was made from, beyond its own fields: sources and toolchain, as short hashes."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

import cute_kernels
from cute_kernels.runtime import toolchain
from cute_kernels.runtime.kernel import Kernel


@functools.cache
def _hash(path: Path) -> str:
    """Hash of a Python file, or of all of them below a folder, with their names."""
    digest = hashlib.sha256()
    for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        content = source.read_bytes()
        digest.update(f"{source.relative_to(path.parent)}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def sources(kernel: Kernel) -> str:
    """Hash of the Python files of cute_kernels, and of the kernel's own file where that lies elsewhere."""
    package = Path(cute_kernels.__file__).parent
    text = _hash(package)
    file = getattr(sys.modules[type(kernel).__module__], "__file__", None)
    if file and package not in Path(file).parents:
        text += _hash(Path(file))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(kernel: Kernel) -> str:
    """Hash of all but the fields and the architecture that can change the kernel's machine code.

    The sources, the versions of the compiler's distributions and of apache-tvm-ffi, and the compiler's CUDA flavour,
    which follows the driver.
    """
    text = f"{sources(kernel)} {toolchain.versions()} cu{toolchain.cuda_major()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
