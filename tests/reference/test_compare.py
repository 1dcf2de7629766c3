"""The judge itself: right outputs pass, planted errors are found wherever they are."""

import math

import pytest
import torch

from reference import compare, inputs, segsum

NAMES = ("L", "G", "M", "A_cumsum", "decay_states")
SHAPE = {"batch": 2, "chunks": 3, "chunk_size": 16, "heads": 6, "groups": 2, "d_state": 32}


def rounded(x: inputs.SegsumInputs) -> segsum.SegsumReference:
    """The oracle's outputs in the operator's types: the best outputs there are."""
    ref = segsum.segsum(*x)
    dtype = x.B.dtype
    return segsum.SegsumReference(
        *(t.to(dtype).contiguous() for t in ref[:3]), *(t.float().contiguous() for t in ref[3:])
    )


def planted(outputs, name: str, at: tuple, value: float):
    tensor = getattr(outputs, name).clone()
    tensor[at] = value
    return outputs._replace(**{name: tensor})


@pytest.fixture(params=[1, 1 << 20], ids=["one-chunk-slabs", "one-slab"])
def slab(request, monkeypatch):
    monkeypatch.setitem(compare.SLAB_ELEMENTS, "cpu", request.param)


@pytest.mark.parametrize("name", ["official", *inputs.ADVERSARIAL])
def test_rounded_oracle_passes(name, slab):
    make = inputs.official if name == "official" else inputs.ADVERSARIAL[name]
    x = make(1, **{**SHAPE, "heads": 8})
    report = compare.compare(x, rounded(x))
    assert report.ok, report
    # Rounding to nearest is half an ulp, and infinite or NaN elements count as equal.
    assert all(r.max_ratio <= 0.51 for r in report.outputs.values()), report
    assert report["L"].elements == 2 * 3 * 8 * 16 * 16


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_element_is_found_and_named(name, slab):
    x = inputs.official(0, **SHAPE)
    good = rounded(x)
    at = {"L": (1, 5, 2, 9, 4), "G": (1, 2, 9, 4, 5), "M": (1, 2, 9, 4, 5)}.get(name, (1, 5, 2, 9))
    value = float(getattr(good, name)[at])
    report = compare.compare(x, planted(good, name, at, value * 1.05 + 0.05))
    assert {n for n in NAMES if not report[n].ok} == {name}
    assert report[name].wrong == 1
    assert report[name].at == at
    assert report[name].expected == pytest.approx(value, rel=0.01)
    with pytest.raises(AssertionError, match=name):
        compare.assert_ok(x, planted(good, name, at, value * 1.05 + 0.05))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 7.0])
@pytest.mark.parametrize("name", NAMES)
def test_unwritten_element_is_found(name, poison):
    x = inputs.official(0, **SHAPE)
    good = rounded(x)
    index = (0,) * getattr(good, name).dim()
    assert compare.compare(x, planted(good, name, index, poison))[name].wrong == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["L", "G", "M"])
def test_one_ulp_passes_and_two_do_not(name, dtype):
    x = inputs.official(0, **{**SHAPE, "dtype": dtype})
    x = x._replace(B=x.B.sign() / 4, C=x.C.sign())  # products are exact: no accumulation error to allow for
    good = rounded(x)
    tensor = getattr(good, name)
    ref = getattr(segsum.segsum(*x), name)
    at = (1, 2, 1, 9, 4) if name == "L" else (1, 2, 9, 4, 5)
    spacing = float(compare.ulp(ref[at], dtype))
    step = tensor[at] + spacing
    assert float(step) != float(tensor[at])
    allowed = abs(float(step) - float(ref[at])) <= spacing + 2**-21 * 8 + 1e-7
    assert compare.compare(x, planted(good, name, at, float(step)))[name].ok == allowed
    assert compare.compare(x, planted(good, name, at, float(tensor[at]) + 3 * spacing))[name].wrong == 1


def test_fp32_outputs_at_the_edge_of_the_bar():
    x = inputs.official(0, **SHAPE)
    good = rounded(x)
    at = (1, 3, 2, 15)
    exact = float(segsum.segsum(*x).A_cumsum[at])
    spacing = float(compare.ulp(torch.tensor(exact, dtype=torch.float64), torch.float32))
    for ulps, ok in ((3, True), (-3, True), (5, False), (-5, False)):
        assert compare.compare(x, planted(good, "A_cumsum", at, exact + ulps * spacing))["A_cumsum"].ok == ok
    at = (0, 0, 0, 3)
    exact = float(segsum.segsum(*x).decay_states[at])
    for error, ok in ((1.8e-6, True), (-1.8e-6, True), (2.2e-6, False), (-2.2e-6, False)):
        assert compare.compare(x, planted(good, "decay_states", at, exact + error))["decay_states"].ok == ok


