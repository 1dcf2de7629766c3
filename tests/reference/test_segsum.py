"""The oracle against the same formulas written a second time: scalar Python, exact sums, one element after another."""

import math

import pytest
import torch

from reference import inputs, segsum

INF = float("inf")


def scalar_softplus(x: float) -> float:
    if math.isnan(x):
        return x
    if x > 0:
        return x + math.log1p(math.exp(-x))
    return math.log1p(math.exp(x))


def scalar_exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return INF


def scalar_sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def scalar_oracle(x: inputs.SegsumInputs):
    """Yields (name, index, value) of every output element."""
    b, c, q, h = x.dt.shape
    g = x.B.shape[3]
    dt, A_log, B, C = (t.double().tolist() for t in x[:4])
    bias = [0.0] * h if x.dt_bias is None else x.dt_bias.double().tolist()
    low, high = x.dt_limit
    for ib in range(b):
        for ic in range(c):
            for ih in range(h):
                a = []
                for s in range(q):
                    step = scalar_softplus(dt[ib][ic][s][ih] + bias[ih])
                    step = step if math.isnan(step) else min(max(step, low), high)
                    a.append(-scalar_exp(A_log[ih]) * step)
                for i in range(q):
                    yield "A_cumsum", (ib, ih, ic, i), scalar_sum(a[: i + 1])
                    yield "decay_states", (ib, ih, ic, i), scalar_exp(scalar_sum(a[i + 1 :]))
                    for j in range(q):
                        value = scalar_exp(scalar_sum(a[j + 1 : i + 1])) if j <= i else 0.0
                        yield "L", (ib, ih, ic, i, j), value
                        group = ih // (h // g)
                        product = scalar_sum(
                            [u * v for u, v in zip(C[ib][ic][i][group], B[ib][ic][j][group], strict=True)]
                        )
                        column = ih if x.g_layout == "per_head" else group
                        yield "G", (ib, ic, i, j, column), product
                        yield "M", (ib, ic, i, j, ih), product * value if j <= i else 0.0


SMALL = {"batch": 2, "chunks": 2, "chunk_size": 7, "heads": 4, "groups": 2, "d_state": 5}


@pytest.mark.parametrize("name", ["official", *inputs.ADVERSARIAL])
def test_oracle_matches_scalar_python(name):
    make = inputs.official if name == "official" else inputs.ADVERSARIAL[name]
    x = make(3, **SMALL)
    found = segsum.segsum(*x)._asdict()
    for key, at, expected in scalar_oracle(x):
        assert float(found[key][at]) == pytest.approx(expected, rel=1e-12, abs=1e-13, nan_ok=True), (key, at)


def test_per_group_layout():
    x = inputs.official(0, **SMALL)
    per_head, per_group = segsum.segsum(*x), segsum.segsum(*x._replace(g_layout="per_group"))
    assert per_group.G.shape == (2, 2, 7, 7, 2)
    assert torch.equal(per_group.G.repeat_interleave(2, -1), per_head.G)
    assert torch.equal(per_group.M, per_head.M)


def test_known_values():
    x = inputs.fast_then_slow(0, heads=1, d_state=16)
    L = segsum.segsum(*x).L[0, 0, 0]
    assert float(L[150, 149]) == pytest.approx(math.exp(-0.1), rel=1e-6)
    assert float(L[50, 48]) == pytest.approx(math.exp(-2), rel=1e-6)
    assert float(L[200, 50]) == pytest.approx(math.exp(-49 - 10.1), rel=1e-5)
    group = segsum.segsum(*inputs.group_index(0, chunk_size=4, d_state=16)).G
    assert group[0, 0, 1, 2].tolist() == [16.0 * (h // 4 + 1) for h in range(16)]


def test_steps_have_the_range_of_fp32():
    x = inputs.official(0, chunk_size=4, heads=1, d_state=1)
    a = segsum.steps(x.dt, torch.tensor([100.0]))
    assert torch.equal(a, torch.full_like(a, -INF))


def test_softplus_far_out():
    x = torch.tensor([-1000.0, -40.0, 40.0, 1000.0, INF, -INF], dtype=torch.float64)
    assert segsum.softplus(x).tolist() == [0.0, math.log1p(math.exp(-40.0)), 40.0 + math.exp(-40.0), 1000.0, INF, 0.0]
