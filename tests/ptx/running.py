"""Inputs and expected outputs of the test kernels, and running them on the machine."""

from __future__ import annotations

import torch

from reference.ptx import run_object

from .kernels import compiled


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """To 10 bits of mantissa, nearest even: what a TFLOAT32 tensor map does on load."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def case(name: str, *shape: int):
    """Arguments (the last is the output, poisoned) and the expected output in float64."""
    g = torch.Generator().manual_seed(7)
    if name == "elementwise":
        x = torch.randn(1000, generator=g)
        d = x.double()
        return [x], torch.where(x > 0.5, d.exp(), (x * 100).double().sin() + d.exp().log1p()), torch.float32
    if name in ("gemm", "gemm32", "ring"):
        m, n, tiles, kind, majors = (*shape, *("BFloat16", "KK")[len(shape) - 3 :])
        dtype = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "TFloat32": torch.float32}[kind]
        k = (32 if kind == "TFloat32" else 64) * tiles
        a, b = torch.randn(2 * m, k, generator=g).to(dtype), torch.randn(n, k, generator=g).to(dtype)
        exact = [round_tf32(x) if kind == "TFloat32" else x for x in (a, b)]
        out = exact[0].double() @ exact[1].double().T
        out[torch.arange(n)[None] > (torch.arange(2 * m) % m)[:, None]] = 0
        a, b = (x.T.contiguous().T if major == "M" else x for x, major in zip((a, b), majors, strict=True))
        return [a, b], out, torch.float32 if name == "gemm32" else dtype
    if name == "hankel":
        h, w = torch.randn(256, generator=g).bfloat16(), torch.randn(16, 64, generator=g).bfloat16()
        return [h, w], torch.stack([h[i : i + 64] for i in range(64)]).double() @ w.double().T, torch.float32
    if name == "transpose":
        x = torch.randn(44, 72, generator=g)
        return [x], 2 * x.T.double(), torch.float32
    if name == "transpose_tf32":
        x = torch.randn(44, 72, generator=g)
        return [x], round_tf32(x).T.double(), torch.float32
    if name == "multicast":
        x = torch.randn(64, 32, generator=g)
        return [x], x.double().expand(2, 64, 32), torch.float32
    x = torch.arange(128, dtype=torch.int32).view(2, 64)
    return [x], x.flip(0).double(), torch.int32


def run(name: str, arch: str, *shape: int, ptx: str | None = None, check=True, inputs=None, rows=None, **options):
    """(output, expected, reports); `ptx` replaces the compiled PTX, `inputs` the case's own, `rows` its output's."""
    made = compiled(name, arch, *shape)
    own, expected, dtype = case(name, *shape)
    inputs = own if inputs is None else inputs
    out = torch.empty((rows or len(expected), *expected.shape[1:]), dtype=dtype)
    out.untyped_storage().fill_(0xFF)
    args = [*inputs, out]
    reports = run_object(
        made.object, made.symbol, ptx or made.ptx, args, arch=arch, uninitialised=[len(inputs)], check=check, **options
    )
    return out, expected, reports
