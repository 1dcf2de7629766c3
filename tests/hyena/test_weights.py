"""The conversion of weights, compiled and run on the PTX machine: the bits of its arithmetic in PyTorch."""

import pytest
import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Precision
from reference import hyena_inputs

from ..covering import parametrize
from .cases import operands, tensors

pytest.importorskip("cutlass")
machine = pytest.importorskip("reference.ptx.machine")


@parametrize(
    {
        "width, inner": [(64, 128), (128, 384), (256, 1024)],
        "precision": Precision.NAMES,
        "arch": ["sm_90a", "sm_100a"],
    },
    together=1,
)
def test_operands(width, inner, precision, arch):
    w = tensors(hyena_inputs.stress(1, 1, width=width, inner=inner))
    w["mlp_fc1_weight"][5] *= 1e-20  # rows of any size
    w["mlp_fc2_weight"][7] *= 1e20
    with machine.ptx_machine(arch):
        made = stages.convert_weights(w, Precision.named(precision))
    want = operands(w, Precision.named(precision))
    for name in ("in_proj", "out_proj", "fc1", "fc2", "out_proj_scale", "fc1_scale", "fc2_scale"):
        assert torch.equal(getattr(made, name), getattr(want, name)), name
    records, wanted = made.in_proj_records, want.in_proj_records
    torch.testing.assert_close(records[:, 1], wanted[:, 1], rtol=1e-5, atol=1e-5)
    assert torch.equal(records[:, [0, 2, 3, 4, 5]], wanted[:, [0, 2, 3, 4, 5]])
    torch.testing.assert_close(made.fc1_norm, want.fc1_norm, rtol=1e-6, atol=0)
