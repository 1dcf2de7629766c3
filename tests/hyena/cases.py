"""What tests of the Hyena stages share: inputs as tensors, poisoned outputs, errors against the oracle."""

import numpy as np
import torch

from cute_kernels.hyena import stages


def rel_l2(got, want):
    return np.linalg.norm(got.numpy().astype(np.float64) - want) / np.linalg.norm(want)


def tensors(inputs):
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


def poisoned(*shape):
    return torch.full(shape, float("nan"))


def padded(p):
    """[B, D, L] float64 to the padded fp32 rows that kernels exchange; the padding is poison."""
    out = poisoned(*p.shape[:2], stages.pitch(p.shape[2]))
    out[..., : p.shape[2]] = torch.from_numpy(p)
    return out
