"""What a new tensor is made like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def template(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """For empty_like, which takes half the time of torch.empty: that parses a shape, a type and a device.

    It has the metadata over one element.
    """
    return torch.empty(1, dtype=dtype, device=device).expand(shape)
