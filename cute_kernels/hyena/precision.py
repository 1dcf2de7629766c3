"""The names of the precisions, and the products of plain PyTorch at each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels import checks
from cute_kernels.hyena.config import Precision

NAMES = tuple(Precision.NAMES)
_OF_TORCH = {"ieee": "highest", "tf32": "high", "bf16": "medium"}


# What torch.backends.cuda.matmul.fp32_precision reads, after a microsecond of comparing names.
_fp32_precision = torch._C._get_fp32_precision_getter


def resolve(operator: str, precision: str | None) -> str:
    """The precision's name; None asks torch. ValueError where there is no such name.

    torch's `torch.backends.cuda.matmul.fp32_precision` comes first: once it is set, the older
    `torch.get_float32_matmul_precision()` may raise. A torch that was set to "medium" the older way runs TF32 on CUDA
    and says so here, so None means "high" then.
    """
    if precision is None:
        new = _fp32_precision("cuda", "matmul")
        return _OF_TORCH[new] if new in _OF_TORCH else torch.get_float32_matmul_precision()
    if not isinstance(precision, str) or precision not in Precision.NAMES:
        raise checks.wrong(operator, "precision", repr(precision), f"{', '.join(map(repr, NAMES))} or None")
    return precision


_lock = threading.RLock()


@contextlib.contextmanager
def products(precision: str, device: torch.device) -> Iterator[None]:
    """PyTorch's fp32 products inside: plain fp32 at "highest", TF32 on a GPU at the others, and autocast off.

    The setting is one for the whole process, so it is touched only where it differs, and by one thread at a time.
    """
    backend = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul
    wanted = "tf32" if device.type == "cuda" and precision != "highest" else "ieee"
    with _lock, torch.autocast(device.type, enabled=False):
        saved = backend.fp32_precision
        differs = (saved if saved != "none" else "ieee") != wanted
        if differs:
            backend.fp32_precision = wanted
        try:
            yield
        finally:
            if differs:
                backend.fp32_precision = saved


def operand(x: Tensor, precision: str) -> Tensor:
    """x as a product at this precision sees it."""
    # TF32 holds every bf16 number, so a TF32 product of rounded operands is a bf16 product that sums in fp32.
    return x.bfloat16().float() if precision == "medium" else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    return F.linear(operand(x, precision), operand(weight, precision), bias)
