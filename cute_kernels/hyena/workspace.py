"""Several tensors in one allocation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, as cudaMalloc's


class Pieces:
    """Where named tensors lie in a buffer of bytes."""

    def __init__(self, pieces: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        self._pieces = {}
        offset = 0
        for name, (shape, dtype) in pieces.items():
            strides = tuple(itertools.accumulate((*shape[:0:-1],), lambda a, b: a * b, initial=1))[::-1]
            self._pieces[name] = (shape, strides, offset // dtype.itemsize, dtype)
            size = math.prod(shape) * dtype.itemsize
            offset += (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        self.nbytes = offset

    def empty(self, device: torch.device) -> Tensor:
        """A new buffer: [nbytes] uint8."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors, which share the buffer's memory."""
        typed = {dtype: buffer.view(dtype) for _, _, _, dtype in self._pieces.values()}
        return {
            name: typed[dtype].as_strided(shape, strides, offset)
            for name, (shape, strides, offset, dtype) in self._pieces.items()
        }
