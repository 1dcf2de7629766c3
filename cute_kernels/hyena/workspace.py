"""Where a block's intermediates lie, all of them fp32 or counted in it.

    constants  what depends on the weights (and the length) alone: operands, the scales of their rows, the filter
    scratch    g and x0, [2, B, D, Lp]

The kernels' host functions find everything there, so that a call makes one allocation, constants before scratch, and no
views. A prepared block is a buffer of constants; then the scratch has a buffer of its own.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_ALIGN = 8  # tokens: rows of [B, D, L] intermediates are padded to a multiple of it
ALIGNMENT = 64  # floats, of every piece
ORDER = 64  # width of the filter's hidden layers that kernels know
FILTER_RECORD, IN_PROJ_RECORD = 4, 8  # floats that go with a row: see filter_weights.py and in_proj.py


def pitch(length: int) -> int:
    return (length + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN


def filter_operand_shape(width: int) -> tuple[int, int]:
    """Of the filter's weights as operands: the rows of its second, third and last layers, and a record for each."""
    return 2 * ORDER + width, ORDER + FILTER_RECORD


@dataclass(frozen=True)
class Constants:
    """The pieces of `constants`; without operands where `parts` is 0."""

    width: int  # D
    inner: int  # d_inner
    dtype: str  # of operands, 16 bits each
    parts: int

    def shapes(self, row: int) -> dict[str, tuple[int, ...]]:
        """The pieces in their order; the filter, whose length varies, is the last."""
        d, m, p = self.width, self.inner, self.parts
        pieces = {}
        if p:
            pieces |= {"in_proj": (p, 3 * d, d), "in_proj_records": (3 * d, IN_PROJ_RECORD)}
            pieces |= {"out_proj": (p, d, d), "fc1": (p, m, d), "fc2": (p, d, m)}
            pieces |= {"out_proj_scale": (d,), "fc1_scale": (m,), "fc2_scale": (d,), "fc1_norm": (m,)}
            pieces |= {"filter": filter_operand_shape(d)}
        return {**pieces, "k": (d, row)}

    def offsets(self) -> dict[str, int]:
        """Floats before each piece."""
        offsets, end = {}, 0
        for name, shape in self.shapes(0).items():
            offsets[name] = end
            floats = math.prod(shape) // (2 if len(shape) == 3 else 1)
            end += (floats + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return offsets

    def size(self, length: int) -> int:
        """Floats of a buffer for a filter of `length` taps."""
        return self.offsets()["k"] + self.width * pitch(length)

    def views(self, buffer: Tensor, length: int) -> dict[str, Tensor]:
        """The pieces by name, sharing the buffer's memory."""
        halves = buffer.view(getattr(torch, self.dtype)) if self.parts else None
        views = {}
        offsets = self.offsets()
        for name, shape in self.shapes(pitch(length)).items():
            strides = tuple(itertools.accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1]
            if len(shape) == 3:
                views[name] = halves.as_strided(shape, strides, 2 * offsets[name])
            else:
                views[name] = buffer.as_strided(shape, strides, offsets[name])
        return views
