"""GPU time of a call as a user with other work in between would see it: with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any supported GPU


def cold_times(
    calls: dict[str, Callable[[], object]], device: torch.device, repeats: int = 30
) -> dict[str, list[float]]:
    """GPU times in microseconds of each call, 256 MB written before each; the calls take turns, `repeats` rounds.

    The write takes longer than the host needs for the call behind it, so the times hold no host work.
    """
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    for call in calls.values():
        for _ in range(3):
            call()
    events = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            flush.fill_(0.0)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize(device)
    return {name: [1000 * begin.elapsed_time(end) for begin, end in pairs] for name, pairs in events.items()}


def cold_time(call: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    """Median GPU time of one call in microseconds, as `cold_times` takes it."""
    return statistics.median(cold_times({"call": call}, device, repeats)["call"])


def fill_time(num_bytes: int, device: torch.device, repeats: int = 30) -> float:
    """Median time in microseconds of one fp32 fill of `num_bytes`: the floor of an operator that only writes."""
    target = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
    return cold_time(lambda: target.fill_(1.0), device, repeats)
