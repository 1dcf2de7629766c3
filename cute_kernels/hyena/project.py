"""The block's first part: LayerNorm, in_proj, the short convolution and the gate, from x to g = v * x1 and x0.

A block owns a slab of channels, which is the rows of in_proj that make x0, x1 and v of these channels, and a run of
token tiles. It converts its rows to tensor-core operands once, then walks along the tokens. Channels are the rows of
the product and tokens its columns: a thread holds whole pieces of time of its channels, so the short convolution needs
a shuffle, the gate nothing, and the results leave channels first.

The weight of norm1 goes into the rows of in_proj, and its bias into in_proj's: what is left of LayerNorm is
(x - mean) / deviation, which is at most sqrt(D), so one scale serves every token.
"""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Project
from cute_kernels.hyena.weights import compact, operand_type
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
K_TILE = 64  # one 128-byte swizzle row of 16-bit operands
HALO = 8  # columns for the two tokens before a tile: the last two of them
LANES = 16  # threads that share a row of x or of in_proj
TAPS = 3
BARRIER = 1


class ProjectKernel:
    def __init__(self, config: Project):
        self.config = c = config
        self.dtype = operand_type(c.dtype)
        self.k_tiles = c.width // K_TILE
        self.rows = 3 * c.channels
        self.columns = c.tile + HALO
        # |(x - mean) / deviation| <= sqrt(D)
        self.scale = 2.0 ** (numerics.TARGET_EXPONENT - math.ceil(math.log2(c.width) / 2))

    def mma(self):
        k = OperandMajorMode.K
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, k, k, F32, (1, 1, 1), tiler_mn=(64, self.columns)
        )

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (T, D) fp32, T = B * L
        mNw: cute.Tensor,  # (D,) fp32: norm1
        mNb: cute.Tensor,  # (D,)
        mW: cute.Tensor,  # (3D, D) fp32: in_proj, rows of x0, x1, v
        mB: cute.Tensor,  # (3D,)
        mTaps: cute.Tensor,  # (3D, 3): the short convolution
        mTb: cute.Tensor,  # (3D,)
        mG: cute.Tensor,  # (B, D, Lp) fp32: v * x1, rows padded to Lp
        mX0: cute.Tensor,  # (B, D, Lp) fp32
        length: I32,  # L
        conv_length: I32,  # tokens of a row that are computed, at most L
        run: I32,  # tiles of one block
        eps: F32,
        stream: cuda.CUstream,
    ):
        c = self.config
        x_layout = sm90_utils.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (64, self.columns, K_TILE), self.dtype, self.k_tiles * c.parts * c.buffers
        )

        @cute.struct
        class Storage:
            sScale: cute.struct.MemRange[F32, self.rows]
            sBias: cute.struct.MemRange[F32, self.rows]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, self.rows * c.width * c.parts], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]

        self.Storage = Storage
        tiles = mG.shape[0] * cute.ceil_div(conv_length, c.tile)
        self.kernel.set_name_prefix("hyena_project", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(mX, mNw, mNb, mW, mB, mTaps, mTb, mG, mX0, length, conv_length, run, eps),
            *(self.mma(), self.mma(), x_layout),
        ).launch(
            grid=(cute.ceil_div(tiles, run) * c.slabs, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mG: cute.Tensor,
        mX0: cute.Tensor,
        length: I32,
        conv_length: I32,
        run: I32,
        eps: F32,
        mma_new: cute.TiledMma,
        mma_add: cute.TiledMma,
        x_layout: cute.ComposedLayout,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        storage = memory.SmemAllocator().allocate(self.Storage)
        sX = storage.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner)  # (tile + 8, 64, buffers * parts * K tiles)
        # One tile of 64 rows; others start at other rows of it.
        w_layout = cute.make_layout(
            ((8, self.rows // 8), (K_TILE, 1), (1, self.k_tiles * self.config.parts)),
            stride=((K_TILE, 8 * K_TILE), (1, 0), (0, self.rows * K_TILE)),
        )
        sW = storage.sW.get_tensor(w_layout, swizzle=x_layout.inner)  # (rows, 64, parts * K tiles)
        sScale = storage.sScale.get_tensor(cute.make_layout(self.rows))
        sBias = storage.sBias.get_tensor(cute.make_layout(self.rows))
        self.block(
            *(mX, mNw, mNb, mW, mB, mTaps, mTb, mG, mX0, length, conv_length, run, eps, mma_new, mma_add),
            *(sX, sW, sScale, sBias, cute.arch.block_idx()[0]),
        )

    @cute.jit
    def block(
        self,
        mX: cute.Tensor,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mG: cute.Tensor,
        mX0: cute.Tensor,
        length: I32,
        conv_length: I32,
        run: I32,
        eps: F32,
        mma_new: cute.TiledMma,
        mma_add: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sScale: cute.Tensor,
        sBias: cute.Tensor,
        block: I32,
    ):
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tidx % 32
        channel0 = block % c.slabs * c.channels
        per_row = cute.ceil_div(conv_length, c.tile)  # tiles
        first = block // c.slabs * run
        last = cutlass.min(first + run, mG.shape[0] * per_row)

        # Loads of the first tile are on their way while the weights are converted.
        x = cute.make_rmem_tensor((4, self.k_tiles, c.passes), F32)
        halo = cute.make_rmem_tensor((4, self.k_tiles, 1), F32)
        halo.fill(0.0)
        b, t0 = first // per_row, first % per_row * c.tile
        self.load_tile(x, mX, b, t0, length, conv_length, warp, lane)
        if warp == 0 and t0 > 0:
            self.load_row(halo[None, None, 0], mX, b.to(I64) * length + (t0 - 2 + lane // LANES), lane)

        self.convert_weights(mW, mB, mNw, mNb, sW, sScale, sBias, channel0, warp, lane)

        if warp == 0:
            # Six empty columns, then the two tokens before the tile.
            for i in cutlass.range_constexpr(c.buffers):
                self.clear_halo(sX, i, lane)
            self.normalise(halo, eps)
            self.store_row(halo[None, None, 0], sX, c.tile + HALO - 2 + lane // LANES, 0, lane)
        self.normalise(x, eps)
        self.store_tile(x, sX, None, 0, warp, lane)

        # This thread's two rows of the product: channels g and g + 8 of x0, or x1 and v of one channel.
        wg, thread = warp // 4, tidx % 128
        row = 16 * (warp % 4) + lane // 4
        row0, d0, d1 = I32(0), channel0 + row, channel0 + row + 8  # row0: the first row of the warpgroup's M tile
        out0 = d0
        if wg > 0:
            row0 = c.channels + 64 * (wg - 1)
            out0 = channel0 + 32 * (wg - 1) + 8 * (warp % 4) + lane // 4
            d0, d1 = c.width + out0, 2 * c.width + out0
        active = wg > 0 or 16 * (warp % 4) < c.channels  # with 32 channels half of x0's M tile is of no use
        taps, affine = cute.make_rmem_tensor((TAPS + 1, 2), F32), cute.make_rmem_tensor((2, 2), F32)
        taps.fill(0.0)
        affine.fill(0.0)
        if active:
            for i in cutlass.range_constexpr(TAPS):
                taps[i, 0], taps[i, 1] = mTaps[d0, i], mTaps[d1, i]
            taps[TAPS, 0], taps[TAPS, 1] = mTb[d0], mTb[d1]
        self.sync()
        if active:
            for i in cutlass.range_constexpr(2):
                affine[0, i], affine[1, i] = sScale[row0 + row + 8 * i], sBias[row0 + row + 8 * i]

        mma_new.set(warpgroup.Field.ACCUMULATE, False)
        mma_add.set(warpgroup.Field.ACCUMULATE, True)
        slice_ = mma_new.get_slice(thread)
        m_layout = cute.make_layout(((8, 8), *sW.shape[1:]), stride=sW.stride)
        sA = cute.make_tensor(sW.iterator + cute.assume(row0 * K_TILE, divby=8 * K_TILE), m_layout)
        fA = mma_new.make_fragment_A(slice_.partition_A(sA))  # (MMA, 1, K blocks, parts * K tiles)
        fB = mma_new.make_fragment_B(slice_.partition_B(sX))  # (MMA, 1, K blocks, buffers * parts * K tiles)
        acc = cute.make_rmem_tensor(mma_new.partition_shape_C((64, self.columns)), F32)
        total = acc if cutlass.const_expr(c.parts == 1) else cute.make_rmem_tensor_like(acc)

        for tile in cutlass.range(first, last, unroll=1):
            cute.arch.fence_proxy("async.shared", space="cta")
            if tile > first:
                self.sync()
            b, t0 = tile // per_row, tile % per_row * c.tile
            buffer = (tile - first) % c.buffers
            following = (tile + 1 - first) % c.buffers
            if tile + 1 < last:
                next_b, next_t0 = (tile + 1) // per_row, (tile + 1) % per_row * c.tile
                self.load_tile(x, mX, next_b, next_t0, length, conv_length, warp, lane)
            self.product((mma_new, mma_add), acc, total, fA, fB, buffer)
            if tile + 1 < last:
                self.normalise(x, eps)
                if cutlass.const_expr(c.buffers == 1):
                    self.sync()  # every warpgroup's product is done
                self.store_tile(x, sX, buffer, following, warp, lane)
            if cutlass.const_expr(c.parts == 1):
                warpgroup.wait_group(0)
            if active:
                self.finish(total, affine, taps, mG, mX0, wg, b, out0, t0, conv_length, lane)

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.config.threads)

    @cute.jit
    def load_row(self, x, m, row, lane):
        """A row's elements of this thread, x (4, K tiles): four of every 64."""
        g = cute.zipped_divide(m, (1, 4))  # ((1, 4), (rows, D / 4))
        for i in cutlass.range_constexpr(self.k_tiles):
            cute.autovec_copy(g[(0, None), (row, LANES * i + lane % LANES)], x[None, i])

    @cute.jit
    def load_tile(self, x, mX, b, t0, length, conv_length, warp, lane):
        """The tokens of this thread in a tile, one in every pass; zeros beyond the end."""
        c = self.config
        x.fill(0.0)
        for i in cutlass.range_constexpr(c.passes):
            token = 2 * (warp + c.warps * i) + lane // LANES
            if token < c.tile and t0 + token < conv_length:
                self.load_row(x[None, None, i], mX, b.to(I64) * length + (t0 + token), lane)

    @cute.jit
    def normalise(self, x, eps):
        """(x - mean) / deviation, times the operands' scale, in place: a row in each pass (4, K tiles, passes)."""
        d = self.config.width
        for i in cutlass.range_constexpr(cute.size(x, mode=[2])):
            row = x[None, None, i]
            mean = numerics.sum_over(tree_sum(row), LANES) * F32(1.0 / d)
            row.store(row.load() - mean)
            # The mean's rounding error would be all there is of a row that is nearly constant.
            rest = numerics.sum_over(tree_sum(row), LANES) * F32(1.0 / d)
            row.store(row.load() - rest)
            square = F32(0.0)
            for j in cutlass.range_constexpr(cute.size(row)):
                square += row[j] * row[j]
            variance = numerics.sum_over(square, LANES) * F32(1.0 / d)
            row.store(row.load() * (F32(self.scale) / cute.math.sqrt(variance + eps)))

    @cute.jit
    def store_row(self, x, sX, n, piece0, lane):
        """Four neighbours of every 64 of a row, x (4, K tiles), into row n of the operand whose pieces start there."""
        c = self.config
        hi, lo = cute.make_rmem_tensor_like(x, self.dtype), cute.make_rmem_tensor_like(x, self.dtype)
        numerics.split(x, hi, lo)
        for part in cutlass.range_constexpr(c.parts):
            for i in cutlass.range_constexpr(self.k_tiles):
                target = piece_of(sX, n, piece0 + part * self.k_tiles + i, lane)
                cute.autovec_copy((hi if cutlass.const_expr(part == 0) else lo)[None, i], target)

    @cute.jit
    def store_tile(self, x, sX, buffer, following, warp, lane):
        """Normalised tokens into the buffer `following`; the last two tokens of `buffer`, if any, become its halo."""
        c = self.config
        pieces = c.parts * self.k_tiles
        for i in cutlass.range_constexpr(c.passes):
            token = 2 * (warp + c.warps * i) + lane // LANES
            if token < c.tile:
                n = column_of(token)
                if cutlass.const_expr(buffer is not None):
                    self.move_halo(sX, token, n, buffer * pieces, following * pieces, lane)
                self.store_row(x[None, None, i], sX, n, following * pieces, lane)

    @cute.jit
    def move_halo(self, sX, token, n, source, target, lane):
        """Row n, if it is one of a tile's last two tokens, between pieces that start at `source` and at `target`."""
        c = self.config
        if token >= c.tile - 2:
            x = cute.make_rmem_tensor(4, self.dtype)
            for j in cutlass.range_constexpr(c.parts * self.k_tiles):
                cute.autovec_copy(piece_of(sX, n, source + j, lane), x)
                cute.autovec_copy(x, piece_of(sX, c.tile + HALO - 2 + lane // LANES, target + j, lane))

    @cute.jit
    def clear_halo(self, sX, buffer, lane):
        zero = cute.make_rmem_tensor(4, self.dtype)
        zero.fill(0.0)
        pieces = self.config.parts * self.k_tiles
        for i in cutlass.range_constexpr(HALO // 2 - 1):
            for j in cutlass.range_constexpr(pieces):
                n = self.config.tile + 2 * i + lane // LANES
                cute.autovec_copy(zero, piece_of(sX, n, buffer * pieces + j, lane))

    @cute.jit
    def convert_weights(self, mW, mB, mNw, mNb, sW, sScale, sBias, channel0, warp, lane):
        """The slab's rows of in_proj, times norm1's weight, as operands; their scales; their biases with norm1's."""
        c = self.config
        nw, nb = (cute.make_rmem_tensor((4, self.k_tiles), F32) for _ in range(2))
        for m, x in ((mNw, nw), (mNb, nb)):
            self.load_row(x, cute.make_tensor(m.iterator, cute.prepend(m.layout, cute.make_layout(1))), 0, lane)
        w = cute.make_rmem_tensor((4, self.k_tiles, c.rows_at_once), F32)
        for start in cutlass.range(c.row_passes // c.rows_at_once, unroll=1):
            for i in cutlass.range_constexpr(c.rows_at_once):
                row = 2 * (warp + c.warps * (start * c.rows_at_once + i)) + lane // LANES
                self.load_row(w[None, None, i], mW, self.source_row(row, channel0), lane)
            for i in cutlass.range_constexpr(c.rows_at_once):
                row = 2 * (warp + c.warps * (start * c.rows_at_once + i)) + lane // LANES
                x = w[None, None, i]
                bias, amax = F32(0.0), F32(0.0)
                for j in cutlass.range_constexpr(cute.size(x)):
                    bias = cute.math.fma(x[j], nb[j], bias)
                    x[j] = x[j] * nw[j]
                    amax = cute.arch.fmax(amax, cute.arch.fmax(x[j], -x[j]))
                scale, inverse = numerics.scale_of(numerics.max_over(amax, LANES))
                x.store(x.load() * scale)
                self.store_row(x, sW, row, 0, lane)
                bias = numerics.sum_over(bias, LANES)
                if lane % LANES == 0:
                    sScale[row] = inverse * F32(1.0 / self.scale)
                    sBias[row] = mB[self.source_row(row, channel0)] + bias

    @cute.jit
    def source_row(self, row: I32, channel0: I32):
        """The row of in_proj behind a row of the slab: first x0, then x1 and v in turns of eight channels."""
        c = self.config
        source = channel0 + row
        if row >= c.channels:
            pair = row - c.channels
            source = channel0 + pair // 16 * 8 + pair % 8 + (1 + pair % 16 // 8) * c.width
        return source

    @cute.jit
    def product(self, mma, acc, total, fA, fB, buffer):
        """The product of the warpgroup's rows with a tile. With one part it is only started."""
        c = self.config
        kt = self.k_tiles
        if cutlass.const_expr(c.parts == 1):
            warpgroup.fence()
            for k in cutlass.range_constexpr(kt):
                self.issue(mma, acc, fA, k, fB, buffer * kt + k, k == 0)
            warpgroup.commit_group()
        else:
            total.fill(0.0)
            # This loop stays one: unrolled, the accumulators of neighbouring steps would be live together.
            for k in cutlass.range(kt, unroll=1):
                warpgroup.fence()
                self.issue(mma, acc, fA, kt + k, fB, buffer * 2 * kt + k, True)
                self.issue(mma, acc, fA, k, fB, buffer * 2 * kt + kt + k, False)
                self.issue(mma, acc, fA, k, fB, buffer * 2 * kt + k, False)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                total.store(total.load() + acc.load())

    @cute.jit
    def issue(self, mma, acc, fA, a, fB, b, fresh: cutlass.Constexpr):
        for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            one = mma[0] if cutlass.const_expr(fresh and kb == 0) else mma[1]
            cute.gemm(one, acc, fA[None, None, kb, a], fB[None, None, kb, b], acc)

    @cute.jit
    def finish(self, acc, affine, taps, mG, mX0, wg, b, d, t0, conv_length, lane):
        """Bias, short convolution, gate, stores. A thread has four neighbouring tokens in each 16 columns."""
        c = self.config
        u = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.columns // 8)))  # (pair, row, columns / 8)
        q = lane % 4
        before = (lane & 28) | ((lane + 3) & 3)  # the lane with the four tokens before
        tail = cute.make_rmem_tensor((2, 2), F32)  # the two tokens before the next 16
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(self.columns // 8):
                for e in cutlass.range_constexpr(2):
                    u[e, r, j] = cute.math.fma(u[e, r, j], affine[0, r], affine[1, r])
            for e in cutlass.range_constexpr(2):
                tail[e, r] = u[e, r, c.tile // 8]
                if t0 == 0:
                    tail[e, r] = F32(0.0)
        out = cute.make_rmem_tensor((4, 2), F32)
        past = cute.make_rmem_tensor(6, F32)
        for i in cutlass.range_constexpr(c.tile // 16):
            for r in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    last = u[e, r, 2 * i + 1]
                    sent = tail[e, r] if q == 3 else last
                    past[e] = cute.arch.shuffle_sync(sent, before)
                    past[2 + e], past[4 + e] = u[e, r, 2 * i], last
                    tail[e, r] = last
                for j in cutlass.range_constexpr(4):
                    value = taps[TAPS, r]
                    for k in cutlass.range_constexpr(TAPS):
                        value = cute.math.fma(taps[k, r], past[j + k], value)
                    out[j, r] = value
            t = t0 + 16 * i + 4 * q
            if t < conv_length:
                if wg == 0:
                    for r in cutlass.range_constexpr(2):
                        cute.autovec_copy(out[None, r], four_at(mX0, b, d + 8 * r, t))
                else:
                    for j in cutlass.range_constexpr(4):
                        out[j, 0] = out[j, 0] * out[j, 1]
                    cute.autovec_copy(out[None, 0], four_at(mG, b, d, t))


@cute.jit
def tree_sum(x):
    """The sum of a register tensor in pairs: exact where all elements are equal and their number a power of two."""
    y = [x[i] for i in range(cute.size(x))]
    while cutlass.const_expr(len(y) > 1):
        y = [y[i] + y[i + 1] for i in range(0, len(y) - 1, 2)] + y[len(y) // 2 * 2 :]
    return y[0]


def column_of(token):
    """The product's column of a token in its tile: neighbouring columns of a thread are neighbouring tokens."""
    return token // 16 * 16 + token % 4 // 2 * 8 + token % 16 // 4 * 2 + token % 2


def piece_of(s: cute.Tensor, row, piece, lane):
    """This thread's four elements of a row in one piece of an operand."""
    return cute.local_tile(s, (1, 4, 1), (row, lane % LANES, piece))[0, None, 0]


def four_at(m: cute.Tensor, b, d, t):
    """Four neighbouring tokens of a channel, from a multiple of four."""
    return cute.zipped_divide(m, (1, 1, 4))[(0, 0, None), (b.to(I64), d.to(I64), t // 4)]


def compile_project(config: Project, arch: str):
    if arch != "sm_90a":
        raise NotImplementedError(f"this kernel has no {arch} engine yet")
    d, batch, tokens = config.width, cute.sym_int(), cute.sym_int()
    pitch = cute.sym_int(divisibility=4)
    tensors = [compact(F32, tokens, d), compact(F32, d), compact(F32, d), compact(F32, 3 * d, d), compact(F32, 3 * d)]
    tensors += [compact(F32, 3 * d, TAPS), compact(F32, 3 * d)]
    tensors += [compact(F32, batch, d, pitch), compact(F32, batch, d, pitch)]
    scalars = [I32(1), I32(1), I32(1), F32(1e-5)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ProjectKernel(config), *tensors, *scalars, stream, options=compile_options(arch))
