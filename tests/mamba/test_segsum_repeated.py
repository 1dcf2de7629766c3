"""Calls that look like the last one skip its checks; any that differ in what counts don't."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels
from cute_kernels.mamba import segsum
from cute_kernels.runtime import backend, repeated
from reference import compare, inputs
from tests.stand_in import StandIn

pytestmark = pytest.mark.skipif(repeated.TensorGuards is None, reason="this torch has no guards")
SHAPE = {"chunk_size": 8, "heads": 3, "d_state": 4}


def make(seed=0, **shape):
    return inputs.official(seed, "cpu", **{**SHAPE, **shape})


def call(x, **options):
    return cute_kernels.mamba_segsum(*x[:5], **options)


@pytest.fixture
def found(monkeypatch):
    """The calls whose plan had to be found, and those that went through the dispatcher."""
    seen = []
    for name in ("_find_plan", "_through_dispatcher"):
        original = getattr(segsum, name)

        def watched(*args, name=name, original=original):
            seen.append(name)
            return original(*args)

        monkeypatch.setattr(segsum, name, watched)
    monkeypatch.setattr(segsum, "_last", segsum._Last(None))
    return seen


@pytest.fixture
def known(found):
    """Inputs of a call that is known."""
    x = make()
    for _ in range(3):
        call(x)
    assert found == ["_find_plan"] * 2
    found.clear()
    return x


@pytest.mark.parametrize("bias", [None, torch.float32])
def test_the_third_call_is_known_whatever_its_values(found, bias):
    for seed in range(3):
        x = make(seed, bias_dtype=bias)
        compare.assert_ok(x, call(x))
    assert found == ["_find_plan"] * 2


def test_shapes_that_take_turns_are_not_learnt(found):
    for _ in range(3):
        call(make())
        call(make(heads=2))
    assert segsum._last.look_same is None


CHANGES = {
    "batch": make(batch=2),
    "heads": make(heads=2),
    "type": make(dtype=torch.float16),
    "step type": make(dt_dtype=torch.float32),
    "A type": make(A_dtype=torch.float32),
    "bias": make(bias_dtype=torch.float32),
    "strides": make()._replace(B=make().B.permute(4, 0, 1, 2, 3).contiguous().permute(1, 2, 3, 4, 0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_metadata(known, found, change):
    y = CHANGES[change]
    compare.assert_ok(y, call(y))
    assert found == ["_find_plan"]


def test_other_options(known, found):
    assert call(known, g_layout="per_group").G.shape[-1] == 1
    limited = call(known, dt_limit=(0.5, 0.5))
    assert not torch.equal(limited.L, call(known).L)
    assert len(found) == 3


def test_another_backend(known):
    with backend.use(StandIn()), pytest.raises(NotImplementedError, match="no kernel for chunks of Q = 8"):
        call(known)


def test_a_wrong_argument_is_refused(known):
    with pytest.raises(ValueError, match="A_log is of shape"):
        call(known._replace(A_log=known.A_log[:2]))
    with pytest.raises(TypeError, match="B is of type list"):
        call(known._replace(B=[]))
    with pytest.raises(ValueError, match=r"out\.L is of shape"):
        call(known, out=call(make(batch=2)))


def test_negative_views():
    x = make(dt_dtype=torch.float32)
    for _ in range(3):
        call(x)
    y = x._replace(dt=torch.complex(torch.zeros_like(x.dt), -x.dt).conj().imag)
    assert y.dt.is_neg()
    compare.assert_ok(x, call(y))


def test_gradients(known, found):
    leaf = known._replace(A_log=known.A_log.clone().requires_grad_())
    assert call(leaf).L.requires_grad
    assert found == ["_through_dispatcher", "_find_plan"]
    with torch.no_grad():
        for _ in range(3):
            assert not call(leaf).L.requires_grad
    assert call(leaf).L.requires_grad  # known, but for no_grad
    with pytest.raises(RuntimeError, match="does not support automatic differentiation"):
        call(leaf, out=call(known))


def test_an_out_that_requires_grad(known):
    out = call(known)
    with pytest.raises(RuntimeError, match="does not support automatic differentiation"):
        call(known, out=out._replace(L=out.L.clone().requires_grad_()))


class Mode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_operator(known):
    with Mode() as mode:
        call(known)
    assert "cute_kernels::mamba_segsum" in mode.seen


class Sub(torch.Tensor):
    pass


def test_observers(known, found):
    observers = {
        "subclass": lambda: call(known._replace(dt=known.dt.as_subclass(Sub))),
        "trace": lambda: torch.jit.trace(lambda dt: call(known._replace(dt=dt)).L, known.dt, check_trace=False),
        "make_fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(lambda dt: call(known._replace(dt=dt)).L)(
            known.dt
        ),
        "functionalize": lambda: torch.func.functionalize(lambda: call(known).L)(),
        "compile": lambda: torch.compile(lambda dt: call(known._replace(dt=dt)).L, backend="eager")(known.dt),
    }
    for name, observe in observers.items():
        found.clear()
        observe()
        assert "_through_dispatcher" in found or name == "compile", name
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        call(known._replace(dt=forward_ad.make_dual(known.dt, torch.ones_like(known.dt))))


def test_inference_mode(known, found):
    with torch.inference_mode():
        compare.assert_ok(known, call(known))
    compare.assert_ok(known, call(known))
