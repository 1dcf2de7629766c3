import json
import re

import pytest
from typer.testing import CliRunner

from cute_kernels import operators
from perf import cases, counts, report
from perf.__main__ import app

from ..runtime.kernels import Scale
from .runs import made


@pytest.fixture
def stored(tmp_path):
    folder = tmp_path / "results"
    made(factor=1.5, date="2025-01-02", revision="old5678").save(folder / "a.json")
    made(factor=1.2, against=("fill", "torch")).save(folder / "b.json")
    made("hyena_block", options={"precision": "high"}, against=("copy",)).save(folder / "c.json")
    work = {
        case.name: {"launches": 2, "instructions": case.bytes // 10, "mma": case.mma, "special": 10**5, "l2_bytes": 1}
        for case in cases.cases("mamba_segsum", "official")
    }
    data = {"schema": counts.SCHEMA, "op": "mamba_segsum", "options": {"g_layout": "per_head"}, "revision": None}
    (folder / "counts_x.json").write_text(json.dumps(data | dict.fromkeys(counts.ARCHS, work)))
    return folder


def make(*arguments):
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == 0, result.output


def test_the_page_stands_alone_and_has_everything(stored, tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "prebuilt_kernels", lambda: [Scale(), Scale(threads=128)])
    page = tmp_path / "new" / "page.html"
    make("--results", stored, "--out", page)
    text = page.read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert text.count("data:image/png;base64,") >= 4  # times and rooflines of both operators
    for part in (
        "What ran where",
        "mamba_segsum, official sizes, g_layout per_head",
        "hyena_block, official sizes, precision high",
        "PyTorch&#39;s L2",
        "B200 predicted us",
        "Predicting each H200 case from the others is off by 0%",
        "sm_100a",
        "Scale(threads=128)",
        "abc1234",
    ):
        assert part in text, part
    assert "old5678" not in text  # the newest of two runs of the same


def test_a_broken_file_is_named(stored, tmp_path):
    (stored / "broken.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", "--results", str(stored), "--out", str(tmp_path / "p.html")])
    assert result.exit_code == 2
    assert "broken.json" in "".join(result.output.replace("│", "").split())


def test_the_stored_results_make_a_page(tmp_path):
    make("--no-kernels", "--out", tmp_path / "page.html")
    assert "What ran where" in (tmp_path / "page.html").read_text()


def test_without_a_run_there_are_bounds_alone(stored):
    runs, _, (counted,) = report.stored(stored)
    full, bounds = report.prediction(counted, runs), report.prediction(counted, [])
    assert len(full["rows"]) == len(bounds["rows"]) == 16
    assert full["header"][-1] == "B200 predicted us"
    assert bounds["header"][-2:] == ["B200 least us", "by"]
    assert "No time on an H200 is stored" in bounds["text"]
    for rows, header in ((full["rows"], full["header"]), (bounds["rows"], bounds["header"])):
        assert all(len(row) == len(header) for row in rows)


def test_a_stage_without_a_kernel_is_said(stored):
    runs, _, (counted,) = report.stored(stored)
    fewer = {name: work | {"launches": 1} for name, work in counted["sm_100a"].items()}
    found = report.prediction(counted | {"sm_100a": fewer}, runs)
    assert "Not every stage has a kernel for sm_100a" in found["text"]
    assert "B200 predicted us" not in found["header"]
