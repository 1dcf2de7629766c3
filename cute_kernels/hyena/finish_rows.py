"""What `finish` does to rows of tokens between its products: load, LayerNorm, GELU, store.

A warpgroup's accumulators are fp32 registers in the tensor core's order: register 4 b + 2 m + c of a thread holds row
16 warp + lane / 4 + 8 m and column 8 b + 2 (lane % 4) + c. A pair of columns is what a thread loads and stores at once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.pin import pin
from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Finish

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
BOX, TILE, THREADS = Finish.box, Finish.tile, Finish.consumers
ROWS_BARRIER, TURN_BARRIER, GROUP_BARRIER = 1, 2, 4  # all consumers; each warpgroup's turn; each warpgroup's own


@cute.jit
def sync():
    cute.arch.barrier(barrier_id=ROWS_BARRIER, number_of_threads=THREADS)


@cute.jit
def sync_warpgroup(wg: I32):
    cute.arch.barrier(barrier_id=GROUP_BARRIER + wg, number_of_threads=THREADS // 2)


@cute.jit
def take_turn(wg: I32, made: cute.Tensor | None, zero: I32):
    """Waits until the other warpgroup gives up the tensor core.

    The assembler moves arithmetic behind a barrier, to where its results are needed, and so into the turn. So the
    barrier's name depends on registers that must be made before, through a `zero` that only the caller knows to be one.
    """
    name = TURN_BARRIER + wg
    if cutlass.const_expr(made is not None):
        words = cute.recast_tensor(made, I32)
        bits = words[0]
        for i in cutlass.range_constexpr(1, cute.size(words)):
            bits = bits | words[i]
        name = name + (bits & zero)
    cute.arch.barrier(barrier_id=name, number_of_threads=THREADS)


@cute.jit
def give_turn(wg: I32):
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - wg, number_of_threads=THREADS)


@cute.jit
def row_of(tidx: I32, m: cutlass.Constexpr):
    """The row of the block's tile that register 2 m belongs to."""
    return tidx % 128 // 32 * 16 + tidx % 32 // 4 + 8 * m


@cute.jit
def pair_of(tidx: I32, b: cutlass.Constexpr):
    """The pair of columns that register 4 b belongs to, within the warpgroup's columns."""
    return 4 * b + tidx % 4


