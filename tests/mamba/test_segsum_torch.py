"""The plain PyTorch path: its gradients against autograd through the float64 oracle. Outputs: test_segsum_cases."""

import math

import pytest
import torch

from cute_kernels.mamba.segsum_torch import segsum_torch, segsum_torch_backward
from reference import inputs, segsum

fp32 = torch.float32
SHAPE = {"batch": 2, "chunks": 2, "chunk_size": 9, "heads": 4, "groups": 2, "d_state": 6}
OUTPUTS = ("L", "G", "M", "A_cumsum", "decay_states")


def through_oracle(x: inputs.SegsumInputs, grads):
    """Gradients of dt, A_log, B, C, dt_bias by autograd, all in float64."""
    leaves = [None if t is None else t.double().requires_grad_() for t in x[:5]]
    outputs = segsum.segsum(*leaves, x.dt_limit, x.g_layout)
    pairs = [(o, g.double()) for o, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [t for t in leaves if t is not None]
    found = torch.autograd.grad(
        [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, materialize_grads=True
    )
    return [*found, *[None] * (5 - len(found))]


def random_grads(x: inputs.SegsumInputs, which):
    gen = torch.Generator().manual_seed(5)
    outputs = segsum_torch(*x[:5], *x.dt_limit, x.g_layout)
    return [
        torch.randn(o.shape, generator=gen).to(o.dtype) if name in which else None
        for name, o in zip(OUTPUTS, outputs, strict=True)
    ]


def assert_close(found, expected, like):
    """Within the rounding of its type, after sums of some thousand terms in float64 and a rate rounded to fp32."""
    eps = torch.finfo(like.dtype).eps
    scale = float(expected.abs().max())
    assert found.dtype == like.dtype
    assert found.shape == like.shape
    assert float((found.double() - expected).abs().max()) <= 2 * eps * scale + 1e-12


@pytest.mark.parametrize("g_layout", ["per_head", "per_group"])
@pytest.mark.parametrize("which", [*[(n,) for n in OUTPUTS], OUTPUTS], ids="-".join)
def test_backward(which, g_layout):
    x = inputs.official(3, **SHAPE, dt_dtype=fp32, A_dtype=fp32, bias_dtype=fp32, g_layout=g_layout)
    grads = random_grads(x, which)
    found = segsum_torch_backward(grads, *x[:5], *x.dt_limit, g_layout)
    for f, e, like in zip(found, through_oracle(x, grads), x[:5], strict=True):
        assert_close(f, e, like)
        assert f.is_contiguous()


@pytest.mark.parametrize("name", ["long_decay", "mixture", "huge_then_tiny", "steep", "no_decay", "hf_init", "limited"])
def test_backward_of_hard_inputs(name):
    x = inputs.ADVERSARIAL[name](3, **{**SHAPE, "chunk_size": 64})
    grads = random_grads(x, OUTPUTS)
    found = segsum_torch_backward(grads, *x[:5], *x.dt_limit, x.g_layout)
    for f, e, like in zip(found, through_oracle(x, grads), x[:5], strict=True):
        assert (f is None) == (like is None)
        if like is not None:
            assert_close(f, e, like)


def test_backward_of_types_and_views():
    x = inputs.transposed(3, **{**SHAPE, "bias_dtype": torch.float16, "dt_dtype": torch.float16})
    grads = random_grads(x, OUTPUTS)
    for f, e, like in zip(
        segsum_torch_backward(grads, *x[:5], *x.dt_limit, x.g_layout), through_oracle(x, grads), x[:5], strict=True
    ):
        assert_close(f, e, like)


def test_clamped_steps_have_no_gradient():
    x = inputs.official(0, **SHAPE, dt_dtype=fp32)
    x = x._replace(dt=x.dt + 20 * torch.sign(x.dt), dt_limit=(0.01, 3.0))
    ddt, *_ = segsum_torch_backward(random_grads(x, OUTPUTS), *x[:5], *x.dt_limit, x.g_layout)
    assert float(ddt.abs().max()) == 0.0


def test_not_finite_operands_stay_in_their_gradients():
    """A NaN in B spoils what it touches: not the steps of other chunks, and nothing above the diagonal."""
    x = inputs.official(0, **SHAPE, dt_dtype=fp32)
    B = x.B.clone()
    B[0, 0, 8] = math.nan  # the last column: its products lie above the diagonal of every row but the last
    ddt, dA_log, dB, _, _ = segsum_torch_backward(
        random_grads(x, ("M",)), x.dt, x.A_log, B, x.C, None, 0.0, math.inf, "per_head"
    )
    assert bool(ddt[1].isfinite().all() and ddt[0, 1].isfinite().all())
    assert bool(ddt.isfinite().all() and dA_log.isfinite().all())  # L[8, 8] = 1 whatever the steps are
    assert bool(dB.isfinite().all())
