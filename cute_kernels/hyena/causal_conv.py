"""`causal_long_conv`: a causal convolution as long as the sequence, with a skip and two gates.

g = u * pre_gate
y[b, d, t] = post_gate * (sum over s <= t of k[d, s] g[b, d, t - s] + skip[d] * g)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cute_kernels import checks
from cute_kernels.hyena import precision as precision_
from cute_kernels.hyena import stages, torch_path
from cute_kernels.hyena.compose import conv_kernel
from cute_kernels.hyena.config import LongConv
from cute_kernels.runtime import backend, fresh
from cute_kernels.runtime.kernel import Kernel

OPERATOR = "causal_long_conv"
SLICE_ELEMENTS = 1 << 27  # of u, that go through one FFT: a bound of its memory


def causal_long_conv(
    u: Tensor,  # [B, D, L] fp32
    k: Tensor,  # [D, Lk] fp32
    skip: Tensor | None = None,  # [D] fp32
    pre_gate: Tensor | None = None,  # [B, D, L] fp32
    post_gate: Tensor | None = None,  # [B, D, L] fp32
    precision: str | None = None,
    out: Tensor | None = None,  # [B, D, L] fp32
) -> Tensor:
    """post_gate * (conv(g, k) + skip * g) with g = u * pre_gate, [B, D, L] fp32. A gate not given is 1, a skip 0.

    Args:
        u: Any strides.
        k: The filter; zero-padded to L where it is shorter, cut where it is longer.
        skip: Weight of the unconvolved input.
        pre_gate, post_gate: Factors before and after.
        precision: "highest" is fp32-accurate, "high" TF32-class, "medium" rounds operands to bf16; None reads torch's
            setting, as `hyena_block` does.
        out: A contiguous, 16-byte aligned tensor to write to, which overlaps no input. Not differentiable.

    Any B, D and L, 0 included. Sequences beyond L = 32768, and CPU tensors, go through torch.fft.
    DLPack arrays, autocast, torch.compile, gradients (of all five tensors) and errors: as `hyena_block`.
    """
    if torch.compiler.is_compiling():
        return _through_dispatcher(u, k, skip, pre_gate, post_gate, precision, out)
    tensors = (u, k, skip, pre_gate, post_gate)
    if u is None or k is None or not {type(t) for t in tensors} <= checks.PLAIN_OR_NONE:
        tensors = tuple(
            None if t is None and name not in ("u", "k") else checks.as_tensor(OPERATOR, name, t)
            for name, t in zip(_INPUT_NAMES, tensors, strict=True)
        )
    if (
        not {type(t) for t in tensors} <= checks.PLAIN_OR_NONE
        or checks.is_observed()
        or torch._C._is_any_autocast_enabled()
        or (
            torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in (*tensors, out if isinstance(out, Tensor) else None))
        )
    ):
        return _through_dispatcher(*tensors, precision, out)
    return run(*tensors, precision_.resolve(OPERATOR, precision), out)


_INPUT_NAMES = ("u", "k", "skip", "pre_gate", "post_gate")


def _through_dispatcher(u, k, skip, pre_gate, post_gate, precision, out) -> Tensor:
    if not torch.compiler.is_compiling():
        checks.refuse_tangents(OPERATOR, u, k, skip, pre_gate, post_gate)
        precision = precision_.resolve(OPERATOR, precision)
    args = (u, k, skip, pre_gate, post_gate, precision)
    if out is None:
        return torch.ops.cute_kernels.causal_long_conv(*args)
    out = checks.as_tensor(OPERATOR, "out", out)
    checks.refuse_gradients_of_out(OPERATOR, u, k, skip, pre_gate, post_gate, out)
    torch.ops.cute_kernels.causal_long_conv_out(*args, out)
    return out


class _Plan(NamedTuple):
    """What follows from the arguments' metadata, found once for each combination of them."""

    shape: torch.Size  # of the output
    new: Callable[[], list[Tensor]]  # an output
    empty: bool  # nothing to compute
    kernel: bool  # whether one covers the length
    rows: int  # batch rows that PyTorch computes at a time


_plans: dict[tuple, _Plan] = {}
_MAX_PLANS = 4096  # a bound for callers whose batch never repeats


