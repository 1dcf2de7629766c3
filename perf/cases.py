"""What is measured: every operator's sizes, and the least bytes and operations each of them takes.

Sets: `official`, the benchmark's own 16; `models`, the layers of released models; `sweep`, one size after the other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from torch import Tensor

SETS = ("official", "models", "sweep")

SEGSUM_OFFICIAL = (  # batch rows, chunks
    *((1, 1), (1, 2), (1, 3), (2, 2), (4, 1), (1, 8), (4, 2), (4, 3), (16, 1), (4, 5), (2, 16), (16, 2), (32, 1)),
    *((64, 1), (8, 8), (32, 2)),
)
SEGSUM_MODELS = {  # chunk size, heads, groups, states. The head dimension only shapes hidden_states, which is not read
    "granite-4.0-h-tiny": (256, 48, 1, 128),  # and -350m, -1b, mamba2-780m
    "granite-4.0-h-micro": (256, 64, 1, 128),  # and mamba2-1.3b
    "granite-4.0-h-small": (256, 128, 1, 128),
    "mamba2-2.7b": (256, 80, 1, 128),
    "nemotron-h-8b": (128, 128, 8, 128),
    "nemotron-3-nano": (128, 64, 8, 128),
    "falcon-h1-1.5b": (128, 48, 1, 256),
    "falcon-h1-7b": (128, 24, 1, 256),
    "falcon-h1-34b": (128, 32, 2, 256),
}
MODEL_TOKENS = 4096  # of a layer's call in the models set of mamba_segsum
HYENA_OFFICIAL = {  # (batch rows, length): absolute tolerance of the official check, in units of 1e-5
    **{(1, 131): 24, (1, 256): 26, (2, 128): 26, (1, 512): 27, (1, 1024): 27, (4, 256): 28, (2, 512): 28},
    **{(1, 2048): 29, (4, 541): 29, (1, 4096): 29, (2, 2048): 29, (2, 2053): 29, (16, 512): 31, (32, 256): 31},
    **{(8, 997): 32, (2, 4096): 32},
}
HYENA_MODELS = {  # width, length: HyenaDNA's maximum length and two more tokens
    "hyenadna-tiny-1k": (128, 1026),
    "hyenadna-tiny-16k": (128, 16386),
    "hyenadna-small-32k": (256, 32770),
    "hyenadna-medium-160k": (256, 160002),
}


class Tolerance(NamedTuple):
    """The official check: at least `share` of the elements within `absolute` + `relative` * |reference|."""

    absolute: float
    relative: float
    share: float = 0.99

    def of(self, reference: Tensor) -> Tensor:
        """The error allowed for each element."""
        return self.absolute + self.relative * reference.abs()


SEGSUM_TOLERANCE = Tolerance(1e-5, 0.05)


@dataclasses.dataclass(frozen=True)
class Case:
    """One size of one operator. Bytes and operations are the least that any implementation needs."""

    op: str
    name: str
    sizes: dict[str, int]
    read: int  # bytes
    written: int  # bytes
    mma: int  # operations of matrix products
    fp32: int  # other floating-point operations, where they count
    tolerance: Tolerance | None = None

    @property
    def bytes(self) -> int:
        return self.read + self.written


def cases(op: str, set_name: str, options: dict[str, Any] | None = None) -> list[Case]:
    """The cases of a set, from few bytes to many. `options`: what of the call changes its bytes ("g_layout").

    ValueError: no such operator or set.
    """
    if op not in OPERATORS:
        raise ValueError(f"op is {op!r}, but must be one of {', '.join(OPERATORS)}")
    if set_name not in SETS:
        raise ValueError(f"set is {set_name!r}, but must be one of {', '.join(SETS)}")
    sizes, cost, tolerance = OPERATORS[op]
    found = [
        Case(
            op, name, size, **cost(options or {}, **size), tolerance=tolerance(size) if set_name == "official" else None
        )
        for name, size in sizes(set_name)
    ]
    return sorted(found, key=lambda case: case.bytes)


# --- sizes -----------------------------------------------------------------------------------------------------------

Sizes = list[tuple[str, dict[str, int]]]


def _segsum_sizes(set_name: str) -> Sizes:
    if set_name == "models":
        shapes = {name: (1, MODEL_TOKENS // q, q, h, g, n) for name, (q, h, g, n) in SEGSUM_MODELS.items()}
    else:
        swept = [(1, c) for c in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)]
        batches = SEGSUM_OFFICIAL if set_name == "official" else swept
        shapes = {f"{b}x{c}": (b, c, 256, 16, 1, 256) for b, c in batches}
    names = ("batch", "chunks", "chunk_size", "heads", "groups", "d_state")
    return [(name, dict(zip(names, shape, strict=True))) for name, shape in shapes.items()]


def _hyena_sizes(shapes: dict[str, tuple[int, int, int]]) -> Sizes:
    return [(name, {"batch": b, "length": length, "width": d}) for name, (b, length, d) in shapes.items()]


def _block_sizes(set_name: str) -> Sizes:
    if set_name == "models":  # the block's operator ends at l_max
        return _hyena_sizes({name: (1, n, d) for name, (d, n) in HYENA_MODELS.items() if n <= 32770})
    swept = [(b, length) for b in (1, 8) for length in (128, 512, 2048, 8192, 32768)]
    return _hyena_sizes({f"{b}x{n}": (b, n, 256) for b, n in (HYENA_OFFICIAL if set_name == "official" else swept)})


def _filter_sizes(set_name: str) -> Sizes:
    if set_name == "models":
        return [(name, {"length": n, "width": d}) for name, (d, n) in HYENA_MODELS.items()]
    official = sorted({length for _, length in HYENA_OFFICIAL})
    lengths = official if set_name == "official" else [1 << k for k in range(7, 16)]
    return [(str(n), {"length": n, "width": 256}) for n in lengths]


def _conv_sizes(set_name: str) -> Sizes:
    if set_name == "models":
        return _hyena_sizes({name: (1, n, d) for name, (d, n) in HYENA_MODELS.items()})
    swept = [(b, 1 << k) for b in (1, 2, 8, 32) for k in range(7, 16)]
    return _hyena_sizes({f"{b}x{n}": (b, n, 256) for b, n in (HYENA_OFFICIAL if set_name == "official" else swept)})


# --- the least they take ---------------------------------------------------------------------------------------------


def _segsum_cost(options, batch, chunks, chunk_size, heads, groups, d_state) -> dict[str, int]:
    n, q = batch * chunks, chunk_size
    columns = groups if options.get("g_layout") == "per_group" else heads
    return {
        "read": 2 * (n * q * heads + heads + 2 * n * q * groups * d_state),
        "written": n * (2 * q * q * (2 * heads + columns) + 2 * 4 * q * heads),
        "mma": 2 * n * groups * q * q * d_state,
        "fp32": 2 * n * heads * q * q,  # an exponential and a product for half of the elements
    }


def _filter_cost(options, length, width, order=64, emb_dim=5) -> dict[str, int]:
    weights = order * (emb_dim + 2 * order + width + 4) + 2 * width
    return {
        "read": 4 * weights,
        "written": 4 * length * width,
        "mma": 0,  # the sine layers need plain fp32
        "fp32": 2 * length * order * (emb_dim + 2 * order + width),
    }


def _conv_cost(options, batch, length, width) -> dict[str, int]:
    n = 2 << (length - 1).bit_length()
    transform = int(2.5 * n * math.log2(n))  # a real FFT
    return {
        "read": 4 * width * length * (batch + 1),
        "written": 4 * width * length * batch,
        "mma": 0,
        "fp32": width * ((2 * batch + 1) * transform + 3 * batch * n),
    }


def _block_cost(options, batch, length, width) -> dict[str, int]:
    d, inner, tokens = width, 4 * width, batch * length
    weights = 4 * d * d + 2 * d * inner + 21 * d + inner
    implicit, conv = _filter_cost(options, length, width), _conv_cost(options, batch, length, width)
    return {
        "read": 4 * (tokens * d + weights) + implicit["read"],
        "written": 4 * tokens * d,
        "mma": 2 * tokens * (4 * d * d + 2 * d * inner),
        "fp32": implicit["fp32"] + conv["fp32"],
    }


def _block_tolerance(sizes: dict[str, int]) -> Tolerance:
    return Tolerance(1e-5 * HYENA_OFFICIAL[sizes["batch"], sizes["length"]], 1e-5)


OPERATORS = {  # sizes of a set, cost of a size, tolerance of an official size
    "mamba_segsum": (_segsum_sizes, _segsum_cost, lambda sizes: SEGSUM_TOLERANCE),
    "hyena_block": (_block_sizes, _block_cost, _block_tolerance),
    "hyena_filter": (_filter_sizes, _filter_cost, lambda sizes: None),
    "causal_long_conv": (_conv_sizes, _conv_cost, lambda sizes: None),
}
