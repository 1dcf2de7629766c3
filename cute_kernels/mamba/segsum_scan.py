"""Discretization and the cumulative sums of one chunk (device code).

exp(A_cumsum[i] - A_cumsum[j]) from fp32 sums loses every digit once |A_cumsum| is in the thousands, so sums are kept as
two floats, hi + lo, and their differences are taken part by part. They are kept in units of log2: one ``ex2`` turns a
difference into an element of L.

Steps below -2048 count as -2048 in these sums, for e^-2048 is 0 already; so an infinite step does not spoil the
differences that do not contain it. A NaN step counts as +2^21, which no sum of other steps can hide: a difference above
2^20 is NaN. A_cumsum itself is a second sum, of the steps as they are.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device.math import (
    LOG2_E,
    LOG2_E_LO,
    exp,
    exp2_approx,
    max_nan,
    min_nan,
    select,
    softplus,
    two_sum,
)

FLT_MAX = 3.4028234663852886e38
INF, NAN = float("inf"), float("nan")
STEP_FLOOR = -2048.0  # 256 of them: -2^19
NAN_STEP, NAN_SUM = 2.0**21, 2.0**20
TOGETHER = 2  # steps whose arithmetic is interleaved
AT_ONCE = 8  # steps of a thread whose loads are in flight together


def decay_rate(A_log):
    """A = -exp(A_log), finite unless A_log is +inf."""
    rate = exp(A_log)
    return -select(A_log < INF, min_nan(rate, Float32(FLT_MAX)), rate)


def decay_step(dt, bias, rate, dt_min, dt_max):
    """a = A * clamp(softplus(dt + bias)): one step of the sum. Finite inputs give a finite step."""
    if bias is None:
        delta = softplus(dt)
    else:
        x, x_lo = two_sum(dt, bias)
        delta = softplus(x, _finite_or_zero(x_lo, x))
    delta = min_nan(max_nan(delta, dt_min), dt_max)
    step = rate * delta
    finite = (delta < INF) & (rate > -INF)
    return select(finite, max_nan(step, Float32(-FLT_MAX)), step)


def bounded_step(step):
    """The step as the sums count it."""
    return select(step <= 0.0, cute.arch.fmax(step, Float32(STEP_FLOOR)), Float32(NAN_STEP))


def decay(difference):
    """2^difference, for a difference of sums; rounding can make one positive, which a decay is not."""
    return select(difference < NAN_SUM, exp2_approx(min_nan(difference, Float32(0.0))), Float32(NAN))


def difference(hi_i, lo_i, hi_j, lo_j):
    """sum_i - sum_j, part by part."""
    return (hi_i - hi_j) + (lo_i - lo_j)


def _finite_or_zero(lo, hi):
    # the residual of an infinite sum is NaN
    return select(cute.math.abs(hi) <= FLT_MAX, lo, Float32(0.0))


@cute.jit
def warp_scan(
    step: cute.Tensor,  # (values,) this lane's steps, in order
    values: cutlass.Constexpr,
    finite: cutlass.Constexpr,
):
    """Inclusive sums over a warp's 32 * ``values`` steps as (hi, lo), each (values,): hi is the sum rounded to fp32.

    ``finite``: no sum is infinite or NaN.
    """
    lane = cute.arch.lane_idx()
    s = cute.make_rmem_tensor(values, Float32)
    e = cute.make_rmem_tensor(values, Float32)
    s[0], e[0] = step[0], Float32(0.0)
    for k in cutlass.range_constexpr(1, values):
        s[k], err = two_sum(s[k - 1], step[k])
        e[k] = e[k - 1] + err

    lane_s, lane_e = s[values - 1], e[values - 1]
    for n in cutlass.range_constexpr(5):
        up_s = cute.arch.shuffle_sync_up(lane_s, 1 << n)
        up_e = cute.arch.shuffle_sync_up(lane_e, 1 << n)
        sum_s, err = two_sum(up_s, lane_s)
        from_lane = lane >= (1 << n)
        lane_s = select(from_lane, sum_s, lane_s)
        lane_e = select(from_lane, (up_e + lane_e) + err, lane_e)
    before_s = select(lane > 0, cute.arch.shuffle_sync_up(lane_s, 1), Float32(0.0))
    before_e = select(lane > 0, cute.arch.shuffle_sync_up(lane_e, 1), Float32(0.0))

    hi = cute.make_rmem_tensor(values, Float32)
    lo = cute.make_rmem_tensor(values, Float32)
    for k in cutlass.range_constexpr(values):
        sum_s, err = two_sum(before_s, s[k])
        rest = (before_e + e[k]) + err
        if cutlass.const_expr(not finite):
            rest = _finite_or_zero(rest, sum_s)
        hi[k] = sum_s + rest
        lo[k] = rest - (hi[k] - sum_s)
    return hi, lo


def to_log2(hi, lo):
    """A pair in units of log2, for finite hi."""
    scaled = hi * LOG2_E
    low = cute.math.fma(hi, Float32(LOG2_E), -scaled)
    return scaled, cute.math.fma(hi, Float32(LOG2_E_LO), low) + lo * LOG2_E


def steps_layout(chunk_size, heads):
    """(Q, head) in shared memory, with a gap that spreads the heads over the banks."""
    return cute.make_layout((chunk_size, heads), stride=(1, chunk_size + 2))


class Steps:
    """How the threads of a block share the steps of ``heads`` heads: a thread keeps its head, so that A is computed
    once, and walks over rows."""

    def __init__(self, chunk_size, heads, threads):
        self.chunk_size, self.heads, self.threads = chunk_size, heads, threads
        self.rows = threads // heads  # of a pass
        passes = -(-chunk_size // self.rows)
        self.at_once = min(passes, AT_ONCE)
        self.batches = -(-passes // self.at_once)

    @cute.jit
    def load(
        self,
        gdt: cute.Tensor,  # (Q, head)
        end: Int32,
        batch: Int32,
    ):
        """This thread's elements of dt of a batch of passes, of rows above ``end``; others in their place below."""
        tidx = cute.arch.thread_idx()[0]
        h, first = tidx % self.heads, tidx // self.heads + batch * (self.at_once * self.rows)
        dt = cute.make_rmem_tensor(self.at_once, gdt.element_type)
        for p in cutlass.range_constexpr(self.at_once):
            # not under a condition, behind which the compiler waits for each element to convert it
            dt[p] = gdt[cutlass.min(first + p * self.rows, end - 1), h]
        return dt

    @cute.jit
    def rate(
        self,
        gA_log: cute.Tensor,  # (head,)
        gbias: cute.Tensor | None,  # (head,)
    ):
        """A_log and the bias of this thread's head."""
        h = cute.arch.thread_idx()[0] % self.heads
        bias = None
        if cutlass.const_expr(gbias is not None):
            bias = gbias[h]
        return gA_log[h], bias

    @cute.jit
    def make(
        self,
        dt: cute.Tensor,  # what ``load`` gave for batch 0
        A_log,
        bias,
        gdt: cute.Tensor,  # (Q, head)
        steps: cute.Tensor,  # (Q, head) in shared memory
        end: Int32,
        dt_min: Float32,
        dt_max: Float32,
    ):
        """Steps above row ``end`` to shared memory, and something finite below."""
        rate = decay_rate(A_log.to(Float32))
        bias = None if cutlass.const_expr(bias is None) else bias.to(Float32)
        self.put(dt, rate, bias, steps, end, 0, dt_min, dt_max)
        if cutlass.const_expr(self.batches > 1):
            for batch in cutlass.range(1, self.batches, unroll=1):
                self.put(self.load(gdt, end, batch), rate, bias, steps, end, batch, dt_min, dt_max)

    @cute.jit
    def put(self, dt, rate, bias, steps, end, batch, dt_min, dt_max):
        tidx = cute.arch.thread_idx()[0]
        h, first = tidx % self.heads, tidx // self.heads + batch * (self.at_once * self.rows)
        if tidx < self.rows * self.heads:
            for p in cutlass.range_constexpr(0, self.at_once, TOGETHER):
                rows = [first + (p + k) * self.rows for k in range(min(TOGETHER, self.at_once - p))]
                if rows[0] < end:
                    found = [decay_step(dt[p + k].to(Float32), bias, rate, dt_min, dt_max) for k in range(len(rows))]
                    for k in cutlass.range_constexpr(len(rows)):
                        if rows[k] < self.chunk_size:
                            steps[rows[k], h] = found[k]
                else:
                    for k in cutlass.range_constexpr(len(rows)):
                        if rows[k] < self.chunk_size:
                            steps[rows[k], h] = Float32(0.0)


