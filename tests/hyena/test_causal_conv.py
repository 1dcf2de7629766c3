"""`causal_long_conv`, the public function: results, checks, impulses."""

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.runtime import backend
from tests.stand_in import StandIn

ARGUMENTS = ("u", "k", "skip", "pre_gate", "post_gate")


def make(batch=2, width=3, length=37, taps=None, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (batch, width, length),
        (width, length if taps is None else taps),
        (width,),
        *[(batch, width, length)] * 2,
    ]
    return {
        n: torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for n, s in zip(ARGUMENTS, shapes, strict=True)
    }


def direct(u, k, skip=None, pre_gate=None, post_gate=None):
    """The sum as it is written, in float64."""
    u, k = u.double(), k.double()
    g = u if pre_gate is None else u * pre_gate.double()
    y = torch.zeros_like(g)
    for s in range(min(k.shape[1], u.shape[2])):
        y[..., s:] += k[:, s, None] * g[..., : u.shape[2] - s]
    if skip is not None:
        y = y + skip.double()[:, None] * g
    return y if post_gate is None else y * post_gate.double()


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 127, 541])
def test_lengths(length):
    x = make(length=length)
    torch.testing.assert_close(cute_kernels.causal_long_conv(**x).double(), direct(**x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("taps", [0, 1, 5, 36, 37, 38, 100])
def test_filters_of_another_length(taps):
    x = make(taps=taps)
    torch.testing.assert_close(cute_kernels.causal_long_conv(**x).double(), direct(**x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("given", range(8))
def test_what_is_not_given(given):
    x = make()
    for bit, name in enumerate(("skip", "pre_gate", "post_gate")):
        if not given >> bit & 1:
            x[name] = None
    torch.testing.assert_close(cute_kernels.causal_long_conv(**x).double(), direct(**x), rtol=1e-5, atol=1e-4)


def test_impulses():
    """Nothing before its cause; the last tap reaches the last output alone."""
    length = 50
    u = torch.zeros(1, 1, length)
    u[..., 20] = 1.0
    k = torch.randn(1, length)
    y = cute_kernels.causal_long_conv(u, k)
    assert y[..., :20].abs().max() < 1e-6
    torch.testing.assert_close(y[0, 0, 20:], k[0, :30], rtol=1e-5, atol=1e-5)
    last = torch.zeros(1, length)
    last[0, -1] = 1.0
    y = cute_kernels.causal_long_conv(torch.ones(1, 1, length), last)
    assert y[..., :-1].abs().max() < 1e-5
    assert abs(y[0, 0, -1] - 1) < 1e-5


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_empty(shape):
    x = make(*shape)
    assert cute_kernels.causal_long_conv(**x).shape == shape
    out = torch.empty(shape)
    assert cute_kernels.causal_long_conv(**x, out=out) is out


def test_rows_do_not_touch_each_other():
    x = make(batch=3)
    x["u"][1] = float("nan")
    found = cute_kernels.causal_long_conv(**x)
    clean = make(batch=3)
    expected = cute_kernels.causal_long_conv(**clean)
    for row in (0, 2):
        torch.testing.assert_close(found[row], expected[row])


def test_medium_rounds_operands():
    x = make(length=300)
    expected = direct(x["u"].bfloat16().float(), x["k"].bfloat16().float())
    found = cute_kernels.causal_long_conv(x["u"], x["k"], precision="medium")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_views_arrays_and_out():
    x = make()
    expected = cute_kernels.causal_long_conv(**x)
    assert torch.equal(cute_kernels.causal_long_conv(**{n: t.numpy() for n, t in x.items()}), expected)
    views = {n: t.mT.contiguous().mT if t.dim() > 1 else torch._neg_view(-t) for n, t in x.items()}
    torch.testing.assert_close(cute_kernels.causal_long_conv(**views), expected)
    out = torch.full_like(expected, float("nan"))
    version = out._version
    assert cute_kernels.causal_long_conv(**x, out=out) is out
    assert torch.equal(out, expected)
    assert out._version > version


WRONG = {
    "u rank": ({"u": torch.zeros(3, 37)}, r"u is of shape \[3, 37\], but must be \[B, D, L\], of rank 3"),
    "u type": ({"u": torch.zeros(2, 3, 37).half()}, "u is of type float16, but must be float32"),
    "k rank": ({"k": torch.zeros(1, 3, 37)}, r"k is of shape .* must be \[D, Lk\]"),
    "k channels": ({"k": torch.zeros(4, 37)}, r"k is of shape \[4, 37\], but must be \[3, Lk\], as u has D = 3"),
    "k device": ({"k": torch.zeros(3, 37, device="meta")}, "k is on meta, but must be on cpu like u"),
    "skip": ({"skip": torch.zeros(4)}, r"skip is of shape \[4\], but must be \[3\]"),
    "skip type": ({"skip": torch.zeros(3).double()}, "skip is of type float64"),
    "pre_gate": ({"pre_gate": torch.zeros(2, 3, 36)}, r"pre_gate is of shape .* must be \[2, 3, 37\] like u"),
    "post_gate": ({"post_gate": torch.zeros(1, 3, 37)}, r"post_gate is of shape .* must be \[2, 3, 37\] like u"),
    "sparse": ({"post_gate": torch.zeros(2, 3, 37).to_sparse()}, r"post_gate is a torch\.sparse_coo tensor"),
    "precision": ({"precision": "low"}, "precision is 'low'"),
    "out": ({"out": torch.zeros(2, 3, 36)}, r"out is of shape .* must be \[2, 3, 37\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name):
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=f"causal_long_conv: {message}"):
        cute_kernels.causal_long_conv(**{**make(), **changes})


def test_wrong_kinds_and_shared_memory():
    x = make()
    with pytest.raises(TypeError, match="skip is of type float"):
        cute_kernels.causal_long_conv(**{**x, "skip": 1.0})
    with pytest.raises(TypeError, match="k is of type NoneType"):
        cute_kernels.causal_long_conv(x["u"], None)
    for name in ("u", "pre_gate", "post_gate"):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            cute_kernels.causal_long_conv(**x, out=x[name])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_on_the_machine(arch):
    """Views and a filter of another length reach the kernel; what it can't read is copied."""
    pytest.importorskip("cutlass")
    x = make(width=2, length=21, taps=30)
    views = {n: t.mT.contiguous().mT if t.dim() > 1 else torch._neg_view(-t) for n, t in x.items()}
    with pytest.importorskip("reference.ptx.machine").ptx_machine(arch) as m:
        for given in (x, views, {**views, "pre_gate": None}):
            torch.testing.assert_close(
                cute_kernels.causal_long_conv(**given).double(), direct(**given), rtol=1e-5, atol=1e-5
            )
        assert len(m.reports) == 3
        assert not cute_kernels.causal_long_conv(x["u"], x["k"][:, :0]).any()


def test_warmup():
    asked = []

    class Asked(StandIn):
        def function(self, kernel, device):
            asked.append(kernel)

    with backend.use(Asked()):
        cute_kernels.warmup("causal_long_conv", seq_len=100, skip=True)
        assert [(k.points, k.skip, k.pre_gate) for k in asked] == [(128, True, False)]
        cute_kernels.warmup("causal_long_conv")
        assert len(set(asked)) > 8
        assert not cute_kernels.is_supported("causal_long_conv", seq_len=-1)[0]
