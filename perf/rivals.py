"""What an operator is measured against, as calls on the same inputs.

`fill`: one fp32 fill of the bytes the operator writes. `copy`: a copy that moves the bytes it reads and writes.
`torch`: its formulas in PyTorch, kernel by kernel. `compile`: the formulas through torch.compile, in a CUDA graph.
`cufft` (of the long convolution): rfft, product, irfft in a CUDA graph, padded to a power of two.
"""

from __future__ import annotations

from typing import Any

import torch

from perf import calls, runs
from perf.cases import Case
from perf.timing import Call

FLOORS = runs.FLOORS
NAMES = (*FLOORS, "torch", "compile", "cufft")


def check(names: list[str], op: str) -> None:
    """ValueError where a name is none of the rivals, or no rival of this operator."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"against names {name!r}, but must name some of {', '.join(NAMES)}")
        if name == "cufft" and op != "causal_long_conv":
            raise ValueError(f"against names 'cufft', which rivals causal_long_conv alone, not {op}")


def build(name: str, case: Case, x: calls.Arguments, options: dict[str, Any], device: torch.device) -> Call:
    if name == "fill":
        target = torch.empty(case.written // 4, dtype=torch.float32, device=device)
        return lambda: target.fill_(1.0)
    if name == "copy":
        source = torch.ones(case.bytes // 8, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    eager = calls.formula(case, x, options)
    if name == "torch":
        return eager
    if name == "cufft":
        return in_graph(eager)
    torch._dynamo.reset()  # one size after the other, each compiled for itself
    return in_graph(torch.compile(eager, dynamic=False))


def in_graph(call: Call) -> Call:
    """The call captured in a CUDA graph, after it ran three times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
