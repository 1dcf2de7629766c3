"""The block's buffer of constants."""

import pytest
import torch

from cute_kernels.hyena.workspace import ALIGNMENT, Constants, pitch


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_pieces_share_a_buffer_and_nothing_else(parts):
    constants = Constants(64, 192, "float16", parts)
    buffer = torch.empty(constants.size(13))
    views = constants.views(buffer, 13)
    assert list(views)[-1] == "k"
    assert views["k"].shape == (64, pitch(13)) == (64, 16)
    assert len(views) == (11 if parts else 1)
    for number, t in enumerate(views.values()):
        assert t.is_contiguous()
        assert (t.data_ptr() - buffer.data_ptr()) % (4 * ALIGNMENT) == 0
        t.fill_(number)
    for number, t in enumerate(constants.views(buffer, 13).values()):
        assert (t == number).all()
    assert sum(t.nbytes for t in views.values()) == buffer.nbytes  # no holes at these sizes


def test_only_the_filter_depends_on_the_length():
    constants = Constants(64, 64, "bfloat16", 1)
    assert constants.size(100) - constants.size(0) == 64 * 104
    assert constants.views(torch.empty(constants.size(0)), 0)["fc1"].dtype == torch.bfloat16
