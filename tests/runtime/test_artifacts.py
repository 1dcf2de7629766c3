import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from cute_kernels.runtime import artifacts, toolchain
from cute_kernels.runtime.build import Built

from .conftest import finish
from .kernels import Scale


@pytest.fixture
def shipped(scale_sm90a, tmp_path, monkeypatch):
    """A folder of artifacts with Scale() for sm_90a, which the environment names."""
    folder = shutil.copytree(scale_sm90a.folder, tmp_path / "artifacts")
    monkeypatch.setenv(artifacts.VARIABLE, str(folder))
    return Built(folder, scale_sm90a.symbol, scale_sm90a.arch)


def test_no_folder_no_artifacts():
    assert artifacts.load(Scale(), "sm_90a") is None


WITHOUT_COMPILER = """
import sys
sys.modules["cutlass"] = None  # `import cutlass` raises
import torch
from cute_kernels.runtime import artifacts, backend
from tests.runtime.kernels import Scale

class Sm90(backend.Backend):
    def arch(self, device):
        return "sm_90a"

function = Sm90().function(Scale({factor}), torch.device("cpu"))
try:
    function(torch.zeros(4), torch.zeros(4))
except ValueError as error:
    print(error)
"""


def test_round_trip_in_a_process_without_the_compiler(shipped, start):
    for path in (shipped.object, shipped.ptx, shipped.cubin):  # the library and its metadata are enough
        path.unlink()
    assert "expected device_type=cuda" in finish(start(WITHOUT_COMPILER.format(factor=2.0)))


@pytest.mark.parametrize("found", [True, False])
def test_round_trip_where_only_the_runtime_library_is_installed(found, shipped, tmp_path, start):
    site = tmp_path / "site"
    site.mkdir()
    for package in Path(torch.__file__).parents[1].iterdir():
        if "cutlass" not in package.name and package.suffix != ".pth":
            (site / package.name).symlink_to(package)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    if found:
        (libraries / toolchain.RUNTIME_LIBRARY).symlink_to(toolchain.runtime_library())
    no_site = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p and 'dsl_packages' not in p]\n"
    code = no_site + WITHOUT_COMPILER.format(factor=2.0)
    process = start(code, PYTHONPATH=str(site), LD_LIBRARY_PATH=str(libraries))
    out, err = process.communicate(timeout=60)
    if found:
        assert "expected device_type=cuda" in out, err
    else:
        assert "libcute_dsl_runtime.so was not found: install nvidia-cutlass-dsl" in err.splitlines()[-1]


def test_a_missing_kernel_without_the_compiler_is_one_clear_sentence(shipped, start):
    _, err = start(WITHOUT_COMPILER.format(factor=3.0)).communicate(timeout=60)
    assert "RuntimeError" in err.splitlines()[-1]
    assert "has no Scale(factor=3.0, threads=256) for sm_90a" in err.splitlines()[-1]


def test_a_missing_kernel_with_the_compiler_is_left_to_it(shipped):
    assert artifacts.load(Scale(3.0), "sm_90a") is None
    assert artifacts.load(Scale(), "sm_100a") is None
    assert artifacts.load(Scale(), "sm_90a") is not None


def test_a_damaged_library_is_refused(shipped):
    shipped.so.write_bytes(shipped.so.read_bytes()[:1000])
    with pytest.raises(RuntimeError, match=r"\.so is missing or damaged"):
        artifacts.load(Scale(), "sm_90a")


def test_a_library_from_other_sources_is_refused(shipped):
    shipped.metadata.write_text(json.dumps({**shipped.read_metadata(), "sources": "of yesterday"}))
    with pytest.raises(RuntimeError, match="other sources of cute_kernels"):
        artifacts.load(Scale(), "sm_90a")


def test_there_are_no_more_compilers_than_kernels_or_memory(tmp_path, monkeypatch):
    asked = []

    def executor(jobs, *_):
        asked.append(jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr(artifacts.concurrent.futures, "ProcessPoolExecutor", executor)
    kernels = [Scale(float(i)) for i in range(3)]
    for bytes_each in (1, 1 << 60):
        monkeypatch.setattr(artifacts, "COMPILER_BYTES", bytes_each)
        with pytest.raises(KeyboardInterrupt):
            next(artifacts.build_all(kernels, ["sm_90a", "sm_100a"], tmp_path, 1000))
    assert asked == [6, 1]


KILLED = """
import multiprocessing, os, signal
from pathlib import Path
from tests.runtime.kernels import Scale
from cute_kernels.runtime import artifacts

if __name__ == "__main__":
    kernels = [Scale(), Scale(3.0)]
    made = artifacts.build_all(kernels, ["sm_90a"], Path({out!r}), 1)
    next(made)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_their_parent(start, tmp_path):
    process = start(KILLED.format(out=str(tmp_path)))
    workers = [Path("/proc", pid) for pid in process.stdout.readline().split()]
    assert workers, process.communicate()[1]
    deadline = time.monotonic() + 30
    while any(worker.exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [worker.name for worker in workers if worker.exists()]
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left


def test_a_driver_that_is_too_old_is_named(shipped, monkeypatch):
    monkeypatch.setattr(toolchain, "driver_version", lambda: 12090)
    with pytest.raises(RuntimeError, match="needs a driver for CUDA 13; this one is for CUDA 12"):
        artifacts.load(Scale(), "sm_90a")
