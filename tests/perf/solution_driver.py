"""Runs a bundled solution in a process of its own: `python solution_driver.py FOLDER OP compile ARCH | run ROOT`.

`compile` needs no GPU: every kernel that the 16 official sizes launch is compiled for ARCH. `run` calls the solution on
the official inputs of all sizes, on poisoned outputs; only then is the checkout at ROOT imported, to judge them.
"""

import json
import sys
from pathlib import Path

import torch

SEGSUM = ((1, 1), (1, 2), (1, 3), (2, 2), (4, 1), (1, 8), (4, 2), (4, 3), (16, 1), (4, 5), (2, 16), (16, 2), (32, 1))
SEGSUM += ((64, 1), (8, 8), (32, 2))


def segsum_arguments(batch, chunks, device, q=256, h=16, p=160, g=1, n=256):
    """The official inputs and poisoned outputs, in the benchmark's order."""
    generator = torch.Generator().manual_seed(batch * 1000 + chunks)
    bf16 = {"dtype": torch.bfloat16, "device": device}

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(**bf16)

    def poison(*shape, **like):
        return torch.full(shape, float("nan"), **like)

    b, c, fp32 = batch, chunks, {"dtype": torch.float32, "device": device}
    hidden_states = torch.empty(1, **bf16).expand(b, c, q, h, p)  # never read
    A_log = (-5 + 4 * torch.rand(h, generator=generator)).to(**bf16)
    inputs = (hidden_states, normal(b, c, q, h), A_log, normal(b, c, q, g, n), normal(b, c, q, g, n))
    outputs = (poison(b, h, c, q, q, **bf16), *(poison(b, c, q, q, h, **bf16) for _ in range(2)))
    return inputs, (*outputs, *(poison(b, h, c, q, **fp32) for _ in range(2)))


def judge_segsum(inputs, outputs):
    from reference import compare
    from reference import inputs as reference_inputs

    compare.assert_ok(reference_inputs.SegsumInputs(*inputs[1:]), outputs)


OPERATORS = {"mamba_segsum": (SEGSUM, segsum_arguments, judge_segsum)}


class CompileOnly:
    """A backend that compiles, and checks nothing but that kernels are called."""

    def __init__(self, arch):
        self.name, self.compiled, self.launches = arch, {}, 0

    def arch(self, device):
        return self.name

    def sm_count(self, device):
        return {"sm_90a": 132, "sm_100a": 148}[self.name]

    def function(self, kernel, device):
        if kernel not in self.compiled:
            self.compiled[kernel] = kernel.compile(self.name)

        def launch(*arguments):
            self.launches += 1

        return launch


def main(folder, op, mode, argument):
    sys.path.insert(0, folder)  # as the harness does
    import kernel

    sizes, arguments, judge = OPERATORS[op]
    if mode == "compile":
        from solution_kernels.runtime import backend

        backend._backend = CompileOnly(argument)
        for size in sizes:
            inputs, outputs = arguments(*size, "meta")
            kernel.run(*inputs, *outputs)
        done = {"kernels": len(backend._backend.compiled), "launches": backend._backend.launches}
    else:
        calls = [arguments(*size, "cuda") for size in sizes]
        for inputs, outputs in calls:
            kernel.run(*inputs, *outputs)
        torch.cuda.synchronize()
        assert not [name for name in sys.modules if name.partition(".")[0] in ("cute_kernels", "perf", "reference")]
        sys.path.append(str(Path(argument)))
        for inputs, outputs in calls:
            judge(inputs, outputs)
        done = {"cases": len(calls)}
    assert "cute_kernels" not in sys.modules
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
