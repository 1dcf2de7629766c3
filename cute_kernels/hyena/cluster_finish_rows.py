"""What `cluster_finish` does to tokens between its products: load, LayerNorm, GELU, sum over a cluster, store.

Channels are the rows of a product and tokens its columns. A warpgroup has 64 of each 128 channels, and its accumulators
are fp32 registers in the tensor core's order: register 4 j + 2 m + c of a thread holds channel row0 + 8 m, with
row0 = 64 warpgroup + 16 warp + lane / 4, and token 8 j + 2 (lane % 4) + c. As tensors they are (2, 2, tokens / 8, row
boxes), or (c, m, j, n). So a thread has few channels: what belongs to a channel is in registers.

Operands made from accumulators have neighbouring tokens side by side, in core matrices of 8 of K by 8 tokens, 128
bytes: a warp writes one with every store.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.device.math import select
from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import ClusterFinish

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
THREADS = ClusterFinish.consumers
BOX_ROWS, BOX_K = ClusterFinish.box
ROWS_BARRIER = 1  # of all consumers


@cute.jit
def sync():
    cute.arch.barrier(barrier_id=ROWS_BARRIER, number_of_threads=THREADS)


@cute.jit
def row_of(tidx: I32):
    """The thread's first row of a box of 128."""
    return tidx // 32 * 16 + tidx % 32 // 4


@cute.jit
def token_of(tidx: I32, j: cutlass.Constexpr):
    """The first of the thread's two tokens in block j of 8."""
    return 8 * j + tidx % 4 * 2


def copy_of(tidx: I32, copies: int):
    """Which of the blocks with the same tokens makes this thread's output: four lanes' pairs are dealt out in order."""
    return 0 if copies == 1 else tidx % 4 // (4 // copies)


@cute.jit
def load_channels(m: cute.Tensor, tidx: I32, boxes: cutlass.Constexpr):  # (boxes * 128,) fp32 -> (2, boxes): (m, n)
    out = cute.make_rmem_tensor((2, boxes), F32)
    for n in cutlass.range_constexpr(boxes):
        for i in cutlass.range_constexpr(2):
            out[i, n] = m[BOX_ROWS * n + 8 * i + row_of(tidx)]
    return out


def elements_of(m: cute.Tensor, x: cute.Tensor, token0: I32, tidx: I32):
    """Those elements of m (T, D) that are this thread's, indexed as x (2, 2, tokens / 8, row boxes)."""
    d = m.shape[1]
    start = m.iterator + (I64(token0 + token_of(tidx, 0)) * d + row_of(tidx))
    return cute.make_tensor(start, cute.make_layout(x.shape, stride=(d, 8, 8 * d, BOX_ROWS)))


@cute.jit
def load_tokens(
    m: cute.Tensor,  # (T, D) fp32
    out: cute.Tensor,  # (2, 2, tokens / 8, row boxes) registers
    token0: I32,
    tidx: I32,
):
    """0 beyond the last token."""
    out.fill(0.0)
    left, mine = m.shape[0] - token0 - token_of(tidx, 0), elements_of(m, out, token0, tidx)
    for j in cutlass.range_constexpr(cute.size(out, mode=[2])):
        for c in cutlass.range_constexpr(2):
            if 8 * j + c < left:
                for n in cutlass.range_constexpr(cute.size(out, mode=[3])):
                    for i in cutlass.range_constexpr(2):
                        out[c, i, j, n] = mine[c, i, j, n]


@cute.jit
def store_tokens(
    x: cute.Tensor,  # (2, 2, tokens / 8, row boxes) registers
    m: cute.Tensor,  # (T, D) fp32
    token0: I32,
    tidx: I32,
):
    left, mine = m.shape[0] - token0 - token_of(tidx, 0), elements_of(m, x, token0, tidx)
    for j in cutlass.range_constexpr(cute.size(x, mode=[2])):
        for c in cutlass.range_constexpr(2):
            if 8 * j + c < left:
                for n in cutlass.range_constexpr(cute.size(x, mode=[3])):
                    for i in cutlass.range_constexpr(2):
                        mine[c, i, j, n] = x[c, i, j, n]


