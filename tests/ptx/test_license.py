"""How tensor cores add: what an H200 gave, bit for bit; and one step of every MMA against float64."""

import numpy as np
import pytest
import torch

from . import accumulation, approximations, license, operators, recorded
from .running import run

RECORDED = license.recorded()


@pytest.mark.parametrize("kind, spread", RECORDED, ids=lambda x: str(x))
def test_matrix_product_has_the_bits_of_an_h200(kind, spread):
    operands, recorded = RECORDED[kind, spread]
    out = run("gemm32", "sm_90a", 64, 64, 1, kind, "KK", inputs=operands, rows=64)[0]
    assert torch.equal(out.view(torch.int32), recorded.view(torch.int32))


ULPS = {"ex2": 2, "rcp": 1, "rsqrt": 2, "sqrt": 1}  # the farthest of 400 million arguments or more, on the H200


@pytest.mark.parametrize("variant", approximations.VARIANTS)
def test_approximate_functions_are_near_those_of_an_h200(variant):
    """The machine rounds the exact value: as far off as the H200's functions are. In [-2 pi, 2 pi] for sin and cos."""
    x, name = approximations.samples(), variant.split(".")[0]
    with np.load(approximations.KEPT) as kept:
        counts, distance = kept[f"{variant} counts"], kept[variant]
    gpu = approximations.unordered(approximations.ordered(recorded.rounded(variant, x)) + distance)
    out = approximations.on_machine(variant, x)
    same = np.isnan(gpu) | np.isinf(gpu)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(gpu))
    if name in ULPS:
        assert abs(approximations.ordered(out) - approximations.ordered(gpu)).max() <= ULPS[name]
        assert abs(np.flatnonzero(counts) - approximations.FARTHEST).max() == ULPS[name]
    elif name == "lg2":
        assert np.all((abs(out - gpu) <= 2.0**-22 * np.maximum(1, abs(gpu)))[~same])
    elif name == "tanh":
        assert np.all((abs(out - gpu) <= 2.0**-16 * abs(gpu))[~same])
    else:
        assert np.all(abs(out - gpu)[abs(x) <= 2 * np.pi] <= 2.0**-20.4)


@pytest.mark.parametrize("case", recorded.cases())
def test_operator_leaves_the_memory_of_an_h200(case):
    """Every launch of the recorded kernels, bit for bit, given what the H200's approximate functions gave."""
    assert not recorded.replay(case, operators.CASES[case].inputs())


@pytest.mark.parametrize("variant", accumulation.VARIANTS)
def test_one_step_has_the_bits_of_an_h200(variant):
    """Rounding, guard bits, cancellation, subnormal and overflowing addends, infinities, NaN: see families."""
    kind, n, _ = accumulation.VARIANTS[variant]
    names, arrays = accumulation.arguments(kind, n)
    with np.load(accumulation.KEPT) as kept:
        assert accumulation.checksum(arrays) == kept[f"{variant} inputs"], "recorded with other operands"
        recorded = kept[variant]
    differ = accumulation.checksums(accumulation.on_machine(variant)) != recorded
    assert not differ.any(), {name for name, d in zip(names, differ, strict=True) if d}


@pytest.mark.parametrize("variant", accumulation.VARIANTS)
def test_one_step_is_near_the_exact_sum(variant):
    """Within the truncation of every addend below the guard bits, and of the sum; not-finite sums as IEEE has them."""
    kind, n, _ = accumulation.VARIANTS[variant]
    _, a, b, c = accumulation.operands(kind, n)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.einsum("trk,tnk->trn", a, b) + c
        seen = [np.where(x == 0, 0, np.maximum(abs(x), 2.0 ** (-14 if kind == "f16" else -126))) for x in (a, b)]
        largest = np.maximum(np.einsum("trk,tnk->trnk", *seen).max(-1), np.maximum(abs(c), 2.0**-126))
        bound = (a.shape[-1] + 1) * 2.0**-25 * largest + 2.0**-23 * abs(exact) + 2.0**-149
        out = accumulation.on_machine(variant).view(np.float32)
        finite = np.isfinite(exact) & (abs(exact) < np.finfo(np.float32).max)
        assert np.all(abs(out - exact)[finite] <= bound[finite])
        np.testing.assert_array_equal(out[~finite], exact[~finite].astype(np.float32))
