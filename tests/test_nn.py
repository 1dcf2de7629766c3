"""The modules: names, numbers, training."""

import copy
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels

from .hyena.hyena_dna import layer
from .hyena.test_params import hyena_dna_state


def make(**options):
    torch.manual_seed(0)
    return cute_kernels.nn.HyenaBlock(64, **{"max_length": 40, "d_inner": 128, **options})


def test_state_dict_is_a_hyena_dna_layer():
    state, x = hyena_dna_state()
    block = make()
    assert set(block.state_dict()) == set(state)
    assert all(t.shape == state[key].shape for key, t in block.state_dict().items())
    initial = layer(block.state_dict(), x)
    torch.testing.assert_close(block(x).double(), initial, rtol=1e-4, atol=1e-4)
    block.load_state_dict(state)
    torch.testing.assert_close(block(x[:, :23]).double(), layer(state, x[:, :23]), rtol=1e-4, atol=1e-4)
    params = cute_kernels.HyenaBlockParams.from_state_dict(block.state_dict())
    assert torch.equal(block(x), cute_kernels.hyena_block(x, params))
    with torch.no_grad():
        assert torch.equal(block(x), cute_kernels.hyena_block(x, block.params.prepare(seq_len=40)))


def test_every_parameter_trains():
    block = make()
    x, target = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    optimizer = torch.optim.Adam(block.parameters(), 1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (block(x) - target).square().mean()
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in block.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(list(block.parameters())) == 25  # the 24 weights and z


def test_new_weights_are_seen():
    block, x = make(), torch.randn(1, 9, 64)
    with torch.no_grad():
        before = block(x)
        block.norm2.bias = torch.nn.Parameter(torch.ones(64))
        assert not torch.equal(block(x), before)
        after = block(x)
        block.mlp.fc2.bias.add_(1.0)
        torch.testing.assert_close(block(x), after + 1)
    block.double()
    with pytest.raises(ValueError, match="norm1_weight is of type float64, but must be float32"):
        block(x)
    block.float()
    assert block.params is block.params
    assert block(x).requires_grad


def test_copies_and_files():
    block, x = make(), torch.randn(1, 9, 64)
    expected = block(x)
    other = copy.deepcopy(block)
    with torch.no_grad():
        block.mlp.fc2.bias.add_(1.0)
    assert torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_longer_than_its_positions():
    block = make(max_length=8)
    x = torch.randn(1, 12, 64)
    out = block(x)
    torch.testing.assert_close(out[:, :8], block(x[:, :8]), rtol=1e-4, atol=1e-5)


def test_compile():
    block = make()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((3, 7), (2, 40)):
        x = torch.randn(batch, length, 64)
        assert torch.equal(compiled(x), block(x))
    compiled(x).sum().backward()
    assert block.mixer.filter_fn.pos_emb.z.grad.abs().max() > 0


def test_meta_device():
    block = make(device="meta")
    assert block(torch.empty(2, 3, 64, device="meta")).shape == (2, 3, 64)


def devices(block):
    return {t.device.type for t in block.state_dict().values()}


def test_default_device():
    with torch.device("meta"):
        assert devices(make()) == {"meta"}
        assert devices(make(device="cpu")) == {"cpu"}
    torch.set_default_device("meta")
    try:
        assert devices(make()) == {"meta"}
    finally:
        torch.set_default_device(None)


def test_numbers_of_numpy():
    sizes = {"d_inner": np.int32(128), "max_length": np.int64(40), "filter_order": np.int64(64), "emb_dim": np.int8(5)}
    block, x = make(**sizes, sin_freq=np.float32(1), layer_norm_eps=np.float32(0.25)), torch.randn(1, 9, 64)
    assert torch.equal(block(x), make(layer_norm_eps=0.25)(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_inner": 0}, "d_inner is 0, but must be a positive int"),
        ({"emb_dim": 4}, "emb_dim is 4, but must be odd"),
        ({"max_length": 1.5}, "max_length is 1.5"),
    ],
)
def test_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=f"HyenaBlock: {message}"):
        make(**options)


def test_options_changed_later_count():
    block = make()
    x = torch.randn(1, 9, 64)
    before = block(x)
    block.norm1.eps = block.norm2.eps = 10.0
    after = block(x)
    assert not torch.equal(before, after)
    block.norm2.eps = 1e-5
    with pytest.raises(ValueError, match=r"norm2\.eps"):
        block(x)


