"""The machine's licence: the same kernels and inputs on an H200 and on the machine, compared bit for bit.

    python -m tests.ptx.license device FOLDER     on a machine with an H200: compiles, runs, keeps inputs and outputs
    python -m tests.ptx.license judge FOLDER      anywhere: runs the machine on the same inputs and compares
    python -m tests.ptx.license keep FOLDER       stores the matrix products of one tile, for the tests

How a tensor core adds one step, on operands chosen for that: accumulation.py.
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch

from .kernels import compiled
from .recorder import recorder
from .running import case, run

ARCH = "sm_90a"
RECORDED = pathlib.Path(__file__).with_name("h200.npz")
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
    for kernel, i, _ in all_cases():
        data = torch.load(folder / f"{'-'.join(map(str, (*kernel, i)))}.pt")
        out = run(kernel[0], ARCH, *kernel[1:], inputs=data["inputs"])[0]
        gpu = data["output"]
        worst = ((out.double() - gpu.double()).abs() / gpu.double().abs().clamp_min(1e-30)).max()
        print(
            f"{'-'.join(map(str, (*kernel, i))):40} {_unequal(out, gpu):6} of {out.numel()} differ, at most {worst:.2e}"
        )


def keep(folder: pathlib.Path) -> None:
    """The first 64 rows of each product of one k tile: operands as bits, and the GPU's outputs."""
    kept = {}
    for kernel, i, _ in all_cases():
        if kernel in MMA and kernel[3] == 1:
            data = torch.load(folder / f"{'-'.join(map(str, (*kernel, i)))}.pt")
            a, b = (x[:64].contiguous().view(torch.int16).numpy() for x in data["inputs"])
            kept |= {f"{kernel[4]} {i} {name}": x for name, x in zip("abd", (a, b, data["output"][:64]), strict=True)}
    np.savez_compressed(RECORDED, **kept)


def recorded() -> dict[tuple[str, int], tuple[list[torch.Tensor], torch.Tensor]]:
    """What `keep` stored: by type and input set, the operands and the output of an H200."""
    with np.load(RECORDED) as data:
        names = sorted({name[:-2] for name in data})
        out = {}
        for name in names:
            kind, i = name.split()
            dtype = {"BFloat16": torch.bfloat16, "Float16": torch.float16}[kind]
            operands = [torch.from_numpy(data[f"{name} {x}"]).view(dtype) for x in "ab"]
            out[kind, int(i)] = (operands, torch.from_numpy(data[f"{name} d"]))
        return out


if __name__ == "__main__":
    recorder(__doc__, {"device": on_device, "judge": judge, "keep": keep})
