"""Runs a bundled solution in a process of its own, on every PARTS-th official size from the PART-th:

python solution_driver.py FOLDER OP compile ARCH | run ROOT  PART PARTS

`compile` needs no GPU: every kernel that these sizes launch is compiled for ARCH. `run` calls the solution on the
official inputs, on poisoned outputs; only then is the checkout at ROOT imported, to judge them.
"""

import json
import math
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


HYENA = ((1, 1024), (2, 4096), (16, 512), (1, 512), (4, 541), (2, 2048), (8, 997), (32, 256), (1, 2048), (2, 128))
HYENA += ((2, 2053), (4, 256), (1, 4096), (1, 256), (1, 131), (2, 512))
LIVELY = (3, 700, True)  # weights so large that every branch reaches the output, which the official ones don't


def hyena_arguments(batch, length, lively, device, d=256, inner=1024, order=64, emb_dim=5):
    """Inputs and poisoned output, in the benchmark's order."""
    generator = torch.Generator().manual_seed(batch * 10000 + length)

    def normal(*shape):
        fan_in = shape[-1] if len(shape) > 1 else 25
        return torch.randn(shape, generator=generator) * (fan_in**-0.5 if lively else 0.02)

    shapes = ((3 * d, d), (3 * d,), (3 * d, 1, 3), (3 * d,), (order, emb_dim), (order,))
    deltas = torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, d).reshape(1, 1, d)
    final = normal(d, order), normal(d)
    if lively:
        final = tuple(t * length**-0.5 for t in final)  # a sum over time
    weights = (
        *(torch.ones(d), torch.zeros(d), torch.ones(d), torch.zeros(d)),
        *(normal(*shape) for shape in shapes),
        torch.ones(1, order),
        *(normal(*shape) for shape in ((order, order), (order,), (order, order), (order,))),
        *(*final, deltas),
        *(normal(*shape) for shape in ((d, d), (d,), (inner, d), (inner,), (d, inner), (d,))),
    )
    x = torch.randn(batch, length, d, generator=generator)
    inputs = (x.to(device), *(w.to(device) for w in weights), 1e-5, 0.05)
    return inputs, (torch.full((batch, length, d), float("nan"), device=device),)


def judge_hyena(inputs, outputs):
    from perf.cases import HYENA_OFFICIAL
    from reference import hyena

    named = dict(zip(hyena.NAMES, inputs[:25], strict=True))
    want = torch.from_numpy(hyena.block({name: t.cpu().numpy() for name, t in named.items()})["out"])
    error = (outputs[0].cpu().double() - want).abs()
    size = tuple(want.shape[:2])
    if size in HYENA_OFFICIAL:
        assert (error <= 1e-5 * HYENA_OFFICIAL[size] + 1e-5 * want.abs()).all(), (size, error.max())
    else:
        assert error.norm() < 1.5e-3 * want.norm(), (size, error.norm() / want.norm())


OPERATORS = {  # sizes, arguments, judge, and the device whose tensors `compile` passes
    "mamba_segsum": (SEGSUM, segsum_arguments, judge_segsum, "meta"),
    "hyena_block": ([*((*size, False) for size in HYENA), LIVELY], hyena_arguments, judge_hyena, "cpu"),
}


class CompileOnly:
    """A backend that compiles, and checks nothing but that kernels are called."""

    def __init__(self, arch):
        self.name, self.compiled, self.launches = arch, {}, 0

    def arch(self, device):
        return self.name

    def sm_count(self, device):
        return {"sm_90a": 132, "sm_100a": 148}[self.name]

    def held(self, tensor):
        return tensor

    def function(self, kernel, device):
        if kernel not in self.compiled:
            self.compiled[kernel] = kernel.compile(self.name)

        def launch(*arguments):
            self.launches += 1

        return launch


def main(folder, op, mode, argument, part, parts):
    sys.path.insert(0, folder)  # as the harness does
    import kernel

    sizes, arguments, judge, stand_in = OPERATORS[op]
    sizes = sizes[int(part) :: int(parts)]
    if mode == "compile":
        from solution_kernels.runtime import backend

        backend._backend = CompileOnly(argument)
        for size in sizes:
            inputs, outputs = arguments(*size, stand_in)
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
