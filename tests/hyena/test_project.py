"""LayerNorm, in_proj, short convolution and gate on the PTX machine, against the oracle's g and x0."""

import dataclasses

import numpy as np
import pytest

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Precision, Project
from reference import hyena, hyena_inputs
from tests.hyena.cases import poisoned, rel_l2, tensors

# Relative L2 on stress inputs: several times what is seen, and far below what a wrong kernel gives.
LIMITS = {"highest": 5e-7, "high": 6e-4, "medium": 5e-3}
EPS = 1e-5


def kernel_for(precision, width=128, channels=32, tile=16):
    chosen = Precision.named(precision)
    return Project(chosen.dtype, chosen.parts, width, channels, tile)


def project(inputs, kernel, run=1, conv_length=None):
    pytest.importorskip("cutlass")
    machine = pytest.importorskip("reference.ptx.machine")
    w = tensors(inputs)
    batch, length, width = w["hidden_states"].shape
    conv_length = conv_length or length
    out = tuple(poisoned(batch, width, stages.pitch(conv_length)) for _ in range(2))
    with machine.ptx_machine("sm_90a"):
        stages.project(w["hidden_states"], w, kernel, conv_length, EPS, run, out)
    return tuple(o[..., :conv_length] for o in out)


def check(inputs, kernel, limit, run=1, conv_length=None):
    want = hyena.block(inputs, EPS, l_max=conv_length or 32768)
    for got, name in zip(project(inputs, kernel, run, conv_length), ("g", "x0"), strict=True):
        assert rel_l2(got, want[name]) < limit, name


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("precision", Precision.NAMES)
@pytest.mark.parametrize("batch, length, run", [(1, 70, 1), (3, 131, 4)])
def test_precisions(kind, precision, batch, length, run):
    inputs = hyena_inputs.SETS[kind](batch, length, width=128, inner=128)
    check(inputs, kernel_for(precision, tile=32), LIMITS[precision], run)


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65])
@pytest.mark.parametrize("tile", [16, 64])
def test_lengths(length, tile):
    check(
        hyena_inputs.stress(2, length, width=64, inner=128), kernel_for("highest", 64, tile=tile), LIMITS["highest"], 2
    )


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("width, channels, tile", [(64, 64, 48), (192, 32, 16), (256, 64, 64), (256, 32, 64)])
def test_widths(precision, width, channels, tile):
    if precision == "highest" and channels == 64 and width == 256:
        pytest.skip("its operands don't fit in shared memory")
    inputs = hyena_inputs.stress(1, 131, width=width, inner=128)
    check(inputs, kernel_for(precision, width, channels, tile), LIMITS[precision], 2)


def test_only_the_first_tokens():
    """L > l_max: the operator sees the first l_max tokens of every batch row."""
    check(hyena_inputs.stress(2, 50, width=64, inner=128), kernel_for("highest", 64), LIMITS["highest"], 3, 30)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_rows_that_layer_norm_finds_hard(precision):
    """Constant rows are normalised to zeros, and noise on top of a large constant to the noise."""
    inputs = hyena_inputs.stress(1, 40, width=192, inner=128)
    x = inputs["hidden_states"]
    x[0, ::3] = 12345.678
    x[0, 1::3] += 1e4
    check(inputs, kernel_for(precision, 192), LIMITS[precision])


def test_weights_of_any_magnitude():
    inputs = hyena_inputs.stress(1, 20, width=64, inner=128)
    inputs["in_proj_weight"] *= np.float32(1e30)
    inputs["in_proj_bias"] *= np.float32(1e30)
    inputs["short_conv_weight"] *= np.float32(1e-30)
    check(inputs, kernel_for("highest", 64), LIMITS["highest"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_bad_tokens_stay_where_they_are(bad):
    """A token that is not finite, or is huge, reaches the two tokens after it and nothing else."""
    inputs = hyena_inputs.stress(2, 40, width=64, inner=128)
    want = hyena.block(inputs, EPS)
    inputs["hidden_states"][0, 18] = bad
    rest = [t for t in range(40) if t not in (18, 19, 20)]
    for got, name in zip(project(inputs, kernel_for("highest", 64), run=6), ("g", "x0"), strict=True):
        assert rel_l2(got[1], want[name][1]) < LIMITS["highest"]
        assert rel_l2(got[0][:, rest], want[name][0][:, rest]) < LIMITS["highest"]


def test_same_bits_for_any_run():
    inputs = hyena_inputs.stress(2, 70, width=64, inner=128)
    first, second = (project(inputs, kernel_for("high", 64), run) for run in (1, 7))
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "field, value, error",
    [("width", 96, NotImplementedError), ("width", 512, NotImplementedError), ("channels", 48, ValueError)],
)
def test_what_is_not_supported(field, value, error):
    with pytest.raises(error, match=str(value)):
        dataclasses.replace(kernel_for("high"), **{field: value})
