import pytest

import cute_kernels
from perf import calls, cases, errors


def case(op, name):
    return next(c for c in cases.cases(op, "official") if c.name == name)


def test_segsum_is_judged_by_the_bar():
    c, options = case("mamba_segsum", "1x1"), {"g_layout": "per_head"}
    x = calls.arguments(c, 0, "cpu")
    out = cute_kernels.mamba_segsum(**x)
    assert 0 < errors.errors(c, x, options, out)["bar"] <= 1
    out.L[0, 0, 0, 5, 5] = 2.0
    assert errors.errors(c, x, options, out)["bar"] == float("inf")


@pytest.mark.parametrize(
    ("op", "name"), [("hyena_block", "2x128"), ("hyena_filter", "131"), ("causal_long_conv", "1x131")]
)
def test_hyena_is_judged_beside_pytorch(op, name):
    c = case(op, name)
    x = calls.arguments(c, 0, "cpu")
    out = calls.formula(c, x, {})()
    found = errors.errors(c, x, {}, out)
    assert 0 < found["l2"] == found["torch_l2"] < 1e-5
    assert 0 < found["max"] == found["torch_max"]
    assert ("tolerance" in found) == (op == "hyena_block")
    wrong = errors.errors(c, x, {}, out + 1e-3)
    assert wrong["max"] == pytest.approx(1e-3, rel=0.01)
    if op == "hyena_block":
        assert found["tolerance"] < 0.1 < 1 < wrong["tolerance"]


def test_the_worst_batch_row_counts():
    c = case("causal_long_conv", "2x128")
    x = calls.arguments(c, 0, "cpu")
    out = calls.formula(c, x, {})()
    out[1] *= 1.5
    assert errors.errors(c, x, {}, out)["l2"] == pytest.approx(0.5, rel=0.01)
