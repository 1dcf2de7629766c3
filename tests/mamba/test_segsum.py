"""The public function: checks and errors, `out`, DLPack, views, the plan of a call. The launch is a stand-in."""

import math

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.mamba import segsum
from cute_kernels.mamba.segsum_torch import segsum_torch
from cute_kernels.runtime import backend
from reference import compare, inputs
from tests.stand_in import StandIn

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = {"batch": 2, "chunks": 3, "chunk_size": 64, "heads": 4, "groups": 2, "d_state": 16}
INF = math.inf


def make(**shape) -> inputs.SegsumInputs:
    return inputs.official(0, **{**SHAPE, **shape})


def arguments(**changes) -> dict:
    return {**make()._asdict(), **changes}


@pytest.fixture
def launches(monkeypatch):
    """Puts a kernel in PyTorch behind the launch, which insists on what a real one needs; the list of its launches."""
    calls = []

    def launcher(problem, b, c, dt_limit, device):
        segsum.check_supported(problem)

        def launch(dt, A_log, dt_bias, B, C, *outputs):
            calls.append({"dt": dt, "A_log": A_log, "dt_bias": dt_bias, "B": B, "C": C, "problem": problem})
            for x in (B, C):
                assert x.data_ptr() % 16 == 0
                assert x.stride(-1) == 1
                assert all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
            assert not any(x.is_neg() for x in (dt, A_log, B, C))
            results = segsum_torch(dt, A_log, B, C, dt_bias, *dt_limit, problem.g_layout)
            for target, result in zip(outputs, results, strict=True):
                assert target.is_contiguous()
                assert target.data_ptr() % 16 == 0
                target.copy_(result)

        return launch

    monkeypatch.setattr(segsum, "_launcher", launcher)
    with backend.use(StandIn()):
        yield calls


# --- wrong arguments -------------------------------------------------------------------------------------------------

