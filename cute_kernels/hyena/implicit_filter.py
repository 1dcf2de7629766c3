"""`hyena_filter`: the block's long filter alone. The public function, its checks, and the way to the kernel.

For t = 0 .. L-1, n = norm_len or L, and bands = (emb_dim - 1) / 2:

    z[t] = [t/(n-1), cos(-f w), sin(-f w)],  w = 2 pi t / n,  f = linspace(1e-4, bands - 1, bands)    unless stored
    h = sin(freq * (z W1^T + b1));  h = sin(freq * (h W2^T + b2));  h = sin(freq * (h W3^T + b3));  h = h Wf^T
    h[t, d] = h[t, d] * (exp(-t/(n-1) * |deltas[d]|) + exp_mod_shift) (+ filter_bias[d])
    k[d, t] = h.flat[d * L + t] ("reshape") or h[t, d] ("transpose")
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_kernels import checks
from cute_kernels.hyena import block, stages, torch_path
from cute_kernels.hyena.compose import filter_kernel
from cute_kernels.hyena.params import (
    FILTER_NAMES,
    HyenaBlockParams,
    HyenaOptions,
    HyenaProblem,
    check_options,
)
from cute_kernels.runtime import backend
from cute_kernels.runtime.kernel import Kernel

OPERATOR = "hyena_filter"


def hyena_filter(
    params: HyenaBlockParams,
    seq_len: int,
    exp_mod_shift: float | None = None,
    filter_layout: str | None = None,
    bias_in_filter: bool | None = None,
    norm_len: int | None = None,
) -> Tensor:
    """The implicit filter k [D, seq_len] fp32 of a Hyena block, always computed in fp32.

    Args:
        params: The weights; the ten of the filter (and z) count.
        seq_len: L, from 0; l_max doesn't bound it here.
        exp_mod_shift, filter_layout, bias_in_filter, norm_len: In place of those of params; `HyenaBlockParams` says
            what they mean.

    Devices, gradients, torch.compile and errors: as `hyena_block`.
    """
    if not isinstance(params, HyenaBlockParams):
        raise TypeError(f"{OPERATOR}: params is of type {type(params).__qualname__}, but must be HyenaBlockParams")
    given = {
        "exp_mod_shift": exp_mod_shift,
        "filter_layout": filter_layout,
        "bias_in_filter": bias_in_filter,
        "norm_len": norm_len,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    options = check_options(OPERATOR, params.options._replace(**changes)) if changes else params.options
    seq_len = check_length(seq_len, params.problem)
    tensors = [getattr(params, name) for name in FILTER_NAMES]
    if (
        torch.compiler.is_compiling()
        or not params.plain
        or checks.is_observed()
        or torch._C._is_any_autocast_enabled()
        or (torch.is_grad_enabled() and params.requires_grad)
    ):
        if not torch.compiler.is_compiling():
            checks.refuse_tangents(OPERATOR, *tensors, params.z)
        return torch.ops.cute_kernels.hyena_filter(
            *(*tensors, params.z, seq_len),
            *(options.exp_mod_shift, options.filter_layout, options.bias_in_filter, options.norm_len),
        )
    return run(params.weights(), params.problem, seq_len, options)


def run(w: Mapping[str, Tensor], problem: HyenaProblem, seq_len: int, options: HyenaOptions) -> Tensor:
    """The operator on plain, contiguous tensors, below autograd."""
    first = w["filter_linear1_weight"]
    o = options
    if first.device.type == "meta":
        return torch.empty(problem.width, seq_len, dtype=torch.float32, device="meta")
    kernel = None
    if checks.has_kernels(OPERATOR, first):
        block.check_supported(problem, OPERATOR)
        backend.current().arch(first.device)
        kernel = filter_kernel(problem, options, seq_len, backend.current().sm_count(first.device))
    with torch.no_grad():
        if kernel is None or seq_len == 0:
            return torch_path.hyena_filter(
                *(w, seq_len, o.exp_mod_shift, o.filter_layout, o.bias_in_filter, o.norm_len, w.get("z"))
            ).contiguous()
        k = stages.hyena_filter(w, kernel, seq_len, o.norm_len or seq_len, o.exp_mod_shift, w.get("z"))
        return k[:, :seq_len].contiguous()


def check_length(seq_len: int, problem: HyenaProblem) -> int:
    """The length. ValueError where it is wrong."""
    seq_len = checks.integer(OPERATOR, "seq_len", seq_len, least=0)
    if problem.z_rows is not None and seq_len > problem.z_rows:
        raise checks.wrong(OPERATOR, "seq_len", seq_len, f"at most {problem.z_rows}, the rows of z")
    return seq_len


# As the block's, but for d_inner and the precision, which a filter has not.
check_shape = functools.partial(block.check_shape, OPERATOR, d_inner=64, precision=None)


def warmup(**shape: Any) -> None:
    """Loads or compiles the kernels of a filter. Takes what `check_shape` takes."""
    asked = check_shape(**shape)
    current = backend.current()
    sm_count = current.sm_count(asked.device)
    kernels = (filter_kernel(asked.problem, asked.options, length, sm_count) for length in asked.lengths)
    for kernel in dict.fromkeys(filter(None, kernels)):
        current.function(kernel, asked.device)


def prebuilt_kernels() -> list[Kernel]:
    """None beside the block's."""
    return []
