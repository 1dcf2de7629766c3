"""`hyena_block`: checks and errors, options, views, out, devices. On the CPU; with kernels, on the PTX machine."""

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.hyena import block
from cute_kernels.runtime import backend
from reference import hyena, hyena_inputs
from tests.stand_in import StandIn

from .helpers import SMALL, make, rel_l2, tensors


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 63, 64, 65, 127, 129, 541])
def test_against_the_oracle(kind, length):
    x, params, inputs = make(kind, length=length)
    assert rel_l2(cute_kernels.hyena_block(x, params), hyena.block(inputs)["out"]) < 1e-5


OPTIONS = [
    {"layer_norm_eps": 0.1},
    {"exp_mod_shift": 0.5},
    {"l_max": 17},
    {"filter_layout": "transpose"},
    {"bias_in_filter": False},
    {"norm_len": 77},
    {"layer_norm_eps": 0.0, "l_max": 8, "filter_layout": "transpose", "bias_in_filter": False, "norm_len": 50},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options):
    x, params, inputs = make()
    expected = hyena.block(inputs, **options)["out"]
    found = cute_kernels.hyena_block(x, params, **options)
    assert rel_l2(found, expected) < 1e-5
    _, set_before, _ = make(options=options)
    assert torch.equal(cute_kernels.hyena_block(x, set_before), found)
    assert not torch.equal(cute_kernels.hyena_block(x, params), found)


def test_stored_positions():
    z = np.random.default_rng(3).standard_normal((45, 5)).astype(np.float32)
    x, params, inputs = make(options={"z": torch.from_numpy(z)})
    expected = hyena.block(inputs, z=z)["out"]
    assert rel_l2(cute_kernels.hyena_block(x, params), expected) < 1e-5
    _, params, _ = make(options={"z": torch.from_numpy(z)[None]})
    assert rel_l2(cute_kernels.hyena_block(x, params), expected) < 1e-5
    with pytest.raises(ValueError, match=r"x is of shape .* of at most 45 tokens, as z has that many rows"):
        cute_kernels.hyena_block(torch.zeros(1, 46, 64), params)
    assert cute_kernels.hyena_block(torch.zeros(1, 46, 64), params, l_max=45).shape == (1, 46, 64)


def test_other_sizes():
    """A CPU has no limits but the formulas'."""
    dims = {"width": 6, "inner": 10, "order": 7, "emb_dim": 3}
    x, params, inputs = make(**dims)
    assert rel_l2(cute_kernels.hyena_block(x, params), hyena.block(inputs)["out"]) < 1e-5


def test_medium_rounds_operands():
    x, params, inputs = make()
    expected = hyena.block(inputs)["out"]
    error = rel_l2(cute_kernels.hyena_block(x, params, precision="medium"), expected)
    assert 1e-4 < error < 1e-2
    assert rel_l2(cute_kernels.hyena_block(x, params, precision="high"), expected) < 1e-5  # fp32 on a CPU


@pytest.mark.parametrize("shape", [(0, 30, 64), (2, 0, 64), (0, 0, 64)])
def test_empty(shape):
    _, params, _ = make()
    x = torch.zeros(shape)
    assert cute_kernels.hyena_block(x, params).shape == shape
    out = torch.empty(shape)
    assert cute_kernels.hyena_block(x, params, out=out) is out
    assert cute_kernels.hyena_block(x, params.prepare(seq_len=shape[1])).shape == shape


def test_meta():
    _, w = tensors(hyena_inputs.stress(1, 1, **SMALL))
    params = cute_kernels.HyenaBlockParams(**{name: t.to("meta") for name, t in w.items()})
    out = cute_kernels.hyena_block(torch.empty(2, 9, 64, device="meta"), params)
    assert out.is_meta and out.shape == (2, 9, 64)


def test_slices_of_the_batch(monkeypatch):
    """Memory is bounded by taking few rows at a time."""
    from cute_kernels.hyena import compose

    x, params, _ = make(batch=5)
    expected = cute_kernels.hyena_block(x, params)
    monkeypatch.setattr(compose, "SLICE_ELEMENTS", 2 * 30 * 192)
    assert torch.allclose(cute_kernels.hyena_block(x, params), expected, atol=1e-5)


# --- wrong arguments -------------------------------------------------------------------------------------------------

