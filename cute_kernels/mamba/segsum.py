"""`mamba_segsum`: Mamba-2's discretization and segment sum. The public function, its checks, and the way to the kernel.

With a[b,h,c,i] = -exp(A_log[h]) * clamp(softplus(dt[b,c,i,h] + dt_bias[h]), *dt_limit) and head h in group
g(h) = h // (H // G):

    L[b,h,c,i,j]   = exp(sum of a over j < s <= i)  for j <= i, 0 for j > i
    G[b,c,i,j,h]   = sum_n C[b,c,i,g(h),n] * B[b,c,j,g(h),n]
    M[b,c,i,j,h]   = G * L  for j <= i, 0 for j > i
    A_cumsum[b,h,c,i]     = sum of a over s <= i
    decay_states[b,h,c,i] = exp(sum of a over s > i)

Source: Dao and Gu, "Transformers are SSMs", arXiv:2405.21060; the public benchmark SOL-ExecBench L2/044.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _any_requires_grad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from cute_kernels import checks
from cute_kernels.checks import PLAIN, PLAIN_OR_NONE, dtype_name
from cute_kernels.mamba.segsum_torch import segsum_torch
from cute_kernels.runtime import backend, fresh
from cute_kernels.runtime.kernel import Kernel

INF = float("inf")
OPERATOR = "mamba_segsum"
CHUNK_SIZES = (64, 128, 256)
D_STATES = range(16, 257, 16)
OPERAND_DTYPES = (torch.bfloat16, torch.float16)
STEP_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
G_LAYOUTS = ("per_head", "per_group")


class SegsumOutputs(NamedTuple):
    """What `mamba_segsum` returns. L, G and M have the type of B and C, the other two are fp32; all are contiguous."""

    L: Tensor  # [b, H, c, Q, Q]
    G: Tensor  # [b, c, Q, Q, H], or [b, c, Q, Q, G] with g_layout="per_group"
    M: Tensor  # [b, c, Q, Q, H]
    A_cumsum: Tensor  # [b, H, c, Q] fp32
    decay_states: Tensor  # [b, H, c, Q] fp32


_OUT_NAMES = tuple(f"out.{name}" for name in SegsumOutputs._fields)
_INPUT_NAMES = ("dt", "A_log", "B", "C", "dt_bias")


def mamba_segsum(
    dt: Tensor,  # [b, c, Q, H] bf16, fp16 or fp32
    A_log: Tensor,  # [H] bf16, fp16 or fp32
    B: Tensor,  # [b, c, Q, G, N] bf16 or fp16
    C: Tensor,  # [b, c, Q, G, N] as B
    dt_bias: Tensor | None = None,  # [H] bf16, fp16 or fp32
    dt_limit: tuple[float, float] = (0.0, INF),
    g_layout: str = "per_head",
    out: Sequence[Tensor] | None = None,
) -> SegsumOutputs:
    """Discretizes Mamba-2's steps and returns the decay matrix, the group products, their masked product and the sums.

    Args:
        dt: Time steps before softplus, for b batch rows of c chunks of Q steps and H heads. Any strides.
        A_log: Logarithm of the negated decay rate of each head. Any stride.
        B, C: Input and output projections of G groups with N states each; G divides H and head h uses group
            h // (H // G). Views whose last dimension is contiguous and whose strides and address are multiples of 16
            bytes are read in place, others are copied first.
        dt_bias: Added to dt before softplus.
        dt_limit: Smallest and largest step after softplus, 0 <= smallest <= largest.
        g_layout: "per_head" repeats G for every head, "per_group" returns it once for each group.
        out: Five contiguous, 16-byte aligned tensors to write to, in the order of `SegsumOutputs`. They may overlap
            neither each other nor the inputs. Not differentiable.

    On a GPU: Q in {64, 128, 256}, N a multiple of 16 up to 256. CPU tensors of any Q and N run through plain PyTorch,
    slowly. Any object with `__dlpack__` (CuPy, JAX, ...) is accepted in place of a tensor; results are torch tensors,
    computed on torch's current stream of the inputs' device. Gradients of all five outputs reach dt, A_log, B, C and
    dt_bias: the backward recomputes in PyTorch, in float64, and is slow.

    Returns:
        SegsumOutputs (L, G, M, A_cumsum, decay_states).

    Raises:
        ValueError: an argument is wrong: its rank, size, type, device or value.
        TypeError: an argument is neither a tensor nor a DLPack array.
        NotImplementedError: the arguments are right, but no kernel covers them: Q, N or the GPU.
        RuntimeError: `out` together with gradients; or a CUDA graph is being captured before `cute_kernels.warmup`.
    """
    if is_compiling():
        return _through_dispatcher(dt, A_log, B, C, dt_bias, dt_limit, g_layout, out)
    if (
        type(dt) not in PLAIN
        or type(A_log) not in PLAIN
        or type(B) not in PLAIN
        or type(C) not in PLAIN
        or type(dt_bias) not in PLAIN_OR_NONE
    ):
        dt, A_log, B, C = (_as_tensor(*x) for x in (("dt", dt), ("A_log", A_log), ("B", B), ("C", C)))
        dt_bias = None if dt_bias is None else _as_tensor("dt_bias", dt_bias)
        if not {type(x) for x in (dt, A_log, B, C, dt_bias)} <= PLAIN_OR_NONE:
            return _through_dispatcher(dt, A_log, B, C, dt_bias, dt_limit, g_layout, out)
    if checks.is_observed() or (
        is_grad_enabled()
        and (
            dt.requires_grad
            or A_log.requires_grad
            or B.requires_grad
            or C.requires_grad
            or (dt_bias is not None and dt_bias.requires_grad)
            or (out is not None and _any_requires_grad(*(out := _as_outputs(out))))
        )
    ):
        return _through_dispatcher(dt, A_log, B, C, dt_bias, dt_limit, g_layout, out)
    # Straight to the kernel: the dispatcher of torch.library would cost several times the launch.
    return run(dt, A_log, B, C, dt_bias, dt_limit, g_layout, out)


def _through_dispatcher(dt, A_log, B, C, dt_bias, dt_limit, g_layout, out) -> SegsumOutputs:
    if not is_compiling():
        checks.refuse_tangents(OPERATOR, dt, A_log, B, C, dt_bias)
    dt_min, dt_max = _limits(dt_limit)
    checks.one_of(OPERATOR, "g_layout", g_layout, G_LAYOUTS)
    args = (dt, A_log, B, C, dt_bias, dt_min, None if dt_max == INF else dt_max, g_layout)
    if out is None:
        return SegsumOutputs(*torch.ops.cute_kernels.mamba_segsum(*args))
    out = _as_outputs(out)
    checks.refuse_gradients_of_out(OPERATOR, dt, A_log, B, C, dt_bias, *out)
    torch.ops.cute_kernels.mamba_segsum_out(*args, *out)
    return out


# --- from arguments to a plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegsumProblem:
    """What of a call is independent of its batch, its device and its values."""

    chunk_size: int
    num_heads: int
    n_groups: int
    d_state: int
    dtype: torch.dtype
    dt_dtype: torch.dtype
    A_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    g_layout: str


class _Plan(NamedTuple):
    """What follows from the arguments' metadata, found once for each combination of them."""

    launch: Callable[..., object] | None  # None: plain PyTorch
    dt_limit: tuple[float, float]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and type, in order
    metadata: list[tuple]  # of the outputs
    output_bytes: tuple[int, ...]
    new: Callable[[], list[Tensor]]  # the outputs
    known_apart: list[tuple]  # the last addresses of outputs and inputs that were found to share no memory
    device: torch.device
    empty: bool  # nothing to compute: no chunks, or no memory
    may_be_negated: bool  # an input may be a lazily negated view: the imaginary part of a conjugate, fp16 or fp32
    B_strides: tuple[int, ...] | None  # that the kernel reads B with; None: copy first
    C_strides: tuple[int, ...] | None
    in_place: bool  # B and C already have these strides


