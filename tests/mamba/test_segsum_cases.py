"""Every case, on every backend, against float64. Outputs are poisoned first and guarded on both sides."""

import math

import pytest
import torch

import cute_kernels
from reference import compare, inputs

from .cases import CASES, ON_MACHINE, TINY, PoisonedOutputs


def test_case(case, runner):
    x = case.inputs(runner.device, runner.small)
    poisoned = PoisonedOutputs.like(x)
    out = cute_kernels.mamba_segsum(*x, out=poisoned.out)
    compare.assert_ok(x, out)
    poisoned.assert_guards_intact()


def test_marked_cases_exist():
    assert {case.name for case in CASES} >= ON_MACHINE
    assert len({case.name for case in CASES}) == len(CASES)


def test_decay_stays_in_range(runner):
    x = inputs.long_decay(0, runner.device, **(TINY if runner.small else {}))
    L = cute_kernels.mamba_segsum(*x).L
    assert bool(((L >= 0) & (L <= 1)).all())


def test_slow_steps_after_fast_ones(runner):
    x = inputs.fast_then_slow(0, runner.device, **(TINY if runner.small else {}))
    out = cute_kernels.mamba_segsum(*x)
    later = torch.arange(min(100, x.dt.shape[2] // 2) + 1, x.dt.shape[2])
    below = out.L[..., later, later - 1].float()
    assert float((below - math.exp(-0.1)).abs().max()) <= 2**-8  # one ulp of bf16 there


def test_every_head_uses_its_group(runner):
    x = inputs.group_index(0, runner.device, **(TINY if runner.small else {}))
    h, g, n = x.dt.shape[3], x.B.shape[3], x.B.shape[4]
    expected = n * (1 + torch.arange(h, device=runner.device) // (h // g))
    G = cute_kernels.mamba_segsum(*x).G
    assert torch.equal(G, expected.to(G.dtype).expand(G.shape))


def test_same_bits_every_time_and_first_outputs_intact(runner):
    shape = TINY if runner.small else {"batch": 2, "chunks": 2}
    x, y = inputs.official(0, runner.device, **shape), inputs.official(1, runner.device, **shape)
    first = cute_kernels.mamba_segsum(*x)
    copies = [t.clone() for t in first]
    cute_kernels.mamba_segsum(*y)
    again = cute_kernels.mamba_segsum(*x)
    for a, b, c in zip(first, copies, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_row_of_a_batch_has_the_bits_of_the_row_alone(runner):
    # alone it is written in one launch, the batch in two
    shape = {**TINY, "chunk_size": 128, "batch": 65} if runner.small else {"batch": 33}
    x = inputs.mixture(0, runner.device, **shape)
    whole = cute_kernels.mamba_segsum(*x)
    for row in range(0, x.dt.shape[0], 16):
        alone = cute_kernels.mamba_segsum(
            *x._replace(dt=x.dt[row : row + 1], B=x.B[row : row + 1], C=x.C[row : row + 1])
        )
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[row : row + 1], b)


@pytest.mark.parametrize("empty", [{"batch": 0}, {"chunks": 0}, {"batch": 0, "chunks": 0}])
def test_empty(runner, empty):
    shape = {**TINY, "batch": 2, "chunks": 3, **empty}
    out = cute_kernels.mamba_segsum(*inputs.official(0, runner.device, **shape))
    b, c, q, h = shape["batch"], shape["chunks"], shape["chunk_size"], shape["heads"]
    assert out.L.shape == (b, h, c, q, q)
    assert out.G.shape == out.M.shape == (b, c, q, q, h)
    assert out.A_cumsum.shape == out.decay_states.shape == (b, h, c, q)


def test_outputs_are_contiguous_and_fresh(runner):
    x = inputs.official(0, runner.device, **{**TINY, "heads": 1})
    out = cute_kernels.mamba_segsum(*x)
    assert all(t.is_contiguous() and not t.requires_grad for t in out)
    assert len({t.data_ptr() for t in out}) == 5