@cute.jit
def scan_lanes(steps: cute.Tensor):  # (values,) this lane's steps of one head, in order
    """(sums (hi | lo, values) in units of log2, sums (values,) of the steps as they are) of a warp's steps."""
    values = cute.size(steps)
    total, as_they_are = cute.make_rmem_tensor(values, Float32), cutlass.Boolean(True)
    for k in cutlass.range_constexpr(values):
        as_they_are &= (steps[k] <= 0.0) & (steps[k] >= STEP_FLOOR)
    bounded = not cute.arch.vote_all_sync(as_they_are)
    if bounded:
        sums, _ = warp_scan(steps, values, finite=False)
        for k in cutlass.range_constexpr(values):
            total[k] = sums[k]
            steps[k] = bounded_step(steps[k])
    hi, lo = warp_scan(steps, values, finite=True)
    pairs = cute.make_rmem_tensor((2, values), Float32)
    for k in cutlass.range_constexpr(values):
        total[k] = select(bounded, total[k], hi[k])
        pairs[0, k], pairs[1, k] = to_log2(hi[k], lo[k])
    return pairs, total


@cute.jit
def write_states(
    pairs: cute.Tensor,  # (hi | lo, values) of this lane
    total: cute.Tensor,  # (values,)
    gA_cumsum: cute.Tensor,  # (Q,)
    gstates: cute.Tensor,  # (Q,)
):
    """A_cumsum and decay_states of one head (one warp)."""
    values, lane = cute.size(total), cute.arch.lane_idx()
    end_hi = cute.arch.shuffle_sync(pairs[0, values - 1], 31)
    end_lo = cute.arch.shuffle_sync(pairs[1, values - 1], 31)
    states = cute.make_rmem_tensor(values, Float32)
    for k in cutlass.range_constexpr(values):
        states[k] = decay(difference(end_hi, end_lo, pairs[0, k], pairs[1, k]))
    cute.autovec_copy(total, cute.flat_divide(gA_cumsum, (values,))[None, lane])
    cute.autovec_copy(states, cute.flat_divide(gstates, (values,))[None, lane])
