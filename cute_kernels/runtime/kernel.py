"""What a kernel is to the runtime: a frozen dataclass of compile-time facts that can compile itself."""

from __future__ import annotations

import contextvars
import dataclasses
import hashlib
import shlex
from typing import Any, ClassVar

from cute_kernels.runtime import arch as arch_

_SCALARS = (str, int, bool, float)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in _SCALARS


class Kernel:
    """Base of every kernel specialisation: a frozen dataclass whose fields are all that changes its machine code.

    Fields are str, int, bool, float, or tuples of these, so that two processes agree on a kernel's name, and so that
    nothing that varies from call to call (a tensor, a device, a length) can cause a new compile.
    """

    operator: ClassVar[str]  # a C identifier: the public operator's name
    archs: ClassVar[tuple[str, ...]] = arch_.NAMES  # that it compiles for

    def symbol(self) -> str:
        """The exported function's name: unique to these fields, because many kernels live in one process."""
        fields = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _is_plain(value):
                raise TypeError(
                    f"{type(self).__name__}.{field.name} is {type(value).__name__} {value!r}: "
                    "a kernel's fields must be str, int, bool, float, or tuples of these"
                )
            fields.append(f"{field.name}={value!r}")
        text = f"{type(self).__module__}.{type(self).__qualname__}({', '.join(fields)})"
        return f"{self.operator}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def compile(self, arch: str) -> Any:
        """Returns what `cute.compile(..., options=compile_options(arch))` returns. Imports cutlass inside.

        The host function must take its tensors, ints and floats positionally, then the environment's stream.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to compile itself")


dump_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("cute_kernels.dump_folder", default=None)
line_info: contextvars.ContextVar[bool] = contextvars.ContextVar("cute_kernels.line_info", default=False)


def compile_options(arch: str) -> str:
    """The options of every `cute.compile`: calls through TVM-FFI, machine code for `arch`.

    While `build` runs they also keep PTX and cubin, which the compiler passes on through files in `dump_folder`.
    Where `line_info` is set, both say which Python line each instruction comes from.
    """
    options = f"--enable-tvm-ffi --gpu-arch={arch}" + " --generate-line-info" * line_info.get()
    if folder := dump_folder.get():
        options += f" --keep-ptx --keep-cubin --dump-dir={shlex.quote(folder)}"
    return options