WRONG = {
    "rank": ({"x": torch.zeros(30, 64)}, r"x is of shape \[30, 64\], but must be \[B, L, D\], of rank 3"),
    "width": ({"x": torch.zeros(2, 30, 128)}, r"x is of shape .* must be \[B, L, 64\], as the weights have D = 64"),
    "type": ({"x": torch.zeros(2, 30, 64).bfloat16()}, "x is of type bfloat16, but must be float32"),
    "double": ({"x": torch.zeros(2, 30, 64).double()}, "x is of type float64"),
    "device": ({"x": torch.zeros(2, 30, 64, device="meta")}, "x is on meta, but must be on cpu like the weights"),
    "sparse": ({"x": torch.zeros(2, 30, 64).to_sparse()}, "x is a torch.sparse_coo tensor"),
    "precision": ({"precision": "fp16"}, "precision is 'fp16', but must be 'highest', 'high', 'medium' or None"),
    "eps": ({"layer_norm_eps": -1}, "layer_norm_eps is -1, but must be a finite number from 0"),
    "layout": ({"filter_layout": "flat"}, "filter_layout is 'flat'"),
    "l_max": ({"l_max": 0}, "l_max is 0, but must be a positive int"),
    "norm_len": ({"norm_len": -4}, "norm_len is -4"),
    "out shape": ({"out": torch.zeros(2, 31, 64)}, r"out is of shape .* must be \[2, 30, 64\]"),
    "out type": ({"out": torch.zeros(2, 30, 64).half()}, "out is of type float16, but must be float32"),
    "out device": ({"out": torch.zeros(2, 30, 64, device="meta")}, "out is on meta, but must be on cpu like x"),
    "out strides": ({"out": torch.zeros(30, 2, 64).transpose(0, 1)}, "out is a view with strides"),
    "out alignment": ({"out": torch.zeros(2 * 30 * 64 + 1)[1:].view(2, 30, 64)}, "out is at address .* 16 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name):
    changes, message = WRONG[name]
    x, params, _ = make()
    with pytest.raises(ValueError, match=f"hyena_block: {message}"):
        cute_kernels.hyena_block(**{"x": x, "params": params, **changes})


def test_wrong_kinds():
    x, params, _ = make()
    with pytest.raises(TypeError, match="params is of type dict, but must be HyenaBlockParams"):
        cute_kernels.hyena_block(x, {})
    with pytest.raises(TypeError, match=r"x is of type list, but must be a torch\.Tensor or a DLPack array"):
        cute_kernels.hyena_block([1.0], params)
    with pytest.raises(TypeError, match="out is of type list"):
        cute_kernels.hyena_block(x, params, out=[1.0])


def test_out_may_not_share_memory():
    x, params, _ = make()
    with pytest.raises(ValueError, match="out shares memory with x, but must have its own"):
        cute_kernels.hyena_block(x, params, out=x)
    room = torch.zeros(2 * 64 * 64)
    w = dict(zip(hyena.NAMES[1:], params.tensors, strict=True))
    w["out_proj_weight"] = room[: 64 * 64].view(64, 64)
    with pytest.raises(ValueError, match="out shares memory with out_proj_weight"):
        cute_kernels.hyena_block(torch.zeros(2, 64, 64), cute_kernels.HyenaBlockParams(**w), out=room.view(2, 64, 64))


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"width": 96}, "D = 96; supported are multiples of 64 from 64 to 1024"),
        ({"width": 1088}, "D = 1088"),
        ({"inner": 100}, "d_inner = 100; supported are multiples of 64"),
        ({"order": 32}, "order 32; supported is 64"),
    ],
)
def test_right_but_unsupported_by_kernels(dims, message):
    x, params, _ = make(length=2, batch=0, **dims)
    with backend.use(StandIn()):
        for call in (
            lambda: cute_kernels.hyena_block(x, params),
            lambda: params.prepare(seq_len=2),
            lambda: cute_kernels.hyena_filter(params, 2),
        ):
            with pytest.raises(NotImplementedError, match=message):
                call()


def test_unsupported_device():
    class Old(StandIn):
        def arch(self, device):
            raise NotImplementedError("compute capability 8.0 is not supported")

    x, params, _ = make()
    with backend.use(Old()), pytest.raises(NotImplementedError, match=r"8\.0"):
        cute_kernels.hyena_block(x, params)


# --- results ---------------------------------------------------------------------------------------------------------


