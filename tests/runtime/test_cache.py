import os
import threading
import warnings

import pytest

import cute_kernels
from cute_kernels.runtime import cache
from cute_kernels.runtime.build import FILES

from .conftest import finish
from .kernels import Scale


def quietly_get(kernel=None, arch="sm_90a"):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cache.get(kernel or Scale(), arch)


def test_miss_then_hit(count_builds):
    first = quietly_get()
    assert first.intact(*FILES)
    assert quietly_get() == first
    assert len(count_builds) == 1


def test_another_kernel_or_architecture_is_a_miss(count_builds):
    for kernel, arch in [
        (Scale(), "sm_90a"),
        (Scale(3.0), "sm_90a"),
        (Scale(threads=128), "sm_90a"),
        (Scale(), "sm_100a"),
    ]:
        quietly_get(kernel, arch)
    assert len(count_builds) == 4


def test_another_fingerprint_is_a_miss(count_builds, monkeypatch):
    first = quietly_get()
    monkeypatch.setattr(cache, "fingerprint", lambda kernel: "0123456789abcdef")
    assert quietly_get().folder != first.folder
    assert len(count_builds) == 2


@pytest.mark.parametrize("suffix", ["so", "ptx", "json"])
@pytest.mark.parametrize("content", [b"", b"\x7fELF and no more"])
def test_a_broken_file_is_a_miss_and_is_replaced(suffix, content, count_builds):
    built = quietly_get()
    built.path(suffix).write_bytes(content)
    assert quietly_get().intact(*FILES)
    assert len(count_builds) == 2
    cache.load(Scale(), "sm_90a")


WARM = """
import sys, time
import tvm_ffi
import cute_kernels
from cute_kernels.runtime import cache
from tests.runtime.kernels import Scale
start = time.perf_counter()
cache.load(Scale(), "sm_90a")
print(time.perf_counter() - start, "cutlass" in sys.modules)
"""


def test_a_new_process_with_a_warm_cache_is_quick_and_never_imports_cutlass(start):
    quietly_get()
    seconds, imported = min(finish(start(WARM)).split() for _ in range(2))
    assert imported == "False"
    assert float(seconds) < 0.1


AT_ONCE = """
import cutlass.cute
import cute_kernels
from cute_kernels.runtime import cache
from tests.runtime.kernels import Scale
compile, calls = Scale.compile, []
Scale.compile = lambda *args: calls.append(args) or compile(*args)
print("ready", flush=True)
input()
built = cache.get(Scale(), "sm_90a")
print(len(calls), built.intact("so"), callable(built.load()))
"""


def test_two_processes_at_once_compile_once(start):
    processes = [start(AT_ONCE), start(AT_ONCE)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(finish(process) for process in processes) == ["0 True True\n", "1 True True\n"]


def test_a_stuck_process_does_not_block_others(count_builds, monkeypatch):
    built = quietly_get()
    built.so.unlink()
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.1)
    lock = built.folder / f".{built.symbol}.{built.arch}.lock"
    with cache._locked(lock):  # another file description: locks even within one process
        assert quietly_get().intact("so")
    assert len(count_builds) == 2


def test_a_folder_that_others_can_write_is_refused(tmp_path, count_builds):
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o770)
    with pytest.raises(PermissionError, match=f"other users can write to {root}"):
        cache.get(Scale(), "sm_90a")
    with pytest.warns(RuntimeWarning, match="compiled anew in every process: other users can write"):
        cache.load(Scale(), "sm_90a")
    assert count_builds == []
    assert list(root.iterdir()) == []


def test_code_that_others_could_have_put_there_is_not_loaded(count_builds):
    built = quietly_get()
    built.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="other users can write"):
        cache.get(Scale(), "sm_90a")


def test_a_folder_of_another_user_is_refused(count_builds, monkeypatch):
    quietly_get()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0:  # what root owns is trusted
        os.chown(cache.folder(), 12345, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache.get(Scale(), "sm_90a")


def test_new_folders_are_for_the_user_alone():
    built = quietly_get()
    assert cache.folder().stat().st_mode & 0o077 == 0
    assert built.folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made_is_done_without(monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, "/proc/no/such/place")
    with pytest.warns(RuntimeWarning, match="compiled anew in every process"):
        assert callable(cache.load(Scale(), "sm_90a"))


def test_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "cute_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "cute_kernels"


def test_a_user_without_a_home_does_without_a_disk(monkeypatch):
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what an unknown user gets
    with pytest.warns(RuntimeWarning, match=f"no home folder .* set .{cache.VARIABLE}"):
        assert callable(cache.load(Scale(), "sm_90a"))
    assert "no home folder" in cute_kernels.env_report().entries["cache"]


def test_a_read_only_folder_still_serves_what_it_holds(count_builds, monkeypatch):
    built = quietly_get()
    for folder in (built.folder, cache.folder()):
        folder.chmod(0o500)
    monkeypatch.setattr(cache, "_locked", lambda path: pytest.fail("a hit takes no lock"))  # root may write anywhere
    assert quietly_get() == built
    for folder in (cache.folder(), built.folder):
        folder.chmod(0o700)


FULL = """
import resource
import cutlass.cute
import cute_kernels
from cute_kernels.runtime import cache
from tests.runtime.kernels import Scale
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))  # as on a full disk, files can be made but not filled
print(callable(cache.load(Scale(), "sm_90a")))
"""


@pytest.mark.parametrize("limit", [0, 17_000])  # not even the object fits; the object fits, the library doesn't
def test_a_full_disk_is_done_without(limit, start):
    process = start(FULL.format(limit=limit))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "True\n"), err
    assert "RuntimeWarning: kernels are compiled anew in every process" in err
    assert [path for path in cache.folder().rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_threads_at_once_compile_once(count_builds):
    results = []
    threads = [threading.Thread(target=lambda: results.append(cache.get(Scale(5.0), "sm_90a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(count_builds) == 1
