"""GPU time and host time of a call.

GPU time is what a user with other work in between would see: from the start of the call's first kernel to the end of
its last, with a cold L2. It is taken by a pair of CUDA events around the call. An empty pair reads 1.3 us on an H200,
which stands in every number here; `perf bench` measures it in the same run. CUPTI spans would leave it out, but
tracing keeps dependent launches from overlapping: two kernels of 9.1 us by events became 12.7 us (mamba_segsum, 1x1).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any supported GPU
MAX_WRITES = 256  # 15 ms: a call that needs the host for longer waits for the GPU itself
Call = Callable[[], object]


def rotating(calls: Sequence[Call]) -> Call:
    """One call that takes its turn through `calls`: the same work on other inputs each time."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def cold_times(calls: dict[str, Call], device: torch.device, repeats: int = 30) -> dict[str, list[float]]:
    """GPU times in microseconds of each call, 256 MB written before each; the calls take turns, `repeats` rounds.

    A time holds no host work: where the GPU was done with the write before the host had queued the whole call, the time
    is taken again behind twice as many writes.
    """
    flush = _flush(device)
    for call in calls.values():
        for _ in range(3):
            call()
    writes = dict.fromkeys(calls, 1)
    events = {name: [_event_pair() for _ in range(repeats)] for name in calls}
    torch.cuda.synchronize(device)
    for n in range(repeats):
        for name, call in calls.items():
            begin, end = events[name][n]
            while True:
                for _ in range(writes[name]):
                    flush()
                begin.record()
                call()
                end.record()
                if not begin.query() or writes[name] >= MAX_WRITES:
                    break
                writes[name] *= 2
        torch.cuda.synchronize(device)
    return {name: [1000 * begin.elapsed_time(end) for begin, end in pairs] for name, pairs in events.items()}


def _flush(device: torch.device) -> Call:
    """Writes what no L2 holds."""
    target = torch.empty(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    return lambda: target.fill_(0.0)


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):
        event.record()  # made now, not when the time is taken
    return begin, end


def cold_time(call: Call, device: torch.device, repeats: int = 30) -> float:
    """Median GPU time of one call in microseconds, as `cold_times` takes it."""
    return statistics.median(cold_times({"call": call}, device, repeats)["call"])


def fill_time(num_bytes: int, device: torch.device, repeats: int = 30) -> float:
    """Median time in microseconds of one fp32 fill of `num_bytes`: the floor of an operator that only writes."""
    target = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
    return cold_time(lambda: target.fill_(1.0), device, repeats)


def host_time(call: Call, device: torch.device, repeats: int = 30, calls: int = 10) -> float:
    """Median host time of a call in microseconds, in runs of few enough that no launch waits for the GPU."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize(device)
    return 1e6 * statistics.median(times)