def test_views_and_arrays():
    x, params, _ = make()
    expected = cute_kernels.hyena_block(x, params)
    views = {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "channels first": x.mT.contiguous().mT,
        "misaligned": torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape),
        "slice": torch.cat([x, x], dim=2)[..., :64],
        "negated": torch._neg_view(-x),
        "parameter": torch.nn.Parameter(x, requires_grad=False),
        "numpy": x.numpy(),
    }
    for name, view in views.items():
        assert torch.equal(cute_kernels.hyena_block(view, params), expected), name
    assert torch.equal(
        cute_kernels.hyena_block(x[:1, :1].expand(3, 7, 64), params),
        cute_kernels.hyena_block(x[:1, :1].expand(3, 7, 64).contiguous(), params),
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_out(mode):
    x, params, _ = make()
    expected = cute_kernels.hyena_block(x, params)
    with mode():
        out = torch.full_like(x, float("nan"))
        assert cute_kernels.hyena_block(x, params, out=out) is out
    assert torch.equal(out, expected)
    out = torch.full_like(x, float("nan"))
    version = out._version
    cute_kernels.hyena_block(x, params, out=out)
    assert out._version > version


def test_outputs_are_new():
    x, params, _ = make()
    first = cute_kernels.hyena_block(x, params)
    kept = first.clone()
    cute_kernels.hyena_block(x + 1, params)
    assert torch.equal(first, kept)
    assert torch.equal(cute_kernels.hyena_block(x, params), kept)


def test_autocast_computes_in_fp32():
    x, params, _ = make()
    expected = cute_kernels.hyena_block(x, params)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cute_kernels.hyena_block(x, params), expected)
        rounded = cute_kernels.hyena_block(x.bfloat16(), params)
        assert torch.equal(rounded, cute_kernels.hyena_block(x.bfloat16().float(), params))
        assert rounded.dtype == torch.float32
        k = cute_kernels.hyena_filter(params, 30)
        cute_kernels.causal_long_conv(x.mT, k)
    assert torch.equal(k, cute_kernels.hyena_filter(params, 30))


def test_plans_are_made_once_and_bounded(monkeypatch):
    made = []
    original = block._make_plan
    monkeypatch.setattr(block, "_make_plan", lambda *args: made.append(args) or original(*args))
    x, params, _ = make(batch=3)
    for _ in range(3):
        cute_kernels.hyena_block(x, params)
    assert len(made) <= 1
    monkeypatch.setattr(block, "_MAX_PLANS", 4)
    for batch in range(1, 9):
        cute_kernels.hyena_block(x[:1].expand(batch, 30, 64), params)
    assert len(block._plans) <= 4


# --- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", hyena.NAMES)
def test_every_tensor_moves_the_output_as_the_oracle_says(name):
    inputs = hyena_inputs.stress(1, 65, **SMALL)
    noise = np.random.default_rng(7).standard_normal(inputs[name].shape).astype(np.float32)
    moved = {**inputs, name: inputs[name] + 0.1 * np.abs(inputs[name]).max() * noise}
    want = hyena.block(moved)["out"] - hyena.block(inputs)["out"]

    def run(arrays):
        x, w = tensors(arrays)
        return cute_kernels.hyena_block(x, cute_kernels.HyenaBlockParams(**w))

    assert np.sqrt(np.mean(want**2)) > 1e-3
    assert rel_l2(run(moved) - run(inputs), want) < 1e-3


def test_prefix_of_a_longer_sequence():
    x, params, _ = make(length=300, options={"norm_len": 300, "filter_layout": "transpose"})
    long, short = (cute_kernels.hyena_block(t, params) for t in (x, x[:, :100]))
    torch.testing.assert_close(long[:, :100], short, rtol=1e-5, atol=1e-5)


# --- without a call --------------------------------------------------------------------------------------------------


def test_supported():
    with backend.use(StandIn()):
        ask = cute_kernels.is_supported
        assert ask("hyena_block", d_model=256, d_inner=1024) == (True, "")
        assert ask("hyena_filter", d_model=256) == (True, "")
        assert ask("causal_long_conv") == (True, "")
        for change, reason in (
            ({"d_model": 100}, "D = 100"),
            ({"d_inner": 65}, "d_inner = 65"),
            ({"d_inner": 0}, "d_inner is 0, but must be a positive int"),
            ({"emb_dim": 4}, "emb_dim is 4, but must be odd"),
            ({"filter_order": 16}, "order 16"),
            ({"precision": "low"}, "precision is 'low'"),
            ({"filter_layout": "flat"}, "filter_layout"),
        ):
            supported, why = ask("hyena_block", **{"d_model": 256, "d_inner": 1024, **change})
            assert not supported
            assert reason in why
    assert "no kernel for device cpu" in ask("hyena_block", d_model=256, d_inner=1024, device="cpu")[1]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("width", [64, 256])
def test_warmup_asks_for_every_kernel_of_a_call(arch, width):
    class Asked(StandIn):
        def __init__(self):
            super().__init__()
            self.asked = []

        def arch(self, device):
            return arch

        def function(self, kernel, device):
            self.asked.append(kernel)
            return lambda *arguments: None

    with backend.use(Asked()) as b:
        cute_kernels.warmup("hyena_block", d_model=width, d_inner=4 * width, precision="high")
        ready = set(b.asked)
        assert all(arch in kernel.archs for kernel in ready)
        b.asked.clear()
        problem = block.HyenaProblem(width, 4 * width, 64, 5, None)
        shapes = 2 ** (np.random.default_rng(0).random((500, 2)) * [7, 15])  # batch to 128, length to 32768
        for batch, length in [(1, 1), (1, 131), (3, 541), (2, 4096), *shapes.astype(int).tolist()]:
            block._composition(torch.empty(1).expand(batch, length, width), problem, block.HyenaOptions(), "high")
        assert set(b.asked) <= ready
