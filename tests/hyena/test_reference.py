"""The float64 oracle of the Hyena block, and the plain PyTorch path against it."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena import torch_path
from reference import hyena, hyena_inputs

from .helpers import rel_l2

SMALL = {"width": 64, "inner": 128}


def run_torch(p, **options):
    w = {name: torch.from_numpy(value) for name, value in p.items()}
    return torch_path.hyena_block(w.pop("hidden_states"), w, **options).numpy()


def test_causal_conv_is_the_direct_sum():
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 37, 64):
        k, g = rng.standard_normal((2, length)), rng.standard_normal((3, 2, length))
        want = np.zeros_like(g)
        for t in range(length):
            for s in range(t + 1):
                want[..., t] += k[:, s] * g[..., t - s]
        np.testing.assert_allclose(hyena.causal_conv(k, g), want, atol=1e-12)


def test_the_two_filter_layouts():
    p = hyena_inputs.official(1, 4, width=64)
    s = hyena.hyena_filter(p, 4, 0.05, "reshape")
    np.testing.assert_array_equal(s["k"], s["h"].reshape(-1).reshape(64, 4))
    np.testing.assert_array_equal(hyena.hyena_filter(p, 4, 0.05, "transpose")["k"], s["h"].T)


def test_short_conv_is_causal_with_zeros_before():
    u = np.zeros((1, 5, 1))
    u[0, 1] = 1.0
    got = hyena.short_conv(u, np.array([[[100.0, 10.0, 1.0]]]), np.zeros(1))
    np.testing.assert_array_equal(got[0, :, 0], [0, 1, 10, 100, 0])


@pytest.mark.parametrize("length", [64, 1024])
def test_stress_inputs_reach_the_output(length):
    s = hyena.block(hyena_inputs.stress(2, length))
    for name in ("n1", "uc", "g", "y", "p", "n2", "hidden", "out"):
        assert 0.3 < np.sqrt(np.mean(s[name] ** 2)) < 5.0, name


def test_official_inputs_cannot_see_the_operator():
    p = hyena_inputs.official(1, 256)
    s = hyena.block(p)
    assert np.abs(s["r"] - p["hidden_states"] - p["out_proj_bias"]).max() < 5e-5


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("length", [1, 2, 3, 63, 131, 541])
def test_torch_path(kind, length):
    p = hyena_inputs.SETS[kind](2, length)
    assert rel_l2(run_torch(p), hyena.block(p)["out"]) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"filter_layout": "transpose"},
        {"bias_in_filter": False},
        {"norm_len": 500},
        {"l_max": 40},
        {"l_max": 40, "filter_layout": "transpose", "bias_in_filter": False},
        {"layer_norm_eps": 0.1, "exp_mod_shift": 0.5},
    ],
    ids=str,
)
def test_torch_path_options(options):
    p = hyena_inputs.stress(2, 100, **SMALL)
    assert rel_l2(run_torch(p, **options), hyena.block(p, **options)["out"]) < 1e-5


def test_stored_positions():
    p = hyena_inputs.stress(1, 50, **SMALL)
    z = np.random.default_rng(1).standard_normal((70, 5)).astype(np.float32)
    assert rel_l2(run_torch(p, z=torch.from_numpy(z)), hyena.block(p, z=z)["out"]) < 1e-5


@pytest.mark.parametrize("length", [0, 1])
def test_empty_and_single(length):
    p = hyena_inputs.stress(0 if length == 0 else 1, length, **SMALL)
    assert run_torch(p).shape == hyena.block(p)["out"].shape


@pytest.mark.parametrize("name", hyena.NAMES)
def test_every_tensor_moves_the_output(name):
    """The change of the output, not only its size, is the oracle's."""
    p = hyena_inputs.stress(1, 65, **SMALL)
    moved = dict(p)
    noise = np.random.default_rng(7).standard_normal(p[name].shape).astype(np.float32)
    moved[name] = p[name] + 0.1 * np.abs(p[name]).max() * noise
    want = hyena.block(moved)["out"] - hyena.block(p)["out"]
    assert np.sqrt(np.mean(want**2)) > 1e-3
    assert rel_l2(run_torch(moved) - run_torch(p), want) < 1e-3


def test_prefix_invariance_with_norm_len():
    p = hyena_inputs.stress(1, 300, **SMALL)
    short = dict(p, hidden_states=p["hidden_states"][:, :100])
    options = {"norm_len": 300, "filter_layout": "transpose"}
    np.testing.assert_allclose(
        hyena.block(p, **options)["out"][:, :100], hyena.block(short, **options)["out"], atol=1e-10
    )


def test_torch_path_gradients():
    p = {
        k: torch.from_numpy(v).double() for k, v in hyena_inputs.stress(1, 6, width=64, inner=64, sin_freq=1.0).items()
    }
    x = p.pop("hidden_states").requires_grad_()
    w = {k: v.requires_grad_() for k, v in p.items()}
    torch_path.hyena_block(x, w).square().sum().backward()
    assert all(t.grad is not None and torch.isfinite(t.grad).all() and t.grad.abs().max() > 0 for t in (x, *w.values()))
