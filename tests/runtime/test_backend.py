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


@pytest.mark.gpu
def test_a_kernel_runs_on_the_current_stream_and_in_a_captured_graph():
    pytest.importorskip("cutlass")
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(1000, device=device)
    y = torch.empty_like(x)
    run = backend.current().function(Scale(), device)
    run(x, y)
    assert torch.equal(y, 2 * x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, y)
        with pytest.raises(RuntimeError, match="warmup"):
            backend.current().function(Scale(7.0), device)
    x.normal_()
    graph.replay()
    assert torch.equal(y, 2 * x)
