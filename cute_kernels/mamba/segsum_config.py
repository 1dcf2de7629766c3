"""What the segsum kernel is specialised on: sizes, dtypes, and the tiles chosen from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.runtime.kernel import Kernel

MAX_GROUPS_IN_TASK = 8
PIECE = 64  # columns of one product
BLOCK = 16  # neighbouring columns whose elements of L and M go through the same row, whatever the tiles: the last


@dataclass(frozen=True)
class SegsumConfig:
    """One block's share of a chunk, and its threads.

    A block writes G and M for ``tile_i`` rows, ``tile_j`` columns and ``head_tile`` heads, and as large a part of L.
    """

    tile_i: int
    tile_j: int
    head_tile: int
    threads: int
    cluster: int = 1  # blocks that share the scan; 1: a launch before makes it

    @classmethod
    def for_shape(
        cls, chunk_size: int, num_heads: int, n_groups: int, d_state: int, num_chunks: int, sm_count: int
    ) -> SegsumConfig:
        """Smaller tiles where there are few chunks, so that every SM has a block, or many heads."""
        groups = max(d for d in range(1, MAX_GROUPS_IN_TASK + 1) if n_groups % d == 0)
        head_tile = num_heads // n_groups * groups
        blocks = chunk_size // 64 * (chunk_size // 16) * (num_heads // head_tile) * num_chunks
        small = blocks < sm_count or head_tile > 64 or groups > 4
        # 8 rows of less than 128 bytes are no whole number of the tensor copy's swizzle atoms
        tile_i = 8 if small and k_tile(d_state) == 64 else 16
        return cls(tile_i, 64, head_tile, 256)


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
    tile_i: int
    tile_j: int
    head_tile: int
    threads: int
    cluster: int

    def compile(self, arch: str) -> Any:
        from cute_kernels.mamba.segsum_kernel import compile_segsum

        return compile_segsum(self, arch)
