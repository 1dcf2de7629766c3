"""Modules of torch.nn that run on the operators."""

from __future__ import annotations

import contextlib
import math
import operator
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels import checks
from cute_kernels.hyena.block import hyena_block
from cute_kernels.hyena.params import (
    HYENA_DNA,
    HYENA_DNA_FILTER,
    HYENA_DNA_Z,
    NAMES,
    SINES,
    HyenaBlockParams,
    HyenaOptions,
    check_emb_dim,
    check_one_frequency,
    check_options,
    hyena_dna_options,
)
from cute_kernels.hyena.precision import resolve
from cute_kernels.hyena.workspace import ORDER

_BLOCK = "HyenaBlock"  # where a message says who complains
_DTYPE = torch.float32  # whatever torch's default is


class _Sine(nn.Module):
    def __init__(self, order: int, frequency: float):
        super().__init__()
        self.freq = nn.Parameter(torch.full((1, order), float(frequency), dtype=_DTYPE))


class _Positions(nn.Module):
    """Trained positions z [1, max_length, emb_dim], which start as the computed ones; t is there for the names."""

    def __init__(self, max_length: int, emb_dim: int):
        super().__init__()
        bands = (emb_dim - 1) // 2
        steps = torch.arange(max_length, dtype=torch.float64)
        t = steps / max(max_length - 1, 1)
        frequencies = torch.linspace(1e-4, bands - 1, bands, dtype=_DTYPE).double()
        phase = frequencies * (2 * math.pi * steps / max_length)[:, None]
        z = torch.cat([t[:, None], torch.cos(-phase), torch.sin(-phase)], dim=1)
        self.z = nn.Parameter(z.float()[None])
        self.register_buffer("t", t.float()[None, :, None])


class _Modulation(nn.Module):
    """Decay rates [1, 1, D] between a fast and a slow share of the length, at which the window has fallen to target."""

    def __init__(self, width: int, fast: float, slow: float, target: float):
        super().__init__()
        first, last = math.log(target) / slow, math.log(target) / fast
        self.deltas = nn.Parameter(torch.linspace(first, last, width, dtype=_DTYPE)[None, None])


class _FilterLayers(nn.Sequential):
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The sines are one module: of different frequencies the last would win everywhere.
        check_one_frequency(_BLOCK, state_dict, [f"{prefix}{number}.freq" for number in SINES])
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Filter(nn.Module):
    def __init__(self, width: int, max_length: int, order: int, emb_dim: int, frequency: float):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width, dtype=_DTYPE))
        self.pos_emb = _Positions(max_length, emb_dim)
        sine = _Sine(order, frequency)  # one frequency for the three layers, under three names
        self.implicit_filter = _FilterLayers(
            *(nn.Linear(emb_dim, order, dtype=_DTYPE), sine),
            *(nn.Linear(order, order, dtype=_DTYPE), sine),
            *(nn.Linear(order, order, dtype=_DTYPE), sine),
            nn.Linear(order, width, bias=False, dtype=_DTYPE),
        )
        self.modulation = _Modulation(width, 0.3, 1.5, 0.01)


class _Mixer(nn.Module):
    def __init__(self, width: int, max_length: int, order: int, emb_dim: int, frequency: float):
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width, dtype=_DTYPE)
        self.out_proj = nn.Linear(width, width, dtype=_DTYPE)
        self.short_filter = nn.Conv1d(3 * width, 3 * width, 3, padding=2, groups=3 * width, dtype=_DTYPE)
        self.filter_fn = _Filter(width, max_length, order, emb_dim, frequency)


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner, dtype=_DTYPE)
        self.fc2 = nn.Linear(inner, width, dtype=_DTYPE)


