"""`hyena_block`: the complete Hyena block. The public function, its checks, and the way to the kernels.

For x [B, L, D], with Lf = min(L, l_max) and all convolutions causal:

    u  = LayerNorm(x; norm1) @ in_proj^T + bias                             [B, L, 3D]
    x0, x1, v = the three parts of the short convolution (3 taps) of u      [B, D, Lf]
    g  = v * x1
    k  = hyena_filter(...)                                                  [D, Lf]
    y  = (conv(g, k) + filter_bias * g) * x0, and 0 beyond Lf
    r  = y @ out_proj^T + bias + x
    out = gelu_tanh(LayerNorm(r; norm2) @ fc1^T + b1) @ fc2^T + b2 + r

Source: Poli et al., "Hyena Hierarchy", arXiv:2302.10866; Nguyen et al., "HyenaDNA", arXiv:2306.15794; the public
benchmark SOL-ExecBench L2/051.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _any_requires_grad, _is_any_autocast_enabled
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from cute_kernels import checks
from cute_kernels.checks import PLAIN, is_observed
from cute_kernels.hyena import precision as precision_
from cute_kernels.hyena.compose import Composition
from cute_kernels.hyena.params import (
    NAMES,
    HyenaBlockParams,
    HyenaOptions,
    HyenaProblem,
    Kind,
    check_emb_dim,
    check_options,
    readable,
)
from cute_kernels.hyena.workspace import ORDER
from cute_kernels.runtime import backend
from cute_kernels.runtime.kernel import Kernel

OPERATOR = "hyena_block"


@dataclass(frozen=True, eq=False)
class PreparedHyenaBlock:
    """A filter and converted weights, made by `HyenaBlockParams.prepare`, given to `hyena_block` in place of params.

    They are those of the weights at that time: after a change of the weights, prepare again.
    """

    params: HyenaBlockParams
    precision: str
    seq_len: int
    buffer: Tensor = field(repr=False)  # [n] fp32, see workspace.Constants


def hyena_block(
    x: Tensor,  # [B, L, D] fp32
    params: HyenaBlockParams | PreparedHyenaBlock,
    layer_norm_eps: float | None = None,
    exp_mod_shift: float | None = None,
    l_max: int | None = None,
    filter_layout: str | None = None,
    bias_in_filter: bool | None = None,
    norm_len: int | None = None,
    precision: str | None = None,
    out: Tensor | None = None,  # [B, L, D] fp32
) -> Tensor:
    """The Hyena block, forward: norm, projection, short and long convolution, gates, and the MLP. [B, L, D] fp32.

    Args:
        x: Any strides; contiguous and 16-byte aligned is read in place, anything else is copied first.
        params: The weights; or what `params.prepare(seq_len=L, precision=...)` made of them, so that the filter and the
            weights' conversions, which depend on the weights alone, are not made again by this call. Nothing else is
            kept from call to call.
        layer_norm_eps, exp_mod_shift, l_max, filter_layout, bias_in_filter, norm_len: In place of those of params,
            which are the public benchmark's unless set (1e-5, 0.05, 32768, "reshape", True, None). `HyenaBlockParams`
            says what they mean.
        precision: Of the matrix products and the long convolution. "highest" is fp32-accurate; "high" is TF32-class;
            "medium" rounds operands to bf16. None reads torch's setting,
            `torch.backends.cuda.matmul.fp32_precision` first. The filter is always made in fp32.
        out: A contiguous, 16-byte aligned tensor to write to, which overlaps no input. Not differentiable.

    On a GPU: D and d_inner multiples of 64, D from 64 to 1024, order 64. D = 128 and 256 with d_inner a multiple of
    128 up to 2048 run on kernels alone where the filter reaches 32768 tokens at most; other sizes use PyTorch for some
    stages and are slower. CPU tensors of any size run through plain PyTorch. Any B and L, 0 included. Any object with
    `__dlpack__` is accepted as x. Under autocast the block computes in fp32. Gradients reach x, all weights and z: the
    backward recomputes the block in PyTorch, in fp32, and is slow; there are none through prepared weights.

    Raises:
        ValueError: an argument is wrong: its rank, size, type, device or value.
        TypeError: x is neither a tensor nor a DLPack array, or params are none.
        NotImplementedError: the arguments are right, but no kernel covers them: D, d_inner, order or the GPU.
        RuntimeError: gradients together with `out` or with prepared weights; or a CUDA graph is being captured before
            `cute_kernels.warmup`.
    """
    prepared = None
    if type(params) is PreparedHyenaBlock:
        params, prepared = params.params, params
    elif not isinstance(params, HyenaBlockParams):
        must = "HyenaBlockParams, or what their prepare() returns"
        raise TypeError(f"{OPERATOR}: params is of type {type(params).__qualname__}, but must be {must}")
    options = params.options
    if (
        layer_norm_eps is not None
        or exp_mod_shift is not None
        or l_max is not None
        or filter_layout is not None
        or bias_in_filter is not None
        or norm_len is not None
    ):
        given = (layer_norm_eps, exp_mod_shift, l_max, filter_layout, bias_in_filter, norm_len)
        options = _merge(options, given, prepared)
    if type(x) not in PLAIN:
        x = checks.as_tensor(OPERATOR, "x", x)
    if prepared is not None and (precision is not None or x.dim() != 3 or x.size(1) != prepared.seq_len):
        _check_prepared(x, prepared, options, precision)
    if is_compiling():
        return _through_dispatcher(x, params, options, precision, prepared, out)
    if (
        type(x) not in PLAIN
        or not params.plain
        or is_observed()
        or _is_any_autocast_enabled()
        or (
            is_grad_enabled()
            and (
                x.requires_grad
                or _any_requires_grad(*params.everything)
                or (isinstance(out, Tensor) and out.requires_grad)
            )
        )
    ):
        return _through_dispatcher(x, params, options, precision, prepared, out)
    # Straight to the kernels: the dispatcher of torch.library would cost several times the launches.
    precision = precision_.resolve(OPERATOR, precision) if prepared is None else prepared.precision
    return run(x, params, options, precision, None if prepared is None else prepared.buffer, out)


def _merge(options: HyenaOptions, given: tuple, prepared: PreparedHyenaBlock | None) -> HyenaOptions:
    changes = {name: value for name, value in zip(HyenaOptions._fields, given, strict=True) if value is not None}
    changed = check_options(OPERATOR, options._replace(**changes))
    if prepared is not None:
        for name, was, now in zip(HyenaOptions._fields, options, changed, strict=True):
            if was != now and name != "layer_norm_eps":
                raise checks.wrong(OPERATOR, name, repr(now), f"{was!r}, as it was prepared")
    return changed


def _check_prepared(x: Tensor, prepared: PreparedHyenaBlock, options: HyenaOptions, precision: str | None) -> None:
    if precision is not None and precision != prepared.precision:
        raise checks.wrong(OPERATOR, "precision", repr(precision), f"{prepared.precision!r}, as it was prepared")
    length = x.shape[1] if len(x.shape) == 3 else prepared.seq_len
    if min(length, options.l_max) != min(prepared.seq_len, options.l_max):
        must = f"of L = {prepared.seq_len} tokens, as params were prepared"
        raise checks.wrong(OPERATOR, "x", f"of shape {list(x.shape)}", must)


def _through_dispatcher(x, params, options, precision, prepared, out) -> Tensor:
    if not is_compiling():
        checks.refuse_tangents(OPERATOR, x, *params.tensors, params.z)
        precision = precision_.resolve(OPERATOR, precision)
    buffer = None
    if prepared is not None:
        precision, buffer = prepared.precision, prepared.buffer
        if is_grad_enabled() and (x.requires_grad or params.requires_grad):
            raise RuntimeError(
                f"{OPERATOR}: prepared weights do not support automatic differentiation, but x or a weight requires "
                "grad: give the params themselves, or call under torch.no_grad()"
            )
    args = (x, *params.tensors, params.z, buffer, *options, precision)
    if out is None:
        return torch.ops.cute_kernels.hyena_block(*args)
    out = checks.as_tensor(OPERATOR, "out", out)
    checks.refuse_gradients_of_out(OPERATOR, x, *params.tensors, params.z, out)
    torch.ops.cute_kernels.hyena_block_out(*args, out)
    return out


# --- from arguments to a plan ----------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What follows from the arguments' metadata, found once for each combination of them."""

    composition: Composition
    run: Callable[..., Tensor]  # (x, weights, prepared constants, out)
    shape: torch.Size  # of the output
    empty: bool  # nothing to compute


