import re
import shutil
import subprocess

import pytest
import torch

from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import build
from cute_kernels.runtime.build import FILES, Built

from .kernels import Scale


@pytest.mark.parametrize("arch", arch_.NAMES)
def test_every_architecture_compiles_without_a_gpu(arch, tmp_path):
    built = build.build(Scale(), arch, tmp_path)
    assert built.intact(*FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{Scale().symbol()}.{arch}.{suffix}" for suffix in (*FILES, "json")
    )
    assert f".target {arch}" in built.ptx.read_text()
    assert built.cubin.read_bytes()[:4] == b"\x7fELF"
    metadata = built.read_metadata()
    assert (metadata["arch"], metadata["symbol"]) == (arch, Scale().symbol())
    assert metadata["kernel"] == "Scale(factor=2.0, threads=256)"
    (launch,) = metadata["launches"]
    assert "scale_kernel" in launch["kernel"]
    assert launch["kernel"] in built.ptx.read_text()
    assert launch["dynamic_shared"] == 0


def test_it_loads_and_checks_its_arguments(scale_sm90a):
    function = scale_sm90a.load()
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(torch.zeros(4), torch.zeros(4))


def test_nothing_of_the_building_machine_is_in_it(scale_sm90a):
    content = b"".join(scale_sm90a.path(suffix).read_bytes() for suffix in (*FILES, "json"))
    assert not re.search(rb"/(home|root|tmp|work|usr|nvidia_cutlass_dsl)/", content)
    if shutil.which("readelf"):
        dynamic = subprocess.run(["readelf", "-d", scale_sm90a.so], capture_output=True, text=True).stdout
        assert set(re.findall(r"NEEDED.*\[(.+)\]", dynamic)) == {"libcute_dsl_runtime.so", "libtvm_ffi.so"}
        assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


@pytest.mark.parametrize("suffix", FILES)
def test_a_damaged_or_missing_file_is_noticed(suffix, scale_sm90a, tmp_path):
    built = Built(shutil.copytree(scale_sm90a.folder, tmp_path / "copy"), scale_sm90a.symbol, scale_sm90a.arch)
    assert built.intact(suffix)
    content = built.path(suffix).read_bytes()
    built.path(suffix).write_bytes(content[: len(content) // 2])
    assert not built.intact(suffix)
    built.path(suffix).unlink()
    assert not built.intact(suffix)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"sha256": []}', '{"sha256": {"so": 1}}'])
def test_broken_metadata_is_noticed(text, scale_sm90a, tmp_path):
    built = Built(shutil.copytree(scale_sm90a.folder, tmp_path / "copy"), scale_sm90a.symbol, scale_sm90a.arch)
    built.metadata.write_text(text)
    assert not built.intact("so")


def test_without_a_linker_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(FileNotFoundError, match="install gcc, or set CC"):
        build.build(Scale(), "sm_90a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_link_leaves_nothing_behind(tmp_path, monkeypatch):
    linker = tmp_path / "linker"
    linker.write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
    linker.chmod(0o755)
    monkeypatch.setenv("CC", str(linker))
    with pytest.raises(OSError, match=r"linking .* failed: no room"):
        build.build(Scale(), "sm_90a", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