_plans: dict[tuple, _Plan] = {}
_MAX_PLANS = 4096  # a bound for callers whose batch never repeats


def run(
    dt: Tensor,  # [b, c, Q, H]
    A_log: Tensor,  # [H]
    B: Tensor,  # [b, c, Q, G, N]
    C: Tensor,  # [b, c, Q, G, N]
    dt_bias: Tensor | None,  # [H]
    dt_limit: tuple[float, float],
    g_layout: str,
    out: Sequence[Tensor] | None,
) -> SegsumOutputs:
    """The operator on plain tensors, below autograd."""
    try:
        key = (
            dt.shape,
            dt.dtype,
            dt.device,
            A_log.shape,
            A_log.dtype,
            A_log.device,
            B.shape,
            B.stride(),
            B.dtype,
            B.device,
            C.shape,
            C.stride(),
            C.dtype,
            C.device,
            None if dt_bias is None else (dt_bias.shape, dt_bias.dtype, dt_bias.device),
            g_layout,
            dt_limit,
            backend.current(),
        )
        try:
            plan = _plans[key]
        except (KeyError, TypeError):  # TypeError: a dt_limit that is a list
            plan = _make_plan(dt, A_log, B, C, dt_bias, dt_limit, g_layout)
            if type(dt_limit) is tuple and all(type(v) in (int, float) for v in dt_limit):
                if len(_plans) >= _MAX_PLANS:
                    _plans.clear()
                _plans[key] = plan

        if plan.launch is None:
            return _run_torch(plan, dt, A_log, B, C, dt_bias, g_layout, out)
        if out is None:
            out = SegsumOutputs(*plan.new())
        else:
            out = _checked_out(plan, out, dt, A_log, B, C, dt_bias)
            increment_version(out)  # autograd can't see a kernel write
        if plan.empty:
            return out
        if plan.may_be_negated:
            dt, A_log, B, C = dt.resolve_neg(), A_log.resolve_neg(), B.resolve_neg(), C.resolve_neg()
            dt_bias = None if dt_bias is None else dt_bias.resolve_neg()
        if not plan.in_place or (B.data_ptr() | C.data_ptr()) & 15:
            B, C = _readable(B, plan.B_strides), _readable(C, plan.C_strides)
        plan.launch(dt, A_log, dt_bias, B, C, *out)
        return out
    except RuntimeError:
        # What a plan's key leaves out, nested and sparse tensors, fails where it is read.
        check_inputs(dt, A_log, B, C, dt_bias, g_layout)
        raise


