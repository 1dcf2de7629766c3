"""What users do by mistake, and what must come back: one sentence, or the right numbers."""

import contextlib
import io
import pickle
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


def test_numbers_of_numpy():
    x, params, _ = make(length=5)
    want = block(x, params, layer_norm_eps=0.25, exp_mod_shift=0.5)
    assert torch.equal(block(x, params, layer_norm_eps=np.float32(0.25), exp_mod_shift=np.float64(0.5)), want)


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


@pytest.mark.parametrize("options", [{"precision": "x"}, {"layer_norm_eps": -1.0}, {"max_length": True}])
def test_modules_that_are_wrong(options):
    with pytest.raises(ValueError, match=f"HyenaBlock: {next(iter(options))} is"):
        cute_kernels.nn.HyenaBlock(64, **options)


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