@pytest.mark.parametrize("document", ["README.md", "docs/hyena.md"])
def test_examples_run_as_they_stand(document, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = (Path(__file__).parent.parent / document).read_text()
    (example,) = [part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "HyenaBlock(" in part]
    names = {}
    exec(example, names)
    assert names["y"].shape == names["x"].shape == names["v"].mT.shape


# --- parts that are wrong --------------------------------------------------------------------------------------------

LAYERS = "mixer.filter_fn.implicit_filter"


def exchange(path, part):
    def change(block):
        where, _, name = path.rpartition(".")
        setattr(block.get_submodule(where), name, part)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (exchange("mlp.fc1", nn.Linear(64, 128, bias=False)), r"mlp.fc1 \(Linear\) has no bias, but mlp.fc1.bias must"),
        (exchange("mlp", None), r"the block \(HyenaBlock\) has no mlp, but mlp.fc1.weight must be there"),
        (exchange("norm1", nn.Identity()), r"norm1 \(Identity\) has no weight, but norm1.weight must be there"),
        (exchange("norm2", nn.LayerNorm(64, elementwise_affine=False)), r"norm2 \(LayerNorm\) has no weight"),
        (exchange("norm2", nn.Conv1d(1, 64, 1)), r"norm2 \(Conv1d\) has no eps, but norm2.eps must be there"),
        (exchange("mixer.filter_fn.pos_emb.z", None), r"pos_emb \(_Positions\) has no z"),
        (exchange(f"{LAYERS}.1", nn.SiLU()), rf"{LAYERS}.1 \(SiLU\) has no freq, but {LAYERS}.1.freq must be there"),
        (exchange(f"{LAYERS}.5", nn.SiLU()), rf"{LAYERS}.5 \(SiLU\) has no freq"),
        (lambda block: block.get_submodule(LAYERS).append(nn.Identity()), f"{LAYERS} has 8 layers, but must have 7"),
    ],
)
def test_missing_parts(change, message):
    block, x = make(), torch.randn(1, 9, 64)
    block(x)
    change(block)
    with pytest.raises(TypeError, match=f"^HyenaBlock: .*{message}"):
        block(x)
    assert not hasattr(block, "nothing")


@pytest.mark.parametrize(
    ("path", "part", "message"),
    [
        (f"{LAYERS}.3", None, f"{LAYERS}.3.freq is a tensor of its own, but must be that of layer 1: one frequency"),
        (f"{LAYERS}.5", None, f"{LAYERS}.5.freq is a tensor of its own"),
        (f"{LAYERS}.6", nn.Linear(64, 64), f"{LAYERS}.6.bias is there, but must be None"),
    ],
)
def test_parts_that_would_be_ignored(path, part, message):
    block, x = make(), torch.randn(1, 9, 64)
    block(x)
    exchange(path, copy.deepcopy(block.get_submodule(path)) if part is None else part)(block)
    with pytest.raises(ValueError, match=f"^HyenaBlock: {message}"):
        block(x)


def test_another_sine_of_the_same_frequency():
    block, x = make(), torch.randn(1, 9, 64)
    expected = block(x)
    sine = copy.deepcopy(block.get_submodule(f"{LAYERS}.1"))
    sine.freq = block.get_submodule(f"{LAYERS}.1").freq
    exchange(f"{LAYERS}.3", sine)(block)
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("strict", [True, False])
def test_frequencies_that_differ_are_not_loaded(strict):
    state, _ = hyena_dna_state()
    state[f"{LAYERS}.5.freq"] += 1
    message = f"{LAYERS}.5.freq must equal .*{LAYERS}.1.freq: the block's three sines have one frequency"
    with pytest.raises(ValueError, match=f"HyenaBlock: {message}"):
        make().load_state_dict(state, strict=strict)
    with pytest.raises(ValueError, match=f"HyenaBlock: 0.{message}"):
        nn.Sequential(make()).load_state_dict({f"0.{name}": t for name, t in state.items()}, strict=strict)
    with pytest.raises(ValueError, match=f"HyenaBlockParams: {message}"):
        cute_kernels.HyenaBlockParams.from_state_dict(state)


def test_loads_what_torch_loads():
    state, _ = hyena_dna_state()
    state = {name: t.half() for name, t in state.items()}
    block = make()
    block.load_state_dict(state)
    assert torch.equal(block.params.sin_freq, state[f"{LAYERS}.1.freq"].float())
    del state[f"{LAYERS}.1.freq"], state[f"{LAYERS}.3.freq"]
    state[f"{LAYERS}.5.freq"] += 1
    assert block.load_state_dict(state, strict=False).missing_keys == [f"{LAYERS}.{i}.freq" for i in (1, 3)]
    assert torch.equal(block.params.sin_freq, state[f"{LAYERS}.5.freq"].float())
    make(device="meta").load_state_dict(make().state_dict(), assign=True)
    with FakeTensorMode():
        make().load_state_dict(make().state_dict())
