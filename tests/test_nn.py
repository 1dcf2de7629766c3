"""The modules: names, numbers, training."""

import copy
import io

import pytest
import torch

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