WRONG = {
    "dt rank": ({"dt": torch.zeros(3, 64, 4)}, r"dt is of shape \[3, 64, 4\], but must be \[b, c, Q, H\], of rank 4"),
    "dt type": ({"dt": torch.zeros(2, 3, 64, 4, dtype=torch.float64)}, "dt is of type float64, but must be bfloat16"),
    "dt integers": ({"dt": torch.zeros(2, 3, 64, 4, dtype=torch.int32)}, "dt is of type int32"),
    "no heads": ({"dt": torch.zeros(2, 3, 64, 0)}, r"dt is of shape .* H >= 1"),
    "no steps": ({"dt": torch.zeros(2, 3, 0, 4)}, r"dt is of shape .* Q >= 1"),
    "A_log rank": ({"A_log": torch.zeros(1, 4)}, r"A_log is of shape \[1, 4\], but must be \[H\]"),
    "A_log size": ({"A_log": torch.zeros(1)}, r"A_log is of shape \[1\], but must be \[4\]"),
    "A_log type": ({"A_log": torch.zeros(4, dtype=torch.int64)}, "A_log is of type int64"),
    "A_log device": ({"A_log": torch.zeros(4, device="meta")}, "A_log is on meta, but must be on cpu"),
    "dt_bias size": ({"dt_bias": torch.zeros(5)}, r"dt_bias is of shape \[5\], but must be \[4\]"),
    "dt_bias type": ({"dt_bias": torch.zeros(4, dtype=torch.bool)}, "dt_bias is of type bool"),
    "B rank": ({"B": torch.zeros(2, 3, 64, 16, dtype=bf16)}, "B is of shape .* of rank 5"),
    "B type": ({"B": torch.zeros(2, 3, 64, 2, 16)}, "B is of type float32, but must be bfloat16 or float16"),
    "B batch": ({"B": torch.zeros(1, 3, 64, 2, 16, dtype=bf16)}, r"B is of shape \[1, 3, .*must be \[2, 3, 64, G, N\]"),
    "B chunks": ({"B": torch.zeros(2, 1, 64, 2, 16, dtype=bf16)}, "B is of shape"),
    "B steps": ({"B": torch.zeros(2, 3, 128, 2, 16, dtype=bf16)}, "B is of shape"),
    "B groups": ({"B": torch.zeros(2, 3, 64, 3, 16, dtype=bf16)}, "B is of shape .* G a divisor of dt's 4 heads"),
    "B no groups": ({"B": torch.zeros(2, 3, 64, 0, 16, dtype=bf16)}, "B is of shape .* G >= 1"),
    "B no states": ({"B": torch.zeros(2, 3, 64, 2, 0, dtype=bf16)}, "B is of shape .* N >= 1"),
    "B device": ({"B": torch.zeros(2, 3, 64, 2, 16, dtype=bf16, device="meta")}, "B is on meta"),
    "C shape": (
        {"C": torch.zeros(2, 3, 64, 2, 32, dtype=bf16)},
        r"C is of shape .* must be \[2, 3, 64, 2, 16\] like B",
    ),
    "C type": ({"C": torch.zeros(2, 3, 64, 2, 16, dtype=fp16)}, "C is of type float16, but must be bfloat16 like B"),
    "sparse": ({"A_log": torch.zeros(4).to_sparse()}, "A_log is a torch.sparse_coo tensor"),
    "limits reversed": ({"dt_limit": (2.0, 1.0)}, "dt_limit is .*smallest <= largest"),
    "limits negative": ({"dt_limit": (-1.0, 1.0)}, "dt_limit"),
    "limits nan": ({"dt_limit": (0.0, math.nan)}, "dt_limit"),
    "limits infinite": ({"dt_limit": (INF, INF)}, "dt_limit"),
    "limits not a pair": ({"dt_limit": 1.0}, "dt_limit is 1.0, but must be a pair"),
    "limits of text": ({"dt_limit": ("a", "b")}, "dt_limit"),
    "limits in a text": ({"dt_limit": "01"}, "dt_limit is '01', but must be a pair"),
    "limits in a set": ({"dt_limit": {1, 2}}, "dt_limit is {1, 2}, but must be a pair"),
    "limits no float": ({"dt_limit": (0, 10**400)}, "dt_limit is .* but must be a pair"),
    "limits no fp32": ({"dt_limit": (1e39, 1e40)}, r"dt_limit is \(1e\+39, 1e\+40\), .* smallest at most 3.403e\+38"),
    "layout": ({"g_layout": "heads"}, "g_layout is 'heads', but must be 'per_head' or 'per_group'"),
    "layout no text": ({"g_layout": None}, "g_layout is None, but must be 'per_head' or 'per_group'"),
    "layout an array": ({"g_layout": np.array(["per_head"])}, "g_layout is array.* but must be 'per_head'"),
    "out a number": ({"out": 3}, "out is int, but must be five tensors"),
    "out read-only": ({"out": [np.broadcast_to(np.float32(0), 4)] * 5}, "out.L is a read-only array, but must be writ"),
    "out not five": ({"out": [torch.zeros(1)]}, "out is 1 items, but must be five tensors"),
    "out a tensor": ({"out": torch.zeros(5)}, "out is Tensor, but must be five tensors"),
}


