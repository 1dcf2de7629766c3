"""The command line."""

import os

import pytest
from typer.testing import CliRunner

from cute_kernels import operators
from cute_kernels.__main__ import app
from cute_kernels.runtime import artifacts, build, cache

from .runtime.kernels import Scale

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(artifacts.VARIABLE, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(operators, "prebuilt_kernels", lambda: [Scale(), Scale(3.0)])


def test_build_then_info(tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = ["build", "--arch", "sm_90a", "--arch", "sm_100a", "--out", str(out), "--jobs", "2"]
    result = run(app, command)
    assert result.exit_code == 0, result.output
    assert "4 kernels" in result.output
    built = build.find(out)
    assert {(b.symbol, b.arch) for b in built} == {
        (kernel.symbol(), arch) for kernel in (Scale(), Scale(3.0)) for arch in ("sm_90a", "sm_100a")
    }
    assert all(b.intact(*build.FILES) for b in built)

    made = {b.so: b.so.stat().st_mtime_ns for b in built}
    built[0].so.write_bytes(b"")
    assert run(app, command).exit_code == 0
    again = {b.so for b in built if b.so.stat().st_mtime_ns != made[b.so]}
    assert again == {built[0].so}  # the rest was up to date

    monkeypatch.setenv(artifacts.VARIABLE, str(out))
    cache.get(Scale(5.0), "sm_103a")
    built[0].so.write_bytes(b"")
    built[1].metadata.write_text("{")
    result = run(app, ["info"])
    assert result.exit_code == 0, result.output
    for text in (
        f"{out}, 4 kernels, 2 of them damaged",
        f"{built[0].symbol} (damaged)",
        "nvidia-cutlass-dsl-libs-cu13",
        "Scale(factor=5.0, threads=256)",
        "sm_103a",
    ):
        assert text in result.output


def test_info_with_nothing_there():
    result = run(app, ["info"])
    assert result.exit_code == 0, result.output
    assert "No compiled kernels yet" in result.output


def test_info_names_a_cache_that_is_refused(tmp_path):
    cache.folder().mkdir()
    cache.folder().chmod(0o777)
    assert "not used: other users can write" in run(app, ["info"]).output


def test_info_of_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what an unknown user gets
    result = run(app, ["info"])
    assert result.exit_code == 0, result.output
    assert "none: this user has no home folder" in result.output


@pytest.mark.parametrize("variable", [artifacts.VARIABLE, cache.VARIABLE])
def test_info_names_what_is_no_folder(variable, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv(variable, str(file))
    assert "not a folder" in run(app, ["info"]).output


def test_build_checks_its_folder_before_it_compiles(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for out, reason in (
        (file, "File exists"),
        (file / "out", "Not a directory"),
        ("/proc", "No such file or directory"),
        ("/proc/x", "No such file or directory"),
    ):
        result = run(app, ["build", "--arch", "sm_90a", "--out", str(out)])
        assert result.exit_code == 2
        assert f"{out} can't be a folder for kernels: {reason}" in result.output
        assert "compiling" not in result.output


def test_build_refuses_no_jobs(tmp_path):
    result = run(app, ["build", "--arch", "sm_90a", "--out", str(tmp_path), "--jobs", "0"])
    assert result.exit_code == 2
    assert "Invalid value for '--jobs'" in result.output


def test_build_refuses_another_architecture(tmp_path):
    result = run(app, ["build", "--arch", "sm_80", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "sm_90a, sm_100a, sm_103a" in result.output


def test_build_names_the_kernel_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "prebuilt_kernels", lambda: [Scale(threads=-1)])
    result = run(app, ["build", "--arch", "sm_90a", "--out", str(tmp_path), "--jobs", "1"])
    assert result.exit_code == 1
    assert "Scale(factor=2.0, threads=-1) for sm_90a failed" in result.output
