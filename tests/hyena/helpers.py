"""What the tests of the Hyena operators share."""

from __future__ import annotations

import numpy as np
import torch

import cute_kernels
from reference import hyena_inputs

SMALL = {"width": 64, "inner": 128}


def tensors(inputs, device="cpu"):
    """x and the weights by name."""
    w = {name: torch.from_numpy(value).to(device) for name, value in inputs.items()}
    return w.pop("hidden_states"), w


def make(kind="stress", batch=2, length=30, device="cpu", options=None, **dims):
    """x, params and the arrays they are made from."""
    inputs = hyena_inputs.SETS[kind](batch, length, **{**SMALL, **dims})
    x, w = tensors(inputs, device)
    return x, cute_kernels.HyenaBlockParams(**w, **(options or {})), inputs


def rel_l2(got, want):
    got = got.detach().cpu().numpy().astype(np.float64) if isinstance(got, torch.Tensor) else got
    return np.linalg.norm(got - want) / np.linalg.norm(want)