@pytest.mark.parametrize("on", ["torch", "kernel"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name, on, request):
    changes, message = WRONG[name]
    calls = request.getfixturevalue("launches") if on == "kernel" else []
    with pytest.raises(ValueError, match=f"mamba_segsum: {message}"):
        cute_kernels.mamba_segsum(**arguments(**changes))
    assert not calls


@pytest.mark.parametrize("name", ["layout no text", "layout an array", "out a number"])
def test_wrong_argument_with_gradients(name):
    changes, message = WRONG[name]
    with pytest.raises(ValueError, match=f"mamba_segsum: {message}"):
        cute_kernels.mamba_segsum(**arguments(dt=make().dt.clone().requires_grad_(), **changes))


@pytest.mark.parametrize("on", ["torch", "kernel"])
@pytest.mark.parametrize("name", ["dt", "A_log", "B", "C", "dt_bias"])
@pytest.mark.parametrize("layout", ["sparse_coo", "_mkldnn", "nested"])
def test_memory_that_no_kernel_reads(layout, name, on, request):
    """Behind a call with the same metadata, whose plan is kept."""
    if on == "kernel":
        request.getfixturevalue("launches")
    x = arguments(dt=make().dt.float(), dt_bias=torch.zeros(4))
    cute_kernels.mamba_segsum(**x)
    make_it = {"sparse_coo": torch.Tensor.to_sparse, "_mkldnn": torch.Tensor.to_mkldnn, "nested": as_nested}[layout]
    with pytest.raises(ValueError, match=f"{name} is a .*{layout} tensor, but must be a strided tensor"):
        cute_kernels.mamba_segsum(**x | {name: make_it(x[name])})


def as_nested(x):
    return torch.nested.as_nested_tensor([x, x])


@pytest.mark.parametrize("name", ["dt", "A_log", "B", "C", "dt_bias"])
def test_not_an_array(name):
    with pytest.raises(TypeError, match=f"{name} is of type list, but must be a torch.Tensor or a DLPack array"):
        cute_kernels.mamba_segsum(**arguments(**{name: [1.0]}))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"chunk_size": 96}, "Q = 96 steps; supported are 64, 128 and 256"),
        ({"chunk_size": 512}, "Q = 512"),
        ({"d_state": 24}, "N = 24 states; supported are multiples of 16 from 16 to 256"),
        ({"d_state": 272}, "N = 272"),
        ({"d_state": 8}, "N = 8"),
    ],
)
def test_right_but_unsupported_by_kernels(shape, message, launches):
    with pytest.raises(NotImplementedError, match=message):
        cute_kernels.mamba_segsum(*make(**shape))
    with pytest.raises(NotImplementedError, match=message):
        cute_kernels.mamba_segsum(*make(**shape, batch=0))
    assert not launches


def test_any_size_runs_in_pytorch():
    x = make(chunk_size=37, d_state=3, heads=6, groups=3)
    compare.assert_ok(x, cute_kernels.mamba_segsum(*x))


def test_unsupported_device(monkeypatch):
    class Old(StandIn):
        def arch(self, device):
            raise NotImplementedError("compute capability 8.0 is not supported")

    with backend.use(Old()), pytest.raises(NotImplementedError, match=r"8\.0"):
        cute_kernels.mamba_segsum(*make())


# --- results ---------------------------------------------------------------------------------------------------------


def test_defaults_and_result_type():
    x = make()
    out = cute_kernels.mamba_segsum(*x[:4])
    assert type(out).__name__ == "SegsumOutputs"
    assert out._fields == ("L", "G", "M", "A_cumsum", "decay_states")
    assert [t.dtype for t in out] == [bf16, bf16, bf16, fp32, fp32]
    same = cute_kernels.mamba_segsum(x.dt, x.A_log, B=x.B, C=x.C, dt_bias=None, dt_limit=[0, INF], g_layout="per_head")
    assert all(torch.equal(a, b) for a, b in zip(out, same, strict=True))


def test_meta_tensors():
    x = make(device="meta")
    out = cute_kernels.mamba_segsum(*x)
    assert out.M.shape == (2, 3, 64, 64, 4)
    assert all(t.is_meta for t in out)


def test_parameters_and_no_grad():
    x = make(A_dtype=fp32)
    expected = cute_kernels.mamba_segsum(*x)
    with torch.no_grad():
        out = cute_kernels.mamba_segsum(x.dt, torch.nn.Parameter(x.A_log), x.B, x.C)
    assert torch.equal(out.M, expected.M)
    assert not out.M.requires_grad
    with torch.inference_mode():
        assert torch.equal(cute_kernels.mamba_segsum(*x).M, expected.M)


@pytest.mark.parametrize("name", ["official", *inputs.ADVERSARIAL])
def test_views_reach_the_kernel_as_it_needs_them(name, launches):
    shape = {**SHAPE, "batch": 2}
    x = inputs.official(1, **shape) if name == "official" else inputs.ADVERSARIAL[name](1, **shape)
    compare.assert_ok(x, cute_kernels.mamba_segsum(*x))
    assert len(launches) == 1


