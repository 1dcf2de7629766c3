import os

import cute_kernels
from cute_kernels.runtime import artifacts, build, cache, toolchain

from .conftest import finish


def test_it_names_what_matters():
    report = cute_kernels.env_report()
    assert {"cute_kernels", "python", "torch", "cuda-python", "nvidia-cutlass-dsl", "driver", "cache"} <= set(
        report.entries
    )
    assert str(report).count("\n") == len(report.entries) - 1
    assert report.entries["artifacts"].startswith("none ($CUTE_KERNELS_ARTIFACTS")


def test_it_counts_artifacts(scale_sm90a, monkeypatch):
    monkeypatch.setenv(artifacts.VARIABLE, str(scale_sm90a.folder))
    assert cute_kernels.env_report().entries["artifacts"] == f"{scale_sm90a.folder}, 1 kernels"


def test_it_says_where_there_is_no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for name, message in (("nope", "no such folder"), ("file", "not a folder")):
        monkeypatch.setenv(artifacts.VARIABLE, str(tmp_path / name))
        assert cute_kernels.env_report().entries["artifacts"] == f"{tmp_path / name}, {message}"
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    assert cute_kernels.env_report().entries["cache"].endswith(f"not used: {tmp_path / 'file'} is not a folder")


def test_a_machine_without_compiler_or_linker(monkeypatch):
    monkeypatch.setattr(toolchain, "cuda_major", lambda: None)
    monkeypatch.setattr(build, "linker", lambda: None)
    entries = cute_kernels.env_report().entries
    assert entries["compiler"].startswith("none")
    assert entries["linker"].startswith("not found")


def test_it_imports_no_compiler(start):
    code = "import sys, cute_kernels; str(cute_kernels.env_report()); print('cutlass' in sys.modules)"
    assert finish(start(code, **os.environ)) == "False\n"
