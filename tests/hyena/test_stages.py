"""Every stage's kernel, compiled and run on the PTX machine, against the oracle's intermediates."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Filter, Finish, Precision
from reference import hyena, hyena_inputs

pytest.importorskip("cutlass")
machine = pytest.importorskip("reference.ptx.machine")

# Relative L2 on stress inputs: several times what is seen, and far below what a wrong kernel gives.
LIMITS = {"highest": 5e-7, "high": 6e-4, "medium": 5e-3}
EPS = 1e-5


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


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("layout", ["reshape", "transpose"])
@pytest.mark.parametrize("length, tile, split", [(1, 16, 1), (70, 16, 2), (131, 32, 1), (131, 64, 2)])
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


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("precision", Precision.NAMES)
@pytest.mark.parametrize(
    "width, inner, batch, length, config",
    [
        (128, 128, 1, 70, {}),
        (128, 256, 3, 43, {"multicast": 2}),
        (256, 1024, 1, 131, {"multicast": 4}),
    ],
    ids=str,
)
def test_finish(kind, precision, width, inner, batch, length, config):
    inputs = hyena_inputs.SETS[kind](batch, length, width=width, inner=inner)
    s, w, chosen = hyena.block(inputs), tensors(inputs), Precision.named(precision)
    kernel = Finish(chosen.dtype, chosen.parts, width, inner, **config)
    out = poisoned(batch, length, width)
    with machine.ptx_machine("sm_90a"):
        operands = stages.convert_weights(w, chosen)
        stages.finish(padded(s["p"]), w["hidden_states"], w, operands, kernel, length, EPS, out)
    assert rel_l2(out, s["out"]) < LIMITS[precision]


def test_finish_beyond_the_operator():
    """Tokens that the long convolution doesn't reach: p counts as zero there, whatever memory holds."""
    inputs = hyena_inputs.stress(2, 50, width=128, inner=128)
    s, w, chosen = hyena.block(inputs, l_max=30), tensors(inputs), Precision.named("highest")
    out = poisoned(2, 50, 128)
    with machine.ptx_machine("sm_90a"):
        operands = stages.convert_weights(w, chosen)
        kernel = Finish(chosen.dtype, chosen.parts, 128, 128)
        stages.finish(padded(s["p"]), w["hidden_states"], w, operands, kernel, 30, EPS, out)
    assert rel_l2(out, s["out"]) < LIMITS["highest"]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_finish_of_any_magnitude(scale):
    """p of any size is scaled into the operands' range."""
    inputs = hyena_inputs.stress(1, 8, width=128, inner=128)
    p = hyena.block(inputs)["p"] * scale
    w, chosen = tensors(inputs), Precision.named("high")
    w["out_proj_weight"] = w["out_proj_weight"] / scale
    want = hyena.block(inputs)["out"]
    with machine.ptx_machine("sm_90a"):
        operands = stages.convert_weights(w, chosen)
        out = stages.finish(padded(p), w["hidden_states"], w, operands, Finish("float16", 1, 128, 128), 8, EPS)
    assert rel_l2(out, want) < LIMITS["high"]
