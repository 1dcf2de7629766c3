"""`ncu_raw.csv` is the raw page of mamba_segsum at 1x1 and 8x8 on an H200, with some of its columns."""

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perf import bench, ncu, report
from perf.__main__ import app
from perf.ncu_csv import profiles

from .runs import MACHINE

RAW = Path(__file__).with_name("ncu_raw.csv").read_text()
NAMES = ["1x1", "8x8"]


def test_kernels_belong_to_the_case_of_the_marker_before_them():
    found = profiles(RAW, NAMES)
    assert [(p.case, p.kernel) for p in found] == [
        (name, kernel) for name in NAMES for kernel in ("mamba_segsum_scan_0", "mamba_segsum_1")
    ]


def test_numbers_are_those_of_the_profile():
    p = profiles(RAW, NAMES)[-1]
    assert p.us == pytest.approx(121.312)
    assert (p.registers, p.threads, p.blocks, p.shared) == (64, 256, 4096, 43008)
    assert p.instructions == 36_594_052
    assert p.dram_percent == 67.65
    assert math.isnan(p.dram_read)  # the profile was made without it
    assert sum(p.stalls.values()) == pytest.approx(1.0)
    assert list(p.worst_stalls(2)) == ["barrier", "long_scoreboard"]
    assert p.stalls["barrier"] == pytest.approx(0.36, abs=0.01)


def test_another_number_of_cases_is_an_error():
    with pytest.raises(ValueError, match="holds 2 marked cases, but must hold 3"):
        profiles(RAW, [*NAMES, "64x1"])


def test_what_is_no_table_is_shown():
    with pytest.raises(ValueError, match="No kernels were profiled"):
        profiles("==WARNING== No kernels were profiled.", NAMES)


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    """The folder that the command wrote, with the stored CSV in the profiler's place."""
    monkeypatch.setattr(ncu.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(ncu, "profile", lambda tool, report, spec: RAW)
    monkeypatch.setattr(bench, "gpu", lambda: None)
    monkeypatch.setattr(ncu.runs, "machine", lambda device, revision: MACHINE)
    arguments = ["ncu", "--op", "mamba_segsum", "--only", ",".join(NAMES), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Kernels: use of the GPU" in result.output
    return tmp_path


def test_the_command_writes_json_and_a_page(profiled):
    (path,) = profiled.glob("ncu_*.json")
    assert path.name == "ncu_mamba_segsum_official-1x1-8x8_per_head_h200_2026-01-02.json"
    data = ncu.load(path)
    assert len(data["kernels"]) == 4
    text = path.with_suffix(".html").read_text()
    assert text.count("data:image/png;base64,") == 4  # stalls and use of two kernels
    assert "mamba_segsum_scan_0" in text


def test_the_report_shows_the_profile(profiled):
    _, profiles_, _ = report.stored(profiled)
    (section,) = map(ncu.section, profiles_)
    assert section["title"] == "mamba_segsum, official-1x1-8x8 sizes, g_layout per_head"
    assert "580.1" in section["machine"]


def test_without_the_profiler_it_says_so(monkeypatch):
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    result = CliRunner().invoke(app, ["ncu", "--op", "mamba_segsum"])
    assert result.exit_code == 2
    assert "ncu was not found" in result.output


@pytest.mark.gpu
def test_it_profiles_on_the_gpu(tmp_path):
    if not ncu.shutil.which("ncu"):
        pytest.skip("Nsight Compute is not installed")
    arguments = ["ncu", "--op", "mamba_segsum", "--only", "1x1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("ncu_*.json")
    kernels = ncu.load(path)["kernels"]
    assert kernels
    for kernel in kernels:
        for name, value in kernel.items():
            assert name in ("case", "kernel", "stalls") or math.isfinite(value), name
