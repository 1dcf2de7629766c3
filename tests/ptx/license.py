"""The machine's licence: the same kernels and inputs on an H200 and on the machine, compared bit for bit.

    python -m tests.ptx.license device FOLDER     on a machine with an H200: compiles, runs, keeps inputs and outputs
    python -m tests.ptx.license judge FOLDER      anywhere: runs the machine on the same inputs and compares

The judge also finds how the GPU's tensor core adds: which grouping, guard bits and rounding give its bits.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib

import torch

from .kernels import compiled
from .running import case, run

ARCH = "sm_90a"
EXACT = [("transpose",), ("transpose_tf32",), ("multicast",), ("cluster",)]
MMA = [("gemm32", 64, 64, 1, kind, "KK") for kind in ("BFloat16", "Float16")] + [
    ("gemm32", 64, 64, 4, "BFloat16", "KM")
]
CLOSE = [("elementwise",)]
SPREADS = (0, 4, 12)  # inputs of an MMA are scaled by 2 to a random power of at most this size


def inputs_of(name: str, *shape) -> list[list[torch.Tensor]]:
    """The input sets of one kernel: its own; for MMAs also with spread exponents, for conversions with ties."""
    inputs = case(name, *shape)[0]
    if name == "transpose_tf32":
        ties = ((1 + torch.arange(inputs[0].numel()) * 2.0**-11) * 2.0).view(inputs[0].shape)
        return [inputs, [ties]]
    if not name.startswith("gemm"):
        return [inputs]
    g = torch.Generator().manual_seed(11)
    sets = []
    for spread in SPREADS:
        scaled = []
        for x in inputs:
            powers = torch.randint(-spread, spread + 1, x.shape, generator=g) if spread else torch.zeros(x.shape)
            scaled.append(_like(x, powers))
        sets.append(scaled)
    return sets


def _like(x: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """x times 2^powers, in x's own memory layout."""
    out = torch.empty_like(x, memory_format=torch.preserve_format)
    return out.copy_(x.double() * 2.0 ** powers.double())


def all_cases():
    for kernel in (*EXACT, *MMA, *CLOSE):
        for i, inputs in enumerate(inputs_of(*kernel)):
            yield kernel, i, inputs


def on_device(folder: pathlib.Path) -> None:
    import tvm_ffi

    from cute_kernels.runtime import build, toolchain

    folder.mkdir(parents=True, exist_ok=True)
    toolchain.preload()
    for kernel, i, inputs in all_cases():
        made = compiled(kernel[0], ARCH, *kernel[1:])
        so = made.object.with_suffix(".device.so")
        if not so.exists():
            build._link(made.object, so)
        _, expected, dtype = case(*kernel)
        out = torch.full(expected.shape, -1, dtype=dtype, device="cuda")
        tvm_ffi.load_module(str(so))[made.symbol](*[x.cuda() for x in inputs], out)
        torch.cuda.synchronize()
        name = "-".join(map(str, (*kernel, i)))
        torch.save({"inputs": inputs, "output": out.cpu()}, folder / f"{name}.pt")
        print("ran", name)


def _unequal(a: torch.Tensor, b: torch.Tensor) -> int:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return int((a.view(kind) != b.view(kind)).sum())


def judge(folder: pathlib.Path) -> None:
    recorded = {}
    for kernel, i, _ in all_cases():
        name = "-".join(map(str, (*kernel, i)))
        recorded[kernel, i] = torch.load(folder / f"{name}.pt")

    def machine(kernel, i, **options):
        return run(kernel[0], ARCH, *kernel[1:], inputs=recorded[kernel, i]["inputs"], **options)[0]

    for (kernel, i), data in recorded.items():
        out = machine(kernel, i)
        gpu = data["output"]
        worst = ((out.double() - gpu.double()).abs() / gpu.double().abs().clamp_min(1e-30)).max()
        print(
            f"{'-'.join(map(str, (*kernel, i))):40} {_unequal(out, gpu):6} of {out.numel()} differ, at most {worst:.2e}"
        )
    print("\nhow the tensor core adds: unequal elements over all MMA cases")
    for group, nearest, bits in itertools.product((4, 8, 0), (False, True), range(6)):
        options = {"mma_group": group, "mma_nearest": nearest, "guard_bits": bits, "strict": False}
        bad = [_unequal(machine(k, i, **options), d["output"]) for (k, i), d in recorded.items() if k in MMA]
        print(f"products at a time {group or 'all'}, {'nearest' if nearest else 'cut'}, {bits} guard bits: {bad}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("device", "judge"))
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    (on_device if options.command == "device" else judge)(options.folder)


if __name__ == "__main__":
    main()
