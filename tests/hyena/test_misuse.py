"""What users do by mistake, and what must come back: one sentence, or the right numbers."""

import contextlib
import io
import pickle
import re
import threading

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.hyena import precision
from cute_kernels.hyena.params import NAMES

from .helpers import make

block, hyena_filter = cute_kernels.hyena_block, cute_kernels.hyena_filter
PAIR = np.array([1.0, 2.0])


@pytest.mark.parametrize(
    "options",
    [
        *({"layer_norm_eps": eps} for eps in (True, "1", PAIR, torch.tensor(1e-5), 1j, 10**400, 1e39, float("nan"))),
        *({"exp_mod_shift": shift} for shift in (True, PAIR, -(10**400))),
        *({"l_max": l_max} for l_max in (True, 2.0, 2**70, PAIR)),
        *({"norm_len": norm_len} for norm_len in (True, 2**31, 2**70)),
        *({"filter_layout": layout} for layout in (PAIR, ["reshape"], 0)),
        *({"bias_in_filter": bias} for bias in (PAIR, 1, "True")),
        *({"precision": name} for name in (["high"], {}, PAIR, "HIGH")),
    ],
    ids=str,
)
def test_options_that_are_none(options):
    x, params, _ = make(length=3)
    (name,) = options
    with pytest.raises(ValueError, match=f"^hyena_block: {name} is .* but must be "):
        block(x, params, **options)


@pytest.mark.parametrize("seq_len", [True, -1, 2**31, 2**70, 1.0])
def test_lengths_that_are_none(seq_len):
    params = make()[1]
    with pytest.raises(ValueError, match=r"seq_len is .* must be an int from 0"):
        hyena_filter(params, seq_len)
    with pytest.raises(ValueError, match=r"seq_len is .* must be an int from 0"):
        params.prepare(seq_len=seq_len)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"l_max": 2**63}, "must be a positive int, below 2^63"),
        ({"norm_len": 2**31}, "must be a positive int or None, below 2^31"),
        ({"layer_norm_eps": 1e39}, "must be a finite number from 0 that fp32 holds"),
        ({"layer_norm_eps": 10**400}, "is an int of 1329 bits, but"),
        ({"exp_mod_shift": 10**5000}, "is an int of 16610 bits, but must be a finite number that fp32 holds"),
        ({"filter_layout": list(range(1000))}, "..., but must be 'reshape' or 'transpose'"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_bounds_are_told_in_short(options, message):
    x, params, _ = make(length=3)
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        block(x, params, **options)
    assert len(str(e.value)) < 200


def test_numbers_of_numpy():
    x, params, _ = make(length=5)
    want = block(x, params, layer_norm_eps=0.25, exp_mod_shift=0.5)
    assert torch.equal(block(x, params, layer_norm_eps=np.float32(0.25), exp_mod_shift=np.float64(0.5)), want)
    want = block(x, params, l_max=4, norm_len=9)
    given = make(length=5, options={"l_max": np.int64(4), "norm_len": np.int32(9)})[1]
    assert type(given.l_max) is type(given.options.norm_len) is int
    assert torch.equal(block(x, given), want)
    assert torch.equal(block(x, params, l_max=np.int64(4), norm_len=np.uint8(9)), want)
    assert torch.equal(block(x.clone().requires_grad_(), given), want)
    assert torch.equal(block(x, given.prepare(seq_len=np.int64(5))), want)
    assert torch.equal(hyena_filter(params, np.int64(5)), hyena_filter(params, 5))


def test_no_limit_of_the_length():
    x, params, _ = make(length=5)
    assert torch.equal(block(x, params, l_max=2**63 - 1), block(x, params))


def test_arrays_for_prepared():
    x, params, _ = make(length=5)
    prepared = params.prepare(seq_len=5)
    assert torch.equal(block(x.numpy(), prepared), block(x, params))
    for wrong in (None, [1.0], 3):
        with pytest.raises(TypeError, match=r"x is of type .* but must be"):
            block(wrong, prepared)


def test_negative_strides_do_not_end_the_process():
    x, params, _ = make(length=5)
    with pytest.raises(ValueError, match=r"x is an array with strides .* without negative strides"):
        block(x.numpy()[:, ::-1], params)


@pytest.mark.parametrize("device", ["cuda:77", "nowhere", -1, 3.5])
@pytest.mark.parametrize("operator", ["hyena_block", "hyena_filter", "causal_long_conv"])
def test_devices_that_are_none(operator, device):
    shape = {"hyena_block": {"d_model": 256, "d_inner": 1024}, "hyena_filter": {"d_model": 256}}.get(operator, {})
    supported, why = cute_kernels.is_supported(operator, **shape, device=device)
    assert not supported
    assert "device is " in why


def test_outputs_that_are_read_only():
    x, params, _ = make(length=5)
    out = np.zeros(x.shape, np.float32)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="out is a read-only array, but must be writable"):
        block(x, params, out=out)
    with pytest.raises(ValueError, match="out is a read-only array, but must be writable"):
        cute_kernels.causal_long_conv(x, x[0], out=out)