def run(
    u: Tensor,  # [B, D, L]
    k: Tensor,  # [D, Lk]
    skip: Tensor | None,  # [D]
    pre_gate: Tensor | None,  # [B, D, L]
    post_gate: Tensor | None,  # [B, D, L]
    precision: str,
    out: Tensor | None,  # [B, D, L]
) -> Tensor:
    """The operator on plain tensors, below autograd."""
    inputs = (u, k, skip, pre_gate, post_gate)
    key = (
        *((None if t is None else (t.shape, t.dtype, t.layout, t.device)) for t in inputs),
        precision,
        backend.current(),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(*inputs)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    if out is None:
        (out,) = plan.new()
    else:
        out = checks.given_output(OPERATOR, out, plan.shape, torch.float32, u.device, "u")
        if not plan.empty:
            checks.check_memory(OPERATOR, ("out",), (out,), (out.nbytes,), _INPUT_NAMES, inputs)
        increment_version(out)  # autograd can't see a kernel write
    if plan.empty:
        return out
    if plan.kernel:
        u, k, pre_gate, post_gate = map(_readable, (u, k, pre_gate, post_gate))
        skip = None if skip is None else skip.resolve_neg().contiguous()
        stages.long_conv(u, k, skip, pre_gate, post_gate, out)
        return out
    with torch.no_grad(), precision_.products(precision, u.device):
        for first in range(0, u.shape[0], plan.rows):
            rows = slice(first, first + plan.rows)
            gates = (None if t is None else t[rows] for t in (pre_gate, post_gate))
            out[rows] = torch_path.causal_long_conv(u[rows], k, skip, *gates, precision)
    return out


def _make_plan(u, k, skip, pre_gate, post_gate) -> _Plan:
    check_inputs(u, k, skip, pre_gate, post_gate)
    kernel = None
    if checks.has_kernels(OPERATOR, u):
        backend.current().arch(u.device)  # NotImplementedError where there are no kernels for it
        given = {"skip": skip is not None, "pre_gate": pre_gate is not None, "post_gate": post_gate is not None}
        kernel = conv_kernel(u.shape[2] if k.shape[1] else 0, **given)
    new = fresh.maker(u.device, [(u.shape, torch.float32)])
    rows = max(1, SLICE_ELEMENTS // max(u.shape[1] * u.shape[2], 1))
    return _Plan(u.shape, new, u.numel() == 0 or u.device.type == "meta", kernel is not None, rows)


def _readable(x: Tensor | None) -> Tensor | None:
    """x as a kernel can read it: rows of neighbours, with their own sign."""
    if x is None or (x.stride(-1) == 1 and not x.is_neg()):
        return x
    return x.resolve_neg().contiguous()


def check_inputs(
    u: Tensor,  # [B, D, L]
    k: Tensor,  # [D, Lk]
    skip: Tensor | None,  # [D]
    pre_gate: Tensor | None,  # [B, D, L]
    post_gate: Tensor | None,  # [B, D, L]
) -> None:
    """ValueError where an argument is wrong, whatever computes with it. Reads metadata alone, fake tensors' too."""
    shapes = {"u": "[B, D, L]", "k": "[D, Lk]", "skip": "[D]", "pre_gate": "[B, D, L]", "post_gate": "[B, D, L]"}
    named = dict(zip(_INPUT_NAMES, (u, k, skip, pre_gate, post_gate), strict=True))
    named = {name: t for name, t in named.items() if t is not None}
    for name, t in named.items():
        rank = shapes[name].count(",") + 1
        if t.dim() != rank:
            raise checks.wrong(OPERATOR, name, f"of shape {list(t.shape)}", f"{shapes[name]}, of rank {rank}")
        if t.layout != torch.strided:
            raise checks.wrong(OPERATOR, name, f"a {t.layout} tensor", "a strided tensor")
        if t.dtype != torch.float32:
            raise checks.wrong(OPERATOR, name, f"of type {checks.dtype_name(t.dtype)}", "float32")
        if t.device != u.device:
            raise checks.wrong(OPERATOR, name, f"on {t.device}", f"on {u.device} like u")
    width = u.shape[1]
    for name in ("k", "skip"):
        if name in named and named[name].shape[0] != width:
            must = f"[{width}, Lk]" if name == "k" else f"[{width}]"
            raise checks.wrong(OPERATOR, name, f"of shape {list(named[name].shape)}", f"{must}, as u has D = {width}")
    for name in ("pre_gate", "post_gate"):
        if name in named and any(named[name].shape[i] != u.shape[i] for i in range(3)):
            raise checks.wrong(OPERATOR, name, f"of shape {list(named[name].shape)}", f"{list(u.shape)} like u")


# --- without a call --------------------------------------------------------------------------------------------------


def check_shape(
    *,
    seq_len: int | None = None,
    skip: bool = False,
    pre_gate: bool = False,
    post_gate: bool = False,
    precision: str | None = None,
    device: torch.device | str | int | None = None,
) -> tuple[list[LongConv], torch.device]:
    """The kernels of a length, or of any, and the device.

    ValueError where an argument is wrong, NotImplementedError where no kernels run on the device.
    """
    if seq_len is not None:
        seq_len = checks.integer(OPERATOR, "seq_len", seq_len, least=0, bits=63, also=" or None")
    for name, value in (("skip", skip), ("pre_gate", pre_gate), ("post_gate", post_gate)):
        checks.flag(OPERATOR, name, value)
    precision_.resolve(OPERATOR, precision)
    kernels = kernels_of([seq_len] if seq_len is not None else LENGTHS, skip, pre_gate, post_gate)
    return kernels, checks.kernel_device(OPERATOR, device)


LENGTHS = tuple(sorted((*(1 << k for k in range(16)), 768, 1536, 3072, 6144)))  # one for each size of a transform


def kernels_of(lengths: Iterable[int], skip: bool, pre_gate: bool, post_gate: bool) -> list[LongConv]:
    found = dict.fromkeys(conv_kernel(length, skip=skip, pre_gate=pre_gate, post_gate=post_gate) for length in lengths)
    return [kernel for kernel in found if kernel is not None]


def warmup(**shape: Any) -> None:
    """Loads or compiles the kernels of a length, or of any, for any batch. Takes what `check_shape` takes."""
    kernels, device = check_shape(**shape)
    for kernel in kernels:
        backend.current().function(kernel, device)


def prebuilt_kernels() -> list[Kernel]:
    """The convolution without skip and gates, from 128 to 32768; the block has those it needs."""
    return kernels_of(LENGTHS[7:], False, False, False)
