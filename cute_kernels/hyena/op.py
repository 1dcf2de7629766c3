"""The Hyena operators as torch sees them: custom ops for torch.compile, tracing and autograd.

Importing this module registers them:

    cute_kernels::hyena_block, hyena_block_out, hyena_block_backward
    cute_kernels::hyena_filter, hyena_filter_backward
    cute_kernels::causal_long_conv, causal_long_conv_out, causal_long_conv_backward

The first of each is differentiable; its backward is an op of its own that recomputes in PyTorch, for the inputs that
`needed` marks. Weights are single tensors by their official names; `prepared` is the buffer of a PreparedHyenaBlock.
"""

from __future__ import annotations

import torch

from cute_kernels import checks
from cute_kernels.hyena import block, causal_conv, implicit_filter, torch_path
from cute_kernels.hyena import precision as precision_
from cute_kernels.hyena.params import (
    FILTER_NAMES,
    NAMES,
    HyenaBlockParams,
    HyenaOptions,
    check_options,
    check_weights,
    readable,
)

_DTYPE = torch.float32  # of everything, under autocast, too


def _tensors(names) -> str:
    return ", ".join(f"Tensor {name}" for name in names)


def _needed(ctx, count: int) -> list[bool]:
    return list(ctx.needs_input_grad[:count])


def _spread(found, needed) -> list:
    """The gradients of the needed inputs, with None for the others."""
    found = iter(found)
    return [next(found) if n else None for n in needed]


def _empty_gradients(inputs, needed):
    wanted = [t for t, n in zip(inputs, needed, strict=True) if n]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]


# --- hyena_block -----------------------------------------------------------------------------------------------------

_BLOCK_TENSORS = f"Tensor x, {_tensors(NAMES)}, Tensor? z"
_BLOCK_OPTIONS = (
    "float layer_norm_eps, float exp_mod_shift, SymInt l_max, str filter_layout, bool bias_in_filter, SymInt? norm_len"
)
_BLOCK = f"{_BLOCK_TENSORS}, Tensor? prepared, {_BLOCK_OPTIONS}, str? precision"
_COUNT = len(NAMES) + 2  # x, the weights, z


def _parsed(args) -> tuple:
    """x, params, options, precision and the prepared buffer."""
    x, *weights, z = args[:_COUNT]
    buffer, *options, precision = args[_COUNT:]
    options = HyenaOptions(*options)
    params = HyenaBlockParams(**dict(zip(NAMES, weights, strict=True)), z=z, **options._asdict())
    return x, params, options, precision_.resolve(block.OPERATOR, precision), buffer


@torch.library.custom_op("cute_kernels::hyena_block", mutates_args=(), schema=f"({_BLOCK}) -> Tensor")
def hyena_block(*args):
    return block.run(*_parsed(args), None)


@torch.library.custom_op(
    "cute_kernels::hyena_block_out", mutates_args=("out",), schema=f"({_BLOCK}, Tensor(a!) out) -> ()"
)
def hyena_block_out(*args):
    block.run(*_parsed(args[:-1]), args[-1])


def _check_block(args):
    x, params, options, _, _ = _parsed(args)
    block.check_input(x, params.problem, params.device, options)
    if checks.has_kernels(block.OPERATOR, x):
        block.check_supported(params.problem)
    return x


@hyena_block.register_fake
def _(*args):
    x = _check_block(args)
    return torch.empty(x.shape, dtype=_DTYPE, device=x.device)


@hyena_block_out.register_fake
def _(*args):
    x = _check_block(args[:-1])
    checks.check_output(block.OPERATOR, "out", args[-1], x.shape, _DTYPE, x.device, "x")


@torch.library.custom_op(
    "cute_kernels::hyena_block_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_BLOCK_TENSORS}, {_BLOCK_OPTIONS}, bool[] needed) -> Tensor[]",
)
def hyena_block_backward(grad, *args):
    inputs, options, needed = args[:_COUNT], HyenaOptions(*args[_COUNT:-1]), args[-1]

    def function(leaves):
        x, *weights, z = leaves
        return torch_path.hyena_block(x, dict(zip(NAMES, weights, strict=True)), **options._asdict(), z=z)

    return torch_path.gradients(function, inputs, needed, grad)


@hyena_block_backward.register_fake
def _(grad, *args):
    return _empty_gradients(args[:_COUNT], args[-1])


def _block_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_COUNT])
    ctx.options = inputs[_COUNT + 1 : -1]
    if inputs[_COUNT] is not None:
        raise RuntimeError(f"{block.OPERATOR}: prepared weights do not support automatic differentiation")


def _block_backward(ctx, grad):
    needed = _needed(ctx, _COUNT)
    found = torch.ops.cute_kernels.hyena_block_backward(grad, *ctx.saved_tensors, *ctx.options, needed)
    return (*_spread(found, needed), None, *[None] * len(ctx.options), None)


hyena_block.register_autograd(_block_backward, setup_context=_block_context)


# --- hyena_filter ----------------------------------------------------------------------------------------------------

