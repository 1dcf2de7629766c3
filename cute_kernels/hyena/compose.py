"""The block put together from its stages: those that have a kernel for a problem, and PyTorch for the others.

On a CPU no stage has one, and this is the block in plain PyTorch. Where every stage has one, they are four launches of
three host functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.hyena import stages, torch_path
from cute_kernels.hyena.config import (
    ClusterFinish,
    ClusterFinishLaunch,
    ConvertWeights,
    Filter,
    Finish,
    FinishLaunch,
    LongConv,
    MixLaunch,
    Precision,
    ProjectLaunch,
)
from cute_kernels.hyena.params import HyenaOptions, HyenaProblem
from cute_kernels.hyena.precision import products
from cute_kernels.hyena.workspace import ORDER, Constants, pitch
from cute_kernels.runtime import backend, fresh
from cute_kernels.runtime.kernel import Kernel

# PyTorch's intermediates are several times as large as the widest of them: rows go through in slices of this size.
SLICE_ELEMENTS = 1 << 28


def filter_kernel(problem: HyenaProblem, options: HyenaOptions, length: int, sm_count: int) -> Filter | None:
    if problem.order != ORDER or problem.width % 64:
        return None
    layout, bias, stored = options.filter_layout, options.bias_in_filter, problem.z_rows is not None
    kernel = Filter.for_shape(problem.width, problem.emb_dim, layout, bias, stored, length, sm_count)
    # Its offsets have 32 bits.
    return kernel if kernel.fits and problem.width * pitch(length) < 1 << 32 else None


def project_launch(
    problem: HyenaProblem,
    options: HyenaOptions,
    precision: str,
    batch: int,
    conv_length: int,
    sm_count: int,
) -> ProjectLaunch | None:
    p = problem
    if p.order != ORDER or p.width not in (64, 128, 192, 256):
        return None
    if p.inner % 64 or p.inner > 2048:
        return None
    return ProjectLaunch.for_shape(
        *(Precision.named(precision), p.width, p.inner, batch, conv_length, sm_count),
        *(p.emb_dim, options.filter_layout, options.bias_in_filter, p.z_rows is not None),
    )


def conv_kernel(length: int, *, skip: bool, pre_gate: bool, post_gate: bool) -> LongConv | None:
    if not 0 < length <= LongConv.MAX_POINTS:
        return None
    return LongConv.of_length(length, skip, pre_gate, post_gate)


def finish_kernel(problem: HyenaProblem, precision: str, tokens: int, sm_count: int) -> Finish | ClusterFinish | None:
    if problem.width not in (128, 256) or problem.inner % 128:
        return None
    shape = (precision, problem.width, problem.inner)
    kernel = ClusterFinish.for_shape(*shape, tokens, sm_count) or Finish.for_precision(*shape)
    return kernel if kernel.fits else None


@dataclass(frozen=True)
class Launches:
    """The block in three host functions, where every stage has a kernel."""

    project: ProjectLaunch
    mix: MixLaunch
    finish: FinishLaunch | ClusterFinishLaunch


@dataclass(frozen=True)
class Composition:
    """How one problem runs at one batch and length."""

    problem: HyenaProblem
    options: HyenaOptions
    precision: str
    batch: int
    length: int  # L
    device: torch.device
    filter: Filter | None = None
    conv: LongConv | None = None
    finish: Finish | ClusterFinish | None = None
    launches: Launches | None = None

    @classmethod
    def with_kernels(cls, problem, options, precision, batch, length, device, sm_count) -> Composition:
        conv_length = min(length, options.l_max)
        conv = conv_kernel(conv_length, skip=True, pre_gate=False, post_gate=True)
        finish = finish_kernel(problem, precision, max(batch, 1) * max(length, 1), sm_count)
        launches = None
        if conv is not None and finish is not None:
            project = project_launch(problem, options, precision, max(batch, 1), conv_length, sm_count)
            if project is not None:
                launches = Launches(project, MixLaunch(**vars(conv)), finish.launch())
        return cls(
            *(problem, options, precision, batch, length, device),
            filter_kernel(problem, options, conv_length, sm_count),
            *(conv, finish, launches),
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Those of a call."""
        if self.launches is not None:
            return tuple(vars(self.launches).values())
        return tuple(kernel for kernel in (*self.preparing_kernels, self.conv, self.finish) if kernel is not None)

    @property
    def preparing_kernels(self) -> tuple[Kernel, ...]:
        """Those of `make_constants`."""
        f = self.finish
        convert = None if f is None else ConvertWeights(f.dtype, f.parts, f.width, f.inner)
        return tuple(kernel for kernel in (self.filter, convert) if kernel is not None)

    @property
    def conv_length(self) -> int:
        """Tokens of a row that the operator reaches."""
        return min(self.length, self.options.l_max)

    @functools.cached_property
    def norm_len(self) -> int:
        return self.options.norm_len or self.conv_length

    @functools.cached_property
    def constants(self) -> Constants:
        """What depends on the weights and the length alone."""
        chosen = Precision.named(self.precision)
        parts = 0 if self.finish is None else chosen.parts
        return Constants(self.problem.width, self.problem.inner, chosen.dtype, parts)

    @functools.cached_property
    def constants_size(self) -> int:
        """Floats of a buffer of constants."""
        return self.constants.size(self.conv_length)

    def make_constants(self, w: Mapping[str, Tensor]) -> Tensor:
        """The filter and the converted weights: a new buffer, of `constants`."""
        buffer = torch.empty(self.constants_size, dtype=torch.float32, device=self.device)
        k, operands = self._split(buffer)
        o = self.options
        if self.filter is None:
            k[:, : self.conv_length] = torch_path.hyena_filter(
                *(w, self.conv_length, o.exp_mod_shift, o.filter_layout, o.bias_in_filter, o.norm_len, w.get("z"))
            )
        else:
            stages.hyena_filter(w, self.filter, self.conv_length, self.norm_len, o.exp_mod_shift, w.get("z"), k)
        if operands is not None:
            stages.convert_weights(w, Precision.named(self.precision), operands)
        return buffer

    def _split(self, buffer: Tensor) -> tuple[Tensor, stages.Operands | None]:
        """The filter and the converted weights in a buffer of `constants`."""
        views = self.constants.views(buffer, self.conv_length)
        views.pop("filter", None)  # which the first launches use alone
        return views.pop("k"), stages.Operands(**views) if views else None

    def run(
        self,
        x: Tensor,  # [B, L, D], contiguous and aligned
        w: Mapping[str, Tensor],
        buffer: Tensor | None,  # of `constants`, prepared
        out: Tensor | None,  # [B, L, D]; made where it's None
    ) -> Tensor:
        """The block's output."""
        if out is None:
            out = torch.empty(x.shape, dtype=torch.float32, device=self.device)
        k, operands = self._split(self.make_constants(w) if buffer is None else buffer)
        largest = self.length * max(3 * self.problem.width, self.problem.inner)
        rows = max(1, SLICE_ELEMENTS // max(largest, 1))
        with torch.no_grad(), products(self.precision, self.device):
            for first in range(0, x.shape[0], rows):
                part = slice(first, first + rows)
                self._run_mixed(x[part], w, k, operands, out[part])
        return out

    def launcher(self) -> Callable[[Tensor, stages.Arguments, Tensor | None, Tensor | None], Tensor]:
        """`run` by three host functions, with all that is the same for every call found before."""
        current, device = backend.current(), self.device
        project, mix, finish = (current.function(kernel, device) for kernel in vars(self.launches).values())
        b, lf = self.batch, self.conv_length
        width, norm_len = self.problem.width, self.norm_len
        eps, shift = map(float, self.options[:2])
        sm_count = current.sm_count(device)
        run, blocks = self.launches.project.division(b, lf, sm_count)
        mix_rows = self.launches.mix.rows(b, width, sm_count)
        k_offset = self.constants.offsets()["k"]
        scratch_size, constants_size = 2 * b * width * pitch(lf), self.constants_size
        result = (b, self.length, width), torch.float32
        makers = []  # with constants in the scratch's buffer, and without: of this buffer, and of the output after it
        for size in (constants_size + scratch_size, scratch_size):
            buffer = (size,), torch.float32
            makers.append((fresh.maker(device, [buffer]), fresh.maker(device, [buffer, result])))
        beside_constants, alone = makers

        def launch(x, w, constants, out):
            first, skip, last = w.held(current)
            make, make_both = beside_constants if constants is None else alone
            if out is None:
                scratch, out = make_both()
            else:
                (scratch,) = make()
            if constants is None:  # the first launch makes them
                constants, offset, beside = scratch, constants_size, 1
            else:
                offset, beside = 0, 0
            project(x, *first, scratch, constants, offset, lf, run, blocks, beside, eps, norm_len, shift)
            mix(skip, scratch, constants, offset, k_offset, b, lf, mix_rows)
            finish(x, scratch, constants, *last, out, offset, lf, eps)
            return out

        return launch

    def _run_mixed(self, x: Tensor, w: Mapping[str, Tensor], k: Tensor, operands, out: Tensor) -> None:
        lf, eps = self.conv_length, self.options.layer_norm_eps
        g, x0 = torch_path.project(x[:, :lf], w, eps, self.precision)
        padded = torch.empty(x.shape[0], x.shape[2], pitch(lf), dtype=torch.float32, device=self.device)
        k, p = k[:, :lf], padded[..., :lf]
        if self.conv is None:
            p.copy_(torch_path.causal_long_conv(g, k, w["filter_bias"], None, x0, self.precision))
        else:
            stages.long_conv(g.contiguous(), k, w["filter_bias"], None, x0.contiguous(), p)
        if self.finish is None:
            out.copy_(torch_path.finish(p, x, w, eps, self.precision))
        else:
            stages.finish(padded, x, w, operands, self.finish, lf, eps, out)