@pytest.mark.parametrize(("name", "copied"), [("official", False), ("aligned_slice", False), ("misaligned", True)])
def test_only_unreadable_operands_are_copied(name, copied, launches):
    x = inputs.official(0, **SHAPE) if name == "official" else inputs.ADVERSARIAL[name](0, **SHAPE)
    cute_kernels.mamba_segsum(*x)
    for field in ("B", "C"):
        assert (launches[0][field].data_ptr() != getattr(x, field).data_ptr()) == copied
    for field in ("dt", "A_log"):
        assert launches[0][field].data_ptr() == getattr(x, field).data_ptr()


def test_strides_of_size_one_are_made_canonical(launches):
    x = make(batch=1, groups=1)
    # Legal in torch: a dimension of size 1 has any stride, and as_strided tensors are contiguous all the same.
    B = x.B.as_strided(x.B.shape, (7, *x.B.stride()[1:3], 3, 1))
    assert B.is_contiguous()
    compare.assert_ok(x, cute_kernels.mamba_segsum(x.dt, x.A_log, B, x.C))
    assert launches[0]["B"].stride() == x.B.stride()
    assert launches[0]["B"].data_ptr() == x.B.data_ptr()


def test_lazily_negated_views(launches):
    x = make(dt_dtype=fp32, dtype=fp16)
    dt = torch.complex(torch.zeros_like(x.dt), -x.dt).conj().imag
    B = torch._neg_view(-x.B)
    assert dt.is_neg() and B.is_neg()
    compare.assert_ok(x, cute_kernels.mamba_segsum(dt, x.A_log, B, x.C))


def test_numpy_through_dlpack():
    x = make(dt_dtype=fp32, A_dtype=fp32, dtype=fp16)
    out = cute_kernels.mamba_segsum(*(t.numpy() for t in x[:4]))
    compare.assert_ok(x, out)
    with pytest.raises(ValueError, match="A_log is of type int64"):
        cute_kernels.mamba_segsum(x.dt, np.zeros(4, dtype=np.int64), x.B, x.C)


