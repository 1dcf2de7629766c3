"""Which tiles are chosen, for any shape that the operator takes."""

import pytest
import torch

from cute_kernels.mamba.segsum import CHUNK_SIZES, D_STATES, SegsumProblem, kernel
from cute_kernels.mamba.segsum_config import (
    MAX_GROUPS_IN_TASK,
    MAX_HEADS_OF_GROUPS,
    MOST_IN_ONE_LAUNCH,
    MOST_PER_GROUP,
    SHARED_BYTES,
    SegsumConfig,
    k_tile,
)
from cute_kernels.runtime import cache

SHAPES = [(1, 1), (3, 1), (16, 1), (16, 4), (65, 5), (65, 65), (128, 8), (96, 12), (48, 1), (64, 64), (200, 8)]


@pytest.mark.parametrize("num_chunks", [1, 8, 10_000])
@pytest.mark.parametrize("d_state", D_STATES)
@pytest.mark.parametrize(("num_heads", "n_groups"), SHAPES)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_tiles_cover_the_chunk(chunk_size, num_heads, n_groups, d_state, num_chunks):
    config = SegsumConfig.for_shape(chunk_size, num_heads, n_groups, d_state, num_chunks, sm_count=132)
    heads_per_group = num_heads // n_groups
    assert chunk_size % config.tile_i == 0 and chunk_size % config.tile_j == 0
    assert num_heads % config.head_tile == 0 and config.head_tile % heads_per_group == 0
    assert config.head_tile // heads_per_group <= MAX_GROUPS_IN_TASK
    assert config.head_tile <= max(heads_per_group, MAX_HEADS_OF_GROUPS)
    assert config.tile_i in (8, 16)  # the rows of one block of columns of M at most
    assert config.cluster == 1 or (config.cluster == chunk_size // config.tile_j and num_heads % config.cluster == 0)
    if config.cluster > 1:
        assert config.shared_bytes(chunk_size, n_groups, d_state) <= SHARED_BYTES
    assert config.tile_i == 16 or k_tile(d_state) == 64  # whole swizzle atoms


@pytest.mark.parametrize(
    ("d_state", "expected"), [(16, 16), (48, 16), (32, 32), (96, 32), (64, 64), (192, 64), (256, 64)]
)
def test_widest_swizzle(d_state, expected):
    assert k_tile(d_state) == expected


def test_few_chunks_take_one_launch():
    for per_group, most in ((False, MOST_IN_ONE_LAUNCH), (True, MOST_PER_GROUP)):
        configs = [SegsumConfig.for_shape(256, 16, 1, 256, n, 132, per_group) for n in range(1, 65)]
        assert [config.cluster > 1 for config in configs] == [n <= most for n in range(1, 65)]
    assert SegsumConfig.for_shape(256, 3, 1, 256, 1, sm_count=132).cluster == 1  # heads that no cluster divides
    assert SegsumConfig.for_shape(64, 16, 1, 256, 1, sm_count=132).cluster == 1  # columns of a single piece


def test_then_few_chunks_take_small_tiles():
    few, many = (SegsumConfig.for_shape(256, 15, 1, 256, n, sm_count=132) for n in (1, 64))
    assert few.tile_i < many.tile_i


@pytest.mark.parametrize(("num_chunks", "num_heads", "n_groups"), [(1, 16, 1), (2, 16, 1), (4, 8, 4)])
def test_shared_memory_is_counted(num_chunks, num_heads, n_groups):
    problem = SegsumProblem(256, num_heads, n_groups, 64, *[torch.bfloat16] * 3, None, "per_head")
    key = kernel(problem, num_chunks, 132)
    (launch,) = cache.get(key, "sm_90a").read_metadata()["launches"]
    config = SegsumConfig.for_shape(256, num_heads, n_groups, 64, num_chunks, 132)
    assert 0 <= config.shared_bytes(256, n_groups, 64) - launch["dynamic_shared"] <= 4096
