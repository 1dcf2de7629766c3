import json

import pytest
import torch
from typer.testing import CliRunner

from perf import bench, runs
from perf.__main__ import app

from .runs import MACHINE, made


@pytest.fixture
def without_gpu(monkeypatch):
    """`bench` with made-up measurements."""
    rows = {row.name: row for row in made().rows}
    monkeypatch.setattr(bench, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench.runs, "machine", lambda device, revision: MACHINE)
    monkeypatch.setattr(bench, "measure", lambda case, *_: rows[case.name])
    return monkeypatch


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_it_writes_json_and_a_plot(without_gpu, tmp_path):
    out = tmp_path / "run.json"
    result = run("--op", "mamba_segsum", "--against", "fill", "--out", out)
    assert result.exit_code == 0, result.output
    assert "1.200 x fill" in result.output
    assert len(runs.Run.load(out).rows) == 16
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_only_some_sizes(without_gpu, tmp_path):
    out = tmp_path / "run.json"
    assert run("--op", "mamba_segsum", "--only", "1x8, 8x8", "--out", out).exit_code == 0
    assert [row.name for row in runs.Run.load(out).rows] == ["1x8", "8x8"]


def test_a_part_does_not_replace_the_whole(without_gpu, tmp_path):
    without_gpu.setattr(runs, "FOLDER", tmp_path)
    for only in ("", "1x8", "1x8, 8x8"):
        assert run("--op", "mamba_segsum", "--only", only).exit_code == 0
    assert {path.name: len(runs.Run.load(path).rows) for path in tmp_path.glob("*.json")} == {
        "mamba_segsum_official_per_head_h200_2026-01-02.json": 16,
        "mamba_segsum_official-1x8_per_head_h200_2026-01-02.json": 1,
        "mamba_segsum_official-1x8-8x8_per_head_h200_2026-01-02.json": 2,
    }


def test_an_earlier_run_is_compared(without_gpu, tmp_path):
    made(factor=2.0).save(tmp_path / "old.json")
    result = run("--op", "mamba_segsum", "--out", tmp_path / "new.json", "--compare", tmp_path / "old.json")
    assert "16 of 16 cases moved" in " ".join(result.output.split())


def test_control_c_keeps_what_is_done(without_gpu, tmp_path):
    rows = iter(made().rows[:2])

    def interrupted(*_):
        try:
            return next(rows)
        except StopIteration:
            raise KeyboardInterrupt from None

    without_gpu.setattr(bench, "measure", interrupted)
    out = tmp_path / "run.json"
    result = run("--op", "mamba_segsum", "--out", out)
    assert result.exit_code == 0, result.output
    assert "Stopped; what was measured is kept." in result.output
    assert len(json.loads(out.read_text())["rows"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "mamba_segsum", "--against", "cudnn"), "against names 'cudnn'"),
        (("--op", "mamba_segsum", "--against", "cufft"), "rivals causal_long_conv alone"),
        (("--op", "mamba_segsum", "--only", "3x3"), "only names '3x3'"),
        (("--op", "gelu"), "gelu"),
        (("--op", "mamba_segsum", "--repeats", "5"), "30"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so():
    result = run("--op", "mamba_segsum")
    assert result.exit_code == 2
    assert "needs an NVIDIA GPU" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.gpu
def test_one_size_on_the_gpu(tmp_path):
    out = tmp_path / "run.json"
    result = run("--op", "mamba_segsum", "--only", "1x1", "--against", "fill,copy,torch", "--repeats", 30, "--out", out)
    assert result.exit_code == 0, result.output
    (row,) = runs.Run.load(out).rows
    assert row.failed == {}
    assert row.times["empty"].median < row.times["launch"].median < row.times["operator"].median
    assert row.times["operator"].median < row.times["torch"].median
    assert 0 < row.errors["bar"] <= 1
    assert 1 < row.host["operator"] < 1000