def _run_torch(plan: _Plan, dt, A_log, B, C, dt_bias, g_layout, out) -> SegsumOutputs:
    if out is not None:
        out = _checked_out(plan, out, dt, A_log, B, C, dt_bias)
    with torch.no_grad():
        results = segsum_torch(dt, A_log, B, C, dt_bias, *plan.dt_limit, g_layout)
        if out is None:
            return SegsumOutputs(*results)
        for target, result in zip(out, results, strict=True):
            target.copy_(result)
    return out


_metadata = operator.attrgetter("shape", "dtype", "device")


def _checked_out(plan: _Plan, out: Sequence[Tensor], *inputs: Tensor | None) -> SegsumOutputs:
    out = _as_outputs(out)
    if not (
        [*map(_metadata, out)] == plan.metadata
        and all(map(Tensor.is_contiguous, out))
        and not any(map(Tensor.is_neg, out))
    ):
        check_outputs(out, plan.outputs, plan.device)
    if not plan.empty:
        dt, A_log, _, _, dt_bias = inputs  # the plan is for one choice of B's and C's strides
        where = (
            *(*map(Tensor.data_ptr, out), *map(Tensor.data_ptr, inputs[:4]), dt.stride(), A_log.stride()),
            None if dt_bias is None else (dt_bias.data_ptr(), dt_bias.stride()),
        )
        if where not in plan.known_apart:
            checks.check_memory(OPERATOR, _OUT_NAMES, out, plan.output_bytes, _INPUT_NAMES, inputs)
            plan.known_apart[:] = [where]
    return out


def _make_plan(dt, A_log, B, C, dt_bias, dt_limit, g_layout) -> _Plan:
    dt_limit = _limits(dt_limit)
    problem = check_inputs(dt, A_log, B, C, dt_bias, g_layout)
    device = dt.device
    b, c = dt.shape[:2]
    empty = b * c == 0
    launch = None
    if device.type == "meta":
        launch, empty = _launch_nothing, True
    elif checks.has_kernels(OPERATOR, dt):
        launch = _launcher(problem, b, c, dt_limit, device)
    B_strides, C_strides = _kernel_strides(B), _kernel_strides(C)
    outputs = describe_outputs(problem, b, c)
    return _Plan(
        launch,
        dt_limit,
        outputs,
        [(shape, dtype, device) for shape, dtype in outputs],
        tuple(math.prod(shape) * dtype.itemsize for shape, dtype in outputs),
        fresh.maker(device, outputs),
        [],
        device,
        empty,
        not {problem.dtype, problem.dt_dtype, problem.A_dtype, problem.bias_dtype} <= {torch.bfloat16, None},
        B_strides,
        C_strides,
        B.stride() == B_strides and C.stride() == C_strides,
    )


