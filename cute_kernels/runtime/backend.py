"""The one way from an operator to a launch. Replaceable, so that the same operators can run on something else."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import artifacts, cache
from cute_kernels.runtime.kernel import Kernel


class Backend:
    """Runs kernels on the GPU. Another backend subclasses it and answers the same questions."""

    def __init__(self) -> None:
        self._functions: dict[tuple[Kernel, torch.device], Callable[..., Any]] = {}
        self._loaded: dict[tuple[str, str], Callable[..., Any]] = {}  # by symbol and architecture: shared by devices
        self._lock = threading.RLock()

    def handles(self, tensor: torch.Tensor) -> bool:
        """Whether kernels run on this tensor; where not, the operator computes in plain PyTorch."""
        return tensor.is_cuda

    def arch(self, device: torch.device) -> str:
        """ "sm_90a", "sm_100a" or "sm_103a". NotImplementedError for any other device."""
        return arch_.of_device(_index(device))

    def sm_count(self, device: torch.device) -> int:
        """Streaming multiprocessors of the device."""
        return arch_.sm_count(_index(device))

    def held(self, tensor: torch.Tensor) -> Any:
        """What `function`s take in place of a tensor that many calls are given: it was converted before.

        It has the tensor's address of now, so it must be made again where that changes.
        """
        import tvm_ffi

        return tvm_ffi.from_dlpack(tensor)

    def function(self, kernel: Kernel, device: torch.device) -> Callable[..., Any]:
        """The kernel's host function for `device`: from memory, or artifacts, or the disk cache, or the compiler.

        It takes raw tensors, ints and floats positionally, and launches on torch's current stream of their device.
        RuntimeError while a CUDA graph is being captured and the kernel isn't in memory yet.
        """
        function = self._functions.get((kernel, device))
        return self._find(kernel, device) if function is None else function

    def _find(self, kernel: Kernel, device: torch.device) -> Callable[..., Any]:
        arch = self.arch(device)
        with self._lock:
            name = (kernel.symbol(), arch)
            if name not in self._loaded:
                if _capturing(device):
                    raise RuntimeError(
                        f"{kernel.operator} is not loaded and can't be while a CUDA graph is being captured: "
                        f'call cute_kernels.warmup("{kernel.operator}", ...) before'
                    )
                self._loaded[name] = artifacts.load(kernel, arch) or cache.load(kernel, arch)
            return self._functions.setdefault((kernel, device), self._loaded[name])


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise NotImplementedError(
            f"kernels run on CUDA devices of architecture {', '.join(arch_.NAMES)}, not on {device}"
        )
    return torch.cuda.current_device() if device.index is None else device.index


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


_gpu = Backend()
_current: contextvars.ContextVar[Backend] = contextvars.ContextVar("cute_kernels.backend", default=_gpu)


def current() -> Backend:
    """The backend that launches go through here: the GPU, or what `use` put in its place."""
    return _current.get()


@contextlib.contextmanager
def use(backend: Backend) -> Iterator[Backend]:
    """Replaces the backend inside a `with` block, for this thread (and task) alone."""
    token = _current.set(backend)
    try:
        yield backend
    finally:
        _current.reset(token)
