"""compute-sanitizer over every operator, on a GPU: `python -m tests.sanitizer [CASE ...]`.

Runs each of the four tools on each small case, a process each, as many at once as there are processors; the cases
reach the kernels of every call. Prints what a tool reports as soon as it is done with a case.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

import cute_kernels
from reference import hyena_inputs, inputs

TOOLS = {  # the slowest first
    "racecheck": [],
    "initcheck": [],
    # without cuGetProcAddress failing where the CUDA bindings' loader probes for functions of newer drivers
    "memcheck": ["--report-api-errors", "no"],
    "synccheck": [],
}


def segsum(g_layout: str, **shape: int) -> None:
    x = inputs.official(0, "cuda", **shape)
    cute_kernels.mamba_segsum(x.dt, x.A_log, x.B, x.C, g_layout=g_layout)


def hyena(batch: int, length: int) -> tuple[torch.Tensor, cute_kernels.HyenaBlockParams]:
    w = {name: torch.from_numpy(array).cuda() for name, array in hyena_inputs.stress(batch, length).items()}
    return w.pop("hidden_states"), cute_kernels.HyenaBlockParams(**w)


def block(batch: int, length: int, precision: str) -> None:
    x, params = hyena(batch, length)
    cute_kernels.hyena_block(x, params, precision=precision)


def prepared_block(batch: int, length: int, precision: str) -> None:
    x, params = hyena(batch, length)
    cute_kernels.hyena_block(x, params.prepare(seq_len=length, precision=precision))


def hyena_filter(length: int) -> None:
    cute_kernels.hyena_filter(hyena(1, length)[1], length)


def conv(length: int) -> None:
    u, k = torch.randn(2, 3, length, device="cuda"), torch.randn(3, length, device="cuda")
    cute_kernels.causal_long_conv(u, k, skip=torch.randn(3, device="cuda"))


CASES: dict[str, Callable[[], None]] = {
    "segsum-one_group": functools.partial(
        segsum, "per_head", chunks=2, heads=16, groups=1, d_state=256, chunk_size=256
    ),
    "segsum-odd_heads": functools.partial(segsum, "per_head", batch=2, heads=3, groups=3, d_state=64, chunk_size=128),
    "segsum-per_group": functools.partial(segsum, "per_group", chunks=2, heads=8, groups=2, d_state=128, chunk_size=64),
}
CASES |= {
    f"block-{batch}x{length}-{precision}": functools.partial(block, batch, length, precision)
    for (batch, length), precision in itertools.product([(1, 131), (2, 541), (33, 131)], ("highest", "high", "medium"))
}  # 33 x 131: more tokens than one wave of clusters has
CASES["block-2x541-high-prepared"] = functools.partial(prepared_block, 2, 541, "high")
CASES["filter-541"] = functools.partial(hyena_filter, 541)
CASES |= {f"conv-{length}": functools.partial(conv, length) for length in (3, 131, 997, 4099, 16384, 32768)}


def check(tool: str, case: str) -> tuple[bool, str]:
    command = [sys.executable, "-m", "tests.sanitizer", "--run", case]
    options = ["--tool", tool, "--error-exitcode", "1", *TOOLS[tool]]
    run = subprocess.run(["compute-sanitizer", *options, *command], capture_output=True, text=True)
    return run.returncode == 0, run.stdout + run.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all unless told")
    parser.add_argument("--run", action="store_true", help="run the cases, without a tool")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="all unless told")
    options = parser.parse_args()
    cases = options.cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    if options.run:
        for case in cases:
            CASES[case]()
        torch.cuda.synchronize()
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer was not found on the search path: install it with the CUDA toolkit")
    for case in cases:  # so that every kernel is compiled and cached before the tools look at it
        CASES[case]()
    clean = True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {
            pool.submit(check, tool, case): f"{tool} {case}"
            for tool, case in itertools.product(options.tool or TOOLS, cases)
        }
        for run in as_completed(runs):
            passed, report = run.result()
            clean &= passed
            print(f"{runs[run]}: {'clean' if passed else report}", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