_plans: dict[tuple, _Plan] = {}
_MAX_PLANS = 4096  # a bound for callers whose batch never repeats


def run(
    x: Tensor,  # [B, L, D]
    params: HyenaBlockParams,
    options: HyenaOptions,
    precision: str,
    buffer: Tensor | None,  # prepared
    out: Tensor | None,  # [B, L, D]
) -> Tensor:
    """The operator on plain tensors, below autograd."""
    current = backend.current()
    kind = params.kind if options is params.options else Kind.of(params.problem, options, params.device)
    key = (x.shape, x.dtype, x.layout, x.device, kind, precision, current)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(x, params, options, precision)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    if out is not None:
        out = checks.given_output(OPERATOR, out, plan.shape, torch.float32, x.device, "x")
        if not (plan.empty or _apart(out, x, params, buffer)):
            inputs = (x, *params.tensors, params.z, buffer)
            checks.check_memory(OPERATOR, ("out",), (out,), (out.nbytes,), _INPUT_NAMES, inputs)
        increment_version(out)  # autograd can't see a kernel write
    composition = plan.composition
    if buffer is not None and buffer.numel() != composition.constants_size:
        raise checks.wrong(
            OPERATOR,
            "params",
            f"prepared to {buffer.numel()} numbers",
            f"prepared for this precision, device and length, to {composition.constants_size} numbers",
        )
    if plan.empty:
        return torch.empty(plan.shape, dtype=torch.float32, device=x.device) if out is None else out
    if not x.is_contiguous() or x.is_neg() or x.data_ptr() & 15:
        x = readable(x)
    return plan.run(x, params.weights(), buffer, out)


