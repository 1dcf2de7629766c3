import pytest
import torch

from perf import timing
from perf.timing import cold_time, cold_times, fill_time, host_time, rotating


def test_rotating_takes_turns():
    seen = []
    call = rotating([lambda n=n: seen.append(n) for n in range(3)])
    for _ in range(5):
        call()
    assert seen == [0, 1, 2, 0, 1]


class Gpu:
    """A made-up GPU and host: when the host is, and when the GPU will be done with what is queued. Microseconds."""

    def __init__(self):
        self.host = self.done = 0.0

    def launch(self, us, host=10.0):
        self.host += host
        self.done = max(self.done, self.host) + us

    def synchronize(self, device=None):
        self.host = max(self.host, self.done)

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.gpu.launch(0.0, host=5.0)
        self.time = self.gpu.done

    def query(self):
        return self.time <= self.gpu.host

    def elapsed_time(self, other):
        return (other.time - self.time) / 1000


def test_what_the_host_needs_is_not_in_the_time(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(timing, "_flush", lambda device: lambda: gpu.launch(60.0))
    calls = {"one": lambda: gpu.launch(3.0, host=30.0), "many": lambda: [gpu.launch(2.0) for _ in range(50)]}
    times = cold_times(calls, torch.device("cpu"), 5)
    assert times["one"] == pytest.approx([3.0] * 5)
    assert times["many"] == pytest.approx([100.0] * 5)  # though the host needs 500


@pytest.mark.gpu
def test_timing_agrees_with_the_bandwidth():
    device = torch.device("cuda", torch.cuda.current_device())
    small, large = fill_time(64 << 20, device), fill_time(512 << 20, device)
    assert 4 < large / small < 9  # 8 but for the fixed part
    assert cold_time(lambda: None, device) < small


@pytest.mark.gpu
def test_many_launches_take_the_time_of_the_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    one = torch.empty(1, device=device)
    times = cold_times({"many": lambda: [one.fill_(1.0) for _ in range(100)]}, device, 5)["many"]
    assert max(times) < 100 * 4  # the host needs 5 us and more for each
    assert host_time(lambda: one.fill_(1.0), device) > 1