class Foreign:
    """An array that can do DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_foreign_arrays(launches):
    x = make(bias_dtype=fp32)
    out = cute_kernels.mamba_segsum(*map(Foreign, x[:4]), dt_bias=Foreign(x.dt_bias))
    assert isinstance(out.L, torch.Tensor)
    compare.assert_ok(x, out)


def test_unreadable_foreign_array():
    class Broken(Foreign):
        def __dlpack__(self, **options):
            raise BufferError("no")

    with pytest.raises(ValueError, match=r"B \(.*Broken\) can't be read through DLPack: no"):
        cute_kernels.mamba_segsum(**arguments(B=Broken(make().B)))


# --- out -------------------------------------------------------------------------------------------------------------


def outputs_of(x) -> segsum.SegsumOutputs:
    return segsum.SegsumOutputs(*(torch.full_like(t, math.nan) for t in cute_kernels.mamba_segsum(*x)))


@pytest.mark.parametrize("on", ["torch", "kernel"])
@pytest.mark.parametrize("kind", [tuple, list, segsum.SegsumOutputs._make])
def test_out(kind, on, request):
    if on == "kernel":
        request.getfixturevalue("launches")
    x = make()
    given = kind(outputs_of(x))
    versions = [t._version for t in given]
    out = cute_kernels.mamba_segsum(*x, out=given)
    assert isinstance(out, segsum.SegsumOutputs)
    assert all(a is b for a, b in zip(out, given, strict=True))
    assert all(t._version > v for t, v in zip(given, versions, strict=True))
    compare.assert_ok(x, out)


def shares(out, k, with_):
    """`out` with its k-th tensor laid over other memory."""
    changed = list(out)
    room = with_.view(torch.uint8).flatten()
    size = changed[k].nbytes
    changed[k] = room[:size].view(changed[k].dtype).view(changed[k].shape)
    return changed


@pytest.mark.parametrize("on", ["torch", "kernel"])
def test_wrong_out(on, request):
    calls = request.getfixturevalue("launches") if on == "kernel" else []
    x = make(batch=1, chunks=1)
    good = outputs_of(x)
    calls.clear()
    L, _, M, A_cumsum, _ = good
    shifted = torch.empty(L.numel() + 1, dtype=bf16)[1:].view(L.shape)
    wrong = [
        (good._replace(L=L[:, :2]), r"out.L is of shape \[1, 2, .* must be \[1, 4, 1, 64, 64\]"),
        (good._replace(A_cumsum=A_cumsum.half()), "out.A_cumsum is of type float16, but must be float32"),
        (good._replace(M=M.to("meta")), "out.M is on meta, but must be on cpu"),
        (good._replace(L=L.transpose(-1, -2)), "out.L is a view with strides .* must be contiguous"),
        (good._replace(L=L[:1, :1].expand(L.shape)), "out.L is a view with strides"),
        (good._replace(L=shifted), "out.L is at address .* must be aligned to 16 bytes"),
        (good._replace(decay_states=A_cumsum), "out.A_cumsum shares memory with out.decay_states"),
        (shares(good, 3, M), "out.M shares memory with out.A_cumsum"),
        (shares(good, 4, x.B), "out.decay_states shares memory with B"),
    ]
    for out, message in wrong:
        with pytest.raises(ValueError, match=f"mamba_segsum: {message}"):
            cute_kernels.mamba_segsum(*x, out=out)
    with pytest.raises(TypeError, match=r"out\.L is of type int"):
        cute_kernels.mamba_segsum(*x, out=[1, 2, 3, 4, 5])
    assert not calls


def test_out_over_a_strided_input(launches):
    x = inputs.expanded(0, **SHAPE)
    good = outputs_of(x)
    wide = torch.empty(2, 3, 64, 4, 3000, dtype=bf16)
    dt = wide[..., 7]
    with pytest.raises(ValueError, match=r"out\.\w+ shares memory with dt"):
        cute_kernels.mamba_segsum(*x._replace(dt=dt), out=shares(good, 3, wide))


def test_out_with_gradients():
    x = make(A_dtype=fp32)
    out = outputs_of(x)
    with pytest.raises(RuntimeError, match=r"out=.* does not support automatic differentiation"):
        cute_kernels.mamba_segsum(x.dt, x.A_log.requires_grad_(), x.B, x.C, out=out)
    out.A_cumsum.requires_grad_()
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        cute_kernels.mamba_segsum(*make(), out=out)
    with torch.no_grad():
        compare.assert_ok(x, cute_kernels.mamba_segsum(*x, out=out))


# --- cost of a call --------------------------------------------------------------------------------------------------


def test_checks_run_once_for_each_combination_of_metadata(launches, monkeypatch):
    made = []
    original = segsum._make_plan

    def counted(*args):
        made.append(args)
        return original(*args)

    monkeypatch.setattr(segsum, "_make_plan", counted)
    for _ in range(3):
        cute_kernels.mamba_segsum(*make())
    assert len(made) == 1
    cute_kernels.mamba_segsum(*make(batch=1))
    cute_kernels.mamba_segsum(*make(A_dtype=fp32))
    assert len(made) == 3
    with backend.use(StandIn()):  # another backend has other kernels
        cute_kernels.mamba_segsum(*make())
    assert len(made) == 4
    assert len(launches) == 6


def test_plans_are_bounded(launches, monkeypatch):
    monkeypatch.setattr(segsum, "_MAX_PLANS", 4)
    for batch in range(1, 12):
        cute_kernels.mamba_segsum(*make(batch=batch, chunks=1, heads=2))
    assert len(segsum._plans) <= 4


def test_a_failed_call_leaves_no_plan(launches):
    before = len(segsum._plans)
    with pytest.raises(NotImplementedError):
        cute_kernels.mamba_segsum(*make(d_state=40))
    assert len(segsum._plans) == before


# --- without a call --------------------------------------------------------------------------------------------------


def test_describe_outputs():
    problem = segsum.SegsumProblem(64, 4, 2, 16, bf16, bf16, bf16, None, "per_group")
    shapes = [shape for shape, _ in segsum.describe_outputs(problem, 2, 3)]
    assert shapes == [(2, 4, 3, 64, 64), (2, 3, 64, 64, 2), (2, 3, 64, 64, 4), (2, 4, 3, 64), (2, 4, 3, 64)]
