"""Every stage's kernel, compiled and run on the PTX machine, against the oracle's intermediates."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Filter
from reference import hyena, hyena_inputs

from .cases import poisoned, rel_l2, tensors

pytest.importorskip("cutlass")
machine = pytest.importorskip("reference.ptx.machine")


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("layout", ["reshape", "transpose"])
@pytest.mark.parametrize("length, tile, split", [(1, 16, 1), (70, 16, 2), (131, 32, 1), (131, 8, 2)])
def test_filter(kind, layout, length, tile, split):
    inputs = hyena_inputs.SETS[kind](1, length, width=128, inner=128)
    kernel = Filter(128, 5, layout, True, False, tile, split)
    with machine.ptx_machine("sm_90a"):
        k = stages.hyena_filter(tensors(inputs), kernel, length, length, 0.05, out=poisoned(128, stages.pitch(length)))
    assert rel_l2(k[:, :length], hyena.hyena_filter(inputs, length, 0.05, layout)["k"]) < 3e-6
    assert torch.isnan(k[:, length:]).all()


def test_filter_of_a_trained_model():
    """Stored positions, another length to normalise by, no bias, five bands."""
    inputs = hyena_inputs.stress(1, 40, width=64, inner=128, emb_dim=11)
    options = {"filter_layout": "transpose", "bias_in_filter": False, "norm_len": 90}
    w = tensors(inputs)
    z = np.random.default_rng(3).standard_normal((45, 11)).astype(np.float32)
    with machine.ptx_machine("sm_90a"):
        made = stages.hyena_filter(w, Filter(64, 11, "transpose", False, False), 40, 90, 0.05)
        stored = stages.hyena_filter(w, Filter(64, 11, "transpose", False, True), 40, 90, 0.05, torch.from_numpy(z))
    assert rel_l2(made[:, :40], hyena.hyena_filter(inputs, 40, 0.05, **options)["k"]) < 3e-6
    assert rel_l2(stored[:, :40], hyena.hyena_filter(inputs, 40, 0.05, **options, z=z)["k"]) < 3e-6