def test_outputs_that_negate_their_memory():
    x, params, _ = make(length=5)
    with pytest.raises(ValueError, match="out is a view that negates its memory"):
        block(x, params, out=torch._neg_view(torch.empty_like(x)))
    u = torch.randn(1, 1, 1)
    with pytest.raises(ValueError, match="out is a view that negates its memory"):
        cute_kernels.causal_long_conv(u, u[0], out=torch.zeros(1, 1, 1, dtype=torch.complex64).conj().imag)


def test_operators_that_are_none():
    with pytest.raises(ValueError, match="operator is"):
        cute_kernels.is_supported(["hyena_block"])


def test_params_from_a_file_on_another_device():
    file = io.BytesIO()
    torch.save(make()[1], file)
    file.seek(0)
    params = torch.load(file, map_location="meta", weights_only=False)
    assert params.device.type == "meta"
    assert block(torch.empty(2, 3, 64, device="meta"), params).shape == (2, 3, 64)


def test_params_from_pickle_see_changes():
    x, params, _ = make(length=5)
    copy = pickle.loads(pickle.dumps(params))
    assert torch.equal(block(x, copy), block(x, params))
    for p in (copy, params):
        p.mlp_fc2_bias.add_(1)
    assert torch.equal(block(x, copy), block(x, params))


def test_state_dicts_that_are_wrong():
    state = cute_kernels.nn.HyenaBlock(64, 64, max_length=9).state_dict()
    read = cute_kernels.HyenaBlockParams.from_state_dict
    z, freq = "mixer.filter_fn.pos_emb.z", "mixer.filter_fn.implicit_filter.3.freq"
    for wrong in (torch.ones(5), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=f"{z} is of shape"):
            read({**state, z: wrong})
    with pytest.raises(TypeError, match=f"{z} is of type list"):
        read({**state, z: [1.0]})
    with pytest.raises(TypeError, match=f"{freq} is of type list"):
        read({**state, freq: [1.0]})
    read({**state, freq: np.ones((1, 64), np.float32)})
    assert read({name: t.to("meta") for name, t in state.items()}).device.type == "meta"
    with pytest.raises(ValueError, match=rf"{z} is of shape \[1, 0, 5\], but must be .* with rows >= 1"):
        read({**state, z: torch.zeros(1, 0, 5)})
    for unequal in (torch.full((1, 64), 2.0), torch.full((1, 64), float("nan")), torch.ones(64), np.zeros((1, 64))):
        with pytest.raises(ValueError, match=f"HyenaBlockParams: {freq} must equal .*1.freq: .* one frequency"):
            read({**state, freq: unequal})
    first = freq.replace("3", "1")
    with pytest.raises(ValueError, match="sin_freq is on meta, but must be on cpu like norm1_weight"):
        read({**state, first: state[first].to("meta")})
    with pytest.raises(ValueError, match=r"sin_freq is a torch\.sparse_coo tensor"):
        read({**state, first: state[first].to_sparse()})
    for more in ("6.bias", "8.weight"):
        more = f"mixer.filter_fn.implicit_filter.{more}"
        with pytest.raises(ValueError, match=f"state_dict has '{more}', for which the block's filter has no place"):
            read({**state, more: torch.zeros(64)})


