"""The Hyena operators' torch ops: registration, fakes, torch.compile, gradients, and what must not be lost."""

import pytest
import torch
from torch.autograd import forward_ad

import cute_kernels
from cute_kernels.hyena import torch_path
from cute_kernels.hyena.params import FILTER_NAMES, NAMES
from reference import hyena_inputs

from .helpers import make, tensors

OPS = torch.ops.cute_kernels
TINY = {"width": 6, "inner": 8, "order": 5}
VARIANTS = {
    "plain": {},
    "hyena-dna": {"z": torch.randn(12, 5), "filter_layout": "transpose", "bias_in_filter": False, "norm_len": 12},
    "l_max": {"l_max": 4},
}


def block_arguments(x, params, prepared=None, precision=None):
    return (x, *params.tensors, params.z, prepared, *params.options, precision)


def filter_arguments(params, length):
    o = params.options
    weights = (getattr(params, name) for name in FILTER_NAMES)
    return (*weights, params.z, length, o.exp_mod_shift, o.filter_layout, o.bias_in_filter, o.norm_len)


def leaves(x, params):
    """x, the weights and z, each requiring grad, and params of them."""
    x = x.clone().requires_grad_()
    w = {n: t.clone().requires_grad_() for n, t in zip(NAMES, params.tensors, strict=True)}
    z = None if params.z is None else params.z.clone().requires_grad_()
    everything = [x, *w.values()] + ([] if z is None else [z])
    return x, cute_kernels.HyenaBlockParams(**w, z=z, **params.options._asdict()), everything


def conv_inputs():
    x, params, _ = make(length=7, **TINY)
    u = x.mT.contiguous()
    return u, cute_kernels.hyena_filter(params, 5), params.filter_bias, u * 2 + 1, u.cos()


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_block(variant):
    x, params, _ = make(length=7, **TINY, options=VARIANTS[variant])
    torch.library.opcheck(OPS.hyena_block.default, block_arguments(x, params))
    x, params, _ = leaves(x, params)
    torch.library.opcheck(OPS.hyena_block.default, block_arguments(x, params, precision="high"))


def test_opcheck_block_prepared_and_out():
    x, params, _ = make(length=7, **TINY)
    buffer = params.prepare(seq_len=7).buffer
    torch.library.opcheck(OPS.hyena_block.default, block_arguments(x, params, buffer, "highest"))
    torch.library.opcheck(OPS.hyena_block_out.default, (*block_arguments(x, params), torch.empty_like(x)))


def test_opcheck_filter():
    x, params, _ = make(length=7, **TINY)
    torch.library.opcheck(OPS.hyena_filter.default, filter_arguments(params, 7))
    _, params, _ = leaves(x, params)
    torch.library.opcheck(OPS.hyena_filter.default, filter_arguments(params, 7))


def test_opcheck_conv():
    x = conv_inputs()
    torch.library.opcheck(OPS.causal_long_conv.default, (*x, None))
    torch.library.opcheck(OPS.causal_long_conv.default, (*(t.clone().requires_grad_() for t in x), "highest"))
    torch.library.opcheck(OPS.causal_long_conv_out.default, (*x, None, torch.empty_like(x[0])))


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_with_dynamic_batch_and_length(variant):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    _, params, _ = make(**TINY, options=VARIANTS[variant])
    compiled = torch.compile(
        lambda x: cute_kernels.hyena_block(x * 1, params), fullgraph=True, dynamic=True, backend=count
    )
    for batch, length in ((3, 7), (7, 5), (2, 11)):
        x, _, _ = make(batch=batch, length=length, **TINY)
        assert torch.equal(compiled(x), cute_kernels.hyena_block(x, params))
    assert len(graphs) <= 2  # z may tell apart what fits


def test_compile_of_params_made_inside():
    x, w = tensors(hyena_inputs.stress(2, 7, **TINY))

    def f(x, w):
        params = cute_kernels.HyenaBlockParams(**w)
        k = cute_kernels.hyena_filter(params, 7)
        y = cute_kernels.causal_long_conv(x.mT, k, w["filter_bias"])
        return cute_kernels.hyena_block(x, params) + y.mT

    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x, w), f(x, w))


def test_compile_prepared_and_out():
    x, params, _ = make(length=7, **TINY)
    prepared = params.prepare(seq_len=7)
    expected = cute_kernels.hyena_block(x, params)

    def f(x, out):
        return cute_kernels.hyena_block(x, prepared) + cute_kernels.hyena_block(x, params, out=out)

    out = torch.full_like(x, float("nan"))
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x, out), 2 * expected)
    assert torch.equal(out, expected)