_INPUT_NAMES = ("x", *NAMES, "z", "prepared")


def _apart(out: Tensor, x: Tensor, params: HyenaBlockParams, buffer: Tensor | None) -> bool:
    """Whether out is certainly aligned and shares no memory with an input: `check_memory` where it's well."""
    start, size = out.data_ptr(), out.nbytes
    return (
        not start & 15
        and x.is_contiguous()
        and abs(x.data_ptr() - start) >= size
        and (buffer is None or not -buffer.nbytes < buffer.data_ptr() - start < size)
        and params.apart(start, start + size)
    )


def _make_plan(x: Tensor, params: HyenaBlockParams, options: HyenaOptions, precision: str) -> _Plan:
    check_input(x, params.problem, params.device, options)
    device = x.device
    composition = _composition(x, params.problem, options, precision)
    empty = x.numel() == 0 or device.type == "meta"
    run = composition.run if empty or composition.launches is None else composition.launcher()
    return _Plan(composition, run, x.shape, empty)


def _composition(x: Tensor, problem: HyenaProblem, options: HyenaOptions, precision: str) -> Composition:
    batch, length = x.shape[:2]
    current = backend.current()
    if not checks.has_kernels(OPERATOR, x):
        return Composition(problem, options, precision, batch, length, x.device)
    check_supported(problem)
    current.arch(x.device)  # NotImplementedError where there are no kernels for it
    sm_count = current.sm_count(x.device)
    composition = Composition.with_kernels(problem, options, precision, batch, length, x.device, sm_count)
    for kernel in composition.kernels:
        current.function(kernel, x.device)
    return composition


def prepare(params: HyenaBlockParams, seq_len: int, precision: str | None) -> PreparedHyenaBlock:
    """`HyenaBlockParams.prepare`."""
    name = "HyenaBlockParams.prepare"
    seq_len = checks.integer(name, "seq_len", seq_len, least=0)
    if _passes_z(seq_len, params.problem, params.options):
        raise checks.wrong(name, "seq_len", seq_len, f"at most {params.problem.z_rows}, the rows of z")
    precision = precision_.resolve(name, precision)
    x = torch.empty(1, 1, 1, dtype=torch.float32, device=params.device).expand(1, seq_len, params.problem.width)
    composition = _composition(x, params.problem, params.options, precision)
    with torch.no_grad():
        if seq_len and x.device.type != "meta":
            buffer = composition.make_constants(params.weights())
        else:
            buffer = torch.empty(composition.constants_size, dtype=torch.float32, device=x.device)
    return PreparedHyenaBlock(params, precision, seq_len, buffer)


# --- without a call --------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What `warmup` and `is_supported` are asked about."""

    problem: HyenaProblem
    options: HyenaOptions
    precision: str
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    device: torch.device


