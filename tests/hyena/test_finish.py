"""The kernel of the block's second half, compiled and run on the PTX machine, against the oracle's intermediates."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Finish, Precision
from reference import hyena, hyena_inputs

from ..covering import parametrize
from .cases import operands, padded, poisoned, rel_l2, tensors

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


def kernel_of(precision, width, inner, **config):
    chosen = Precision.named(precision)
    return Finish(chosen.dtype, chosen.parts, width, inner, **config)


@parametrize(
    {
        "width, inner, batch, length, config": [
            (128, 128, 1, 70, {}),  # one chunk for each warpgroup
            (128, 512, 3, 43, {"multicast": 2}),  # tiles that straddle batch rows; two chunks, wide ones with one part
            (128, 256, 2, 33, {"split": 2}),
            (256, 1024, 1, 131, {"split": 4}),  # an odd number of tiles, the last of 3 tokens
            (256, 1024, 1, 65, {"split": 8}),
            (256, 1024, 1, 65, {}),
        ],
        "precision": Precision.NAMES,
        "arch": ARCHS,
    }
)
def test_finish(precision, width, inner, batch, length, config, arch):
    for made in hyena_inputs.SETS.values():
        inputs = made(batch, length, width=width, inner=inner)
        s = hyena.block(inputs)
        out = run(inputs, s["p"], kernel_of(precision, width, inner, **config), precision, length, arch)
        assert rel_l2(out, s["out"]) < LIMITS[precision]


@parametrize({"config": [{}, {"multicast": 2}, {"split": 4}], "precision": ["highest", "high"], "arch": ARCHS})
def test_same_bits_under_every_schedule(precision, config, arch):
    inputs = hyena_inputs.stress(1, 70, width=128, inner=512)
    p, kernel = hyena.block(inputs)["p"], kernel_of(precision, 128, 512, **config)
    first = run(inputs, p, kernel, precision, 70, arch)
    for schedule in ("random", "late 0", "late 5", "late 8"):
        assert torch.equal(first, run(inputs, p, kernel, precision, 70, arch, schedule=schedule, seed=3))


def test_finish_beyond_the_operator():
    """Tokens that the long convolution doesn't reach: p counts as zero there, whatever memory holds."""
    inputs = hyena_inputs.stress(2, 50, width=128, inner=128)
    s = hyena.block(inputs, l_max=30)
    out = run(inputs, s["p"], kernel_of("highest", 128, 128), "highest", 30)
    assert rel_l2(out, s["out"]) < LIMITS["highest"]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_finish_of_any_magnitude(scale):
    """p of any size is scaled into the operands' range."""
    inputs = hyena_inputs.stress(1, 8, width=128, inner=128)
    s = hyena.block(inputs)
    scaled = inputs | {"out_proj_weight": inputs["out_proj_weight"] / np.float32(scale)}
    out = run(scaled, s["p"] * scale, kernel_of("high", 128, 128), "high", 8)
    assert rel_l2(out, s["out"]) < LIMITS["high"]


@parametrize({"config": [{}, {"split": 2}], "precision": ["highest", "high"], "arch": ARCHS})
def test_a_row_that_is_not_finite_stays_alone(precision, config, arch):
    inputs = hyena_inputs.stress(1, 70, width=128, inner=256)
    s, kernel = hyena.block(inputs), kernel_of(precision, 128, 256, **config)
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
    out = run(inputs, s["p"], kernel_of("highest", 128, 128), "highest", 8)
    assert rel_l2(out[0, 2], s["out"][0, 2]) < LIMITS["highest"]


@pytest.mark.parametrize(
    "tokens, split",
    [(1, 8), (131, 8), (512, 8), (960, 8), (1024, 4), (1920, 4), (2048, 2), (4106, 2), (4224, 2), (7976, 1), (8192, 1)],
)
def test_configuration_of_an_h200(tokens, split):
    """As many blocks as run at once: 66 clusters of 2, 30 of 4, 15 of 8."""
    assert Finish.for_shape("high", 256, 1024, tokens, 132).split == split


def test_hidden_widths_without_room_for_weights():
    assert Finish.for_shape("highest", 256, 8192, 8192, 132).fits
    assert not Finish.for_shape("highest", 256, 16384, 8192, 132).fits


def test_split_follows_the_hidden_width():
    assert Finish.for_shape("high", 128, 384, 64, 132).split == 1
    assert Finish.for_shape("highest", 128, 512, 64, 132) == Finish("float16", 2, 128, 512, split=4)


@pytest.mark.parametrize(
    "config, error",
    [
        (("float16", 1, 192, 1024), NotImplementedError),
        (("float16", 1, 256, 1024, 3), ValueError),
        (("float16", 1, 256, 1024, 2, 2), ValueError),
        (("float16", 1, 256, 512, 8), NotImplementedError),
    ],
    ids=str,
)
def test_configurations_that_do_not_exist(config, error):
    with pytest.raises(error, match="must be"):
        Finish(*config)
