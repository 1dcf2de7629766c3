import pytest
from typer.testing import CliRunner

from perf import cases, counts
from perf.__main__ import app


@pytest.mark.parametrize("arch", counts.ARCHS)
def test_segsum_does_the_least_matrix_work_and_writes_its_bytes(arch):
    by_name = {case.name: case for case in cases.cases("mamba_segsum", "official")}
    one, eight = (counts.count(by_name[name], {"g_layout": "per_head"}, arch) for name in ("1x1", "1x8"))
    assert one["mma"] == by_name["1x1"].mma
    assert eight["mma"] == by_name["1x8"].mma
    assert one["l2_bytes"] >= by_name["1x1"].bytes
    assert one["launches"] == eight["launches"] == 1
    assert eight["instructions"] < 8 * one["instructions"]  # larger tiles, fewer scans


def test_a_part_does_not_replace_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "count", lambda *_: {})
    for only in ("", "131, 256"):
        arguments = ["counts", "--op", "hyena_filter", "--only", only, "--out", str(tmp_path)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    found = {path.name: len(counts.load(path)["sm_90a"]) for path in tmp_path.iterdir()}
    assert found == {"counts_hyena_filter.json": 10, "counts_hyena_filter-131-256.json": 2}
