"""Which tiles are chosen, for any shape that the operator takes."""

import pytest

from cute_kernels.mamba.segsum import CHUNK_SIZES, D_STATES
from cute_kernels.mamba.segsum_config import MAX_GROUPS_IN_TASK, SegsumConfig, k_tile

SHAPES = [(1, 1), (3, 1), (16, 1), (16, 4), (65, 5), (65, 65), (128, 8), (96, 12), (48, 1), (64, 64)]


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
    assert config.tile_i in (8, 16)  # the rows of one block of columns of M at most
    assert config.tile_i == 16 or k_tile(d_state) == 64  # whole swizzle atoms


@pytest.mark.parametrize(
    ("d_state", "expected"), [(16, 16), (48, 16), (32, 32), (96, 32), (64, 64), (192, 64), (256, 64)]
)
def test_widest_swizzle(d_state, expected):
    assert k_tile(d_state) == expected


def test_few_chunks_take_small_tiles():
    few, many = (SegsumConfig.for_shape(256, 16, 1, 256, n, sm_count=132) for n in (1, 64))
    assert few.tile_i < many.tile_i