def describe_outputs(problem: SegsumProblem, b: int, c: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and type of the five outputs, in order."""
    q, h, dtype = problem.chunk_size, problem.num_heads, problem.dtype
    columns = h if problem.g_layout == "per_head" else problem.n_groups
    sums = ((b, h, c, q), torch.float32)
    return ((b, h, c, q, q), dtype), ((b, c, q, q, columns), dtype), ((b, c, q, q, h), dtype), sums, sums


def _kernel_strides(x: Tensor) -> tuple[int, ...] | None:
    """The strides a kernel reads B or C with, or None where it can't: TMA needs multiples of 16 bytes, and not 0.

    A dimension of size 1 may have any stride in torch; it gets the one it would have in a compact tensor.
    """
    step = 16 // x.element_size()
    strides = []
    extent = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size == 1:
            stride = extent
        if (stride != 1) if not strides else (stride <= 0 or stride % step):
            return None
        strides.append(stride)
        extent = stride * size
    return tuple(reversed(strides))


def _readable(x: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """x as a kernel can read it: itself, or with size-1 strides made canonical, or a copy."""
    if strides is None or x.data_ptr() & 15:
        return x.clone(memory_format=torch.contiguous_format)
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


# --- launch ----------------------------------------------------------------------------------------------------------


def kernel(problem: SegsumProblem, num_chunks: int, sm_count: int) -> Kernel:
    """The kernel specialisation for one problem and one number of chunks."""
    from cute_kernels.mamba.segsum_config import SegsumConfig, SegsumKernel

    p, per_group = problem, problem.g_layout == "per_group"
    return SegsumKernel(
        chunk_size=p.chunk_size,
        num_heads=p.num_heads,
        n_groups=p.n_groups,
        d_state=p.d_state,
        dtype=dtype_name(p.dtype),
        dt_dtype=dtype_name(p.dt_dtype),
        A_dtype=dtype_name(p.A_dtype),
        bias_dtype="none" if p.bias_dtype is None else dtype_name(p.bias_dtype),
        per_group=per_group,
        **dataclasses.asdict(
            SegsumConfig.for_shape(
                p.chunk_size, p.num_heads, p.n_groups, p.d_state, num_chunks, sm_count, per_group=per_group
            )
        ),
    )


def _launch_nothing(*args: Tensor | None) -> None:
    """The kernel of tensors without memory."""


def _launcher(
    problem: SegsumProblem, b: int, c: int, dt_limit: tuple[float, float], device: torch.device
) -> Callable[..., None]:
    """A function (dt, A_log, dt_bias, B, C, L, G, M, A_cumsum, decay_states) that launches the kernel."""
    check_supported(problem)
    current = backend.current()
    current.arch(device)  # NotImplementedError where there are no kernels for it
    key = kernel(problem, max(b * c, 1), current.sm_count(device))
    function = current.function(key, device)
    dt_min, dt_max = dt_limit

    def launch(dt, A_log, dt_bias, B, C, L, G, M, A_cumsum, decay_states):
        function(dt, A_log, dt_bias, B, C, L, G, M, A_cumsum, decay_states, dt_min, dt_max)

    # The first kernel leaves its running sums, as pairs of fp32, to the second.
    new_sums = fresh.maker(device, [((b, c, problem.num_heads, problem.chunk_size, 2), torch.float32)])

    def launch_two(dt, A_log, dt_bias, B, C, L, G, M, A_cumsum, decay_states):
        (sums,) = new_sums()
        function(dt, A_log, dt_bias, B, C, L, G, M, A_cumsum, decay_states, sums, dt_min, dt_max)

    return launch if key.cluster > 1 else launch_two


# --- without a call --------------------------------------------------------------------------------------------------


def check_shape(
    *,
    dtype: torch.dtype,
    num_heads: int,
    n_groups: int,
    d_state: int,
    chunk_size: int,
    dt_dtype: torch.dtype | None = None,
    A_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    g_layout: str = "per_head",
    device: torch.device | str | int | None = None,
) -> tuple[SegsumProblem, torch.device]:
    """The problem and its device. ValueError where an argument is wrong, NotImplementedError where no kernel covers it.

    dt_dtype and A_dtype are `dtype` unless given; without a bias_dtype there is no dt_bias; the device is the current
    CUDA device unless given.
    """
    dt_dtype = dtype if dt_dtype is None else dt_dtype
    A_dtype = dtype if A_dtype is None else A_dtype
    for name, value, dtypes in (
        ("dtype", dtype, OPERAND_DTYPES),
        ("dt_dtype", dt_dtype, STEP_DTYPES),
        ("A_dtype", A_dtype, STEP_DTYPES),
        ("bias_dtype", bias_dtype, (*STEP_DTYPES, None)),
    ):
        if not any(value is known for known in dtypes):
            raise _wrong(name, checks.shown(value), " or ".join(map(str, dtypes)))
    sizes = {"num_heads": num_heads, "n_groups": n_groups, "d_state": d_state, "chunk_size": chunk_size}
    sizes = {name: checks.integer(OPERATOR, name, value) for name, value in sizes.items()}
    num_heads, n_groups, d_state, chunk_size = sizes.values()
    if num_heads % n_groups:
        raise _wrong("n_groups", n_groups, f"a divisor of num_heads, {num_heads}")
    checks.one_of(OPERATOR, "g_layout", g_layout, G_LAYOUTS)
    problem = SegsumProblem(chunk_size, num_heads, n_groups, d_state, dtype, dt_dtype, A_dtype, bias_dtype, g_layout)
    check_supported(problem)
    return problem, checks.kernel_device(OPERATOR, device)


def warmup(**shape: Any) -> None:
    """Loads or compiles the kernels of a shape for any number of chunks. Takes what `check_shape` takes."""
    problem, device = check_shape(**shape)
    current = backend.current()
    for kernel in _kernels(problem, current.sm_count(device)):
        current.function(kernel, device)


def prebuilt_kernels() -> list[Kernel]:
    """Kernels of the official shape and of released models, for an H200's or B200's number of SMs."""
    bf16 = torch.bfloat16
    problems = [SegsumProblem(256, 16, 1, 256, bf16, bf16, bf16, None, "per_head")]
    problems += [SegsumProblem(*sizes, bf16, bf16, bf16, bf16, "per_head") for sizes in _MODELS.values()]
    kernels = {}
    for sm_count in (132, 148):
        for problem in problems:
            kernels.update(dict.fromkeys(_kernels(problem, sm_count)))
    return list(kernels)


_MODELS = {  # chunk size, heads, groups, states
    "granite-4.0-h-tiny": (256, 48, 1, 128),
    "granite-4.0-h-micro": (256, 64, 1, 128),
    "granite-4.0-h-small": (256, 128, 1, 128),
    "mamba2-2.7b": (256, 80, 1, 128),
    "nemotron-h-8b": (128, 128, 8, 128),
    "falcon-h1-7b": (128, 24, 1, 256),
    "falcon-h1-34b": (128, 32, 2, 256),
}


def _kernels(problem: SegsumProblem, sm_count: int) -> list[Kernel]:
    """The kernels that some number of chunks asks for, each once."""
    # The config may follow the number of chunks while chunks are few against the SMs; it settles above.
    counts = [*range(1, 4 * sm_count), *(1 << k for k in range(10, 31))]
    return list(dict.fromkeys(kernel(problem, n, sm_count) for n in counts))


# --- checks ----------------------------------------------------------------------------------------------------------


def _wrong(name: str, was: object, must: str) -> ValueError:
    return checks.wrong(OPERATOR, name, was, must)


def _as_tensor(name: str, x: Any) -> Tensor:
    return checks.as_tensor(OPERATOR, name, x)


def _as_outputs(out: Sequence[Tensor]) -> SegsumOutputs:
    if type(out) is SegsumOutputs and {*map(type, out)} <= PLAIN:
        return out
    if isinstance(out, Tensor) or not isinstance(out, Sequence) or len(out) != len(SegsumOutputs._fields):
        was = f"{len(out)} items" if isinstance(out, Sequence) else type(out).__qualname__
        raise _wrong("out", was, "five tensors (L, G, M, A_cumsum, decay_states)")
    return SegsumOutputs(*(checks.as_output(OPERATOR, n, t) for n, t in zip(_OUT_NAMES, out, strict=True)))


def _limits(dt_limit: tuple[float, float]) -> tuple[float, float]:
    try:
        if not isinstance(dt_limit, tuple | list):
            raise TypeError
        dt_min, dt_max = map(float, dt_limit)
    except (TypeError, ValueError, OverflowError):
        raise _wrong("dt_limit", checks.shown(dt_limit), "a pair of numbers (smallest, largest)") from None
    if not 0 <= dt_min <= min(dt_max, checks.MAX_FLOAT):
        must = f"(smallest, largest) with 0 <= smallest <= largest, smallest at most {checks.MAX_FLOAT:.4g}"
        raise _wrong("dt_limit", (dt_min, dt_max), must)
    return dt_min, dt_max


def check_inputs(
    dt: Tensor,  # [b, c, Q, H]
    A_log: Tensor,  # [H]
    B: Tensor,  # [b, c, Q, G, N]
    C: Tensor,  # [b, c, Q, G, N]
    dt_bias: Tensor | None,  # [H]
    g_layout: str,
) -> SegsumProblem:
    """ValueError where an argument is wrong, whatever computes with it. Reads metadata alone, fake tensors' too."""
    named = {"dt": dt, "A_log": A_log, "B": B, "C": C}
    if dt_bias is not None:
        named["dt_bias"] = dt_bias
    ranks = {"dt": "[b, c, Q, H]", "A_log": "[H]", "dt_bias": "[H]", "B": "[b, c, Q, G, N]", "C": "[b, c, Q, G, N]"}
    for name, x in named.items():
        rank = ranks[name].count(",") + 1
        if x.is_nested or x.layout != torch.strided:
            raise _wrong(name, "a nested tensor" if x.is_nested else f"a {x.layout} tensor", "a strided tensor")
        if x.dim() != rank:
            raise _wrong(name, f"of shape {list(x.shape)}", f"{ranks[name]}, of rank {rank}")
        dtypes = OPERAND_DTYPES if name in ("B", "C") else STEP_DTYPES
        if x.dtype not in dtypes:
            raise _wrong(name, f"of type {dtype_name(x.dtype)}", checks.dtype_names(dtypes))
        if x.device != dt.device:
            raise _wrong(name, f"on {x.device}", f"on {dt.device} like dt")
    b, c, q, h = dt.shape
    g, n = B.shape[3:]
    if C.dtype != B.dtype:
        raise _wrong("C", f"of type {dtype_name(C.dtype)}", f"{dtype_name(B.dtype)} like B")
    if q < 1 or h < 1:
        raise _wrong("dt", f"of shape {list(dt.shape)}", "[b, c, Q, H] with Q >= 1 and H >= 1")
    for name in ("A_log", "dt_bias"):
        if name in named and named[name].shape[0] != h:
            raise _wrong(name, f"of shape {list(named[name].shape)}", f"[{h}], one value for each of dt's {h} heads")
    if B.shape[0] != b or B.shape[1] != c or B.shape[2] != q:
        raise _wrong("B", f"of shape {list(B.shape)}", f"[{b}, {c}, {q}, G, N], as dt is {list(dt.shape)}")
    if g < 1 or n < 1:
        raise _wrong("B", f"of shape {list(B.shape)}", "[b, c, Q, G, N] with G >= 1 and N >= 1")
    if h % g:
        raise _wrong("B", f"of shape {list(B.shape)}", f"[b, c, Q, G, N] with G a divisor of dt's {h} heads")
    if any(C.shape[k] != B.shape[k] for k in range(5)):
        raise _wrong("C", f"of shape {list(C.shape)}", f"{list(B.shape)} like B")
    checks.one_of(OPERATOR, "g_layout", g_layout, G_LAYOUTS)
    bias_dtype = None if dt_bias is None else dt_bias.dtype
    return SegsumProblem(q, h, g, n, B.dtype, dt.dtype, A_log.dtype, bias_dtype, g_layout)


def check_supported(problem: SegsumProblem) -> None:
    """NotImplementedError where the problem is right, but has no kernel."""
    if problem.chunk_size not in CHUNK_SIZES:
        raise NotImplementedError(
            f"mamba_segsum: no kernel for chunks of Q = {problem.chunk_size} steps; supported are 64, 128 and 256"
        )
    if problem.d_state not in D_STATES:
        raise NotImplementedError(
            f"mamba_segsum: no kernel for N = {problem.d_state} states; supported are multiples of 16 from 16 to 256"
        )


def check_outputs(
    out: SegsumOutputs, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> None:
    """ValueError where a given output has the wrong shape, type, device or layout. Reads metadata alone."""
    for name, x, (shape, dtype) in zip(_OUT_NAMES, out, wanted, strict=True):
        checks.check_output(OPERATOR, name, x, shape, dtype, device, "dt")