class HyenaBlock(nn.Module):
    """One layer of a HyenaDNA model: `forward(x [B, L, D]) -> [B, L, D]`, through `cute_kernels.hyena_block`.

    The names of its state_dict are those of a HyenaDNA layer ("norm1.weight", "mixer.filter_fn.pos_emb.z", ...), and so
    is what it computes: positions are stored and trained, normalised by max_length, the filter is not reshaped, and has
    no bias of its own. All parameters, and the positions, are trainable; the backward is slow (see `hyena_block`).
    Sequences longer than max_length pass their rest by the operator. The three sines are one module: a state_dict in
    which their frequencies differ is refused.

    Its parts may be exchanged for others that hold the same tensors; only these tensors, and the norms' eps, count.

    Args:
        d_model: D, the model's width.
        d_inner: Width of the MLP; 4 D unless given.
        max_length: Rows of the stored positions.
        filter_order, emb_dim: Widths of the filter's MLP.
        sin_freq: Initial frequency of its sines.
        layer_norm_eps: Of both norms.
        precision: As in `hyena_block`.
        device: Where the parameters are made; torch's default unless given. They are fp32.

    Raises:
        ValueError: an argument is wrong; or, while it loads or runs, a tensor or eps is, or the sines differ.
        TypeError: while it runs, a part lacks a tensor, or the filter has more or fewer than seven layers.
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
        d_model = checks.integer(_BLOCK, "d_model", d_model)
        d_inner = 4 * d_model if d_inner is None else checks.integer(_BLOCK, "d_inner", d_inner, also=" or None")
        max_length = checks.integer(_BLOCK, "max_length", max_length)
        filter_order = checks.integer(_BLOCK, "filter_order", filter_order)
        emb_dim = check_emb_dim(_BLOCK, emb_dim)
        sin_freq = checks.number(_BLOCK, "sin_freq", sin_freq)
        if precision is not None:
            resolve(_BLOCK, precision)
        eps = check_options(_BLOCK, HyenaOptions(layer_norm_eps=layer_norm_eps)).layer_norm_eps
        with contextlib.nullcontext() if device is None else torch.device(device):
            self.mixer = _Mixer(d_model, max_length, filter_order, emb_dim, sin_freq)
            self.norm1 = nn.LayerNorm(d_model, eps=eps, dtype=_DTYPE)
            self.mlp = _Mlp(d_model, d_inner)
            self.norm2 = nn.LayerNorm(d_model, eps=eps, dtype=_DTYPE)
        self.max_length, self.precision = max_length, precision
        self._params: HyenaBlockParams | None = None
        self._made_from: tuple | None = None  # addresses and options

    def forward(self, x: Tensor) -> Tensor:  # [B, L, D] -> [B, L, D]
        return hyena_block(x, self.params, precision=self.precision)

    @property
    def params(self) -> HyenaBlockParams:
        """The block's own weights, with its options: for `cute_kernels.hyena_block`, or to prepare."""
        compiling = torch.compiler.is_compiling()
        try:
            tensors, z, eps = self._parts()
            # Some wrappers exchange the storage of the same parameters.
            # Some tensors (of torch.func, fake ones) have none.
            addresses = None if compiling or checks.is_observed() else [t.data_ptr() for t in (*tensors, z)]
        except AttributeError as e:  # of a property it would be taken for the property's absence
            raise TypeError(self._what_is_missing() or f"{_BLOCK}: {e}") from e
        known = self._params
        made_from = (addresses, *eps, self.max_length)
        if (
            known is None
            or made_from != self._made_from
            or z is not known.z
            or not all(map(operator.is_, tensors, known.tensors))
        ):
            if z is None:  # which params would take for computed positions
                raise TypeError(self._what_is_missing())
            if eps[0] != eps[1]:
                raise checks.wrong(_BLOCK, "norm2.eps", eps[1], f"norm1.eps, {eps[0]}")
            known = HyenaBlockParams(
                **dict(zip(NAMES, tensors, strict=True)),
                z=z,
                layer_norm_eps=eps[0],
                **hyena_dna_options(self.max_length),
            )
            if not compiling:
                self._params, self._made_from = known, made_from
        return known

    def _parts(self) -> tuple[tuple[Tensor, ...], Tensor, tuple[float, float]]:
        """The weights in the order of NAMES, z, and the norms' eps."""
        norm1, norm2, mixer, mlp = self.norm1, self.norm2, self.mixer, self.mlp
        filter_fn = mixer.filter_fn
        layers = tuple(filter_fn.implicit_filter._modules.values())
        if len(layers) != 7:
            raise TypeError(f"{_BLOCK}: {HYENA_DNA_FILTER} has {len(layers)} layers, but must have 7")
        linear1, sine, linear2, sine2, linear3, sine3, final = layers
        for number, other in ((3, sine2), (5, sine3)):
            if other is not sine and other.freq is not sine.freq:
                path = f"{HYENA_DNA_FILTER}.{number}.freq"
                raise checks.wrong(_BLOCK, path, "a tensor of its own", "that of layer 1: one frequency")
        if getattr(final, "bias", None) is not None:
            raise ValueError(f"{_BLOCK}: {HYENA_DNA_FILTER}.6.bias is there, but must be None: the last layer has none")
        tensors = (
            *(norm1.weight, norm1.bias, norm2.weight, norm2.bias),
            *(mixer.in_proj.weight, mixer.in_proj.bias, mixer.short_filter.weight, mixer.short_filter.bias),
            *(linear1.weight, linear1.bias, sine.freq, linear2.weight, linear2.bias, linear3.weight, linear3.bias),
            *(final.weight, filter_fn.bias, filter_fn.modulation.deltas, mixer.out_proj.weight, mixer.out_proj.bias),
            *(mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias),
        )
        return tensors, filter_fn.pos_emb.z, (norm1.eps, norm2.eps)

    def _what_is_missing(self) -> str | None:
        """A sentence about the first tensor, or eps, that a part lacks."""
        sines = [f"{HYENA_DNA_FILTER}.{number}.freq" for number in SINES]
        for path in (*HYENA_DNA.values(), *sines, HYENA_DNA_Z, "norm1.eps", "norm2.eps"):
            part, where = self, "the block"
            for name in path.split("."):
                inner = getattr(part, name, None)
                if inner is None:
                    return f"{_BLOCK}: {where} ({type(part).__qualname__}) has no {name}, but {path} must be there"
                part, where = inner, name if part is self else f"{where}.{name}"
            if not path.endswith(".eps") and not isinstance(part, Tensor):
                return f"{_BLOCK}: {path} is of type {type(part).__qualname__}, but must be a torch.Tensor"
        return None

    def _apply(self, *args: Any, **kwargs: Any) -> HyenaBlock:
        self._params = None  # `to` and its like exchange the storage of the same parameters
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_params": None}
