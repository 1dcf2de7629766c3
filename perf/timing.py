"""GPU time of a call as a user with other work in between would see it: with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any supported GPU


def cold_time(call: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    """Median GPU time of `call` in microseconds, 256 MB written before each.

    The write takes longer than the host needs for the call behind it, so the time holds no host work.
    """
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    for _ in range(3):
        call()
    pairs = []
    for _ in range(repeats):
        flush.fill_(0.0)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return 1000 * statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def fill_time(num_bytes: int, device: torch.device, repeats: int = 30) -> float:
    """Median time in microseconds of one fp32 fill of `num_bytes`: the floor of an operator that only writes."""
    target = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
    return cold_time(lambda: target.fill_(1.0), device, repeats)
