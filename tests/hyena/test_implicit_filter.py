"""`hyena_filter`, the public function: results, options, checks."""

import numpy as np
import pytest
import torch

import cute_kernels
from reference import hyena, hyena_inputs

from .helpers import SMALL, make, rel_l2, tensors

machine = pytest.importorskip("reference.ptx.machine")


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("length", [0, 1, 2, 63, 541])
def test_against_the_oracle(kind, length):
    _, params, inputs = make(kind)
    k = cute_kernels.hyena_filter(params, length)
    assert k.shape == (64, length)
    assert k.is_contiguous()
    if length:
        assert rel_l2(k, hyena.hyena_filter(inputs, length, 0.05)["k"]) < 3e-6


@pytest.mark.parametrize(
    "options",
    [
        {"filter_layout": "transpose"},
        {"bias_in_filter": False},
        {"exp_mod_shift": 0.0},
        {"norm_len": 99},
        {"filter_layout": "transpose", "bias_in_filter": False, "norm_len": 30, "exp_mod_shift": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("on", ["torch", "machine"])
def test_options(options, on):
    _, params, inputs = make()
    want = hyena.hyena_filter(inputs, 21, **{"exp_mod_shift": 0.05, **options})["k"]
    if on == "machine":
        pytest.importorskip("cutlass")
        with machine.ptx_machine("sm_90a"):
            k = cute_kernels.hyena_filter(params, 21, **options)
    else:
        k = cute_kernels.hyena_filter(params, 21, **options)
    assert k.is_contiguous()
    assert rel_l2(k, want) < 3e-6


def test_layouts_differ_as_the_formula_says():
    """With h[t, d] = 10 t + d, L = 4, D = 3: the reshape mixes positions and channels."""
    h = 10.0 * torch.arange(4)[:, None] + torch.arange(3)
    width, length = 3, 4
    _, w = tensors(hyena_inputs.stress(1, length, width=width, inner=4, order=4))
    w = {name: torch.zeros_like(t) for name, t in w.items()}
    # The MLP passes (1, t/3) on: sines of small multiples are their arguments, to first order.
    small = 1e-3
    w["sin_freq"].fill_(1.0)
    w["filter_linear1_weight"][1, 0] = small
    w["filter_linear1_bias"][0] = np.pi / 2  # sin is 1
    for i in (2, 3):
        w[f"filter_linear{i}_weight"][0, 0] = np.pi / 2
        w[f"filter_linear{i}_weight"][1, 1] = 1.0
    w["filter_linear_final_weight"][:, 0] = torch.arange(3)
    w["filter_linear_final_weight"][:, 1] = 30.0 / small
    params = cute_kernels.HyenaBlockParams(**w, exp_mod_shift=0.0, bias_in_filter=False)  # deltas are 0: no decay
    k = cute_kernels.hyena_filter(params, length)
    torch.testing.assert_close(k, h.reshape(3, 4), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        cute_kernels.hyena_filter(params, length, filter_layout="transpose"), h.T, rtol=1e-4, atol=1e-4
    )


def test_stored_positions_bound_the_length():
    z = torch.randn(20, 5)
    _, params, inputs = make(options={"z": z})
    k = cute_kernels.hyena_filter(params, 20)
    assert rel_l2(k, hyena.hyena_filter(inputs, 20, 0.05, z=z.numpy())["k"]) < 3e-6
    with pytest.raises(ValueError, match="seq_len is 21, but must be at most 20, the rows of z"):
        cute_kernels.hyena_filter(params, 21)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": -1}, "seq_len is -1, but must be an int from 0"),
        ({"seq_len": 2.0}, "seq_len is 2.0"),
        ({"filter_layout": "flat"}, "filter_layout is 'flat'"),
        ({"norm_len": 0}, "norm_len is 0"),
        ({"exp_mod_shift": float("inf")}, "exp_mod_shift is inf"),
    ],
)
def test_wrong_argument(change, message):
    _, params, _ = make()
    with pytest.raises(ValueError, match=f"hyena_filter: {message}"):
        cute_kernels.hyena_filter(**{"params": params, "seq_len": 5, **change})
    with pytest.raises(TypeError, match="params is of type int"):
        cute_kernels.hyena_filter(3, 5)


def test_precision_settings_do_not_reach_the_filter():
    _, params, _ = make()
    expected = cute_kernels.hyena_filter(params, 50)
    saved = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(cute_kernels.hyena_filter(params, 50), expected)
    finally:
        torch.set_float32_matmul_precision(saved)


@pytest.mark.parametrize("frequency", [0.0, 100.0, 1e3])
def test_frequencies(frequency):
    inputs = hyena_inputs.stress(1, 60, **SMALL)
    inputs["sin_freq"][:] = frequency
    _, w = tensors(inputs)
    k = cute_kernels.hyena_filter(cute_kernels.HyenaBlockParams(**w), 60)
    assert torch.isfinite(k).all()
    if frequency <= 100:
        assert rel_l2(k, hyena.hyena_filter(inputs, 60, 0.05)["k"]) < 1e-2
