"""compute-sanitizer over every operator, on a GPU: `python -m tests.sanitizer`.

Runs the four tools side by side on small cases that reach every kernel, and prints what each of them reports.
"""

from __future__ import annotations

import subprocess
import sys

import torch

import cute_kernels
from reference import hyena_inputs, inputs

TOOLS = {
    # without cuGetProcAddress failing where the CUDA bindings' loader probes for functions of newer drivers
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": [],
    "synccheck": [],
    "initcheck": [],
}
SEGSUM = [  # one product for all heads; several groups and odd heads; small chunks
    ({"batch": 1, "chunks": 3, "heads": 16, "groups": 1, "d_state": 256, "chunk_size": 256}, "per_head"),
    ({"batch": 2, "chunks": 1, "heads": 3, "groups": 3, "d_state": 64, "chunk_size": 128}, "per_head"),
    ({"batch": 1, "chunks": 2, "heads": 8, "groups": 2, "d_state": 128, "chunk_size": 64}, "per_group"),
]
HYENA = [(1, 131), (2, 541)]  # batch rows, length
CONVOLUTIONS = [3, 131, 997, 4099]  # lengths


def run_operators() -> None:
    for shape, g_layout in SEGSUM:
        x = inputs.official(0, "cuda", **shape)
        cute_kernels.mamba_segsum(x.dt, x.A_log, x.B, x.C, g_layout=g_layout)
    for batch, length in HYENA:
        w = {name: torch.from_numpy(array).cuda() for name, array in hyena_inputs.stress(batch, length).items()}
        x = w.pop("hidden_states")
        for precision in ("highest", "high", "medium"):
            cute_kernels.hyena_block(x, cute_kernels.HyenaBlockParams(**w), precision=precision)
    for length in CONVOLUTIONS:
        u, k = torch.randn(2, 3, length, device="cuda"), torch.randn(3, length, device="cuda")
        cute_kernels.causal_long_conv(u, k, skip=torch.randn(3, device="cuda"))
    torch.cuda.synchronize()


def main() -> int:
    if sys.argv[1:] == ["operators"]:
        run_operators()
        return 0
    run_operators()  # so that every kernel is compiled and cached before the tools look at it
    command = [sys.executable, "-m", "tests.sanitizer", "operators"]
    runs = {
        tool: subprocess.Popen(
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *options, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for tool, options in TOOLS.items()
    }
    clean = True
    for tool, run in runs.items():
        report = run.communicate()[0]
        clean &= run.returncode == 0
        print(f"{tool}: {'clean' if run.returncode == 0 else report}")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