def pairs_of(m: cute.Tensor, row: I32):
    """One row of a row-major matrix, (2, columns / 2)."""
    columns = m.shape[1]
    offset = cute.assume(I64(row) * columns, divby=columns)
    return cute.make_tensor(m.iterator + offset, cute.make_layout((2, columns // 2)))


@cute.jit
def load_pairs(
    m: cute.Tensor,  # (T, D) fp32
    out: cute.Tensor,  # (2, 2, blocks) registers: pairs of columns, rows, blocks of 8 columns
    token0: I32,
    pair0: I32,
    tidx: I32,
):
    """The registers' elements of a row-major matrix; 0 beyond its last row."""
    out.fill(0.0)
    for i in cutlass.range_constexpr(2):
        token = token0 + row_of(tidx, i)
        if token < m.shape[0]:
            pairs = pairs_of(m, token)
            for b in cutlass.range_constexpr(cute.size(out, mode=[2])):
                cute.autovec_copy(pairs[None, pair0 + pair_of(tidx, b)], out[None, i, b])


@cute.jit
def store_pairs(
    x: cute.Tensor,  # (2, 2, blocks) registers
    m: cute.Tensor,  # (T, D) fp32
    token0: I32,
    pair0: I32,
    tidx: I32,
):
    for i in cutlass.range_constexpr(2):
        token = token0 + row_of(tidx, i)
        if token < m.shape[0]:
            pairs = pairs_of(m, token)
            for b in cutlass.range_constexpr(cute.size(x, mode=[2])):
                cute.autovec_copy(x[None, i, b], pairs[None, pair0 + pair_of(tidx, b)])


@cute.jit
def fetch(
    atom: cute.CopyAtom,
    t: cute.Tensor,  # (T, D) coordinates
    sRows: cute.Tensor,  # (64, 32, D / 32) fp32
    tile: I32,
    mbar: cute.Pointer,
):
    """Starts to copy a tile of rows; 0 beyond the last. By one warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(mbar, 4 * cute.size(sRows))
    shared, tiles = boxes_of(atom, t, sRows)
    for b in cutlass.range_constexpr(cute.size(sRows, mode=[2])):
        cute.copy(atom, tiles[None, tile, b], shared[None, b], tma_bar_ptr=mbar)


@cute.jit
def send(
    atom: cute.CopyAtom,
    t: cute.Tensor,  # (T, D) coordinates
    sRows: cute.Tensor,  # (64, 32, D / 32) fp32
    tile: I32,
):
    """Copies a tile of rows to global memory, as far as there are any. By one warp."""
    shared, tiles = boxes_of(atom, t, sRows)
    with cute.arch.elect_one():
        for b in cutlass.range_constexpr(cute.size(sRows, mode=[2])):
            cute.copy(atom, shared[None, b], tiles[None, tile, b])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def boxes_of(atom: cute.CopyAtom, t: cute.Tensor, sRows: cute.Tensor):
    """Boxes of 64 rows and 32 columns: in shared memory by box, in the matrix by rows and columns."""
    g = cute.group_modes(cute.local_tile(t, (TILE, 32), (None, None)), 0, 2)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(sRows, 0, 2), g)


@cute.jit
def read_rows(
    sRows: cute.Tensor,  # (64, 32, D / 32) fp32
    out: cute.Tensor,  # (2, 2, blocks) registers
    column0: I32,
    tidx: I32,
):
    for i in cutlass.range_constexpr(2):
        for b in cutlass.range_constexpr(cute.size(out, mode=[2])):
            cute.autovec_copy(pair_in(sRows, column0, tidx, i, b), out[None, i, b])


@cute.jit
def write_rows(
    x: cute.Tensor,  # (2, 2, blocks) registers
    sRows: cute.Tensor,  # (64, 32, D / 32) fp32
    column0: I32,
    tidx: I32,
):
    for i in cutlass.range_constexpr(2):
        for b in cutlass.range_constexpr(cute.size(x, mode=[2])):
            cute.autovec_copy(x[None, i, b], pair_in(sRows, column0, tidx, i, b))


def pair_in(sRows: cute.Tensor, column0: I32, tidx: I32, m: int, b: int):
    """The registers 4 b + 2 m and after in rows of shared memory."""
    where = (row_of(tidx, m), 4 * (b % 4) + tidx % 4, column0 // 32 + b // 4)
    return cute.local_tile(sRows, (1, 2, 1), where)[0, None, 0]


def blocks_of(x: cute.Tensor):
    """Registers in the accumulator's order as (2, 2, blocks): pairs of columns, rows, blocks of 8 columns."""
    return cute.make_tensor(x.iterator, cute.make_layout((2, 2, cute.size(x) // 4)))


@cute.jit
def load_channels(
    mP: cute.Tensor,  # (B, D, Lp) fp32
    out: cute.Tensor,  # (D * 64 / 256,) registers
    token: I32,
    channel0: I32,
    length: I32,
    conv_length: I32,
    tokens: I32,
):
    """Neighbouring channels of one token, 0 where the operator doesn't reach."""
    out.fill(0.0)
    batch = token // length
    t = token - batch * length
    if token < tokens and t < conv_length:
        gP = mP[batch, None, t]  # (D,)
        for i in cutlass.range_constexpr(cute.size(out)):
            out[i] = gP[channel0 + i]


@cute.jit
def store_channels(
    x: cute.Tensor,  # (channels of this thread,) fp32 registers
    scale: F32,
    sA: cute.Tensor,  # (64, 64, parts * K tiles)
    row: I32,
    channel0: I32,
    parts: cutlass.Constexpr,
):
    """Neighbouring channels of one token, scaled, to the tokens' operand."""
    per = cute.size(x)
    k_tiles = cute.size(sA, mode=[2]) // parts
    v = cute.make_tensor(x.iterator, cute.make_layout((8, per // 8)))
    v.store(v.load() * scale)
    hi, lo = cute.make_rmem_tensor_like(v, sA.element_type), cute.make_rmem_tensor_like(v, sA.element_type)
    numerics.split(v, hi, lo)
    for p in cutlass.range_constexpr(parts):
        for i in cutlass.range_constexpr(per // 8):
            n = channel0 + 8 * i
            target = cute.local_tile(sA, (1, 8, 1), (row, n % BOX // 8, p * k_tiles + n // BOX))
            cute.autovec_copy((hi if cutlass.const_expr(p == 0) else lo)[None, i], target[0, None, 0])


@cute.jit
def add_residual(
    r: cute.Tensor,  # (D / 4,) the product p Wo^T, in place
    x: cute.Tensor,  # (D / 4,)
    sO: cute.Tensor,  # (4, D / 2): by pairs, scales of Wo's rows and bias
    sScale: cute.Tensor,  # (64,) inverse scales of p's rows
    pair0: I32,
    tidx: I32,
):
    """r = p Wo^T + bias + x."""
    scale = (sScale[row_of(tidx, 0)], sScale[row_of(tidx, 1)])
    for b in cutlass.range_constexpr(cute.size(r) // 4):
        v = vector(sO, pair0 + pair_of(tidx, b))
        for m in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                j = 4 * b + 2 * m + i
                r[j] = r[j] * (scale[m] * v[i]) + (v[2 + i] + x[j])


@cute.jit
def vector(s: cute.Tensor, pair: I32):
    """(scale, scale, bias, bias) of a pair of columns."""
    v = cute.make_rmem_tensor(4, F32)
    cute.autovec_copy(s[None, pair], v)
    return v


@cute.jit
def statistics(
    r: cute.Tensor,  # (D / 4,)
    sReduce: cute.Tensor,  # (64, 2, 2): mean and sum of squares around it, of each warpgroup's half of a row
    wg: I32,
    tidx: I32,
):
    """Mean and sum of squares of this warpgroup's half of each row, to shared memory."""
    blocks = cute.size(r) // 4
    v = blocks_of(r)
    share = F32(1.0 / (8 * blocks))  # of one element in the warpgroup's part of a row
    mean, square = cute.make_rmem_tensor((2, 2), F32), cute.make_rmem_tensor((2, 2), F32)
    mean.fill(0.0)
    square.fill(0.0)
    for b in cutlass.range_constexpr(blocks):  # four chains of additions: two columns of two rows
        mean.store(mean.load() + v[None, None, b].load())
    for m in cutlass.range_constexpr(2):
        mean[0, m] = numerics.sum_over(mean[0, m] + mean[1, m], 4) * share
        mean[1, m] = mean[0, m]
    for b in cutlass.range_constexpr(blocks):
        centred = v[None, None, b].load() - mean.load()
        square.store(square.load() + centred * centred)
    for m in cutlass.range_constexpr(2):
        square[0, m] = numerics.sum_over(square[0, m] + square[1, m], 4)
    if tidx % 4 == 0:
        for m in cutlass.range_constexpr(2):
            sReduce[row_of(tidx, m), wg, 0] = mean[0, m]
            sReduce[row_of(tidx, m), wg, 1] = square[0, m]


@cute.jit
def normalise(
    r: cute.Tensor,  # (D / 4,) in place
    sReduce: cute.Tensor,  # (64, 2, 2)
    sN: cute.Tensor,  # (4, D / 2): by pairs, norm2's weight and bias, scaled
    pair0: I32,
    eps: F32,
    tidx: I32,
):
    """LayerNorm; the two halves' statistics are of equally many elements."""
    half = 2 * cute.size(r)
    for m in cutlass.range_constexpr(2):
        row = row_of(tidx, m)
        mean_a, mean_b = sReduce[row, 0, 0], sReduce[row, 1, 0]
        apart = mean_a - mean_b
        square = (sReduce[row, 0, 1] + sReduce[row, 1, 1]) + apart * apart * F32(half / 2)
        mean = (mean_a + mean_b) * F32(0.5)
        rstd = numerics.inverse_root(square * F32(0.5 / half) + eps)
        for b in cutlass.range_constexpr(cute.size(r) // 4):
            v = vector(sN, pair0 + pair_of(tidx, b))
            for i in cutlass.range_constexpr(2):
                j = 4 * b + 2 * m + i
                r[j] = (r[j] - mean) * rstd * v[i] + v[2 + i]


@cute.jit
def store_pairs_of_operand(
    x: cute.Tensor,  # (columns / 2,) registers
    sA: cute.Tensor,  # (64, 64, parts * K tiles)
    column0: I32,
    parts: cutlass.Constexpr,
    tidx: I32,
):
    """Accumulators to the tokens' operand, from `column0`."""
    k_tiles = cute.size(sA, mode=[2]) // parts
    v = cute.make_tensor(x.iterator, cute.make_layout((2, 2, cute.size(x) // 4)))
    hi, lo = cute.make_rmem_tensor_like(v, sA.element_type), cute.make_rmem_tensor_like(v, sA.element_type)
    numerics.split(v, hi, lo)
    for p in cutlass.range_constexpr(parts):
        part = hi if cutlass.const_expr(p == 0) else lo
        for b in cutlass.range_constexpr(cute.size(x) // 4):
            n = column0 + 8 * b
            for m in cutlass.range_constexpr(2):
                where = (row_of(tidx, m), n % BOX // 2 + tidx % 4, p * k_tiles + n // BOX)
                cute.autovec_copy(part[None, m, b], cute.local_tile(sA, (1, 2, 1), where)[0, None, 0])


@cute.jit
def activate(
    hidden: cute.Tensor,  # (chunk / 2,) registers, in place: the product n2 W1^T
    s1: cute.Tensor,  # (4, hidden / 2): by pairs, scales of W1's rows and bias
    pair0: I32,
    inverse: F32,  # the hidden operand's inverse scale
    tidx: I32,
):
    """GELU of the scaled sums, as large as the hidden operand may be."""
    for b in cutlass.range_constexpr(cute.size(hidden) // 4):
        v = vector(s1, pair0 + pair_of(tidx, b))
        for m in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                j = 4 * b + 2 * m + i
                hidden[j] = numerics.gelu_tanh_over(hidden[j] * v[i] + v[2 + i], inverse)


@cute.jit
def keep_as_operand(
    hidden: cute.Tensor,  # (chunk / 2,) registers
    frag: cute.Tensor,  # ((2, 2, 2), 1, 4, parts * chunk / 64): operand registers
    parts: cutlass.Constexpr,
):
    """An accumulator's registers are in the order of an operand's: two neighbouring blocks of 8 columns are one K."""
    flat = [
        cute.make_tensor(frag.iterator + p * cute.size(hidden), cute.make_layout(cute.size(hidden)))
        for p in range(parts)
    ]
    flat[0].store(hidden.load().to(frag.element_type))
    if cutlass.const_expr(parts == 2):
        flat[1].store((hidden.load() - flat[0].load().to(F32)).to(frag.element_type))
    words = cute.recast_tensor(frag, I32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pin(words[i])


@cute.jit
def add_scaled(
    r: cute.Tensor,  # (2, 2, own) registers, in place
    total: cute.Tensor,  # (4 * own, ...) registers: the product of fc2
    s2: cute.Tensor,  # (4, D / 2): by pairs, scales of W2's rows and bias
    pair0: I32,
    tidx: I32,
):
    """r + (h W2^T + bias)."""
    for b in cutlass.range_constexpr(cute.size(r, mode=[2])):
        v = vector(s2, pair0 + pair_of(tidx, b))
        for m in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                r[i, m, b] = (total[4 * b + 2 * m + i] * v[i] + v[2 + i]) + r[i, m, b]


@cute.jit
def load_all(m: cute.Tensor, tidx: I32, count: cutlass.Constexpr):
    """The first `count` elements of a vector, one after the other to the consumers' threads; 0 beyond."""
    out = cute.make_rmem_tensor(cute.ceil_div(count, THREADS), F32)
    out.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(out)):
        if tidx + i * THREADS < count:
            out[i] = m[tidx + i * THREADS]
    return out


@cute.jit
def store_vector(
    x: cute.Tensor,  # registers of load_all
    s: cute.Tensor,  # (4, count / 2): by pairs
    slot: cutlass.Constexpr,  # 0: scales, 2: biases
    count: cutlass.Constexpr,
    tidx: I32,
    factor: F32,
):
    for i in cutlass.range_constexpr(cute.size(x)):
        n = tidx + i * THREADS
        if n < count:
            s[slot + n % 2, n // 2] = x[i] * factor
