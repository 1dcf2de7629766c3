"""What the segsum kernel is specialised on: sizes, dtypes, and the tiles chosen from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.runtime.kernel import Kernel

CHUNK_SIZES = (64, 128, 256)
MAX_D_STATE = 256
MAX_FUSED_HEADS = 32  # above, each block's scan of all its heads would cost more than the block's own output
MAX_GROUPS_IN_TILE = 8


@dataclass(frozen=True)
class SegsumConfig:
    """Tiles of one launch.

    A *products* task writes G and M for ``tile_i`` rows, ``tile_j`` columns and ``head_tile`` heads; a *decays* task
    writes ``rows_l`` rows of L for one head. ``fused_scan``: a products task sums its own decays; otherwise a first
    kernel writes the sums to a workspace.
    """

    tile_i: int
    tile_j: int
    head_tile: int
    rows_l: int
    stages: int
    fused_scan: bool

    @classmethod
    def for_shape(cls, chunk_size: int, num_heads: int, n_groups: int, d_state: int) -> SegsumConfig:
        groups = max(d for d in range(1, MAX_GROUPS_IN_TILE + 1) if n_groups % d == 0)
        head_tile = num_heads // n_groups * groups
        tile_j = min(chunk_size, 128)
        row_bytes = 4 * tile_j * head_tile  # of G and M together
        tile_i = 8
        while tile_i < 64 and tile_i * row_bytes < 128 * 1024 and 2 * tile_i * tile_j * groups * 4 <= 32 * 1024:
            tile_i *= 2
        k_tiles = groups * (d_state // k_tile(d_state))
        return cls(tile_i, tile_j, head_tile, 64, min(3, k_tiles), head_tile <= MAX_FUSED_HEADS)


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
    rows_l: int
    stages: int
    fused_scan: bool

    def compile(self, arch: str) -> Any:
        from cute_kernels.mamba.segsum_kernel import compile_segsum

        return compile_segsum(self, arch)
