"""The kernel of the block's second half, compiled and run on the PTX machine, against the oracle's intermediates."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Finish, Precision
from reference import hyena, hyena_inputs

from ..covering import parametrize
from .cases import operands, padded, poisoned, tensors
from .helpers import rel_l2

# Relative L2 on stress inputs: several times what is seen, and far below what a wrong kernel gives.
LIMITS = {"highest": 5e-7, "high": 6e-4, "medium": 5e-3}
EPS = 1e-5
ARCHS = ("sm_90a", "sm_100a")


def run(inputs, p, kernel, precision, conv_length, arch="sm_90a", **options):
    """The kernel's output [B, L, D], from the gated convolution p [B, D, L]."""
    pytest.importorskip("cutlass")
    machine = pytest.importorskip("reference.ptx.machine")
    w = tensors(inputs)
    out = poisoned(*inputs["hidden_states"].shape)
    converted = operands(w, Precision.named(precision))
    with machine.ptx_machine(arch, **options):
        return stages.finish(padded(p), w["hidden_states"], w, converted, kernel, conv_length, EPS, out)


@parametrize(
    {
        "width, inner, batch, length": [
            (128, 128, 1, 70),  # one chunk for each warpgroup
            (128, 256, 2, 33),
            (128, 384, 1, 64),  # whole tiles; three chunks
            (128, 512, 3, 43),  # tiles that straddle batch rows; two chunks, wide ones with one part
            (256, 1024, 1, 131),  # the last tile has 3 tokens
        ],
        "precision": Precision.NAMES,
        "arch": ARCHS,
    }
)
def test_finish(precision, width, inner, batch, length, arch):
    for made in hyena_inputs.SETS.values():
        inputs = made(batch, length, width=width, inner=inner)
        s = hyena.block(inputs)
        out = run(inputs, s["p"], Finish.for_precision(precision, width, inner), precision, length, arch)
        assert rel_l2(out, s["out"]) < LIMITS[precision]


@parametrize({"width, inner": [(128, 512), (256, 384)], "precision": ["highest", "high"], "arch": ARCHS})
def test_same_bits_under_every_schedule(width, inner, precision, arch):
    inputs = hyena_inputs.stress(1, 70, width=width, inner=inner)
    p, kernel = hyena.block(inputs)["p"], Finish.for_precision(precision, width, inner)
    first = run(inputs, p, kernel, precision, 70, arch)
    for schedule in ("random", "late 0", "late 5", "late 8"):
        assert torch.equal(first, run(inputs, p, kernel, precision, 70, arch, schedule=schedule, seed=3))


def test_finish_beyond_the_operator():
    """Tokens that the long convolution doesn't reach: p counts as zero there, whatever memory holds."""
    inputs = hyena_inputs.stress(2, 50, width=128, inner=128)
    s = hyena.block(inputs, l_max=30)
    out = run(inputs, s["p"], Finish.for_precision("highest", 128, 128), "highest", 30)
    assert rel_l2(out, s["out"]) < LIMITS["highest"]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_finish_of_any_magnitude(scale):
    """p of any size is scaled into the operands' range."""
    inputs = hyena_inputs.stress(1, 8, width=128, inner=128)
    s = hyena.block(inputs)
    scaled = inputs | {"out_proj_weight": inputs["out_proj_weight"] / np.float32(scale)}
    out = run(scaled, s["p"] * scale, Finish.for_precision("high", 128, 128), "high", 8)
    assert rel_l2(out, s["out"]) < LIMITS["high"]


@parametrize({"precision": ["highest", "high"], "arch": ARCHS})
def test_a_row_that_is_not_finite_stays_alone(precision, arch):
    inputs = hyena_inputs.stress(1, 70, width=128, inner=256)
    s, kernel = hyena.block(inputs), Finish.for_precision(precision, 128, 256)
    p = s["p"].copy()
    p[0, 5, 3], p[0, 7, 20], p[0, 7, 40] = np.nan, np.inf, 1e30
    inputs["hidden_states"][0, 66, 9] = np.nan
    out = run(inputs, p, kernel, precision, 70, arch)
    touched = [3, 20, 40, 66]
    others = [t for t in range(70) if t not in touched]
    assert rel_l2(out[:, others], s["out"][:, others]) < LIMITS[precision]
    assert torch.isnan(out[0, [3, 20, 66]]).all() and torch.isfinite(out[0, 40]).all()


def test_rows_of_equal_elements():
    """LayerNorm of a row without variance is its bias: the operand's scale must not depend on the row."""
    inputs = hyena_inputs.stress(1, 8, width=128, inner=128)
    inputs["hidden_states"][0, 2] = 3.0
    inputs["out_proj_weight"][:] = 0.0
    inputs["out_proj_bias"][:] = 0.0
    s = hyena.block(inputs)
    out = run(inputs, s["p"], Finish.for_precision("highest", 128, 128), "highest", 8)
    assert rel_l2(out[0, 2], s["out"][0, 2]) < LIMITS["highest"]


def test_hidden_widths_without_room_for_weights():
    assert Finish.for_precision("highest", 256, 8192).fits
    assert not Finish.for_precision("highest", 256, 16384).fits
    assert Finish.for_precision("high", 256, 8192).fits and not Finish.for_precision("high", 256, 8192).rows_in_shared


@pytest.mark.parametrize("width, inner", [(192, 1024), (256, 192)])
def test_configurations_that_do_not_exist(width, inner):
    with pytest.raises(NotImplementedError, match="must be"):
        Finish("float16", 1, width, inner)
