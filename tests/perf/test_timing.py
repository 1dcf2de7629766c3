import pytest
import torch

from perf.timing import cold_time, cold_times, fill_time, host_time, rotating


def test_rotating_takes_turns():
    seen = []
    call = rotating([lambda n=n: seen.append(n) for n in range(3)])
    for _ in range(5):
        call()
    assert seen == [0, 1, 2, 0, 1]


@pytest.mark.gpu
def test_timing_agrees_with_the_bandwidth():
    device = torch.device("cuda", torch.cuda.current_device())
    small, large = fill_time(64 << 20, device), fill_time(512 << 20, device)
    assert 4 < large / small < 9  # 8 but for the fixed part
    assert cold_time(lambda: None, device) < small


@pytest.mark.gpu
def test_host_work_is_not_in_the_gpu_time():
    device = torch.device("cuda", torch.cuda.current_device())
    one = torch.empty(1, device=device)

    def slow():  # many launches: the host needs much longer than one flush
        for _ in range(100):
            one.fill_(1.0)

    times = cold_times({"slow": slow}, device, 5)["slow"]
    assert max(times) < host_time(slow, device, 5, 1) + 100 * 2.5
