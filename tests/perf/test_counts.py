import pytest

from perf import cases, counts


@pytest.mark.parametrize("arch", counts.ARCHS)
def test_segsum_does_the_least_matrix_work_and_writes_its_bytes(arch):
    by_name = {case.name: case for case in cases.cases("mamba_segsum", "official")}
    one, eight = (counts.count(by_name[name], {"g_layout": "per_head"}, arch) for name in ("1x1", "1x8"))
    assert one["mma"] == by_name["1x1"].mma
    assert eight["mma"] == by_name["1x8"].mma
    assert one["l2_bytes"] >= by_name["1x1"].bytes
    assert one["launches"] == eight["launches"] == 1
    assert eight["instructions"] < 8 * one["instructions"]  # larger tiles, fewer scans
