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
from cutlass import Float32

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
def warp_scan(step: cute.Tensor, values: cutlass.Constexpr):  # step: (values,) this lane's steps, in order
    """Inclusive sums over a warp's 32 * ``values`` steps as (hi, lo), each (values,): hi is the sum rounded to fp32."""
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
        rest = _finite_or_zero((before_e + e[k]) + err, sum_s)
        hi[k] = sum_s + rest
        lo[k] = _finite_or_zero(rest - (hi[k] - sum_s), hi[k])
    return hi, lo


def to_log2(hi, lo):
    """A pair in units of log2, for finite hi."""
    scaled = hi * LOG2_E
    low = cute.math.fma(hi, Float32(LOG2_E), -scaled)
    return scaled, cute.math.fma(hi, Float32(LOG2_E_LO), low) + lo * LOG2_E


def sums_layout(chunk_size, heads):
    """(hi | lo, Q, head) in shared memory, with a gap after the rows of each scanning lane that spreads the banks."""
    values = chunk_size // 32
    lane = 2 * values + 2
    return cute.make_layout((2, (values, 32), heads), stride=(1, (2, lane), 32 * lane + 2))


def _of_lane(sums, h, values, lane):
    """This lane's (hi | lo, values) of head h."""
    return cute.flat_divide(sums[None, None, h], (2, values))[None, None, 0, lane]


@cute.jit
def scan_heads(
    gdt: cute.Tensor,  # (Q, head)
    gA_log: cute.Tensor,  # (head,)
    gbias: cute.Tensor | None,  # (head,)
    work: cute.Tensor,  # (hi | lo, Q, head) in shared memory
    sums: cute.Tensor,  # (hi | lo, Q, head)
    gA_cumsum: cute.Tensor,  # (Q, head)
    gstates: cute.Tensor,  # (Q, head)
    dt_min: Float32,
    dt_max: Float32,
    heads: cutlass.Constexpr,
    threads: cutlass.Constexpr,
):
    """Sums, A_cumsum and decay_states of one chunk and ``heads`` heads (all threads of the block call)."""
    Q = cute.size(work, mode=[1])
    tidx = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()

    # a thread keeps its head, so that A is computed once
    rows_per_pass = threads // heads
    h, first = tidx % heads, tidx // heads
    if first < rows_per_pass:
        passes = -(-Q // rows_per_pass)
        dt = cute.make_rmem_tensor(passes, Float32)
        for p in cutlass.range_constexpr(passes):  # all loads in flight before the arithmetic
            r = first + p * rows_per_pass
            dt[p] = Float32(0.0)
            if r < Q:
                dt[p] = gdt[r, h].to(Float32)
        rate = decay_rate(gA_log[h].to(Float32))
        bias = None
        if cutlass.const_expr(gbias is not None):
            bias = gbias[h].to(Float32)
        for p in cutlass.range_constexpr(passes):
            r = first + p * rows_per_pass
            if r < Q:
                work[0, r, h] = decay_step(dt[p], bias, rate, dt_min, dt_max)
    cute.arch.sync_threads()

    V, warps = Q // 32, threads // 32
    for n in cutlass.range_constexpr(-(-heads // warps)):
        h = warp + n * warps
        if h < heads:
            steps = cute.make_rmem_tensor(V, Float32)
            cute.autovec_copy(_of_lane(work, h, V, lane)[0, None], steps)
            hi, lo = warp_scan(steps, V)
            total = cute.make_rmem_tensor(V, Float32)
            counts_as_is = cutlass.Boolean(True)
            for k in cutlass.range_constexpr(V):
                total[k] = hi[k]
                counts_as_is &= (steps[k] <= 0.0) & (steps[k] >= STEP_FLOOR)
            if not cute.arch.vote_all_sync(counts_as_is):
                for k in cutlass.range_constexpr(V):
                    steps[k] = bounded_step(steps[k])
                bounded_hi, bounded_lo = warp_scan(steps, V)
                for k in cutlass.range_constexpr(V):
                    hi[k], lo[k] = bounded_hi[k], bounded_lo[k]
            pairs = cute.make_rmem_tensor((2, V), Float32)
            for k in cutlass.range_constexpr(V):
                pairs[0, k], pairs[1, k] = to_log2(hi[k], lo[k])
            end_hi = cute.arch.shuffle_sync(pairs[0, V - 1], 31)
            end_lo = cute.arch.shuffle_sync(pairs[1, V - 1], 31)
            states = cute.make_rmem_tensor(V, Float32)
            for k in cutlass.range_constexpr(V):
                states[k] = decay(difference(end_hi, end_lo, pairs[0, k], pairs[1, k]))
            cute.autovec_copy(pairs, _of_lane(sums, h, V, lane))
            cute.autovec_copy(total, cute.flat_divide(gA_cumsum[None, h], (V,))[None, lane])
            cute.autovec_copy(states, cute.flat_divide(gstates[None, h], (V,))[None, lane])
