"""Several tensors in one buffer."""

import torch

from cute_kernels.hyena.workspace import ALIGNMENT, Pieces


def test_pieces_share_a_buffer_and_nothing_else():
    pieces = Pieces(
        {
            "a": ((3, 5), torch.float32),
            "b": ((2, 3, 4), torch.float16),
            "none": ((0, 4), torch.float32),
            "c": ((7,), torch.float32),
        }
    )
    buffer = pieces.empty(torch.device("cpu"))
    views = pieces.views(buffer)
    assert [t.shape for t in views.values()] == [(3, 5), (2, 3, 4), (0, 4), (7,)]
    for number, t in enumerate(views.values()):
        assert t.is_contiguous()
        assert (t.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 or t.numel() == 0
        t.fill_(number)
    for number, t in enumerate(pieces.views(buffer).values()):
        assert (t == number).all()
    assert buffer.numel() == pieces.nbytes == 3 * ALIGNMENT
