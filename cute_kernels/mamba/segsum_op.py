"""`mamba_segsum` as torch sees it: custom ops for torch.compile, tracing and autograd.

A schema holds no infinite default, no tuple and no NamedTuple: the ops take `dt_min` and `dt_max` (None: no limit) and
give plain tensors. Importing this module registers them:

    cute_kernels::mamba_segsum           returns the five outputs; differentiable
    cute_kernels::mamba_segsum_out       writes them into given tensors
    cute_kernels::mamba_segsum_backward  gradients of dt, A_log, B, C, dt_bias, recomputed in PyTorch
"""

from __future__ import annotations

import torch

from cute_kernels.mamba import segsum
from cute_kernels.mamba.segsum_torch import segsum_torch_backward
from cute_kernels.runtime import backend

INF = float("inf")
_INPUTS = (
    "Tensor dt, Tensor A_log, Tensor B, Tensor C, Tensor? dt_bias=None, "
    'float dt_min=0.0, float? dt_max=None, str g_layout="per_head"'
)
_OUTPUTS = ("L", "G", "M", "A_cumsum", "decay_states")


@torch.library.custom_op(
    "cute_kernels::mamba_segsum", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def mamba_segsum(dt, A_log, B, C, dt_bias=None, dt_min=0.0, dt_max=None, g_layout="per_head"):
    limits = (dt_min, INF if dt_max is None else dt_max)
    return tuple(segsum.run(dt, A_log, B, C, dt_bias, limits, g_layout, None))


@mamba_segsum.register_fake
def _(dt, A_log, B, C, dt_bias=None, dt_min=0.0, dt_max=None, g_layout="per_head"):
    outputs = _checked(dt, A_log, B, C, dt_bias, g_layout)
    return tuple(torch.empty(shape, dtype=dtype, device=dt.device) for shape, dtype in outputs)


def _checked(dt, A_log, B, C, dt_bias, g_layout):
    """Shape and type of each output, after the checks that need no values."""
    problem = segsum.check_inputs(dt, A_log, B, C, dt_bias, g_layout)
    if backend.current().handles(dt):
        segsum.check_supported(problem)
    return segsum.describe_outputs(problem, *dt.shape[:2])


@torch.library.custom_op(
    "cute_kernels::mamba_segsum_out",
    mutates_args=_OUTPUTS,
    schema=(
        "(Tensor dt, Tensor A_log, Tensor B, Tensor C, Tensor? dt_bias, float dt_min, float? dt_max, str g_layout, "
        "Tensor(a!) L, Tensor(b!) G, Tensor(c!) M, Tensor(d!) A_cumsum, Tensor(e!) decay_states) -> ()"
    ),
)
def mamba_segsum_out(dt, A_log, B, C, dt_bias, dt_min, dt_max, g_layout, L, G, M, A_cumsum, decay_states):
    limits = (dt_min, INF if dt_max is None else dt_max)
    segsum.run(dt, A_log, B, C, dt_bias, limits, g_layout, segsum.SegsumOutputs(L, G, M, A_cumsum, decay_states))


@mamba_segsum_out.register_fake
def _(dt, A_log, B, C, dt_bias, dt_min, dt_max, g_layout, L, G, M, A_cumsum, decay_states):
    outputs = _checked(dt, A_log, B, C, dt_bias, g_layout)
    segsum.check_outputs(segsum.SegsumOutputs(L, G, M, A_cumsum, decay_states), outputs, dt.device)


@torch.library.custom_op(
    "cute_kernels::mamba_segsum_backward",
    mutates_args=(),
    schema=(
        "(Tensor?[] grads, Tensor dt, Tensor A_log, Tensor B, Tensor C, Tensor? dt_bias, "
        "float dt_min, float? dt_max, str g_layout) -> Tensor[]"
    ),
)
def mamba_segsum_backward(grads, dt, A_log, B, C, dt_bias, dt_min, dt_max, g_layout):
    limits = (dt_min, INF if dt_max is None else dt_max)
    found = segsum_torch_backward(grads, dt, A_log, B, C, dt_bias, *limits, g_layout)
    return [g for g in found if g is not None]


@mamba_segsum_backward.register_fake
def _(grads, dt, A_log, B, C, dt_bias, dt_min, dt_max, g_layout):
    inputs = [t for t in (dt, A_log, B, C, dt_bias) if t is not None]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]


def _setup_context(ctx, inputs, output):
    dt, A_log, B, C, dt_bias, dt_min, dt_max, g_layout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dt, A_log, B, C, dt_bias)
    ctx.options = (dt_min, dt_max, g_layout)


def _backward(ctx, *grads):
    dt, A_log, B, C, dt_bias = ctx.saved_tensors
    if all(g is None for g in grads):
        return (None,) * 8
    found = torch.ops.cute_kernels.mamba_segsum_backward(list(grads), dt, A_log, B, C, dt_bias, *ctx.options)
    return (*found[:4], found[4] if dt_bias is not None else None, None, None, None)


mamba_segsum.register_autograd(_backward, setup_context=_setup_context)
