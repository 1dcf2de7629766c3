"""As test_finish, for the kernel whose blocks share out_proj and LayerNorm."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena.config import ClusterFinish, Precision
from reference import hyena, hyena_inputs

from ..covering import parametrize
from .helpers import rel_l2
from .test_finish import ARCHS, LIMITS, run


def kernel_of(precision, width, inner, split=2, tokens=8, copies=1):
    chosen = Precision.named(precision)
    return ClusterFinish(chosen.dtype, chosen.parts, width, inner, split, tokens, copies)


@parametrize(
    {
        "width, inner, batch, length, split, tokens, copies": [
            (128, 256, 1, 70, 2, 32, 1),  # one chunk
            (128, 512, 3, 43, 2, 16, 1),  # tiles that straddle batch rows; two chunks
            (128, 768, 2, 33, 2, 24, 1),  # three
            (256, 1024, 1, 35, 4, 8, 1),  # a last tile of 3 tokens
            (256, 1024, 1, 35, 8, 8, 2),
            (128, 1024, 1, 35, 8, 8, 4),
            (256, 1024, 1, 65, 4, 16, 1),
            (256, 1024, 1, 65, 2, 32, 1),
        ],
        "precision": Precision.NAMES,
        "arch": ARCHS,
    }
)
def test_finish(precision, width, inner, batch, length, split, tokens, copies, arch):
    for made in hyena_inputs.SETS.values():
        inputs = made(batch, length, width=width, inner=inner)
        s = hyena.block(inputs)
        out = run(inputs, s["p"], kernel_of(precision, width, inner, split, tokens, copies), precision, length, arch)
        assert rel_l2(out, s["out"]) < LIMITS[precision]


@parametrize(
    {
        "split, tokens, copies": [(2, 32, 1), (2, 16, 1), (4, 8, 1), (8, 8, 2), (8, 8, 4)],
        "precision": ["highest", "high"],
        "arch": ARCHS,
    }
)
def test_same_bits_under_every_schedule(precision, split, tokens, copies, arch):
    inner = 128 * max(4, split)
    inputs = hyena_inputs.stress(1, 70, width=128, inner=inner)
    p, kernel = hyena.block(inputs)["p"], kernel_of(precision, 128, inner, split, tokens, copies)
    first = run(inputs, p, kernel, precision, 70, arch)
    for schedule in ("random", "late 0", "late 5", "late 8"):
        assert torch.equal(first, run(inputs, p, kernel, precision, 70, arch, schedule=schedule, seed=3))


def test_finish_beyond_the_operator():
    """Tokens that the long convolution doesn't reach: p counts as zero there, whatever memory holds."""
    inputs = hyena_inputs.stress(2, 50, width=128, inner=256)
    s = hyena.block(inputs, l_max=30)
    out = run(inputs, s["p"], kernel_of("highest", 128, 256), "highest", 30)
    assert rel_l2(out, s["out"]) < LIMITS["highest"]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_finish_of_any_magnitude(scale):
    """p of any size is scaled into the operands' range."""
    inputs = hyena_inputs.stress(1, 8, width=128, inner=256)
    s = hyena.block(inputs)
    scaled = inputs | {"out_proj_weight": inputs["out_proj_weight"] / np.float32(scale)}
    out = run(scaled, s["p"] * scale, kernel_of("high", 128, 256), "high", 8)
    assert rel_l2(out, s["out"]) < LIMITS["high"]


@parametrize({"tokens": [8, 32], "precision": ["highest", "high"], "arch": ARCHS})
def test_a_row_that_is_not_finite_stays_alone(precision, tokens, arch):
    inputs = hyena_inputs.stress(1, 70, width=128, inner=256)
    s, kernel = hyena.block(inputs), kernel_of(precision, 128, 256, 2, tokens)
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
    inputs = hyena_inputs.stress(1, 8, width=128, inner=256)
    inputs["hidden_states"][0, 2] = 3.0
    inputs["out_proj_weight"][:] = 0.0
    inputs["out_proj_bias"][:] = 0.0
    s = hyena.block(inputs)
    out = run(inputs, s["p"], kernel_of("highest", 128, 256), "highest", 8)
    assert rel_l2(out[0, 2], s["out"][0, 2]) < LIMITS["highest"]


@pytest.mark.parametrize(
    "tokens, split, own, copies",
    [
        (1, 8, 8, 4),
        (240, 8, 8, 4),
        (241, 8, 8, 2),
        (480, 8, 8, 2),
        (481, 4, 8, 1),
        (960, 4, 8, 1),
        (1024, 2, 8, 1),
        (2048, 2, 16, 1),
        (2164, 2, 24, 1),
        (4096, 2, 32, 1),
        (4224, 2, 32, 1),
    ],
)
def test_configuration_of_an_h200(tokens, split, own, copies):
    """As many blocks as run at once: 66 clusters of 2, 30 of 4, 15 of 8."""
    kernel = ClusterFinish.for_shape("high", 256, 1024, tokens, 132)
    assert (kernel.split, kernel.tokens, kernel.copies) == (split, own, copies) and kernel.fits


def test_other_kernel_where_there_is_no_configuration():
    assert ClusterFinish.for_shape("high", 256, 1024, 8192, 132) is None
    assert ClusterFinish.for_shape("highest", 128, 384, 64, 132) is None


def test_a_narrow_hidden_width_is_divided_less():
    kernel = ClusterFinish.for_shape("high", 128, 512, 64, 132)
    assert (kernel.split, kernel.tokens, kernel.copies) == (4, 8, 1)


@pytest.mark.parametrize(
    "config, error",
    [
        (("float16", 1, 192, 1024, 2, 8), NotImplementedError),
        (("float16", 1, 256, 1024, 3, 8), ValueError),
        (("float16", 1, 256, 1024, 4, 12), ValueError),
        (("float16", 1, 256, 1024, 4, 24), ValueError),
        (("float16", 1, 256, 384, 2, 8), NotImplementedError),
        (("float16", 1, 256, 1024, 8, 8, 3), ValueError),
        (("float16", 1, 256, 1024, 4, 8, 4), ValueError),
        (("float16", 1, 256, 1024, 8, 16), ValueError),
        (("float16", 1, 256, 1024, 8, 16, 4), ValueError),
    ],
    ids=str,
)
def test_configurations_that_do_not_exist(config, error):
    with pytest.raises(error, match="must be"):
        ClusterFinish(*config)
