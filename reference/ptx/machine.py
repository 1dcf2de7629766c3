"""`ptx_machine`: the public operators with the machine in the GPU's place.

with ptx_machine("sm_100a") as machine:
    out = cute_kernels.mamba_segsum(dt, A_log, B, C)      # CPU tensors
machine.reports                                           # one per launch
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cute_kernels.runtime import backend, build, cache
from cute_kernels.runtime.kernel import Kernel, line_info

from .launch import GlobalMemory
from .parser import parse
from .report import MachineFault, Report
from .run import parse_cached, run_object

SM_COUNTS = {"sm_90a": 132, "sm_100a": 148}


class PtxMachine(backend.Backend):
    """A launch backend that interprets the kernels' PTX. Every CPU tensor counts as one on its device."""

    def __init__(self, arch: str, sm_count: int | None, check: bool, options: dict[str, Any]):
        super().__init__()
        if arch not in SM_COUNTS:
            raise ValueError(f"arch is {arch!r}, but the machine knows {', '.join(SM_COUNTS)}")
        self._arch, self._sms, self._check, self._options = arch, sm_count or SM_COUNTS[arch], check, options
        self.reports: list[Report] = []
        self.empty = EmptyTensors()

    def handles(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def arch(self, device: torch.device) -> str:
        return self._arch

    def sm_count(self, device: torch.device) -> int:
        return self._sms

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def function(self, kernel: Kernel, device: torch.device) -> Callable[..., Any]:
        return functools.partial(self._run, kernel)

    def _run(self, kernel: Kernel, *args: Any) -> None:
        object_path, symbol, ptx = _built(kernel, self._arch)
        memory = GlobalMemory()
        for a in args:
            known = self.empty.written(a) if isinstance(a, torch.Tensor) else None
            if known is not None and all(start != known[0] for start, _, _ in memory.ranges):  # views share one
                memory.ranges.append(known)
        reports = run_object(
            object_path, symbol, ptx, list(args), arch=self._arch, memory=memory, check=False, **self._options
        )
        self.reports.extend(reports)
        if any(r.findings for r in reports):
            name_sources(kernel, self._arch, ptx)
            if self._check:
                raise MachineFault(reports)


@functools.cache
def _built(kernel: Kernel, arch: str) -> tuple[pathlib.Path, str, str]:
    built = cache.get(kernel, arch)
    return built.object, built.symbol, built.ptx.read_text()


@functools.cache
def name_sources(kernel: Kernel, arch: str, ptx: str) -> None:
    """Tells the PTX's instructions their Python lines: the kernel is compiled once more, with line information."""
    token = line_info.set(True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            named = parse(build.build(kernel, arch, pathlib.Path(folder)).ptx.read_text())
    finally:
        line_info.reset(token)
    for name, k in parse_cached(ptx).kernels.items():
        for ours, theirs in zip(k.instructions, named.kernels[name].instructions, strict=True):
            ours.source = theirs.source


def _aligned_storage(size: int, alignment: int = 512) -> torch.UntypedStorage:
    """Memory full of 0xFF, aligned as CUDA's allocator does, so that sectors and lines are counted as on a GPU."""
    raw = np.full(size + alignment, 0xFF, np.uint8)
    start = -raw.ctypes.data % alignment
    return torch.frombuffer(raw[start : start + size], dtype=torch.uint8).untyped_storage()


class EmptyTensors:
    """Knows which tensors torch made empty, so that a kernel that reads them before it writes them is found."""

    def __init__(self):
        self._known: dict[int, tuple[weakref.ref, int, tuple]] = {}

    def make(self, original: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if tensor.device.type == "cpu" and tensor.numel() and not kwargs.get("pin_memory"):
            storage = _aligned_storage(tensor.untyped_storage().nbytes())
            with torch.no_grad():
                tensor.set_(storage, 0, tensor.shape, tensor.stride())
            entry = (storage.data_ptr(), storage.nbytes(), np.zeros(storage.nbytes(), np.uint8))
            self._known[storage.data_ptr()] = (weakref.ref(tensor), tensor._version, entry)
        return tensor

    def written(self, tensor: torch.Tensor) -> tuple | None:
        """The memory range with its map of written bytes; None where all of it counts as written."""
        reference, version, entry = self._known.get(tensor.untyped_storage().data_ptr(), (None, 0, None))
        owner = reference() if reference else None
        return entry if owner is not None and owner._version == version else None


@contextlib.contextmanager
def ptx_machine(arch: str, *, sm_count: int | None = None, check: bool = True, **options: Any) -> Iterator[PtxMachine]:
    """Runs every operator inside the `with` block on the machine. `options`: see launch.Options.

    While it is open, `torch.empty` and `torch.empty_like` hand out memory that reads as NaN and that the kernels must
    write before they read.
    """
    machine = PtxMachine(arch, sm_count, check, options)
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    for name, original in originals.items():
        setattr(torch, name, functools.partial(machine.empty.make, original))
    try:
        with backend.use(machine):
            yield machine
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
