"""Judges the operator's outputs against float64.

The bar, for every element:

    L             1 ulp of its type + 1e-7, within [0, 1], 1 on the diagonal
    G             1 ulp of its type + 2^-21 * sum_n |C||B|   (an fp32 accumulator cancels)
    M             1 ulp of its type + 2^-21 * sum_n |C||B| * L
    A_cumsum      4 fp32 ulp of the running sum of |a|
    decay_states  2e-6, never above 1
    L and M are exactly 0 above the diagonal.

Where step s of `dt` or `A_log` makes a[s] NaN or infinite, an output whose sum contains s equals the oracle's (NaN for
NaN, infinity for infinity, 0 for exp(-inf)); the same scan's other outputs may be NaN, never a different number. A
scan without such a step has no excuse.

The work is vectorised and goes slab by slab of whole chunks, so that outputs of any size can be judged where they lie.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reference import segsum as oracle
from reference.inputs import SegsumInputs

L_ABSOLUTE = 1e-7
G_RELATIVE = 2.0**-21
CUMSUM_ULPS = 4
DECAY_ABSOLUTE = 2e-6
FP32_OVERFLOW = 2.0**128
FP32_NORMAL = 2.0**-126

# [b, H, c, Q, Q] elements of one slab: about a dozen float64 temporaries of this size live at once.
SLAB_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}


@dataclass(frozen=True)
class OutputReport:
    """How one output compares."""

    name: str
    elements: int = 0
    wrong: int = 0  # elements outside the bar
    max_error: float = 0.0  # largest |value - float64| among elements where both are finite
    max_ratio: float = 0.0  # largest error over its tolerance, the same elements; above 1 is wrong
    at: tuple[int, ...] | None = None  # the first wrong element; without one, the element of max_ratio
    found: float = 0.0
    expected: float = 0.0

    @property
    def ok(self) -> bool:
        return self.wrong == 0

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"{self.wrong} of {self.elements} elements WRONG, first"
        place = "" if self.at is None else f" at {list(self.at)}: {self.found!r}, float64 {self.expected!r}"
        return f"{self.name:12} error {self.max_error:.3g}, {self.max_ratio:.3f} of the bar; {verdict}{place}"


@dataclass(frozen=True)
class Report:
    """How all five outputs compare."""

    outputs: dict[str, OutputReport] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(r.ok for r in self.outputs.values())

    def __str__(self) -> str:
        return "\n".join(str(r) for r in self.outputs.values())

    def __getitem__(self, name: str) -> OutputReport:
        return self.outputs[name]


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of `dtype` at the magnitude of x (float64), the subnormals' spacing below its smallest normal number."""
    info = torch.finfo(dtype)
    # A double with its mantissa cleared is the power of two at or below it.
    power = (x.contiguous().view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return power.clamp_(min=info.tiny).mul_(info.eps)


def judge(
    name: str,
    found: Tensor,  # any shape, the output's own type
    expected: Tensor,  # broadcasts to it, float64
    tolerance: Tensor,  # broadcasts to it, float64
    *,
    low: float = -oracle.INF,
    high: float = oracle.INF,
    exact: Tensor | None = None,  # where the value must be the oracle's own
    may_be_nan: Tensor | None = None,  # where NaN is as good
    may_overflow: Tensor | None = None,  # where fp32 itself is out of range, and so infinity or NaN is as good
) -> OutputReport:
    """Compares one output, or one piece of one, element by element."""
    expected, tolerance = expected.expand(found.shape), tolerance.expand(found.shape)
    value = found.double()
    error = (value - expected).abs_()
    finite = expected.isfinite()
    same = (value == expected) | (value.isnan() & expected.isnan())
    good = same | ((error <= tolerance) & finite & (value >= low) & (value <= high))
    # Rounding to a type of smaller range may overflow; saturating instead of it is an error like any other.
    info = torch.finfo(found.dtype)
    overflow = info.max * (1 + info.eps / 4)
    good |= value.isinf() & (value.sign() == expected.sign()) & (expected.abs() + tolerance >= overflow)
    if may_overflow is not None:
        good |= may_overflow & ~value.isfinite()
    if exact is not None:
        good = torch.where(exact, same, good)
    if may_be_nan is not None:
        good |= may_be_nan & value.isnan()

    comparable = finite & value.isfinite()
    error = torch.where(comparable, error, 0.0)
    ratio = torch.where(error > 0, error / tolerance, 0.0)
    if exact is not None:
        ratio = torch.where(exact, 0.0, ratio)
    elements = found.numel()
    if elements == 0:
        return OutputReport(name)
    wrong = elements - int(good.sum())
    where = int((~good).flatten().byte().argmax()) if wrong else int(ratio.flatten().argmax())
    at = _unravel(where, found.shape)
    return OutputReport(
        name, elements, wrong, float(error.max()), float(ratio.max()), at, float(value[at]), float(expected[at])
    )


def compare(inputs: SegsumInputs, outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> Report:
    """Judges (L, G, M, A_cumsum, decay_states), each of the operator's own shape and type."""
    L, G, M, A_cumsum, decay_states = outputs
    b, c, q, h = inputs.dt.shape
    g = inputs.B.shape[3]
    dtype = inputs.B.dtype
    shapes = {
        "L": (L, (b, h, c, q, q), dtype),
        "G": (G, (b, c, q, q, h if inputs.g_layout == "per_head" else g), dtype),
        "M": (M, (b, c, q, q, h), dtype),
        "A_cumsum": (A_cumsum, (b, h, c, q), torch.float32),
        "decay_states": (decay_states, (b, h, c, q), torch.float32),
    }
    for name, (tensor, shape, wanted) in shapes.items():
        if tuple(tensor.shape) != shape or tensor.dtype != wanted:
            raise AssertionError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {wanted} {list(shape)}")
    reports = {name: OutputReport(name) for name in shapes}
    slab = SLAB_ELEMENTS["cuda" if L.is_cuda else "cpu"]
    for bs, cs in _slabs(b, c, max(1, slab // (q * q * max(h, g)))):
        part = inputs._replace(dt=inputs.dt[bs, cs], B=inputs.B[bs, cs], C=inputs.C[bs, cs])
        pieces = (L[bs, :, cs], G[bs, cs], M[bs, cs], A_cumsum[bs, :, cs], decay_states[bs, :, cs])
        for r in _compare_slab(part, *pieces):
            origin = (bs.start, cs.start) if r.name in ("G", "M") else (bs.start, 0, cs.start)
            reports[r.name] = _merge(reports[r.name], r, origin)
    return Report(reports)


def assert_ok(inputs: SegsumInputs, outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> Report:
    """`compare`, raising AssertionError with the whole report where an element is outside the bar."""
    report = compare(inputs, outputs)
    if not report.ok:
        raise AssertionError(f"outside the bar:\n{report}")
    return report


def _compare_slab(
    x: SegsumInputs,
    L: Tensor,  # [b, H, c, Q, Q]
    G: Tensor,  # [b, c, Q, Q, H or G]
    M: Tensor,  # [b, c, Q, Q, H]
    A_cumsum: Tensor,  # [b, H, c, Q]
    decay_states: Tensor,  # [b, H, c, Q]
) -> Iterator[OutputReport]:
    q, h = x.dt.shape[2:]
    g = x.B.shape[3]
    dtype = L.dtype
    a = oracle.steps(x.dt, x.A_log, x.dt_bias, x.dt_limit)
    bad = ~a.isfinite()
    count = bad.cumsum(-1)  # [b, H, c, Q]
    total = count[..., -1:]
    dirty = total > 0  # scans with a bad step
    any_bad = bool(dirty.any())
    mask = oracle.lower_triangle(q, a.device)
    upper = ~mask
    diagonal = torch.eye(q, dtype=torch.bool, device=a.device)

    running = a.abs().cumsum(-1)
    yield judge(
        "A_cumsum",
        A_cumsum,
        a.cumsum(-1),
        CUMSUM_ULPS * ulp(running, torch.float32),
        exact=count > 0,
        may_be_nan=dirty & (count == 0),
    )
    yield judge(
        "decay_states",
        decay_states,
        torch.exp(oracle.later_sums(a)),
        torch.tensor(DECAY_ABSOLUTE, dtype=torch.float64, device=a.device),
        low=0.0,
        high=1.0,
        exact=total > count,
        may_be_nan=dirty & (total == count),
    )

    ref_L = oracle.decay_matrix(a)  # [b, H, c, Q, Q]
    # Exact: above the diagonal, on it, and where the sum holds a bad step.
    contains = (count[..., :, None] > count[..., None, :]) if any_bad else None
    excused = (dirty[..., None] & ~contains & mask) if any_bad else None
    exact = upper | diagonal
    yield judge(
        "L",
        L,
        ref_L,
        ulp(ref_L, dtype).add_(L_ABSOLUTE),
        low=0.0,
        high=1.0,
        exact=exact | contains if any_bad else exact,
        may_be_nan=excused,
    )

    ref_G = oracle.products(x.B, x.C)  # [b, c, Q, Q, G]
    bound = oracle.products(x.B.abs(), x.C.abs())
    # Beyond fp32's range an fp32 accumulator has no right answer. (B and C with infinities have one: IEEE's.)
    too_large = (bound >= FP32_OVERFLOW) & ref_G.isfinite() & bound.isfinite()
    bound = bound * G_RELATIVE
    per_head = G.shape[-1] == h
    report = judge(
        "G",
        G.unflatten(-1, (g, h // g)) if per_head else G[..., None],
        ref_G[..., None],
        (ulp(ref_G, dtype) + bound)[..., None],
        may_overflow=too_large[..., None],
    )
    yield _join_heads(report, h // g if per_head else 1)

    def by_group(t: Tensor) -> Tensor:  # [b, H, c, Q, Q] -> [b, c, Q, Q, G, H / G]
        return t.permute(0, 2, 3, 4, 1).unflatten(-1, (g, h // g))

    lower = mask[..., None, None]
    weight = by_group(ref_L)
    ref_M = torch.where(lower, ref_G[..., None] * weight, 0.0)
    M_exact = ~lower
    M_excused = None
    if any_bad:
        M_exact = M_exact | by_group(contains)
        M_excused = by_group(excused)
    # inf * exp(-200) is inf, but exp(-200) is 0 in fp32, and inf * 0 is NaN.
    vanishing = lower & ~ref_G.isfinite()[..., None] & (weight < FP32_NORMAL)
    M_excused = vanishing if M_excused is None else M_excused | vanishing
    report = judge(
        "M",
        M.unflatten(-1, (g, h // g)),
        ref_M,
        ulp(ref_M, dtype).add_(bound[..., None] * weight),
        exact=M_exact,
        may_be_nan=M_excused,
        may_overflow=too_large[..., None] & lower,
    )
    yield _join_heads(report, h // g)


def _slabs(b: int, c: int, chunks: int) -> Iterator[tuple[slice, slice]]:
    """Covers [b, c] with rectangles of at most `chunks` chunks."""
    rows = max(1, chunks // max(c, 1))
    columns = max(1, min(c, chunks))
    for i in range(0, b, rows):
        for k in range(0, c, columns):
            yield slice(i, min(i + rows, b)), slice(k, min(k + columns, c))


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        index, k = divmod(index, size)
        at.append(k)
    return tuple(reversed(at))


def _join_heads(report: OutputReport, heads: int) -> OutputReport:
    """Turns an index that ends in [group, head of the group] into one that ends in the head."""
    if report.at is None:
        return report
    *rest, group, head = report.at
    return replace(report, at=(*rest, group * heads + head))


def _merge(whole: OutputReport, part: OutputReport, origin: tuple[int, ...]) -> OutputReport:
    if part.elements == 0:
        return whole
    keep = whole.wrong > 0 or (part.wrong == 0 and whole.at is not None and whole.max_ratio >= part.max_ratio)
    shown = whole if keep else part
    at = shown.at
    if not keep:
        at = tuple(k + o for k, o in zip(at, origin + (0,) * (len(at) - len(origin)), strict=True))
    return OutputReport(
        whole.name,
        whole.elements + part.elements,
        whole.wrong + part.wrong,
        max(whole.max_error, part.max_error),
        max(whole.max_ratio, part.max_ratio),
        at,
        shown.found,
        shown.expected,
    )
