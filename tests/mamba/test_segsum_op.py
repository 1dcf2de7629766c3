"""The torch ops: registration, fakes, torch.compile, gradients, and everything that must not be lost on the way."""

import math

import pytest
import torch
from torch.autograd import forward_ad

import cute_kernels
from cute_kernels.mamba import SegsumOutputs
from reference import inputs

from .test_segsum_torch import OUTPUTS, assert_close, random_grads, through_oracle

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = {"batch": 2, "chunks": 2, "chunk_size": 8, "heads": 4, "groups": 2, "d_state": 6}
OPS = torch.ops.cute_kernels


def make(**shape) -> inputs.SegsumInputs:
    return inputs.official(0, **{**SHAPE, **shape})


def op_arguments(x: inputs.SegsumInputs) -> tuple:
    dt_max = None if x.dt_limit[1] == math.inf else x.dt_limit[1]
    return (*x[:5], x.dt_limit[0], dt_max, x.g_layout)


def with_gradients(x: inputs.SegsumInputs) -> inputs.SegsumInputs:
    return x._replace(
        **{n: t.clone().requires_grad_() for n, t in zip(x._fields[:5], x[:5], strict=True) if t is not None}
    )


VARIANTS = {
    "plain": {},
    "bias-limits": {"bias_dtype": fp32, "dt_limit": (0.1, 2.0)},
    "per-group": {"g_layout": "per_group", "dtype": fp16, "dt_dtype": fp32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck(variant):
    x = make(**VARIANTS[variant])
    torch.library.opcheck(OPS.mamba_segsum.default, op_arguments(x))
    torch.library.opcheck(OPS.mamba_segsum.default, op_arguments(with_gradients(x)))


def test_opcheck_of_views():
    torch.library.opcheck(OPS.mamba_segsum.default, op_arguments(inputs.transposed(0, **SHAPE)))


def test_opcheck_out():
    x = make(bias_dtype=fp32)
    out = [torch.empty_like(t) for t in cute_kernels.mamba_segsum(*x)]
    torch.library.opcheck(OPS.mamba_segsum_out.default, (*op_arguments(x), *out))


def test_opcheck_backward():
    x = make(bias_dtype=fp32)
    grads = random_grads(x, ("M", "A_cumsum"))
    torch.library.opcheck(OPS.mamba_segsum_backward.default, (grads, *op_arguments(x)))


def test_op_defaults():
    x = make()
    out = OPS.mamba_segsum(*x[:4])
    assert all(torch.equal(a, b) for a, b in zip(out, cute_kernels.mamba_segsum(*x), strict=True))


# --- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_with_dynamic_batch(variant):
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    options = {k: v for k, v in make(**VARIANTS[variant])._asdict().items() if k in ("dt_limit", "g_layout")}

    def f(dt, A_log, B, C, dt_bias):
        out = cute_kernels.mamba_segsum(dt * 1, A_log, B, C, dt_bias, **options)
        assert isinstance(out, SegsumOutputs)
        return out

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=count)
    # No two sizes are equal in the first call: torch would take them for one.
    for batch, chunks in ((3, 7), (7, 3), (5, 9)):
        x = make(**VARIANTS[variant], batch=batch, chunks=chunks)
        for a, b in zip(compiled(*x[:5]), cute_kernels.mamba_segsum(*x), strict=True):
            assert torch.equal(a, b)
    assert len(graphs) == 1


def test_compile_aot_with_gradients():
    x = with_gradients(make(bias_dtype=fp32))
    grads = random_grads(make(bias_dtype=fp32), OUTPUTS)
    compiled = torch.compile(cute_kernels.mamba_segsum, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*x), x[:5], grads)
    expected = torch.autograd.grad(cute_kernels.mamba_segsum(*x), x[:5], grads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compile_out():
    x = make()
    expected = cute_kernels.mamba_segsum(*x)
    out = SegsumOutputs(*(torch.full_like(t, math.nan) for t in expected))

    def f(dt, A_log, B, C, out):
        result = cute_kernels.mamba_segsum(dt, A_log, B, C, out=out)
        return result.M + 1

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x[:4], out), expected.M + 1)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_compile_reports_wrong_arguments():
    x = make()
    compiled = torch.compile(cute_kernels.mamba_segsum, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"A_log is of shape \[\w+\], but must be \[4\]"):
        compiled(x.dt, x.A_log[:2], x.B, x.C)


