import pytest

from perf import calls, cases


@pytest.mark.parametrize("op", cases.OPERATORS)
@pytest.mark.parametrize("set_name", cases.SETS)
def test_every_set_has_cases_of_its_own_names_in_order_of_bytes(op, set_name):
    found = cases.cases(op, set_name)
    assert found
    assert len({case.name for case in found}) == len(found)
    assert [case.bytes for case in found] == sorted(case.bytes for case in found)
    assert all("," not in case.name for case in found)  # a comma separates names in --only


@pytest.mark.parametrize("op", ["mamba_segsum", "hyena_block"])
def test_there_are_sixteen_official_cases_with_a_tolerance(op):
    found = cases.cases(op, "official")
    assert len(found) == 16
    assert all(case.tolerance.share == 0.99 for case in found)


@pytest.mark.parametrize("layout", ["per_head", "per_group"])
def test_segsum_bytes_are_those_of_its_tensors(layout):
    case = next(c for c in cases.cases("mamba_segsum", "official", {"g_layout": layout}) if c.name == "2x2")
    x = calls.arguments(case, 0, "cpu")
    assert case.read == sum(t.nbytes for t in x.values() if t is not None)
    assert case.written == sum(t.nbytes for t in calls.operator(case, x, {"g_layout": layout})())


@pytest.mark.parametrize("op", ["hyena_block", "hyena_filter", "causal_long_conv"])
def test_hyena_bytes_are_those_of_its_tensors(op):
    case = cases.cases(op, "official")[0]
    x = calls.arguments(case, 0, "cpu")
    out = calls.formula(case, x, {})()
    names = [name for name in x if op != "hyena_filter" or name.startswith(("filter_", "sin_", "exp_"))]
    assert case.read == sum(x[name].nbytes for name in names)
    assert case.written == out.nbytes


def test_a_wrong_name_is_an_error():
    with pytest.raises(ValueError, match="op is 'gelu', but must be one of mamba_segsum"):
        cases.cases("gelu", "official")
    with pytest.raises(ValueError, match="set is 'all', but must be one of official, models, sweep"):
        cases.cases("hyena_block", "all")
