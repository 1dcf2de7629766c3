"""New tensors of known kinds, made in less time than by torch.empty, which parses a shape, a type and a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

# What compiled graphs allocate with: past the dispatcher, half the time of empty_like. On the current device alone.
empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def maker(
    device: torch.device,
    kinds: Iterable[tuple[Sequence[int], torch.dtype]],  # shape and type of each tensor
) -> Callable[[], list[Tensor]]:
    """A function that makes new contiguous tensors of these kinds. Not for subclasses, nor under a dispatch mode."""
    kinds = [(tuple(shape), dtype) for shape, dtype in kinds]
    # empty_like reads their metadata; each has the memory of one element.
    templates = [
        torch.empty(shape if 0 in shape else (), dtype=dtype, device=device).expand(shape) for shape, dtype in kinds
    ]

    def make() -> list[Tensor]:
        return [torch.empty_like(t) for t in templates]

    if device.type != "cuda" or empty_strided is None or _current_device is None:
        return make
    index = device.index
    arguments = [(shape, _strides(shape), dtype) for shape, dtype in kinds]

    def make_here() -> list[Tensor]:
        return [*itertools.starmap(empty_strided, arguments)] if _current_device() == index else make()

    return make_here


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    sizes = (max(size, 1) for size in shape[:0:-1])
    return tuple(itertools.accumulate(sizes, lambda a, b: a * b, initial=1))[::-1] if shape else ()
