"""The block put together from its stages: those that have a kernel for a problem, and PyTorch for the others.

On a CPU no stage has one, and this is the block in plain PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.hyena import stages, torch_path
from cute_kernels.hyena.config import ConvertWeights, Filter, Finish, LongConv, Precision
from cute_kernels.hyena.params import ORDER, HyenaOptions, HyenaProblem
from cute_kernels.hyena.precision import products
from cute_kernels.hyena.workspace import Pieces

# PyTorch's intermediates are several times as large as the widest of them: rows go through in slices of this size.
SLICE_ELEMENTS = 1 << 28


def filter_kernel(problem: HyenaProblem, options: HyenaOptions, length: int, sm_count: int) -> Filter | None:
    if problem.order != ORDER or problem.width % 64:
        return None
    stored = problem.z_rows is not None
    tile = 16 if length <= 32 * sm_count else 32
    return Filter(problem.width, problem.emb_dim, options.filter_layout, options.bias_in_filter, stored, tile)


def conv_kernel(length: int, *, skip: bool, pre_gate: bool, post_gate: bool) -> LongConv | None:
    if not 0 < length <= LongConv.MAX_POINTS:
        return None
    return LongConv.of_length(length, skip, pre_gate, post_gate)


def finish_kernel(problem: HyenaProblem, precision: str, tokens: int, arch: str, sm_count: int) -> Finish | None:
    if arch not in Finish.archs or problem.width not in (128, 256) or problem.inner % 128:
        return None
    return Finish.for_shape(precision, problem.width, problem.inner, tokens, sm_count)


@dataclass(frozen=True)
class Composition:
    """How one problem runs at one length."""

    problem: HyenaProblem
    options: HyenaOptions
    precision: str
    length: int  # L
    device: torch.device
    filter: Filter | None
    conv: LongConv | None
    finish: Finish | None

    @classmethod
    def of_torch(cls, problem, options, precision, length, device) -> Composition:
        return cls(problem, options, precision, length, device, None, None, None)

    @classmethod
    def with_kernels(cls, problem, options, precision, batch, length, device, arch, sm_count) -> Composition:
        return cls(
            *(problem, options, precision, length, device),
            filter_kernel(problem, options, min(length, options.l_max), sm_count),
            conv_kernel(min(length, options.l_max), skip=True, pre_gate=False, post_gate=True),
            finish_kernel(problem, precision, batch * length, arch, sm_count),
        )

    @property
    def kernels(self) -> tuple:
        found = [self.filter, self.conv, self.finish]
        if self.finish is not None:
            found.append(ConvertWeights(self.finish.dtype, self.finish.parts, self.problem.width, self.problem.inner))
        return tuple(kernel for kernel in found if kernel is not None)

    @property
    def conv_length(self) -> int:
        """Tokens of a row that the operator reaches."""
        return min(self.length, self.options.l_max)

    @functools.cached_property
    def constants(self) -> Pieces:
        """What depends on the weights alone."""
        d, m = self.problem.width, self.problem.inner
        pieces = {"k": ((d, stages.pitch(self.conv_length)), torch.float32)}
        if self.finish is not None:
            operand = getattr(torch, self.finish.dtype)
            for name, shape in (("out_proj", (d, d)), ("fc1", (m, d)), ("fc2", (d, m))):
                pieces[name] = ((self.finish.parts, *shape), operand)
            for name, size in (("out_proj_scale", d), ("fc1_scale", m), ("fc2_scale", d), ("fc1_norm", m)):
                pieces[name] = ((size,), torch.float32)
        return Pieces(pieces)

    def make_constants(self, w: Mapping[str, Tensor]) -> Tensor:
        """The filter and the converted weights: a new buffer, of `constants`."""
        buffer = self.constants.empty(self.device)
        views = self.constants.views(buffer)
        k = views.pop("k")
        if self.filter is None:
            o = self.options
            k[:, : self.conv_length] = torch_path.hyena_filter(
                *(w, self.conv_length, o.exp_mod_shift, o.filter_layout, o.bias_in_filter, o.norm_len, w.get("z"))
            )
        else:
            norm_len = self.options.norm_len or self.conv_length
            stages.hyena_filter(
                w, self.filter, self.conv_length, norm_len, self.options.exp_mod_shift, w.get("z"), out=k
            )
        if self.finish is not None:
            for name, operand in vars(stages.convert_weights(w, Precision.named(self.precision))).items():
                views[name].copy_(operand)
        return buffer

    def run(
        self,
        x: Tensor,  # [B, L, D], contiguous and aligned
        w: Mapping[str, Tensor],
        buffer: Tensor,  # of `constants`
        out: Tensor,  # [B, L, D]
    ) -> None:
        constants = self.constants.views(buffer)
        largest = self.length * max(3 * self.problem.width, self.problem.inner)
        rows = max(1, SLICE_ELEMENTS // max(largest, 1))
        with products(self.precision, self.device):
            for first in range(0, x.shape[0], rows):
                part = slice(first, first + rows)
                self._run(x[part], w, constants, out[part])

    def _run(self, x: Tensor, w: Mapping[str, Tensor], constants: dict[str, Tensor], out: Tensor) -> None:
        lf, eps = self.conv_length, self.options.layer_norm_eps
        g, x0 = torch_path.project(x[:, :lf], w, eps, self.precision)
        k = constants["k"][:, :lf]
        padded = torch.empty(x.shape[0], x.shape[2], stages.pitch(lf), dtype=torch.float32, device=self.device)
        p = padded[..., :lf]
        if self.conv is None:
            p.copy_(torch_path.causal_long_conv(g, k, w["filter_bias"], None, x0, self.precision))
        else:
            stages.long_conv(g.contiguous(), k, w["filter_bias"], None, x0.contiguous(), p)
        if self.finish is None:
            out.copy_(torch_path.finish(p, x, w, eps, self.precision))
        else:
            operands = stages.Operands(**{name: t for name, t in constants.items() if name != "k"})
            stages.finish(padded, x, w, operands, self.finish, lf, eps, out)
