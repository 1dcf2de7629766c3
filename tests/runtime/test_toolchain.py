import sys
from importlib.metadata import version

import pytest

from cute_kernels.runtime import toolchain

from .conftest import finish


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lays out compiler flavours in a folder that is the only one on the path."""

    def lay(*majors):
        for major in majors:
            library = tmp_path / "nvidia_cutlass_dsl" / f"cu{major}" / "lib" / toolchain.RUNTIME_LIBRARY
            library.parent.mkdir(parents=True)
            library.write_bytes(b"")
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

    caches = (toolchain._packages, toolchain.cuda_major, toolchain.versions, toolchain.preload)
    for cached in caches:
        cached.cache_clear()
    yield lay
    for cached in caches:
        cached.cache_clear()


def test_versions_are_those_of_the_distributions():
    found = toolchain.versions()
    assert {"apache-tvm-ffi", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13"} <= set(found)
    assert all(version(name) == number for name, number in found.items())


@pytest.mark.parametrize(
    ("installed", "driver", "expected"),
    [
        ((12, 13), None, 13),
        ((12, 13), 13000, 13),
        ((12, 13), 12090, 12),
        ((12,), 13010, 12),
        ((13,), 12090, None),
        ((), 13000, None),
    ],
)
def test_the_newest_flavour_that_the_driver_can_run(install, monkeypatch, installed, driver, expected):
    install(*installed)
    monkeypatch.setattr(toolchain, "driver_version", lambda: driver)
    assert toolchain.cuda_major() == expected
    library = toolchain.runtime_library()
    assert library is None if expected is None else library.parts[-3] == f"cu{expected}"


def test_the_flavour_is_the_one_that_cutlass_picks(start):
    code = "import cutlass; from cute_kernels.runtime.toolchain import cuda_major as ours"
    assert finish(start(code + "; print(cutlass.CUDA_VERSION.major == ours())")) == "True\n"


def test_a_missing_runtime_library_is_one_clear_sentence(install, monkeypatch):
    install()
    monkeypatch.setattr(toolchain, "RUNTIME_LIBRARY", "libcute_dsl_runtime_nowhere.so")
    with pytest.raises(RuntimeError, match="was not found: install nvidia-cutlass-dsl"):
        toolchain.preload()
