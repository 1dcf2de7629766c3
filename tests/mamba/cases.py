"""The cases every backend of `mamba_segsum` must get right, and outputs that show what was not written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_kernels.mamba import SegsumOutputs
from reference import inputs
from reference.inputs import SegsumInputs

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """One input set at one shape; `small` is a shape for a backend that is slow."""

    name: str
    make: Callable[..., SegsumInputs]
    shape: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)

    def inputs(self, device: torch.device | str, small: bool = False) -> SegsumInputs:
        return self.make(11, device, **(self.small if small else self.shape))

    def __str__(self) -> str:
        return self.name


TINY = {"chunk_size": 64, "heads": 4, "d_state": 16}


def _official(name: str, *, tiny: dict[str, Any] | None = None, **shape: Any) -> Case:
    return Case(f"official-{name}", inputs.official, shape, {**TINY, **shape, "chunk_size": 64, **(tiny or {})})


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


OFFICIAL = [
    _official("1x1", tiny=TINY),
    _official("2x3", batch=2, chunks=3, tiny={"d_state": 16, "heads": 2}),
    _official("ones", heads=1, tiny={"d_state": 32}),
    *(_official(f"Q{q}-N{n}", chunk_size=q, d_state=n, heads=4) for q, n in ((64, 64), (128, 64), (128, 256))),
    *(_official(f"N{n}", d_state=n, chunk_size=64, heads=2) for n in (16, 32, 48, 80, 112, 144, 208, 240, 256)),
    *(_official(f"H{h}", heads=h, chunk_size=128, d_state=64, tiny={"d_state": 16}) for h in (2, 3, 5, 7, 8, 65)),
    _official("H128", heads=128, chunk_size=64, d_state=32, chunks=2, tiny={"chunks": 1}),
    _official("H24-G4", heads=24, groups=4, chunk_size=64, d_state=32),
    _official("H16-G8", heads=16, groups=8, chunk_size=128, d_state=64, tiny={"d_state": 16}),
    _official("H6-G3", heads=6, groups=3, chunk_size=64, d_state=16),
    _official("H5-G5", heads=5, groups=5, chunk_size=64, d_state=16),
    _official("H128-G8", heads=128, groups=8, chunk_size=128, d_state=128, tiny={"d_state": 16}),
    _official("granite-h", heads=48, chunk_size=256, d_state=128, bias_dtype=bf16, tiny={"d_state": 16}),
    _official("falcon-h1", heads=32, groups=2, chunk_size=128, d_state=256, tiny={"d_state": 16}),
    _official("per-group", g_layout="per_group", tiny=TINY),
    _official("per-group-H16-G8", heads=16, groups=8, chunk_size=64, d_state=32, g_layout="per_group"),
    _official("per-group-H3", heads=3, chunk_size=64, d_state=32, g_layout="per_group"),
    _official("per-group-H5-G5", heads=5, groups=5, chunk_size=64, d_state=32, g_layout="per_group"),
    _official("fp16", dtype=fp16, tiny=TINY),
    _official("one-launch", d_state=64, tiny={"chunk_size": 256}),
    _official("one-launch-2x1", batch=2, d_state=64, tiny={"chunk_size": 256}),
    _official("one-launch-N48", chunk_size=128, heads=6, d_state=48, tiny={"chunk_size": 128}),
    _official("one-launch-H16-G4", chunk_size=128, heads=16, groups=4, d_state=64, tiny={"chunk_size": 128}),
    _official(
        "one-launch-per-group",
        chunk_size=128,
        heads=6,
        groups=3,
        d_state=64,
        g_layout="per_group",
        tiny={"chunk_size": 128},
    ),
    _official(
        "one-launch-fp16-3-chunks", chunks=3, heads=8, dtype=fp16, d_state=32, bias_dtype=fp32, tiny={"chunk_size": 256}
    ),
    _official("fp16-per-group-H3", dtype=fp16, heads=3, chunk_size=64, d_state=48, g_layout="per_group"),
    *(
        _official(
            f"dt-{_short(dt)}-A-{_short(A)}-bias-{_short(bias)}",
            dt_dtype=dt,
            A_dtype=A,
            bias_dtype=bias,
            chunk_size=64,
            heads=3,
            d_state=16,
        )
        for dt, A, bias in (
            (bf16, fp32, None),
            (fp16, bf16, None),
            (fp32, fp16, None),
            (bf16, bf16, bf16),
            (bf16, fp32, fp32),
            (fp16, fp16, fp16),
            (fp32, fp32, fp32),
            (fp32, bf16, fp16),
        )
    ),
    _official("limits", dt_limit=(0.01, 1.5), chunk_size=64, heads=4, d_state=16),
    _official("one-step-size", dt_limit=(0.25, 0.25), chunk_size=64, heads=4, d_state=16),
    _official("all-steps-zero", dt_limit=(0.0, 0.0), chunk_size=64, heads=4, d_state=16),
    _official("3x5", chunk_size=64, heads=4, d_state=16, chunks=5, batch=3, tiny={"batch": 1}),
]

_GROUPS = {"group_index": 2, "transposed": 2, "expanded": 2}  # of their tiny shapes
_HEADS = {"projection_slice": 3}

ADVERSARIAL = [
    Case(name, make, {}, {**TINY, "heads": _HEADS.get(name, 4), "groups": _GROUPS.get(name, 1)})
    for name, make in inputs.ADVERSARIAL.items()
]
ADVERSARIAL += [
    Case(f"{name}-{label}", inputs.ADVERSARIAL[name], shape, {**TINY, **shape, "chunk_size": small, "heads": 4})
    for label, small, shape in (
        ("fp16", 64, {"dtype": fp16, "heads": 8}),
        ("H65", 64, {"heads": 65, "chunk_size": 128, "d_state": 32}),
        ("Q64", 64, {"chunk_size": 64, "chunks": 3, "heads": 5, "d_state": 48}),
        ("one-launch", 128, {"heads": 8, "d_state": 64}),
    )
    for name in (
        "mixture",
        "huge_then_tiny",
        "long_decay",
        "softplus_points",
        "softplus_not_finite",
        "scattered_not_finite",
        "not_finite_operands",
    )
]

CASES = OFFICIAL + ADVERSARIAL

# On the PTX machine: each feature of the kernel once, and the inputs that break kernels.
ON_MACHINE = {
    "official-1x1",
    "official-H3",
    "official-N48",
    "official-N144",
    "official-H6-G3",
    "official-per-group-H5-G5",
    "official-fp16-per-group-H3",
    "official-dt-bfloat16-A-float32-bias-float32",
    "official-dt-float32-A-bfloat16-bias-float16",
    "official-limits",
    "official-one-launch",
    "official-one-launch-2x1",
    "official-one-launch-N48",
    "official-one-launch-H16-G4",
    "official-one-launch-per-group",
    "official-one-launch-fp16-3-chunks",
    "mixture-one-launch",
    "huge_then_tiny-one-launch",
    "softplus_not_finite-one-launch",
    "scattered_not_finite-one-launch",
    "not_finite_operands-one-launch",
    "mixture",
    "huge_then_tiny",
    "softplus_points",
    "softplus_not_finite",
    "scattered_not_finite",
    "not_finite_operands",
    "no_decay",
    "projection_slice",
    "transposed",
    "misaligned",
}

_GUARD = 64  # elements on each side of a poisoned output
_SENTINEL = 12345.0  # survives a round trip through bf16 and fp16 comparisons: compared with itself


@dataclass(frozen=True)
class PoisonedOutputs:
    """Outputs filled with NaN, between guards that must not change."""

    out: SegsumOutputs
    rooms: tuple[Tensor, ...]

    @classmethod
    def like(cls, x: SegsumInputs) -> PoisonedOutputs:
        b, c, q, h = x.dt.shape
        columns = h if x.g_layout == "per_head" else x.B.shape[3]
        shapes = ((b, h, c, q, q), (b, c, q, q, columns), (b, c, q, q, h), (b, h, c, q), (b, h, c, q))
        rooms, out = [], []
        for k, shape in enumerate(shapes):
            dtype = x.B.dtype if k < 3 else fp32
            size = torch.Size(shape).numel()
            room = torch.full((size + 2 * _GUARD,), _SENTINEL, dtype=dtype, device=x.dt.device)
            inside = room[_GUARD : _GUARD + size]
            inside.fill_(float("nan"))
            rooms.append(room)
            out.append(inside.view(shape))
        return cls(SegsumOutputs(*out), tuple(rooms))

    def assert_guards_intact(self) -> None:
        for name, room in zip(SegsumOutputs._fields, self.rooms, strict=True):
            guard = torch.full((_GUARD,), _SENTINEL, dtype=room.dtype, device=room.device)
            assert torch.equal(room[:_GUARD], guard), f"written before {name}"
            assert torch.equal(room[-_GUARD:], guard), f"written past {name}"
