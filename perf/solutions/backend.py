"""The way to a launch in a bundle: kernels are compiled at their first call and kept. Nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_compiled: dict[tuple[Any, str], Callable[..., Any]] = {}  # by kernel and architecture
_lock = threading.Lock()  # threads that compile at once abort the process


class Backend:
    def arch(self, device: torch.device) -> str:
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}a"

    def sm_count(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def function(self, kernel: Any, device: torch.device) -> Callable[..., Any]:
        """The kernel's host function: takes raw tensors, ints and floats, and makes its descriptors at each call."""
        key = (kernel, self.arch(device))
        with _lock:
            if key not in _compiled:
                _compiled[key] = kernel.compile(key[1])
            return _compiled[key]


_backend = Backend()


def current() -> Backend:
    return _backend