_FILTER_TENSORS = f"{_tensors(FILTER_NAMES)}, Tensor? z"
_FILTER_OPTIONS = "SymInt seq_len, float exp_mod_shift, str filter_layout, bool bias_in_filter, SymInt? norm_len"
_FILTER_COUNT = len(FILTER_NAMES) + 1


def _filter_parsed(args) -> tuple:
    """The weights by name, the problem, the length and the options."""
    tensors, (seq_len, shift, layout, bias, norm_len) = args[:_FILTER_COUNT], args[_FILTER_COUNT:]
    options = HyenaOptions(exp_mod_shift=shift, filter_layout=layout, bias_in_filter=bias, norm_len=norm_len)
    check_options(implicit_filter.OPERATOR, options)
    *weights, z = tensors
    problem = check_weights(tuple(weights), z, FILTER_NAMES, implicit_filter.OPERATOR)
    implicit_filter.check_length(seq_len, problem)
    named = dict(zip(FILTER_NAMES, weights, strict=True))
    if z is not None:
        named["z"] = z[0] if z.dim() == 3 else z
    return named, problem, seq_len, options


@torch.library.custom_op(
    "cute_kernels::hyena_filter", mutates_args=(), schema=f"({_FILTER_TENSORS}, {_FILTER_OPTIONS}) -> Tensor"
)
def hyena_filter(*args):
    w, *rest = _filter_parsed(args)
    return implicit_filter.run({name: readable(t) for name, t in w.items()}, *rest)


@hyena_filter.register_fake
def _(*args):
    w, problem, seq_len, _ = _filter_parsed(args)
    return torch.empty(problem.width, seq_len, dtype=_DTYPE, device=w["filter_bias"].device)


@torch.library.custom_op(
    "cute_kernels::hyena_filter_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_FILTER_TENSORS}, {_FILTER_OPTIONS}, bool[] needed) -> Tensor[]",
)
def hyena_filter_backward(grad, *args):
    inputs, options, needed = args[:_FILTER_COUNT], args[_FILTER_COUNT:-1], args[-1]

    def function(leaves):
        *weights, z = leaves
        return torch_path.hyena_filter(dict(zip(FILTER_NAMES, weights, strict=True)), *options, z)

    return torch_path.gradients(function, inputs, needed, grad)


@hyena_filter_backward.register_fake
def _(grad, *args):
    return _empty_gradients(args[:_FILTER_COUNT], args[-1])


def _filter_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_FILTER_COUNT])
    ctx.options = inputs[_FILTER_COUNT:]


def _filter_backward(ctx, grad):
    needed = _needed(ctx, _FILTER_COUNT)
    found = torch.ops.cute_kernels.hyena_filter_backward(grad, *ctx.saved_tensors, *ctx.options, needed)
    return (*_spread(found, needed), *[None] * len(ctx.options))


hyena_filter.register_autograd(_filter_backward, setup_context=_filter_context)


# --- causal_long_conv ------------------------------------------------------------------------------------------------

_CONV_TENSORS = "Tensor u, Tensor k, Tensor? skip, Tensor? pre_gate, Tensor? post_gate"


@torch.library.custom_op(
    "cute_kernels::causal_long_conv", mutates_args=(), schema=f"({_CONV_TENSORS}, str? precision) -> Tensor"
)
def causal_long_conv(*args):
    return causal_conv.run(*args[:5], precision_.resolve(causal_conv.OPERATOR, args[5]), None)


@causal_long_conv.register_fake
def _(u, *args):
    causal_conv.check_inputs(u, *args[:4])
    return torch.empty(u.shape, dtype=_DTYPE, device=u.device)


@torch.library.custom_op(
    "cute_kernels::causal_long_conv_out",
    mutates_args=("out",),
    schema=f"({_CONV_TENSORS}, str? precision, Tensor(a!) out) -> ()",
)
def causal_long_conv_out(*args):
    causal_conv.run(*args[:5], precision_.resolve(causal_conv.OPERATOR, args[5]), args[6])


@causal_long_conv_out.register_fake
def _(u, *args):
    causal_conv.check_inputs(u, *args[:4])
    checks.check_output(causal_conv.OPERATOR, "out", args[5], u.shape, _DTYPE, u.device, "u")


@torch.library.custom_op(
    "cute_kernels::causal_long_conv_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_CONV_TENSORS}, bool[] needed) -> Tensor[]",
)
def causal_long_conv_backward(grad, *args):
    return torch_path.gradients(lambda leaves: torch_path.causal_long_conv(*leaves), args[:5], args[5], grad)


@causal_long_conv_backward.register_fake
def _(grad, *args):
    return _empty_gradients(args[:5], args[5])


def _conv_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])


def _conv_backward(ctx, grad):
    needed = _needed(ctx, 5)
    found = torch.ops.cute_kernels.causal_long_conv_backward(grad, *ctx.saved_tensors, needed)
    return (*_spread(found, needed), None)


causal_long_conv.register_autograd(_conv_backward, setup_context=_conv_context)


for _op in (hyena_block, hyena_filter, causal_long_conv):
    for _device in ("cpu", "cuda"):
        _op.register_autocast(_device, _DTYPE)
