"""Modules of torch.nn that run on the operators."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels import checks
from cute_kernels.hyena.block import hyena_block
from cute_kernels.hyena.params import (
    NAMES,
    ORDER,
    HyenaBlockParams,
    HyenaOptions,
    check_options,
    hyena_dna_options,
    is_int,
)
from cute_kernels.hyena.precision import resolve


class _Sine(nn.Module):
    def __init__(self, order: int, frequency: float):
        super().__init__()
        self.freq = nn.Parameter(torch.full((1, order), float(frequency)))


class _Positions(nn.Module):
    """Trained positions z [1, max_length, emb_dim], which start as the computed ones; t is there for the names."""

    def __init__(self, max_length: int, emb_dim: int):
        super().__init__()
        bands = (emb_dim - 1) // 2
        steps = torch.arange(max_length, dtype=torch.float64)
        t = steps / max(max_length - 1, 1)
        phase = torch.linspace(1e-4, bands - 1, bands).double() * (2 * math.pi * steps / max_length)[:, None]
        z = torch.cat([t[:, None], torch.cos(-phase), torch.sin(-phase)], dim=1)
        self.z = nn.Parameter(z.float()[None])
        self.register_buffer("t", t.float()[None, :, None])


class _Modulation(nn.Module):
    """Decay rates [1, 1, D] between a fast and a slow share of the length, at which the window has fallen to target."""

    def __init__(self, width: int, fast: float, slow: float, target: float):
        super().__init__()
        self.deltas = nn.Parameter(torch.linspace(math.log(target) / slow, math.log(target) / fast, width)[None, None])


class _Filter(nn.Module):
    def __init__(self, width: int, max_length: int, order: int, emb_dim: int, frequency: float):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))
        self.pos_emb = _Positions(max_length, emb_dim)
        sine = _Sine(order, frequency)  # one frequency for the three layers, under three names
        self.implicit_filter = nn.Sequential(
            *(nn.Linear(emb_dim, order), sine, nn.Linear(order, order), sine, nn.Linear(order, order), sine),
            nn.Linear(order, width, bias=False),
        )
        self.modulation = _Modulation(width, 0.3, 1.5, 0.01)


class _Mixer(nn.Module):
    def __init__(self, width: int, max_length: int, order: int, emb_dim: int, frequency: float):
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.short_filter = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width)
        self.filter_fn = _Filter(width, max_length, order, emb_dim, frequency)


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)


class HyenaBlock(nn.Module):
    """One layer of a HyenaDNA model: `forward(x [B, L, D]) -> [B, L, D]`, through `cute_kernels.hyena_block`.

    The names of its state_dict are those of a HyenaDNA layer ("norm1.weight", "mixer.filter_fn.pos_emb.z", ...), and so
    is what it computes: positions are stored and trained, normalised by max_length, the filter is not reshaped, and has
    no bias of its own. All parameters, and the positions, are trainable; the backward is slow (see `hyena_block`).
    Sequences longer than max_length pass their rest by the operator.

    Args:
        d_model: D, the model's width.
        d_inner: Width of the MLP; 4 D unless given.
        max_length: Rows of the stored positions.
        filter_order, emb_dim: Widths of the filter's MLP.
        sin_freq: Initial frequency of its sines.
        layer_norm_eps: Of both norms.
        precision: As in `hyena_block`.
        device: Where the parameters are made. They are fp32.
    """

    def __init__(
        self,
        d_model: int,
        d_inner: int | None = None,
        max_length: int = 32768,
        filter_order: int = ORDER,
        emb_dim: int = 5,
        sin_freq: float = 1.0,
        layer_norm_eps: float = 1e-5,
        precision: str | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        d_inner = 4 * d_model if d_inner is None else d_inner
        sizes = {"d_model": d_model, "d_inner": d_inner, "max_length": max_length, "filter_order": filter_order}
        for name, value in sizes.items():
            if not is_int(value) or value < 1:
                raise checks.wrong("HyenaBlock", name, repr(value), "a positive int")
        if not isinstance(emb_dim, int) or emb_dim < 3 or emb_dim % 2 == 0:
            raise checks.wrong("HyenaBlock", "emb_dim", repr(emb_dim), "odd and at least 3")
        if precision is not None:
            resolve("HyenaBlock", precision)
        check_options("HyenaBlock", HyenaOptions(layer_norm_eps=layer_norm_eps))
        with torch.device("cpu" if device is None else device):
            self.mixer = _Mixer(d_model, max_length, filter_order, emb_dim, sin_freq)
            self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps)
            self.mlp = _Mlp(d_model, d_inner)
            self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps)
        self.max_length, self.precision = max_length, precision
        self._params: HyenaBlockParams | None = None
        self._made_from: tuple | None = None  # addresses and options

    def forward(self, x: Tensor) -> Tensor:  # [B, L, D] -> [B, L, D]
        return hyena_block(x, self.params, precision=self.precision)

    @property
    def params(self) -> HyenaBlockParams:
        """The block's own weights, with its options: for `cute_kernels.hyena_block`, or to prepare."""
        mixer, mlp = self.mixer, self.mlp
        filter_fn = mixer.filter_fn
        linear1, sine, linear2, _, linear3, _, final = filter_fn.implicit_filter._modules.values()
        tensors = (
            *(self.norm1.weight, self.norm1.bias, self.norm2.weight, self.norm2.bias),
            *(mixer.in_proj.weight, mixer.in_proj.bias, mixer.short_filter.weight, mixer.short_filter.bias),
            *(linear1.weight, linear1.bias, sine.freq, linear2.weight, linear2.bias, linear3.weight, linear3.bias),
            *(final.weight, filter_fn.bias, filter_fn.modulation.deltas, mixer.out_proj.weight, mixer.out_proj.bias),
            *(mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias),
        )
        z = filter_fn.pos_emb.z
        known = self._params
        compiling = torch.compiler.is_compiling()
        # Some wrappers exchange the storage of the same parameters.
        # Some tensors (of torch.func, fake ones) have none.
        addresses = None if compiling or checks.is_observed() else [t.data_ptr() for t in (*tensors, z)]
        made_from = (addresses, self.norm1.eps, self.norm2.eps, self.max_length)
        if (
            known is None
            or made_from != self._made_from
            or z is not known.z
            or not all(map(operator.is_, tensors, known.tensors))
        ):
            if self.norm1.eps != self.norm2.eps:
                raise checks.wrong("HyenaBlock", "norm2.eps", self.norm2.eps, f"norm1.eps, {self.norm1.eps}")
            known = HyenaBlockParams(
                **dict(zip(NAMES, tensors, strict=True)),
                z=z,
                layer_norm_eps=self.norm1.eps,
                **hyena_dna_options(self.max_length),
            )
            if not compiling:
                self._params, self._made_from = known, made_from
        return known

    def _apply(self, *args: Any, **kwargs: Any) -> HyenaBlock:
        self._params = None  # `to` and its like exchange the storage of the same parameters
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_params": None}
