import json

import pytest

from perf import runs

from .runs import made


def test_a_run_comes_back_from_its_file(tmp_path):
    run = made()
    run.save(tmp_path / "new" / "run.json")
    assert runs.Run.load(tmp_path / "new" / "run.json") == run
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "perf/bench/0"}'])
def test_another_file_is_an_error(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.json holds no results of `perf bench`"):
        runs.Run.load(path)


def test_every_stored_run_loads():
    paths = [p for p in runs.FOLDER.glob("*.json") if not p.name.startswith(("ncu_", "counts_"))]
    for path in paths:
        assert runs.Run.load(path).rows


def test_the_floor_is_the_first_that_was_measured():
    row = made(against=("copy", "torch")).rows[0]
    assert row.floor == "copy"
    assert row.over("copy").value == pytest.approx(1.2)
    assert row.over("cufft") is None
    assert made(against=()).rows[0].floor is None


def test_the_default_name_tells_what_ran_where():
    path = runs.default_path(
        "hyena_block", "models", {"precision": "high"}, {"gpu": "NVIDIA H200", "date": "2026-01-02"}
    )
    assert path.name == "hyena_block_models_high_h200_2026-01-02.json"


def test_the_machine_has_a_revision_from_the_caller_or_the_environment(monkeypatch):
    assert runs.machine(revision="1234567")["revision"] == "1234567"
    monkeypatch.setenv("PERF_REVISION", "7654321")
    found = runs.machine()
    assert found["revision"] == "7654321"
    json.dumps(found)
    assert "nvidia-cutlass-dsl" in runs.machine_text(found)
