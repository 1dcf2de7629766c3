"""The launches of the block, one function a stage: allocate what it writes, pick the kernel, call it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_kernels.hyena import torch_path
from cute_kernels.hyena.addresses import Addresses
from cute_kernels.hyena.config import ClusterFinish, ConvertWeights, Filter, Finish, LongConv, Precision, Project
from cute_kernels.hyena.workspace import Constants, pitch
from cute_kernels.runtime import backend


@dataclasses.dataclass(frozen=True)
class Operands:
    """The matrices as tensor-core operands, with the scale of each row."""

    in_proj: Tensor  # [parts, 3D, D] in an order of its own, see in_proj.py
    in_proj_records: Tensor  # [3D, 8] fp32
    out_proj: Tensor  # [parts, D, D]
    fc1: Tensor  # [parts, M, D]
    fc2: Tensor  # [parts, D, M]
    out_proj_scale: Tensor  # [D]
    fc1_scale: Tensor  # [M]
    fc2_scale: Tensor  # [D]
    fc1_norm: Tensor  # [M] L2 norms of the rows


class Arguments(dict):
    """A block's weights by name, and in the order in which the launches take them, found once."""

    _held: tuple[backend.Backend | None, Addresses | None, tuple] = None, None, ()

    def held(self, current: backend.Backend) -> tuple[tuple, Any, tuple]:
        """Those of the three host functions, as `current` passes them at the least cost."""
        known, addresses, arguments = self._held
        if known is not current or not addresses.hold():
            hold = current.held
            first = tuple(map(hold, (*self.filter, *self.matrices)))
            arguments = first, hold(self.skip), tuple(map(hold, self.finish))
            self._held = current, Addresses(self.values()), arguments
        return arguments

    @functools.cached_property
    def filter(self) -> tuple[Tensor, ...]:
        first = self["filter_linear1_weight"]
        return (
            *(self.get("z", first), first, self["filter_linear1_bias"], self["sin_freq"].view(-1)),
            *(self[f"filter_linear{i}_{part}"] for i in (2, 3) for part in ("weight", "bias")),
            *(self["filter_linear_final_weight"], self["filter_bias"], self["exp_mod_deltas"].view(-1)),
        )

    @functools.cached_property
    def matrices(self) -> tuple[Tensor, ...]:
        """What is converted, and what goes into in_proj."""
        names = ("norm1_weight", "norm1_bias", "in_proj_weight", "in_proj_bias")
        convolution = self["short_conv_weight"].view(-1, 3), self["short_conv_bias"]
        others = ("out_proj_weight", "mlp_fc1_weight", "mlp_fc2_weight")
        return *(self[name] for name in names), *convolution, *(self[name] for name in others)

    @functools.cached_property
    def skip(self) -> Tensor:
        return self["filter_bias"]

    @functools.cached_property
    def finish(self) -> tuple[Tensor, ...]:
        names = ("out_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "norm2_weight", "norm2_bias")
        return tuple(self[name] for name in names)


def as_arguments(w: Mapping[str, Tensor], z: Tensor | None = None) -> Arguments:
    if isinstance(w, Arguments):
        return w
    return Arguments(w) if z is None else Arguments(w, z=z)


def empty_operands(precision: Precision, width: int, inner: int, device: torch.device) -> Operands:
    shapes = Constants(width, inner, precision.dtype, precision.parts).shapes(0)
    del shapes["filter"], shapes["k"]
    types = {3: getattr(torch, precision.dtype)}
    made = {n: torch.empty(s, dtype=types.get(len(s), torch.float32), device=device) for n, s in shapes.items()}
    return Operands(**made)


def convert_weights(w: Mapping[str, Tensor], precision: Precision, out: Operands | None = None) -> Operands:
    inner, width = w["mlp_fc1_weight"].shape
    device = w["mlp_fc1_weight"].device
    kernel = ConvertWeights(precision.dtype, precision.parts, width, inner)
    out = empty_operands(precision, width, inner, device) if out is None else out
    backend.current().function(kernel, device)(*as_arguments(w).matrices, *vars(out).values())
    return out


@dataclasses.dataclass(frozen=True)
class Projected:
    """What the first launches make: everything that the other two need beside the block's own inputs."""

    g: Tensor  # [B, D, Lp] fp32, v * x1; Lp = pitch(conv_length), what lies beyond conv_length is never read
    x0: Tensor  # [B, D, Lp] fp32
    k: Tensor  # [D, Lp] fp32, the filter
    operands: Operands


def project(
    x: Tensor,  # [B, L, D] fp32
    w: Mapping[str, Tensor],
    kernel: Project,
    conv_length: int,
    eps: float,
    norm_len: int,
    exp_mod_shift: float,
    z: Tensor | None = None,
    prepared: tuple[Tensor, Operands] | None = None,
) -> Projected:
    """The first two launches, which make the filter and the operands too, unless `prepared` has them: then one."""
    w = as_arguments(w, z)
    batch, length, width = x.shape
    row = pitch(conv_length)
    g, x0 = (torch.empty(batch, width, row, dtype=torch.float32, device=x.device) for _ in range(2))
    if prepared is None:
        k = torch.empty(width, row, dtype=torch.float32, device=x.device)
        operands = empty_operands(Precision(kernel.dtype, kernel.parts), width, kernel.inner, x.device)
    else:
        k, operands = prepared
    filter_operand = torch.empty(kernel.filter.operand_shape, dtype=torch.float32, device=x.device)
    b = backend.current()
    run, blocks = kernel.division(batch, conv_length, b.sm_count(x.device))
    b.function(kernel, x.device)(
        *(x.view(-1, width), g, x0, *w.filter, filter_operand, k, *w.matrices, *vars(operands).values()),
        *(length, conv_length, run, blocks, int(prepared is None), eps, norm_len, exp_mod_shift),
    )
    return Projected(g, x0, k, operands)


def finish(
    p: Tensor,  # [B, D, Lp] fp32, Lp = pitch(conv_length)
    x: Tensor,  # [B, L, D] fp32
    w: Mapping[str, Tensor],
    operands: Operands,
    kernel: Finish | ClusterFinish,
    conv_length: int,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    length, width = x.shape[1:]
    out = torch.empty_like(x) if out is None else out
    o = operands
    backend.current().function(kernel, x.device)(
        *(p, x.view(-1, width), o.out_proj, o.fc1, o.fc2, o.out_proj_scale, o.fc1_scale, o.fc2_scale, o.fc1_norm),
        *(*as_arguments(w).finish, out.view(-1, width), length, conv_length, eps),
    )
    return out


def hyena_filter(
    w: Mapping[str, Tensor],
    kernel: Filter,
    length: int,
    norm_len: int,
    exp_mod_shift: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """k [D, Lp] fp32, Lp = pitch(length); what lies beyond `length` is not written."""
    first = w["filter_linear1_weight"]
    if out is None:
        out = torch.empty(kernel.width, pitch(length), dtype=torch.float32, device=first.device)
    operand = torch.empty(kernel.operand_shape, dtype=torch.float32, device=first.device)
    arguments = (*as_arguments(w, z).filter, operand, out)
    backend.current().function(kernel, first.device)(*arguments, length, norm_len, exp_mod_shift)
    return out


def long_conv(
    u: Tensor,  # [B, D, L] fp32, like every tensor here with any strides but 1 for the last
    k: Tensor,  # [D, Lk] fp32, counts as cut or zero-padded to L
    skip: Tensor | None = None,  # [D] fp32
    pre_gate: Tensor | None = None,  # [B, D, L] fp32
    post_gate: Tensor | None = None,  # [B, D, L] fp32
    out: Tensor | None = None,  # [B, D, L] fp32; may be `post_gate` or `u`
) -> Tensor:
    """y = (k * g + skip g) post_gate, g = u pre_gate, the convolution causal along the last dimension.

    Lengths beyond LongConv.MAX_POINTS go through torch.fft.
    """
    out = torch.empty_like(u, memory_format=torch.contiguous_format) if out is None else out
    batch, width, length = u.shape
    if u.numel() == 0:
        return out
    if length > LongConv.MAX_POINTS:
        return out.copy_(torch_path.causal_long_conv(u, k, skip, pre_gate, post_gate))
    kernel = LongConv.of_length(length, skip is not None, pre_gate is not None, post_gate is not None)
    current = backend.current()
    rows = kernel.rows(batch, width, current.sm_count(u.device))
    options = (u if option is None else option for option in (skip, pre_gate, post_gate))
    current.function(kernel, u.device)(u, k, *options, out, rows)
    return out
