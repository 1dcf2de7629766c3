"""What Nsight Compute looks at: every case called once, a marker kernel before each. `python -m perf.ncu_target SPEC`.

SPEC is JSON: {"op", "set", "only", "options"}.
"""

from __future__ import annotations

import json
import sys


def main(spec: dict) -> None:
    import torch

    from perf import bench, calls, cases

    device = torch.device("cuda", torch.cuda.current_device())
    chosen = bench.choose(cases.cases(spec["op"], spec["set"], spec["options"]), spec["only"])
    called = [calls.operator(case, calls.arguments(case, 0, device), spec["options"]) for case in chosen]
    for call in called:  # compiles and loads
        call()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    for call in called:
        torch.cuda._sleep(1)  # the marker: kernels from here on belong to the next case
        call()
        torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
