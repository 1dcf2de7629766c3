"""What can be asked of an operator without calling it: is it supported, and get its kernels ready."""

from __future__ import annotations

import inspect
from typing import Any

from cute_kernels.hyena import block, causal_conv, implicit_filter
from cute_kernels.mamba import segsum
from cute_kernels.runtime.kernel import Kernel

_OPERATORS = {module.OPERATOR: module for module in (segsum, block, implicit_filter, causal_conv)}


def warmup(operator: str, **shape: Any) -> None:
    """Loads or compiles every kernel that an operator needs for a shape. Launches nothing.

    Call it before a CUDA graph is captured, and where the first call must not wait for a compiler.

    Args:
        operator: The operator's name.
        **shape: What `is_supported` takes.

    Raises:
        ValueError: no such operator, or an argument is wrong.
        TypeError: an argument is missing, or the operator takes none of that name.
        NotImplementedError: no kernel for these arguments or this device.
    """
    _module(operator, shape).warmup(**shape)


def is_supported(operator: str, **shape: Any) -> tuple[bool, str]:
    """Whether a kernel covers a shape on a device, and if not, why.

    For "mamba_segsum": dtype (of B and C), num_heads, n_groups, d_state, chunk_size; and optionally dt_dtype, A_dtype
    (both as dtype), bias_dtype (None: no dt_bias), g_layout ("per_head"), device (the current CUDA device).
    For "hyena_block": d_model, d_inner; and optionally emb_dim (5), filter_order (64), filter_layout ("reshape"),
    bias_in_filter (True), stored_z (False), batch and seq_len (None: any), precision (None: torch's setting), device.
    For "hyena_filter": the same without d_inner and precision. For "causal_long_conv": optionally seq_len (None: any),
    skip, pre_gate, post_gate (whether they are given; False), precision, device.

    Raises:
        ValueError: no such operator.
        TypeError: an argument is missing, or the operator takes none of that name.
    """
    module = _module(operator, shape)
    try:
        module.check_shape(**shape)
    except (ValueError, NotImplementedError) as e:
        return False, str(e)
    return True, ""


def prebuilt_kernels() -> list[Kernel]:
    """The official and model configurations of every operator: what is compiled ahead of time, and inspected."""
    return [kernel for module in _OPERATORS.values() for kernel in module.prebuilt_kernels()]


def _module(operator: str, shape: dict[str, Any]):
    """The operator's module. Errors where there is none, or where it can't be asked by these names."""
    if not isinstance(operator, str) or operator not in _OPERATORS:
        raise ValueError(f"operator is {operator!r}, but must be one of {', '.join(map(repr, _OPERATORS))}")
    module = _OPERATORS[operator]
    parameters = inspect.signature(module.check_shape).parameters.values()
    settled = getattr(module.check_shape, "keywords", ())  # of a partial
    takes = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in settled}
    for name in shape:
        if name not in takes:
            raise TypeError(f"{operator}: {name} is no argument of it; it takes {', '.join(takes)}")
    for name, needed in takes.items():
        if needed and name not in shape:
            raise TypeError(f"{operator}: {name} is missing; it takes {', '.join(takes)}")
    return module