def test_compile_with_gradients():
    x, params, _ = make(length=7, **TINY)
    x, params, wanted = leaves(x, params)
    compiled = torch.compile(cute_kernels.hyena_block, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, params).sum(), wanted)
    expected = torch.autograd.grad(cute_kernels.hyena_block(x, params).sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compile_reports_wrong_arguments():
    _, params, _ = make(**TINY)
    compiled = torch.compile(cute_kernels.hyena_block, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"x is of shape .* but must be \[B, L, 6\]"):
        compiled(torch.zeros(2, 3, 7), params)


def test_fake_tensors_without_compile():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    x, w = tensors(hyena_inputs.stress(2, 7, **TINY))
    params = cute_kernels.HyenaBlockParams(**{n: mode.from_tensor(t) for n, t in w.items()})
    out = cute_kernels.hyena_block(mode.from_tensor(x), params)
    assert type(out) is type(params.norm1_bias)
    assert out.shape == x.shape
    assert cute_kernels.hyena_filter(params, 9).shape == (6, 9)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_every_tensor(variant):
    """Against autograd through the formulas in float64."""
    x, params, _ = make(length=9, **TINY, options=VARIANTS[variant])
    x, params, wanted = leaves(x, params)
    grad = torch.randn(x.shape)
    out = cute_kernels.hyena_block(x, params)
    assert out.requires_grad
    found = torch.autograd.grad(out, wanted, grad)
    doubles = [t.detach().double().requires_grad_() for t in wanted]
    w = dict(zip(NAMES, doubles[1:25], strict=True))
    z = doubles[25] if len(doubles) > 25 else None
    expected = torch.autograd.grad(
        torch_path.hyena_block(doubles[0], w, **params.options._asdict(), z=z), doubles, grad.double()
    )
    for name, a, b in zip(("x", *NAMES, "z"), found, expected, strict=False):
        assert b.abs().max() > 0, name
        assert (a - b).norm() <= 1e-4 * b.norm(), name


@pytest.mark.parametrize("name", ["x", *NAMES])
def test_one_tensor_alone(name):
    x, params, _ = make(length=5, **TINY)
    w = dict(zip(("x", *NAMES), (x, *params.tensors), strict=True))
    w[name] = w[name].clone().requires_grad_()
    x = w.pop("x")
    out = cute_kernels.hyena_block(x, cute_kernels.HyenaBlockParams(**w))
    out.sum().backward()
    leaf = x if name == "x" else w[name]
    assert leaf.grad.shape == leaf.shape
    assert leaf.grad.abs().max() > 0


def test_gradients_of_the_filter():
    x, params, _ = make(length=9, **TINY)
    _, params, _ = leaves(x, params)
    grad = torch.randn(6, 9)
    wanted = [getattr(params, name) for name in FILTER_NAMES]
    found = torch.autograd.grad(cute_kernels.hyena_filter(params, 9), wanted, grad)
    doubles = [t.detach().double().requires_grad_() for t in wanted]
    k = torch_path.hyena_filter(dict(zip(FILTER_NAMES, doubles, strict=True)), 9, 0.05)
    for a, b in zip(found, torch.autograd.grad(k, doubles, grad.double()), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_gradients_of_the_convolution():
    x = [t.clone().requires_grad_() for t in conv_inputs()]
    grad = torch.randn_like(x[0])
    found = torch.autograd.grad(cute_kernels.causal_long_conv(*x), x, grad)
    doubles = [t.detach().double().requires_grad_() for t in x]
    expected = torch.autograd.grad(torch_path.causal_long_conv(*doubles), doubles, grad.double())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_gradients_of_nothing():
    x, params, _ = make(length=0, **TINY)
    x, params, wanted = leaves(x, params)
    found = torch.autograd.grad(cute_kernels.hyena_block(x, params).sum(), wanted)
    assert all(not g.any() for g in found)


def test_no_grad_and_frozen_weights():
    x, params, _ = make(length=5, **TINY)
    x, params, _ = leaves(x, params)
    with torch.no_grad():
        assert not cute_kernels.hyena_block(x, params).requires_grad
    assert not cute_kernels.hyena_block(x.detach(), make(length=5, **TINY)[1]).requires_grad


def test_out_with_gradients_is_refused():
    x, params, _ = make(length=5, **TINY)
    out = torch.empty_like(x)
    with pytest.raises(RuntimeError, match=r"hyena_block: out=.* does not support automatic differentiation"):
        cute_kernels.hyena_block(x.clone().requires_grad_(), params, out=out)
    with pytest.raises(RuntimeError, match=r"causal_long_conv: out=.* does not support"):
        cute_kernels.causal_long_conv(x.mT, torch.randn(6, 5, requires_grad=True), out=torch.empty(2, 6, 5))


def test_second_derivative_is_refused_not_wrong():
    x, params, _ = make(length=5, **TINY)
    x.requires_grad_()
    (g,) = torch.autograd.grad(cute_kernels.hyena_block(x, params).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="hyena_block_backward"):
        g.sum().backward()


def test_forward_mode_is_refused_not_dropped():
    x, params, _ = make(length=5, **TINY)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (
            lambda: cute_kernels.hyena_block(dual, params),
            lambda: cute_kernels.causal_long_conv(dual.mT, torch.ones(6, 5)),
        ):
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                call()


def test_backward_under_autocast_is_fp32():
    x, params, _ = make(length=9, **TINY)
    x, params, wanted = leaves(x, params)
    expected = torch.autograd.grad(cute_kernels.hyena_block(x, params).sum(), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(cute_kernels.hyena_block(x, params).sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
