import shutil
import sys
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels.runtime import fingerprint, toolchain

from .kernels import Scale


@pytest.fixture(autouse=True)
def _fresh():
    fingerprint._hash.cache_clear()
    yield
    fingerprint._hash.cache_clear()


def test_a_change_in_any_source_changes_it(tmp_path, monkeypatch):
    package = Path(shutil.copytree(Path(cute_kernels.__file__).parent, tmp_path / "cute_kernels"))
    monkeypatch.setattr(cute_kernels, "__file__", str(package / "__init__.py"))
    seen = {fingerprint.fingerprint(Scale())}
    (package / "device" / "__init__.py").write_text("# changed\n")
    fingerprint._hash.cache_clear()
    seen.add(fingerprint.fingerprint(Scale()))
    (package / "device" / "new.py").write_text("")
    fingerprint._hash.cache_clear()
    seen.add(fingerprint.fingerprint(Scale()))
    assert len(seen) == 3


def test_a_kernel_from_elsewhere_brings_its_own_file(tmp_path, monkeypatch):
    before = fingerprint.fingerprint(Scale())
    copy = tmp_path / "kernels.py"
    copy.write_text(Path(sys.modules[Scale.__module__].__file__).read_text() + "# changed\n")
    monkeypatch.setattr(sys.modules[Scale.__module__], "__file__", str(copy))
    assert fingerprint.fingerprint(Scale()) != before


@pytest.mark.parametrize("name", ["apache-tvm-ffi", "nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-new"])
def test_the_version_of_each_distribution_counts(name, monkeypatch):
    before = fingerprint.fingerprint(Scale())
    found = {**toolchain.versions(), name: "0"}
    monkeypatch.setattr(toolchain, "versions", lambda: found)
    assert fingerprint.fingerprint(Scale()) != before


def test_the_cuda_flavour_counts(monkeypatch):
    before = fingerprint.fingerprint(Scale())
    monkeypatch.setattr(toolchain, "cuda_major", lambda: 12)
    assert fingerprint.fingerprint(Scale()) != before
