"""Discretization and the compensated cumulative sum over one chunk (device code).

exp(A_cumsum[i] - A_cumsum[j]) from fp32 sums loses every digit once |A_cumsum| is in the thousands, so sums are kept as
two floats, hi + lo, and their differences are taken part by part. They are kept in units of log2: one ``ex2`` turns a
difference into an element of L.
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
INF = float("inf")
STEP_FLOOR = -(2.0**119)  # 256 such steps, in units of log2, stay finite


def decay_rate(A_log):
    """A = -exp(A_log), finite unless A_log is +inf."""
    rate = exp(A_log)
    return -select(A_log < INF, min_nan(rate, Float32(FLT_MAX)), rate)


def decay_step(dt, rate, dt_min, dt_max):
    """a = A * clamp(softplus(dt)): one step of the sum. Finite inputs give a finite step."""
    delta = min_nan(max_nan(softplus(dt), dt_min), dt_max)
    step = rate * delta
    finite = (delta < INF) & (rate > -INF)
    return select(finite, max_nan(step, Float32(STEP_FLOOR)), step)


def decay(hi_i, lo_i, hi_j, lo_j):
    """exp of the sum over j < s <= i. Rounding can make the exponent positive, which a decay is not; NaN stays."""
    return exp2_approx(min_nan((hi_i - hi_j) + (lo_i - lo_j), Float32(0.0)))


def _finite_or_zero(lo, hi):
    # infinite sums have a NaN residual, which would spoil the -inf that the exponent must be
    return select(cute.math.abs(hi) <= FLT_MAX, lo, Float32(0.0))


@cute.jit
def warp_scan(step: cute.Tensor, values: cutlass.Constexpr):  # step: (values,) this lane's steps, in order
    """Inclusive sums over a warp's 32 * ``values`` steps: (total, hi, lo), each (values,).

    ``total`` is the sum rounded to fp32 once; hi + lo is the same sum in units of log2.
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

    total = cute.make_rmem_tensor(values, Float32)
    hi = cute.make_rmem_tensor(values, Float32)
    lo = cute.make_rmem_tensor(values, Float32)
    for k in cutlass.range_constexpr(values):
        sum_s, err = two_sum(before_s, s[k])
        rest = _finite_or_zero((before_e + e[k]) + err, sum_s)
        total[k] = sum_s + rest
        rest = _finite_or_zero(rest - (total[k] - sum_s), sum_s)
        hi[k] = total[k] * LOG2_E
        low = cute.math.fma(total[k], Float32(LOG2_E), -hi[k])
        low = cute.math.fma(total[k], Float32(LOG2_E_LO), low) + rest * LOG2_E
        lo[k] = _finite_or_zero(low, hi[k])
    return total, hi, lo


def _of_lane(sums, h, values, lane):
    """This lane's (hi | lo, values) of head h."""
    return cute.flat_divide(sums[None, None, h], (2, values))[None, None, 0, lane]


@cute.jit
def scan_heads(
    mdt: cute.Tensor,  # (Q, H) of one chunk
    mA_log: cute.Tensor,  # (H,)
    mbias: cute.Tensor | None,  # (H,)
    sums: cute.Tensor,  # (hi | lo, Q, head) in shared memory: room to work, and the result without `out`
    out: cute.Tensor | None,  # (hi | lo, Q, head)
    mA_cumsum: cute.Tensor | None,  # (Q, H) of the chunk
    mdecay: cute.Tensor | None,  # (Q, H)
    write_states: cutlass.Boolean,
    row0: Int32,
    rows: Int32,
    h0: Int32,
    dt_min: Float32,
    dt_max: Float32,
    threads: cutlass.Constexpr,
):
    """Sums from ``row0`` on of as many heads as ``sums`` has, over ``rows`` rows (all threads call, a barrier ends it).

    Writes A_cumsum and decay_states, if they are given, when ``write_states``.
    """
    Q, heads = cute.size(sums, mode=[1]), sums.shape[2]
    tidx = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()

    # steps go through the places of hi; a thread keeps its head, so that A is computed once
    rows_per_pass = threads // heads
    h, first = tidx % heads, tidx // heads
    if first < rows_per_pass:
        passes = -(-Q // rows_per_pass)
        dt = cute.make_rmem_tensor(passes, Float32)
        for p in cutlass.range_constexpr(passes):  # all loads in flight before the arithmetic
            r = first + p * rows_per_pass
            dt[p] = Float32(0.0)
            if r < rows:
                dt[p] = mdt[row0 + r, h0 + h].to(Float32)
        rate = decay_rate(mA_log[h0 + h].to(Float32))
        bias = Float32(0.0)
        if cutlass.const_expr(mbias is not None):
            bias = mbias[h0 + h].to(Float32)
        for p in cutlass.range_constexpr(passes):
            r = first + p * rows_per_pass
            step = Float32(0.0)
            if r < rows:
                step = decay_step(dt[p] + bias, rate, dt_min, dt_max)
            if r < Q:
                sums[0, r, h] = step
    cute.arch.sync_threads()

    V, warps = Q // 32, threads // 32
    for n in cutlass.range_constexpr(-(-heads // warps)):
        h = warp + n * warps
        if h < heads:
            mine = _of_lane(sums, h, V, lane)
            pairs = cute.make_rmem_tensor((2, V), Float32)
            cute.autovec_copy(mine, pairs)
            total, hi, lo = warp_scan(pairs[0, None], V)
            for k in cutlass.range_constexpr(V):
                pairs[0, k], pairs[1, k] = hi[k], lo[k]
            cute.autovec_copy(pairs, mine if out is None else _of_lane(out, h, V, lane))
            if cutlass.const_expr(mA_cumsum is not None):
                end_hi = cute.arch.shuffle_sync(hi[V - 1], 31)
                end_lo = cute.arch.shuffle_sync(lo[V - 1], 31)
                if write_states:
                    states = cute.make_rmem_tensor(V, Float32)
                    for k in cutlass.range_constexpr(V):
                        states[k] = decay(end_hi, end_lo, hi[k], lo[k])
                    cute.autovec_copy(total, cute.flat_divide(mA_cumsum[None, h0 + h], (V,))[None, lane])
                    cute.autovec_copy(states, cute.flat_divide(mdecay[None, h0 + h], (V,))[None, lane])
    cute.arch.sync_threads()
