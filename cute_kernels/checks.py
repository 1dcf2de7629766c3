"""What every public function asks of its arguments, and the sentences it answers with."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from cute_kernels.runtime import backend

PLAIN = frozenset({Tensor, torch.nn.Parameter})
PLAIN_OR_NONE = PLAIN | {type(None)}
MAX_FLOAT = torch.finfo(torch.float32).max  # kernels take numbers as fp32


def is_observed() -> bool:
    """Whether somebody beside autograd watches torch's calls: a dispatch mode, functorch, a tracer, forward-mode AD."""
    return (
        _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def refuse_tangents(operator: str, *inputs: Tensor | None) -> None:
    """torch's custom ops drop the tangents of forward-mode differentiation without a word."""
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs
    ):
        raise NotImplementedError(f"{operator}: no forward-mode derivative; supported is the backward")


def refuse_gradients_of_out(operator: str, *tensors: Tensor | None) -> None:
    """A kernel that writes into a given tensor leaves autograd nothing to go back through."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{operator}: out=... does not support automatic differentiation, but one of the arguments requires grad"
        )


def has_kernels(operator: str, x: Tensor) -> bool:
    """Whether kernels run on x; False: plain PyTorch (a CPU), or nothing at all (meta). NotImplementedError else."""
    if x.device.type == "meta":
        return False
    if backend.current().handles(x):
        return True
    if x.device.type != "cpu":
        raise NotImplementedError(f"{operator}: no kernel for device {x.device}; supported are CUDA and CPU tensors")
    return False


def kernel_device(operator: str, device: torch.device | str | int | None) -> torch.device:
    """The device, the current CUDA device unless given. NotImplementedError where no kernels run on it."""
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    try:
        probe = torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as e:  # whichever of them torch chose
        must = f"a device that torch can use here: {str(e).splitlines()[0]}"
        raise wrong(operator, "device", repr(device), must) from e
    if not backend.current().handles(probe):
        raise NotImplementedError(
            f"{operator}: no kernel for device {probe.device}; CPU tensors run through plain PyTorch"
        )
    backend.current().arch(probe.device)
    return probe.device


def wrong(operator: str, name: str, was: object, must: str) -> ValueError:
    return ValueError(f"{operator}: {name} is {was}, but must be {must}")


def shown(value: object) -> str:
    """The value's repr in a short line."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"  # Python refuses to print very long ones
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def integer(operator: str, name: str, value: Any, *, least: int = 1, bits: int = 31, also: str = "") -> int:
    """The value as an int; numpy's are taken, bools are not. ValueError where it is none from least, below 2^bits.

    While torch.compile traces, it may be a torch.SymInt, which stays one.
    """
    known = isinstance(value, (int, torch.SymInt))
    if (
        isinstance(value, bool)
        or not (known or isinstance(value, numbers.Integral))
        or not (least <= value <= (1 << bits) - 1)
    ):
        must = "a positive int" if least == 1 else f"an int from {least}"
        raise wrong(operator, name, shown(value), f"{must}{also}, below 2^{bits}")
    return value if known else int(value)


def number(operator: str, name: str, value: Any, *, least: float = -MAX_FLOAT) -> float:
    """The value as a number; numpy's are taken, bools are not. ValueError where fp32 has none, or it is below least."""
    known = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
    if isinstance(value, bool) or not (known or isinstance(value, numbers.Real)) or not least <= value <= MAX_FLOAT:
        bound = "" if least == -MAX_FLOAT else f" from {least}"
        raise wrong(operator, name, shown(value), f"a finite number{bound} that fp32 holds")
    return value if known else float(value)


def flag(operator: str, name: str, value: Any) -> bool:
    """The value. ValueError where it is no bool."""
    if not isinstance(value, bool):
        raise wrong(operator, name, shown(value), "True or False")
    return value


