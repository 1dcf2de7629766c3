"""What the segsum kernel is specialised on: sizes, dtypes, and the tiles chosen from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.runtime.kernel import Kernel

CHUNK_SIZES = (64, 128, 256)
MAX_D_STATE = 256
MAX_GROUPS_IN_TASK = 8


@dataclass(frozen=True)
class SegsumConfig:
    """One task's share of a chunk, and the threads that do it.

    A task writes G and M for ``rows`` rows i, in tiles of ``tile_i``, ``tile_j`` columns and ``head_tile`` heads, and as
    large a part of L. Rows of G and M are contiguous over columns and heads; DRAM wants runs of 4 KB and more.
    """

    rows: int
    tile_i: int
    tile_j: int
    head_tile: int
    threads: int
    products_first: bool

    @classmethod
    def for_shape(
        cls, chunk_size: int, num_heads: int, n_groups: int, d_state: int, chunks: int, sm_count: int
    ) -> SegsumConfig:
        """Long runs and few reads of B and C for many chunks; for few, small tasks that fill every SM."""
        groups = max(d for d in range(1, MAX_GROUPS_IN_TASK + 1) if n_groups % d == 0)
        head_tile = num_heads // n_groups * groups
        tile_j = 128 if chunk_size >= 128 and head_tile < 32 else 64
        tile_i = 16
        rows = tile_i if groups > 1 else 64
        tasks = chunk_size // tile_j * (num_heads // head_tile) * chunks
        while rows > tile_i and tasks * (chunk_size // rows) < 2 * sm_count:
            rows //= 2
        return cls(rows, tile_i, tile_j, head_tile, 512, False)


def k_tile(d_state: int) -> int:
    """Columns of B and C in one stage: the widest swizzled row that divides d_state."""
    return math.gcd(d_state, 64)


@dataclass(frozen=True)
class SegsumKernel(Kernel):
    """One specialisation. dtypes by torch's names; ``bias_dtype`` is "none" without dt_bias."""

    operator: ClassVar[str] = "mamba_segsum"

    chunk_size: int
    num_heads: int
    n_groups: int
    d_state: int
    dtype: str
    dt_dtype: str
    A_dtype: str
    bias_dtype: str
    per_group: bool
    rows: int
    tile_i: int
    tile_j: int
    head_tile: int
    threads: int
    products_first: bool

    def compile(self, arch: str) -> Any:
        from cute_kernels.mamba.segsum_kernel import compile_segsum

        return compile_segsum(self, arch)
