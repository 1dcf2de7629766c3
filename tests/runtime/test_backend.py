import importlib.util
import threading
import timeit

import pytest
import torch

from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import artifacts, backend, cache
from cute_kernels.runtime.backend import Backend

from .kernels import Scale

CPU = torch.device("cpu")


class Sm90(Backend):
    """The real backend, on a CPU that passes for an sm_90a device."""

    def handles(self, tensor):
        return True

    def arch(self, device):
        return "sm_90a"


@pytest.fixture
def loads(monkeypatch):
    """What was loaded so far; each kernel's function is a string that names it. Nothing is being captured."""
    calls = []
    monkeypatch.setattr(artifacts, "load", lambda kernel, arch: None)
    monkeypatch.setattr(cache, "load", lambda kernel, arch: calls.append((kernel, arch)) or f"{kernel} {arch}")
    monkeypatch.setattr(backend, "_capturing", lambda device: False)
    return calls


def test_the_gpu_is_the_backend_until_another_is_used():
    gpu = backend.current()
    assert not gpu.handles(torch.zeros(1))
    other, inner = Sm90(), Sm90()
    with backend.use(other):
        assert backend.current() is other
        with backend.use(inner):
            assert backend.current() is inner
        assert backend.current() is other
    assert backend.current() is gpu


def test_it_comes_back_after_an_error_and_other_threads_keep_theirs():
    gpu, seen = backend.current(), []
    with pytest.raises(KeyError), backend.use(Sm90()):
        thread = threading.Thread(target=lambda: seen.append(backend.current()))
        thread.start()
        thread.join()
        raise KeyError
    assert backend.current() is gpu
    assert seen == [gpu]


def test_a_kernel_is_loaded_once_and_shared_by_devices(loads):
    sm90 = Sm90()
    first = [sm90.function(Scale(), CPU) for _ in range(3)]
    assert first == ["Scale(factor=2.0, threads=256) sm_90a"] * 3
    sm90.function(Scale(), torch.device("meta"))
    assert loads == [(Scale(), "sm_90a")]
    sm90.function(Scale(3.0), CPU)
    assert len(loads) == 2


def test_artifacts_come_before_the_cache(loads, monkeypatch):
    monkeypatch.setattr(artifacts, "load", lambda kernel, arch: "artifact")
    assert Sm90().function(Scale(), CPU) == "artifact"
    assert loads == []


def test_threads_at_once_load_once(loads):
    sm90, barrier, results = Sm90(), threading.Barrier(8), []

    def work():
        barrier.wait()
        results.append(sm90.function(Scale(), CPU))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(loads) == 1


def test_a_kernel_in_memory_costs_about_a_microsecond(loads):
    sm90, kernel = Sm90(), Scale()
    sm90.function(kernel, CPU)
    best = min(timeit.repeat(lambda: sm90.function(kernel, CPU), number=1000, repeat=20)) / 1000
    assert best < 5e-6  # 0.6 us on a quiet machine


def test_what_is_held_is_the_tensor_to_a_function():
    tvm_ffi = pytest.importorskip("tvm_ffi")
    x = torch.arange(6.0).view(2, 3)
    found = torch.from_dlpack(tvm_ffi.get_global_func("testing.echo")(Backend().held(x)))
    assert torch.equal(found, x)
    assert found.data_ptr() == x.data_ptr()


def test_nothing_is_loaded_while_a_graph_is_captured(loads, monkeypatch):
    sm90 = Sm90()
    sm90.function(Scale(), CPU)
    monkeypatch.setattr(backend, "_capturing", lambda device: True)
    assert sm90.function(Scale(), CPU)  # in memory: fine
    with pytest.raises(
        RuntimeError, match=r"test_scale .* captured: call cute_kernels\.warmup\(\"test_scale\", \.\.\.\) before"
    ):
        sm90.function(Scale(3.0), CPU)
    assert len(loads) == 1


def test_an_unsupported_device_is_refused_before_anything_is_loaded(loads, monkeypatch):
    monkeypatch.setattr(arch_, "of_device", lambda index: arch_.for_capability(8, 0))
    with pytest.raises(NotImplementedError, match=r"8\.0 is not supported: .*sm_90a"):
        Backend().function(Scale(), torch.device("cuda:0"))
    with pytest.raises(NotImplementedError, match="not on cpu"):
        Backend().function(Scale(), CPU)
    assert loads == []


# --- on a GPU. Without a compiler there: from artifacts that `python -m tests.runtime.kernels` made -------------------


@pytest.fixture
def device():
    if importlib.util.find_spec("cutlass") is None and artifacts.folder() is None:
        pytest.skip("needs nvidia-cutlass-dsl, or artifacts of the tests' own kernel")
    return torch.device("cuda", torch.cuda.current_device())


def vectors(device):
    x = torch.randn(1000, device=device)
    return x, torch.full_like(x, torch.nan)


@pytest.mark.gpu
def test_it_runs_on_the_current_stream(device):
    x, y = vectors(device)
    stream = torch.cuda.Stream(device)
    run = backend.current().function(Scale(), device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3.0)
        run(x, y)
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, 6.0))


@pytest.mark.gpu
@pytest.mark.parametrize("called", [True, False])
def test_a_loaded_kernel_can_be_captured(device, called):
    x, y = vectors(device)
    gpu = Backend()  # has nothing in memory
    run = gpu.function(Scale(3.0 if called else 4.0), device)
    if called:
        run(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, y)
        with pytest.raises(RuntimeError, match="warmup"):
            gpu.function(Scale(5.0), device)
    x.normal_()
    graph.replay()
    assert torch.equal(y, (3.0 if called else 4.0) * x)


@pytest.mark.gpu
def test_it_runs_on_a_device_that_is_not_the_current_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (1, 0):
        with torch.cuda.device(1 - index):
            other = torch.device("cuda", index)
            x, y = vectors(other)
            backend.current().function(Scale(), other)(x, y)
            assert torch.equal(y, 2 * x)
            assert torch.cuda.current_device() == 1 - index


@pytest.mark.gpu
def test_it_runs_without_a_disk(device, monkeypatch):
    pytest.importorskip("cutlass")
    monkeypatch.delenv(artifacts.VARIABLE, raising=False)
    monkeypatch.setenv(cache.VARIABLE, "/proc/no/such/place")
    x, y = vectors(device)
    with pytest.warns(RuntimeWarning, match="compiled anew"):
        run = Backend().function(Scale(), device)
    run(x, y)
    assert torch.equal(y, 2 * x)