# So close together that each configuration has one of them: eight lengths an octave, and one more and less.
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128, 1 << 20)
LENGTHS = tuple(sorted({(n << k) // 8 + more for k in range(17) for n in range(8, 16) for more in (-1, 0, 1)} - {0}))


def check_shape(
    operator: str = OPERATOR,
    /,
    *,
    d_model: int,
    d_inner: int,
    emb_dim: int = 5,
    filter_order: int = ORDER,
    filter_layout: str = "reshape",
    bias_in_filter: bool = True,
    stored_z: bool = False,
    batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    device: torch.device | str | int | None = None,
) -> Asked:
    """ValueError where an argument is wrong, NotImplementedError where no kernel covers it.

    batch and seq_len are any unless given, precision is torch's, and the device is the current CUDA device.
    """
    d_model = checks.integer(operator, "d_model", d_model)
    d_inner = checks.integer(operator, "d_inner", d_inner)
    emb_dim = check_emb_dim(operator, emb_dim)
    filter_order = checks.integer(operator, "filter_order", filter_order)
    batch = None if batch is None else checks.integer(operator, "batch", batch, also=" or None")
    seq_len = None if seq_len is None else checks.integer(operator, "seq_len", seq_len, also=" or None")
    options = check_options(operator, HyenaOptions(filter_layout=filter_layout, bias_in_filter=bias_in_filter))
    precision = precision_.resolve(operator, precision)
    rows = 1 if checks.flag(operator, "stored_z", stored_z) else None
    problem = HyenaProblem(d_model, d_inner, filter_order, emb_dim, rows)
    check_supported(problem, operator)
    batches, lengths = (batch,) if batch else BATCHES, (seq_len,) if seq_len else LENGTHS
    return Asked(problem, options, precision, batches, lengths, checks.kernel_device(operator, device))


def warmup(**shape: Any) -> None:
    """Loads or compiles the kernels of a block, prepared or not. Takes what `check_shape` takes."""
    asked = check_shape(**shape)
    current = backend.current()
    for kernel in _kernels(*asked[:-1], current.sm_count(asked.device)):
        current.function(kernel, asked.device)


def prebuilt_kernels() -> list[Kernel]:
    """Those of the official sizes, and of a HyenaDNA layer, for an H200's number of SMs, or a B200's."""
    problem, hyena_dna = HyenaProblem(256, 1024, ORDER, 5, None), HyenaProblem(256, 1024, ORDER, 5, 1)
    trained = HyenaOptions(filter_layout="transpose", bias_in_filter=False)
    cases = [(problem, HyenaOptions(), precision, *shape) for precision in precision_.NAMES for shape in _OFFICIAL]
    cases += [(hyena_dna, trained, precision, 1, n) for precision in ("highest", "high") for n in (1024, 32768)]
    kernels = {}
    for problem, options, precision, batch, length in cases:
        kernels.update(dict.fromkeys(_kernels(problem, options, precision, (batch,), (length,), 132)))
    return list(kernels)


_OFFICIAL = (  # batch, length
    *((1, 131), (1, 256), (1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 128), (2, 512), (2, 2048), (2, 2053)),
    *((2, 4096), (4, 256), (4, 541), (8, 997), (16, 512), (32, 256)),
)


def _kernels(
    problem: HyenaProblem,
    options: HyenaOptions,
    precision: str,
    batches: Iterable[int],
    lengths: Iterable[int],
    sm_count: int,
) -> list[Kernel]:
    """The kernels of a call, and of `prepare`, each once."""
    device = torch.device("cuda")
    found = {}
    for length in lengths:
        for batch in batches:
            composition = Composition.with_kernels(problem, options, precision, batch, length, device, sm_count)
            found.update(dict.fromkeys((*composition.kernels, *composition.preparing_kernels)))
    return list(found)


# --- checks ----------------------------------------------------------------------------------------------------------


def check_input(x: Tensor, problem: HyenaProblem, device: torch.device, options: HyenaOptions) -> None:
    """ValueError where x is wrong for the weights. Reads metadata alone, fake tensors' too."""
    if x.dim() != 3:
        raise checks.wrong(OPERATOR, "x", f"of shape {list(x.shape)}", "[B, L, D], of rank 3")
    if x.layout != torch.strided:
        raise checks.wrong(OPERATOR, "x", f"a {x.layout} tensor", "a strided tensor")
    if x.dtype != torch.float32:
        raise checks.wrong(OPERATOR, "x", f"of type {checks.dtype_name(x.dtype)}", "float32")
    if x.shape[2] != problem.width:
        must = f"[B, L, {problem.width}], as the weights have D = {problem.width}"
        raise checks.wrong(OPERATOR, "x", f"of shape {list(x.shape)}", must)
    if x.device != device:
        raise checks.wrong(OPERATOR, "x", f"on {x.device}", f"on {device} like the weights")
    if _passes_z(x.shape[1], problem, options):
        raise checks.wrong(
            OPERATOR, "x", f"of shape {list(x.shape)}", f"of at most {problem.z_rows} tokens, as z has that many rows"
        )


def _passes_z(length: int, problem: HyenaProblem, options: HyenaOptions) -> bool:
    """Whether a filter as long as the tokens, l_max at most, needs positions that z has not."""
    return problem.z_rows is not None and problem.z_rows < options.l_max and length > problem.z_rows


def check_supported(problem: HyenaProblem, operator: str = OPERATOR) -> None:
    """NotImplementedError where the problem is right, but has no kernel."""
    if problem.width % 64 or problem.width > 1024:
        raise NotImplementedError(
            f"{operator}: no kernel for D = {problem.width}; supported are multiples of 64 from 64 to 1024"
        )
    if problem.inner % 64:
        raise NotImplementedError(f"{operator}: no kernel for d_inner = {problem.inner}; supported are multiples of 64")
    if problem.order != ORDER:
        raise NotImplementedError(f"{operator}: no kernel for a filter of order {problem.order}; supported is {ORDER}")