def test_frequencies_that_are_not_numbers_are_equal():
    state = cute_kernels.nn.HyenaBlock(64, 64, max_length=9).state_dict()
    state = {name: torch.full_like(t, float("nan")) if "freq" in name else t for name, t in state.items()}
    state = {name: t.clone() for name, t in state.items()}
    assert cute_kernels.HyenaBlockParams.from_state_dict(state).sin_freq.isnan().all()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None,), {}, "state_dict is of type NoneType, but must be a mapping of names to tensors"),
        (([1],), {}, "state_dict is of type list, but must be a mapping"),
        (("x.pt",), {}, "state_dict is of type str, but must be a mapping"),
        ((torch.nn.Linear(1, 1),), {}, "state_dict is of type Linear, but must be a mapping"),
        (({}, None), {}, "prefix is of type NoneType, but must be a str"),
        (({},), {"prefix": 3}, "prefix is of type int, but must be a str"),
        (({},), {"z": None}, "z is no option of from_state_dict, which takes layer_norm_eps, .*, norm_len$"),
        (({},), {"norm1_weight": torch.ones(64)}, "norm1_weight is no option of from_state_dict"),
        (({},), {"lmax": 3}, "lmax is no option of from_state_dict"),
    ],
)
def test_arguments_of_from_state_dict(arguments, options, message):
    with pytest.raises(TypeError, match=f"^HyenaBlockParams: {message}"):
        cute_kernels.HyenaBlockParams.from_state_dict(*arguments, **options)


@pytest.fixture
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_default_type_does_not_count(doubles):
    x, params, _ = make(length=9)
    prepared = params.prepare(seq_len=9)
    assert torch.equal(block(x, prepared), block(x, params))
    assert params.prepare(seq_len=0).buffer.dtype == torch.float32
    weights = {name: t.to("meta") for name, t in zip(NAMES, params.tensors, strict=True)}
    meta = cute_kernels.HyenaBlockParams(**weights)
    made = (hyena_filter(meta, 5), meta.prepare(seq_len=5).buffer, block(x.to("meta"), meta), hyena_filter(params, 5))
    assert {t.dtype for t in made} == {torch.float32}
    module = cute_kernels.nn.HyenaBlock(64, 64, max_length=9)
    assert {t.dtype for t in module.state_dict().values()} == {torch.float32}
    assert module(x).dtype == torch.float32


def test_vmap_over_a_weight():
    params = make()[1]
    weights = dict(zip(NAMES, params.tensors, strict=True))
    biases = torch.randn(3, 64)

    def of(bias):
        return hyena_filter(cute_kernels.HyenaBlockParams(**{**weights, "filter_bias": bias}), 5)

    got = torch.func.vmap(of)(biases)
    assert torch.equal(got, torch.stack([of(bias) for bias in biases]))


def test_vmap_over_modules():
    modules = [cute_kernels.nn.HyenaBlock(64, 64, max_length=9) for _ in range(2)]
    x = torch.randn(1, 5, 64)
    with torch.no_grad():
        want = torch.stack([module(x) for module in modules])
        state = torch.func.stack_module_state(modules)
        got = torch.func.vmap(lambda *state: torch.func.functional_call(modules[0], state, (x,)))(*state)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options",
    [
        *({"precision": "x"}, {"layer_norm_eps": -1.0}),
        *({"max_length": value} for value in (True, 2**70, None)),
        *({"d_model": value} for value in (None, 2**70, "64")),
        *({"d_inner": value} for value in (2**70, 1.5)),
        *({"emb_dim": value} for value in (None, True, 1)),
        *({"sin_freq": value} for value in ("a", None, 1e39, 10**400, torch.ones(1), float("nan"), True)),
    ],
    ids=lambda options: next(iter(options)),
)
def test_modules_that_are_wrong(options):
    with pytest.raises(ValueError, match=f"HyenaBlock: {next(iter(options))} is .* but must be "):
        cute_kernels.nn.HyenaBlock(**{"d_model": 64, **options})


def test_threads_leave_the_setting_as_it_was():
    setting = torch.backends.mkldnn.matmul
    before, seen = setting.fp32_precision, set()
    inside = threading.Barrier(2, timeout=0.2)

    def call():
        with precision.products("highest", torch.device("cpu")):
            with contextlib.suppress(threading.BrokenBarrierError):
                inside.wait()  # nobody else gets in
            seen.add(setting.fp32_precision)

    try:
        setting.fp32_precision = "bf16"
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {"ieee"}
        assert setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before