@pytest.mark.parametrize("name", ["L", "M"])
def test_upper_triangle_is_exactly_zero(name):
    x = inputs.official(0, **SHAPE)
    at = (0, 0, 0, 2, 3) if name == "L" else (0, 0, 2, 3, 0)
    assert compare.compare(x, planted(rounded(x), name, at, 1e-30))[name].wrong == 1


def test_bounds_of_decay():
    x = inputs.official(0, **SHAPE)
    good = rounded(x)
    assert compare.compare(x, planted(good, "L", (0, 0, 0, 5, 5), 1 - 2**-8)).outputs["L"].wrong == 1  # diagonal
    above = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert compare.compare(x, planted(good, "decay_states", (0, 0, 0, 15), above))["decay_states"].wrong == 1
    y = inputs.no_decay(0, **SHAPE)
    assert compare.compare(y, planted(rounded(y), "L", (0, 0, 0, 5, 1), 1 + 2**-7))["L"].wrong == 1


def test_not_finite_steps():
    x = inputs.softplus_not_finite(0, **SHAPE)  # Q = 16: head 0 +inf at 5; head 2 nan at 5; head 3 +inf at 4 and 8
    good = rounded(x)
    assert compare.compare(x, good).ok
    nan = math.nan
    # The sum over 5 < s <= 7 of head 0 has no bad step: NaN is excused, a number is not.
    assert compare.compare(x, planted(good, "L", (0, 0, 0, 7, 5), nan)).ok
    assert not compare.compare(x, planted(good, "L", (0, 0, 0, 7, 5), 0.0)).ok
    assert compare.compare(x, planted(good, "M", (0, 0, 7, 5, 0), nan)).ok
    assert compare.compare(x, planted(good, "A_cumsum", (0, 0, 0, 4), nan)).ok
    assert compare.compare(x, planted(good, "decay_states", (0, 0, 0, 5), nan)).ok
    # Sums that do hold it are the oracle's: exp(-inf) = 0, and NaN stays NaN.
    assert not compare.compare(x, planted(good, "L", (0, 0, 0, 7, 4), nan)).ok
    assert not compare.compare(x, planted(good, "L", (0, 0, 0, 7, 4), 1e-20)).ok
    assert not compare.compare(x, planted(good, "L", (0, 3, 0, 12, 5), nan)).ok  # between two infinite steps
    assert not compare.compare(x, planted(good, "L", (0, 2, 0, 7, 4), 0.5)).ok
    assert not compare.compare(x, planted(good, "A_cumsum", (0, 0, 0, 5), -1e30)).ok
    assert not compare.compare(x, planted(good, "decay_states", (0, 0, 0, 4), nan)).ok
    # The upper triangle stays zero; heads without a bad step have no excuse, nor has -inf, whose softplus is 0.
    assert not compare.compare(x, planted(good, "L", (0, 2, 0, 4, 7), nan)).ok
    assert not compare.compare(x, planted(good, "L", (0, 1, 0, 7, 5), nan)).ok
    assert not compare.compare(x, planted(good, "L", (0, 4, 0, 7, 5), nan)).ok


def test_not_finite_operands():
    x = inputs.not_finite_operands(0, **SHAPE)
    good = rounded(x)
    assert compare.compare(x, good).ok
    j = SHAPE["chunk_size"] // 2  # B is +inf there, in the last group
    assert math.isinf(float(good.G[0, 0, 9, j, 5]))
    for value in (-float(good.G[0, 0, 9, j, 5]), math.nan, 1.0):
        assert not compare.compare(x, planted(good, "G", (0, 0, 9, j, 5), value)).ok


def test_overflow_to_infinity_is_rounding_and_saturation_is_not():
    x = inputs.large_products(0, **SHAPE)
    good = rounded(x)
    at = tuple(good.G.isinf().nonzero()[0].tolist())
    assert compare.compare(x, good)["G"].ok
    saturated = math.copysign(65504.0, float(good.G[at]))
    assert compare.compare(x, planted(good, "G", at, saturated))["G"].wrong == 1
    assert compare.compare(x, planted(good, "G", at, -float(good.G[at])))["G"].wrong == 1


def test_wrong_shape_or_type_is_refused():
    x = inputs.official(0, **SHAPE)
    good = rounded(x)
    with pytest.raises(AssertionError, match="M is"):
        compare.compare(x, good._replace(M=good.M[..., :1]))
    with pytest.raises(AssertionError, match="A_cumsum is"):
        compare.compare(x, good._replace(A_cumsum=good.A_cumsum.double()))


def test_empty():
    x = inputs.official(0, **{**SHAPE, "chunks": 0})
    assert compare.compare(x, rounded(x)).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ulp(dtype):
    info = torch.finfo(dtype)
    x = torch.tensor([1.0, 1.99, 2.0, -3.0, info.tiny, info.tiny / 4, 0.0], dtype=torch.float64)
    smallest = info.tiny * info.eps
    expected = [info.eps, info.eps, 2 * info.eps, 2 * info.eps, smallest, smallest, smallest]
    assert compare.ulp(x, dtype).tolist() == expected
