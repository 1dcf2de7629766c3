"""HyenaBlockParams: checks, options, HyenaDNA's names, preparation."""

import dataclasses

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.hyena.params import FILTER_NAMES, HYENA_DNA, NAMES, SHAPES
from reference import hyena, hyena_inputs

from .helpers import SMALL, make, rel_l2, tensors
from .hyena_dna import layer


def weights(**changes):
    _, w = tensors(hyena_inputs.stress(1, 4, **SMALL))
    return {**w, **changes}


def test_names_are_the_official_ones_in_their_order():
    assert hyena.NAMES[1:] == NAMES
    assert len(NAMES) == 24
    assert len(FILTER_NAMES) == 10
    fields = [f.name for f in dataclasses.fields(cute_kernels.HyenaBlockParams)]
    assert tuple(fields[:24]) == NAMES


def test_good_params():
    params = cute_kernels.HyenaBlockParams(**weights())
    assert (params.problem.width, params.problem.inner, params.problem.emb_dim) == (64, 128, 5)
    assert "D=64" in repr(params)
    assert not params.requires_grad
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.l_max = 3
    assert dataclasses.replace(params, l_max=7).options.l_max == 7


def test_a_missing_weight():
    w = weights()
    del w["sin_freq"]
    with pytest.raises(TypeError, match="sin_freq"):
        cute_kernels.HyenaBlockParams(**w)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_weight(name):
    good = weights()[name]
    for bad, message in (
        (good[..., None], f"{name} is of shape .* of rank {len(SHAPES[name])}"),
        (good.double(), f"{name} is of type float64, but must be float32"),
        (good.to("meta"), r"is on \w+, but must be on \w+ like norm1_weight"),
        (good.to_sparse(), f"{name} is a torch.sparse_coo tensor"),
        (good[..., :-1] if good.shape[-1] > 1 else good[..., :0], "is of shape"),
    ):
        with pytest.raises(ValueError, match=f"HyenaBlockParams: .*{message}"):
            cute_kernels.HyenaBlockParams(**weights(**{name: bad}))
    for bad, kind in (([1.0], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"{name} is of type {kind}, but must be a torch.Tensor or a DLPack array"):
            cute_kernels.HyenaBlockParams(**weights(**{name: bad}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0, but must be a finite number from 0"),
        ({"layer_norm_eps": "a"}, "layer_norm_eps"),
        ({"exp_mod_shift": float("nan")}, "exp_mod_shift is nan"),
        ({"l_max": 0}, "l_max is 0, but must be a positive int"),
        ({"l_max": 2.5}, "l_max"),
        ({"norm_len": 0}, "norm_len is 0, but must be a positive int or None"),
        ({"filter_layout": "flat"}, "filter_layout is 'flat', but must be 'reshape' or 'transpose'"),
        ({"bias_in_filter": None}, "bias_in_filter is None, but must be True or False"),
        ({"z": torch.zeros(9, 4)}, r"z is of shape \[9, 4\], but must be \[rows, emb_dim\]"),
        ({"z": torch.zeros(2, 9, 5)}, "z is of shape"),
        ({"z": torch.zeros(0, 5)}, "z is of shape"),
        (
            {"z": torch.zeros(5)},
            r"z is of shape \[5\], but must be \[rows, emb_dim\] or \[1, rows, emb_dim\], of rank 2 or 3",
        ),
        ({"z": torch.zeros(9, 5).half()}, "z is of type float16"),
        (
            {"filter_linear1_weight": torch.zeros(64, 4)},
            "filter_linear1_weight is of shape .* odd emb_dim from 3",
        ),
    ],
)
def test_wrong_option(change, message):
    with pytest.raises(ValueError, match=message):
        cute_kernels.HyenaBlockParams(**weights(**change))


def test_arrays_through_dlpack():
    params = cute_kernels.HyenaBlockParams(**{name: t.numpy() for name, t in weights().items()})
    assert all(isinstance(t, torch.Tensor) for t in params.tensors)


def test_what_a_kernel_cannot_read_is_copied():
    w = weights()
    room = torch.empty(64 * 64 + 1)[1:].view(64, 64)
    changes = {
        "out_proj_weight": w["out_proj_weight"].T.contiguous().T,
        "filter_linear2_weight": room.copy_(w["filter_linear2_weight"]),
        "norm1_bias": torch._neg_view(-w["norm1_bias"]),
    }
    params = cute_kernels.HyenaBlockParams(**{**w, **changes})
    assert {NAMES[i] for i in params.copied} == set(changes)
    for name, t in params.weights().items():
        assert t.is_contiguous() and not t.is_neg() and t.data_ptr() % 16 == 0
        assert torch.equal(t, w[name])


def test_changes_in_place_are_seen():
    x, params, _ = make()
    before = cute_kernels.hyena_block(x, params)
    params.mlp_fc2_bias.add_(1.0)
    torch.testing.assert_close(cute_kernels.hyena_block(x, params), before + 1.0)


# --- HyenaDNA --------------------------------------------------------------------------------------------------------


def hyena_dna_state(length=40, prefix="", seed=0):
    """A trained-looking layer: nothing at its initial value."""
    inputs = hyena_inputs.stress(1, length, seed=seed, **SMALL)
    state = {key: torch.from_numpy(inputs[name]) for name, key in HYENA_DNA.items()}
    freq = state["mixer.filter_fn.implicit_filter.1.freq"]
    state |= {f"mixer.filter_fn.implicit_filter.{i}.freq": freq.clone() for i in (3, 5)}
    rng = np.random.default_rng(seed)
    state["mixer.filter_fn.pos_emb.z"] = torch.from_numpy(rng.standard_normal((1, length, 5)).astype(np.float32))
    state["mixer.filter_fn.pos_emb.t"] = torch.linspace(0, 1, length)[None, :, None]
    return {prefix + key: t for key, t in state.items()}, torch.from_numpy(inputs["hidden_states"])


@pytest.mark.parametrize("length", [1, 17, 40])
def test_from_state_dict_is_hyena_dna(length):
    state, x = hyena_dna_state()
    params = cute_kernels.HyenaBlockParams.from_state_dict(state)
    x = x[:, :length]
    assert rel_l2(cute_kernels.hyena_block(x, params), layer(state, x).numpy()) < 3e-6


def test_from_state_dict_with_a_prefix_and_fewer_names():
    prefix = "hyena.backbone.layers.3."
    state, x = hyena_dna_state(prefix=prefix)
    state |= {"hyena.backbone.layers.2." + key.removeprefix(prefix): t + 1 for key, t in state.items()}
    full = cute_kernels.HyenaBlockParams.from_state_dict(state, prefix)
    for number in (3, 5):  # files that keep a shared tensor once
        del state[f"{prefix}mixer.filter_fn.implicit_filter.{number}.freq"]
    params = cute_kernels.HyenaBlockParams.from_state_dict(state, prefix=prefix)
    assert torch.equal(cute_kernels.hyena_block(x, params), cute_kernels.hyena_block(x, full))
    assert params.options == (1e-5, 0.05, 40, "transpose", False, 40)
    assert cute_kernels.HyenaBlockParams.from_state_dict(state, prefix, l_max=20).l_max == 20


def test_from_state_dict_says_what_is_wrong():
    state, _ = hyena_dna_state(prefix="layers.0.")
    with pytest.raises(ValueError, match=r"state_dict has no 'norm1\.weight'; check prefix, which is ''"):
        cute_kernels.HyenaBlockParams.from_state_dict(state)
    state["layers.0.mixer.filter_fn.implicit_filter.3.freq"] += 1
    with pytest.raises(
        ValueError, match=r"implicit_filter.3.freq must equal layers.0.mixer.filter_fn.implicit_filter.1"
    ):
        cute_kernels.HyenaBlockParams.from_state_dict(state, "layers.0.")


# --- prepare ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_prepared_gives_the_same(precision):
    x, params, _ = make(length=29)
    prepared = params.prepare(seq_len=29, precision=precision)
    expected = cute_kernels.hyena_block(x, params, precision=precision)
    assert torch.equal(cute_kernels.hyena_block(x, prepared), expected)
    assert torch.equal(cute_kernels.hyena_block(x[:1], prepared, precision=precision), expected[:1])
    out = torch.full_like(x, float("nan"))
    assert cute_kernels.hyena_block(x, prepared, out=out) is out
    assert torch.equal(out, expected)
    changed = cute_kernels.hyena_block(x, prepared, layer_norm_eps=0.5)
    assert torch.equal(changed, cute_kernels.hyena_block(x, params, layer_norm_eps=0.5, precision=precision))


def test_prepared_is_shown_in_short():
    shown = repr(make()[1].prepare(seq_len=30, precision="high"))
    assert "HyenaBlockParams(D=64" in shown
    assert "precision='high', seq_len=30" in shown
    assert "tensor" not in shown


def test_prepared_keeps_the_filter_of_its_time():
    x, params, _ = make()
    prepared = params.prepare(seq_len=30)
    before = cute_kernels.hyena_block(x, params)
    params.filter_linear_final_weight.mul_(2.0)
    assert torch.equal(cute_kernels.hyena_block(x, prepared), before)
    assert not torch.equal(cute_kernels.hyena_block(x, params), before)


def test_prepared_refuses_another_problem():
    x, params, _ = make(length=30)
    prepared = params.prepare(seq_len=30, precision="high")
    for call, message in (
        (lambda: cute_kernels.hyena_block(x[:, :29], prepared), "x is of shape .* of L = 30 tokens, as params were"),
        (
            lambda: cute_kernels.hyena_block(x, prepared, precision="highest"),
            "precision is 'highest', but must be 'high'",
        ),
        (
            lambda: cute_kernels.hyena_block(x, prepared, norm_len=9),
            "norm_len is 9, but must be None, as it was prepared",
        ),
        (lambda: params.prepare(seq_len=-1), "seq_len is -1"),
        (lambda: params.prepare(seq_len=4, precision="low"), "precision is 'low'"),
        (
            lambda: dataclasses.replace(params, z=torch.zeros(4, 5)).prepare(seq_len=5),
            "prepare: seq_len is 5, but must be at most 4, the rows of z",
        ),
        (lambda: cute_kernels.hyena_block(x[..., :63], prepared), r"x is of shape .* must be \[B, L, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="prepared weights do not support automatic differentiation"):
        cute_kernels.hyena_block(x.requires_grad_(), prepared)


def test_prepared_beyond_l_max():
    x, params, inputs = make(length=30, options={"l_max": 20})
    prepared = params.prepare(seq_len=25)
    assert rel_l2(cute_kernels.hyena_block(x, prepared), hyena.block(inputs, l_max=20)["out"]) < 1e-5