def one_of(operator: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """The value. ValueError where it is none of the names."""
    if not isinstance(value, str) or value not in choices:
        raise wrong(operator, name, shown(value), " or ".join(map(repr, choices)))
    return value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(dtype_name(d) for d in dtypes)


def as_tensor(operator: str, name: str, x: Any) -> Tensor:
    """x, or what it is through DLPack."""
    if isinstance(x, Tensor):
        return x
    if not hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{operator}: {name} is of type {type(x).__qualname__}, but must be a torch.Tensor or a DLPack array"
        )
    if any(stride < 0 for stride in getattr(x, "strides", None) or ()):
        # torch ends the process at those.
        raise wrong(operator, name, f"an array with strides {list(x.strides)}", "without negative strides")
    try:
        return torch.from_dlpack(x)
    except Exception as e:
        raise ValueError(f"{operator}: {name} ({type(x).__qualname__}) can't be read through DLPack: {e}") from e


def as_output(operator: str, name: str, x: Any) -> Tensor:
    """The same of what will be written to: a read-only array passes through DLPack without a word."""
    if not isinstance(x, Tensor) and not getattr(getattr(x, "flags", None), "writeable", True):
        raise wrong(operator, name, "a read-only array", "writable")
    return as_tensor(operator, name, x)


def check_output(
    operator: str,
    name: str,
    x: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    like: str,  # the argument whose device it is
) -> None:
    """ValueError where a given output has the wrong shape, type, device or layout. Reads metadata alone."""
    if x.dtype is dtype and x.shape == shape and x.device == device and x.is_contiguous() and not x.is_neg():
        return
    if x.layout != torch.strided:
        raise wrong(operator, name, f"a {x.layout} tensor", "a strided tensor")
    if x.shape != shape:
        raise wrong(operator, name, f"of shape {list(x.shape)}", f"{list(shape)}")
    if x.dtype is not dtype:
        raise wrong(operator, name, f"of type {dtype_name(x.dtype)}", dtype_name(dtype))
    if x.device != device:
        raise wrong(operator, name, f"on {x.device}", f"on {device} like {like}")
    if x.is_neg():
        raise wrong(operator, name, "a view that negates its memory", "a tensor without that")
    raise wrong(operator, name, f"a view with strides {list(x.stride())}", "contiguous")


def check_memory(
    operator: str,
    names: Sequence[str],  # of the outputs
    out: Sequence[Tensor],  # contiguous
    sizes: Sequence[int],  # their bytes
    input_names: Sequence[str],
    inputs: Sequence[Tensor | None],
) -> None:
    """ValueError where a given output is misaligned, or shares memory with another output or an input."""
    spans = []  # first address, and address past the end
    for name, x, size in zip(names, out, sizes, strict=True):
        start = x.data_ptr()
        if start & 15:
            raise wrong(operator, name, f"at address {start:#x}", "aligned to 16 bytes")
        spans.append((start, start + size))
    spans += [((start := x.data_ptr()), start + extent(x)) for x in inputs if x is not None]
    spans.sort()
    end = 0
    for start, stop in spans:
        if start < end:
            break
        end = stop
    else:
        return
    # Inputs may overlap each other.
    if found := _shared_memory(operator, names, out, input_names, inputs):
        raise ValueError(found)


def extent(x: Tensor) -> int:
    """Bytes from x's first element to the end of its last."""
    if x.is_contiguous():
        return x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _shared_memory(operator, names, out, input_names, inputs) -> str | None:
    named = list(zip(names, out, strict=True))
    named += [(n, x) for n, x in zip(input_names, inputs, strict=True) if x is not None]
    for k, (name, x) in enumerate(named[: len(names)]):
        for other, y in named[k + 1 :]:
            if x.data_ptr() < y.data_ptr() + extent(y) and y.data_ptr() < x.data_ptr() + extent(x):
                return f"{operator}: {name} shares memory with {other}, but must have its own"
    return None


def given_output(
    operator: str,
    out: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    like: str,  # the argument whose device it is
) -> Tensor:
    """The tensor given as `out`. ValueError where its metadata are wrong."""
    out = as_output(operator, "out", out)
    check_output(operator, "out", out, shape, dtype, device, like)
    return out