@cute.jit
def load_convolved(
    mP: cute.Tensor,  # (B, D, Lp) fp32
    out: cute.Tensor,  # (D / 32, tokens / 8) registers
    token0: I32,
    length: I32,
    conv_length: I32,
    tokens: I32,
    tidx: I32,
):
    """Of one token in each 8, neighbouring channels; 0 where the operator doesn't reach.

    A token beyond the last reads the last one's, and its output is never stored.
    No branch, because the compiler would put what waits for earlier loads in front of it.
    """
    per = cute.size(out, mode=[0])
    for j in cutlass.range_constexpr(cute.size(out, mode=[1])):
        token = cutlass.min(token0 + 8 * j + tidx % 8, tokens - 1)
        batch = token // length
        t = token - batch * length
        channels = mP[batch, None, cutlass.min(t, conv_length - 1)]  # (D,)
        for i in cutlass.range_constexpr(per):
            out[i, j] = select(t < conv_length, channels[tidx // 8 * per + i], 0.0)


@cute.jit
def store_largest(
    p: cute.Tensor,  # (D / 32, tokens / 8) registers of load_convolved
    sReduce: cute.Tensor,  # (8 warps, tokens)
    tidx: I32,
):
    """The largest |p| of each token in a warp's channels."""
    for j in cutlass.range_constexpr(cute.size(p, mode=[1])):
        amax = numerics.largest(p[None, j])
        for offset in cutlass.range_constexpr(8, 17, 8):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=offset))
        if tidx % 32 < 8:
            sReduce[tidx // 32, 8 * j + tidx % 8] = amax


@cute.jit
def store_convolved(
    p: cute.Tensor,  # (D / 32, tokens / 8) registers of load_convolved, scaled in place
    sReduce: cute.Tensor,  # (8 warps, tokens): store_largest
    sScale: cute.Tensor,  # (tokens,): the inverse scales
    sP: cute.Tensor,  # (tokens, 64, parts * K tiles): the operand of out_proj
    parts: cutlass.Constexpr,
    tidx: I32,
):
    per, k_tiles = cute.size(p, mode=[0]), cute.size(sP, mode=[2]) // parts
    for j in cutlass.range_constexpr(cute.size(p, mode=[1])):
        token = 8 * j + tidx % 8
        warps = cute.make_rmem_tensor(8, F32)
        cute.autovec_copy(sReduce[None, token], warps)
        scale, inverse = numerics.scale_of(numerics.largest(warps))
        if tidx < 8:
            sScale[token] = inverse
        x = p[None, j]
        x.store(x.load() * scale)
        hi, lo = cute.make_rmem_tensor(per, sP.element_type), cute.make_rmem_tensor(per, sP.element_type)
        numerics.split(x, hi, lo)
        channel = tidx // 8 * per
        for part in cutlass.range_constexpr(parts):
            where = (token, channel % BOX_K // per, part * k_tiles + channel // BOX_K)
            target = cute.local_tile(sP, (1, per, 1), where)[0, None, 0]
            cute.autovec_copy(hi if cutlass.const_expr(part == 0) else lo, target)


@cute.jit
def add_residual(
    r: cute.Tensor,  # (2, 2, tokens / 8, row boxes) the product p Wo^T, in place
    x: cute.Tensor,  # (2, 2, tokens / 8, row boxes)
    scale: cute.Tensor,  # (2, row boxes): of Wo's rows
    bias: cute.Tensor,  # (2, row boxes)
    sScale: cute.Tensor,  # (tokens,) inverse scales of p's tokens
    tidx: I32,
):
    """r = p Wo^T + bias + x."""
    for j in cutlass.range_constexpr(cute.size(r, mode=[2])):
        for c in cutlass.range_constexpr(2):
            token_scale = sScale[token_of(tidx, j) + c]
            for n in cutlass.range_constexpr(cute.size(r, mode=[3])):
                for i in cutlass.range_constexpr(2):
                    r[c, i, j, n] = r[c, i, j, n] * (token_scale * scale[i, n]) + (bias[i, n] + x[c, i, j, n])


@cute.jit
def statistics(
    r: cute.Tensor,  # (2, 2, tokens / 8, row boxes)
    sReduce: cute.Tensor,  # (2, 8, tokens): mean and sum of squares around it, of each warp's channels
    sStat: cute.Tensor,  # (2, tokens): mean and inverse deviation
    eps: F32,
    tidx: I32,
):
    """LayerNorm's two numbers of every token, to shared memory; ends with a barrier."""
    boxes = cute.size(r, mode=[3])
    share = 16 * boxes  # channels of a warp
    for j in cutlass.range_constexpr(cute.size(r, mode=[2])):
        for c in cutlass.range_constexpr(2):
            x = [r[c, i, j, n] for n in range(boxes) for i in range(2)]
            mean = over_rows(sum(x[1:], x[0])) * F32(1.0 / share)
            square = F32(0.0)
            for v in x:
                square = square + (v - mean) * (v - mean)
            square = over_rows(square)
            if tidx % 32 < 4:
                token = token_of(tidx, j) + c
                sReduce[0, tidx // 32, token] = mean
                sReduce[1, tidx // 32, token] = square
    sync()
    if tidx < cute.size(sStat, mode=[1]):
        parts = cute.make_rmem_tensor((2, 8), F32)
        cute.autovec_copy(sReduce[None, None, tidx], parts)
        mean, square = F32(0.0), F32(0.0)
        for w in cutlass.range_constexpr(8):
            mean = mean + parts[0, w]
        mean = mean * F32(1.0 / 8)
        for w in cutlass.range_constexpr(8):
            apart = parts[0, w] - mean
            square = square + (parts[1, w] + F32(share) * (apart * apart))
        sStat[0, tidx] = mean
        sStat[1, tidx] = numerics.inverse_root(square * F32(1.0 / (8 * share)) + eps)
    sync()


@cute.jit
def over_rows(x: F32):
    """The sum over the lanes with the same tokens."""
    for offset in cutlass.range_constexpr(2, 5):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=1 << offset)
    return x


@cute.jit
def store_normalised(
    r: cute.Tensor,  # (2, 2, tokens / 8, row boxes)
    sStat: cute.Tensor,  # (2, tokens)
    weight: cute.Tensor,  # (2, row boxes): norm2's, scaled
    bias: cute.Tensor,  # (2, row boxes)
    words: cute.Tensor,  # (32 lanes, D / 8, tile / 8, parts): pairs of tokens of the operand
    block0: I32,  # the first of the block's tokens / 8 in it
    dtype: cutlass.Constexpr,
    tidx: I32,
):
    warp, lane = tidx // 32, tidx % 32
    v, stat = cute.make_rmem_tensor(2, F32), cute.make_rmem_tensor((2, 2), F32)
    for j in cutlass.range_constexpr(cute.size(r, mode=[2])):
        for c in cutlass.range_constexpr(2):
            cute.autovec_copy(sStat[None, token_of(tidx, j) + c], stat[None, c])
        for n in cutlass.range_constexpr(cute.size(r, mode=[3])):
            for i in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    v[c] = (r[c, i, j, n] - stat[0, c]) * stat[1, c] * weight[i, n] + bias[i, n]
                store_pair(v, words[lane, BOX_ROWS // 8 * n + 2 * warp + i, block0 + j, None], dtype)


@cute.jit
def store_pair(
    v: cute.Tensor,  # (2,) fp32 registers
    target: cute.Tensor,  # (parts,) words of two operands
    dtype: cutlass.Constexpr,
):
    hi, lo = cute.make_rmem_tensor(2, dtype), cute.make_rmem_tensor(2, dtype)
    numerics.split(v, hi, lo)
    for part in cutlass.range_constexpr(cute.size(target)):
        target[part] = cute.recast_tensor(hi if cutlass.const_expr(part == 0) else lo, I32)[0]


@cute.jit
def activate(
    hidden: cute.Tensor,  # (2, 2, tile / 8) the product n2 W1^T, from block `first` of 8 tokens to before `last`
    words: cute.Tensor,  # (32 lanes, 16, tile / 8, parts): pairs of tokens of the operand
    scale: cute.Tensor,  # (2,): of W1's rows
    bias: cute.Tensor,  # (2,)
    sFactor: cute.Tensor,  # (2,): the inverse scale of the normalised tokens, the scale of the activations
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    tidx: I32,
):
    warp, lane = tidx // 32, tidx % 32
    factor = sFactor[1]
    scale = tuple(scale[i] * sFactor[0] for i in range(2))
    for j in cutlass.range_constexpr(first, last):
        v = cute.make_rmem_tensor((2, 2), F32)
        for c in cutlass.range_constexpr(2):
            a, b = (hidden[c, i, j] * scale[i] + bias[i] for i in range(2))
            if cutlass.const_expr(cute.size(words, mode=[3]) == 1):
                v[c, 0], v[c, 1] = numerics.gelu_tanh_two(a, b, factor)
            else:
                divisor = numerics.inverse_of(factor)
                v[c, 0], v[c, 1] = numerics.gelu_tanh_over(a, divisor), numerics.gelu_tanh_over(b, divisor)
        for i in cutlass.range_constexpr(2):
            store_pair(v[None, i], words[lane, 2 * warp + i, j, None], dtype)


def place_of(tidx: I32, sSums: cute.Tensor):
    """A thread's place in sSums: its index among those whose tokens' output the same block makes."""
    lanes = 4 * cute.size(sSums, mode=[1]) // THREADS  # of each four, that one block has
    return tidx // 4 * lanes + tidx % lanes


@cute.jit
def send_sums(
    sums: cute.Tensor,  # (4, tokens / 8) registers
    sSums: cute.Tensor,  # (4, 256 / copies, tokens / 8, row boxes, split - 1): what other blocks send
    mbar: cute.Pointer,
    rank: I32,
    owner: I32,
    n: cutlass.Constexpr,
    split: cutlass.Constexpr,
    tidx: I32,
):
    """This block's sums, in row box n, of the tokens whose output block `owner` makes, to its shared memory."""
    slot, thread = (rank - owner + split) % split - 1, place_of(tidx, sSums)
    words = cute.recast_tensor(sums, I32)
    for j in cutlass.range_constexpr(cute.size(sums, mode=[1])):
        four = tuple(words[i, j] for i in range(4))
        cute.arch.store_async_dsmem(sSums[None, thread, j, n, slot].iterator.align(16), four, mbar, owner)


@cute.jit
def add_sums(
    mine: cute.Tensor,  # (4, tokens / 8, row boxes) registers, in place
    sSums: cute.Tensor,  # (4, 256 / copies, tokens / 8, row boxes, split - 1)
    tidx: I32,
):
    """Adds what the cluster's other blocks have sent, in the order of their ranks after this block's."""
    thread = place_of(tidx, sSums)
    for n in cutlass.range_constexpr(cute.size(mine, mode=[2])):
        for j in cutlass.range_constexpr(cute.size(mine, mode=[1])):
            for slot in cutlass.range_constexpr(cute.size(sSums, mode=[4])):
                other = cute.make_rmem_tensor(4, F32)
                cute.autovec_copy(sSums[None, thread, j, n, slot], other)
                for i in cutlass.range_constexpr(4):
                    mine[i, j, n] = mine[i, j, n] + other[i]


@cute.jit
def add_scaled(
    r: cute.Tensor,  # (2, 2, tokens / 8, row boxes) registers, in place
    total: cute.Tensor,  # (2, 2, tokens / 8, row boxes) registers: the product of fc2
    scale: cute.Tensor,  # (2, row boxes): of W2's rows
    bias: cute.Tensor,  # (2, row boxes)
):
    """r + (h W2^T + bias)."""
    for n in cutlass.range_constexpr(cute.size(r, mode=[3])):
        for j in cutlass.range_constexpr(cute.size(r, mode=[2])):
            for i in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    r[c, i, j, n] = (total[c, i, j, n] * scale[i, n] + bias[i, n]) + r[c, i, j, n]


@cute.jit
def load_all(m: cute.Tensor, tidx: I32):
    """A vector, one element after the other to the consumers' threads; 0 beyond."""
    count = m.shape[0]
    out = cute.make_rmem_tensor(cute.ceil_div(count, THREADS), F32)
    out.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(out)):
        if tidx + i * THREADS < count:
            out[i] = m[tidx + i * THREADS]
    return out