def test_export():
    class Module(torch.nn.Module):
        def forward(self, dt, A_log, B, C):
            return tuple(cute_kernels.mamba_segsum(dt, A_log, B, C))

    x = make()
    batch = torch.export.Dim("batch", min=1, max=64)
    dynamic = ({0: batch}, None, {0: batch}, {0: batch})
    program = torch.export.export(Module(), tuple(x[:4]), dynamic_shapes=dynamic)
    y = make(batch=7)
    for a, b in zip(program.module()(*y[:4]), cute_kernels.mamba_segsum(*y), strict=True):
        assert torch.equal(a, b)


def test_fake_tensors_without_compile():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    x = make()
    fakes = [mode.from_tensor(t) for t in x[:4]]
    out = cute_kernels.mamba_segsum(*fakes)  # outside of the mode: the tensors alone say that they are fake
    assert type(out.L) is type(fakes[0])
    assert out.G.shape == (2, 2, 8, 8, 4)
    with mode:
        assert cute_kernels.mamba_segsum(*fakes).M.shape == (2, 2, 8, 8, 4)


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [*[(n,) for n in OUTPUTS], OUTPUTS], ids="-".join)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients(variant, which):
    x = make(**VARIANTS[variant])
    leaves = with_gradients(x)
    grads = random_grads(x, which)
    out = cute_kernels.mamba_segsum(*leaves)
    assert all(t.requires_grad for t in out)
    torch.autograd.backward(
        [o for o, g in zip(out, grads, strict=True) if g is not None], [g for g in grads if g is not None]
    )
    for leaf, expected in zip(leaves[:5], through_oracle(x, grads), strict=True):
        if leaf is not None:
            assert_close(leaf.grad, expected, leaf)


@pytest.mark.parametrize("name", ["dt", "A_log", "B", "C", "dt_bias"])
def test_one_input_alone(name):
    x = make(bias_dtype=fp32)
    leaf = getattr(x, name).clone().requires_grad_()
    out = cute_kernels.mamba_segsum(*x._replace(**{name: leaf}))
    grads = random_grads(x, OUTPUTS)
    (found,) = torch.autograd.grad(out, [leaf], grads)
    assert_close(found, through_oracle(x, grads)[x._fields.index(name)], leaf)


def test_gradients_of_views_reach_their_base():
    x = make()
    base = torch.randn(2, 2, 8, 20, requires_grad=True)
    out = cute_kernels.mamba_segsum(base[..., 3:7], x.A_log, x.B, x.C)
    out.A_cumsum.sum().backward()
    assert base.grad[..., 3:7].abs().min() > 0
    assert base.grad[..., :3].abs().max() == 0


def test_second_derivative_is_refused_not_wrong():
    x = with_gradients(make(dt_dtype=fp32))
    (g,) = torch.autograd.grad(cute_kernels.mamba_segsum(*x).A_cumsum.sum(), x.dt, create_graph=True)
    with pytest.raises(RuntimeError, match="mamba_segsum_backward"):
        g.sum().backward()


def test_forward_mode_is_refused_not_dropped():
    x = make(dt_dtype=fp32)
    out = cute_kernels.mamba_segsum(*x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.dt, torch.ones_like(x.dt))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            cute_kernels.mamba_segsum(dual, *x[1:])
        assert torch.equal(cute_kernels.mamba_segsum(*x).L, out.L)  # nothing of this call has a tangent
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda dt: cute_kernels.mamba_segsum(dt, *x[1:]).A_cumsum, (x.dt,), (x.dt,))


def test_functional_gradients_are_refused_not_dropped():
    x = make(dt_dtype=fp32)
    with pytest.raises(RuntimeError, match="functorch"):  # torch's custom ops can't do torch.func.grad
        torch.func.grad(lambda dt: cute_kernels.mamba_segsum(dt, *x[1:]).A_cumsum.sum())(x.dt)


def test_vmap_gives_every_slice_its_own_result():
    x = make(dt_dtype=fp32)
    dts = torch.stack([x.dt, x.dt + 1, -x.dt])
    found = torch.vmap(lambda dt: cute_kernels.mamba_segsum(dt, *x[1:]).M)(dts)
    assert all(torch.equal(m, cute_kernels.mamba_segsum(dt, *x[1:]).M) for m, dt in zip(found, dts, strict=True))


def test_tracing_keeps_the_operator():
    x = make()
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda *a: tuple(cute_kernels.mamba_segsum(*a)))(*x[:4])
    assert any(node.target is OPS.mamba_segsum.default for node in traced.graph.nodes)


def test_changed_inputs_are_noticed():
    x = with_gradients(make(dt_dtype=fp32))
    scaled = x.dt * 1
    out = cute_kernels.mamba_segsum(scaled, x.A_log, x.B, x.C)
    scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.A_cumsum.sum().backward()
