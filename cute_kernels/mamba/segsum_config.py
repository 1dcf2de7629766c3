"""What the segsum kernel is specialised on: sizes, dtypes, and the tiles chosen from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from cute_kernels.runtime.kernel import Kernel

MAX_GROUPS_IN_TASK = 8
MAX_HEADS_OF_GROUPS = 128  # in a task of several groups: what fits in shared memory
PIECE = 64  # columns of one product
SHARED_BYTES = 226 << 10  # of a block
BLOCK = 16  # neighbouring columns whose elements of L and M go through the same row, whatever the tiles: the last
MOST_IN_ONE_LAUNCH = 12  # chunks of 16 heads and 256 steps: beyond, scans that are made once cost less
MOST_PER_GROUP = 16  # and where G is not repeated for every head
MOST_HEADS_IN_ONE_LAUNCH = 16  # more were not measured
ONE_LAUNCH = (  # up to so many of them: rows of a tile, blocks of a cluster, zeros before dt
    (1, 16, 4, True),
    (2, 8, 2, False),
    (3, 16, 4, False),
    (4, 16, 2, False),
    (6, 16, 4, False),  # where two blocks of the next kind would share a few of the SMs
    (MOST_PER_GROUP, 16, 2, False),
    (MOST_PER_GROUP, 16, 4, False),
)
THREADS_IN_ONE_LAUNCH = 512
MOST_OF_GROUPS = 4  # chunks in one launch where there are several groups: a product is taken apart by them


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
    zeros_first: bool = False  # the cluster's blocks write zeros before dt is there

    @classmethod
    def for_shape(
        cls,
        chunk_size: int,
        num_heads: int,
        n_groups: int,
        d_state: int,
        num_chunks: int,
        sm_count: int,
        per_group: bool = False,
    ) -> SegsumConfig:
        """One launch where little is written. Else two, with smaller tiles where there are few chunks, so that every SM
        has a block, or many heads."""
        most = MOST_PER_GROUP if per_group else MOST_IN_ONE_LAUNCH
        # few heads write less for the same set-up
        most *= min(1.0, num_heads * chunk_size / (16 * 256)) ** 0.5
        most = most if n_groups == 1 else min(most, MOST_OF_GROUPS)
        for config in cls._in_one_launch(chunk_size, num_heads, n_groups, d_state, num_chunks, most):
            return config
        heads = num_heads // n_groups
        most = max(1, min(MAX_GROUPS_IN_TASK, MAX_HEADS_OF_GROUPS // heads))
        head_tile = heads * max(d for d in range(1, most + 1) if n_groups % d == 0)
        blocks = chunk_size // 64 * (chunk_size // 16) * (num_heads // head_tile) * num_chunks
        small = blocks < sm_count or head_tile > 64 or head_tile > 4 * heads
        # 8 rows of less than 128 bytes are no whole number of the tensor copy's swizzle atoms
        tile_i = 8 if small and k_tile(d_state) == 64 else 16
        return cls(tile_i, PIECE, head_tile, 256)

    @classmethod
    def _in_one_launch(
        cls, chunk_size: int, num_heads: int, n_groups: int, d_state: int, num_chunks: int, most: float
    ) -> Iterator[SegsumConfig]:
        """Tiles for clusters whose blocks share the scan, the best first: of those that fit."""
        work = num_chunks * chunk_size / 256
        if work > most or num_heads > MOST_HEADS_IN_ONE_LAUNCH or n_groups > MAX_GROUPS_IN_TASK:
            return
        for up_to, tile_i, cluster, zeros_first in ONE_LAUNCH:
            fits = (
                chunk_size // cluster >= PIECE and num_heads % cluster == 0 and (tile_i == 16 or k_tile(d_state) == 64)
            )
            if work <= up_to and fits:
                tile_j = chunk_size // cluster
                config = cls(tile_i, tile_j, num_heads, THREADS_IN_ONE_LAUNCH, cluster, zeros_first)
                if config.shared_bytes(chunk_size, n_groups, d_state) <= SHARED_BYTES:
                    yield config

    def shared_bytes(self, chunk_size: int, groups: int, d_state: int) -> int:
        """Shared memory of a cluster's block: at most so much."""
        own, rows, blocks = self.head_tile // self.cluster, max(self.tile_i, BLOCK), chunk_size // BLOCK
        operands = (1 if groups == 1 else 2) * (PIECE + self.tile_i) * d_state * 2
        floats = own * (chunk_size + 2 * rows + 2 * blocks + 10 + 8 * self.tile_i) + blocks * (own * self.tile_i + 4)
        floats += self.head_tile * (self.tile_j + 4 + BLOCK * self.tile_i + PIECE // 2)
        floats += self.tile_j // BLOCK * (self.head_tile * self.tile_i + 4) + groups * self.tile_i * (PIECE + 4)
        return operands + 4 * floats + 2048


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
    zeros_first: bool

    def compile(self, arch: str) -> Any:
        from cute_kernels.mamba.segsum_kernel import compile_segsum

        return compile_segsum(self, arch)
