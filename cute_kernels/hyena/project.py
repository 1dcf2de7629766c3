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
from cutlass.cute.runtime import make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device import cluster
from cute_kernels.device.copy import prefetch, store_if
from cute_kernels.device.math import select
from cute_kernels.device.pin import pin
from cute_kernels.device.product import row_product
from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import Project
from cute_kernels.hyena.filter import FilterRole, filter_arguments
from cute_kernels.hyena.weights import WeightsRole, compact, operand_type, weights_arguments
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
K_TILE = 64  # one 128-byte swizzle row of 16-bit operands
ROW_BYTES = 128
HALO = 8  # columns for the two tokens before a tile: the last two of them
LANES = 16  # threads that share a row of x or of in_proj
TAPS = 3
BUFFERS = Project.BUFFERS
FEW_TILES = 2  # of a block: those who normalise them convert the weights behind them
BARRIER = 1  # of the threads without those beside them; 2 is the filter's
GROUP_BARRIER = 3  # of the first warpgroup, the next ones follow


class ProjectKernel:
    def __init__(self, config: Project, arch: str):
        self.config = c = config
        self.filter, self.weights = FilterRole(c.filter), WeightsRole(c.weights)
        self.dtype = operand_type(c.dtype)
        self.k_tiles = c.width // K_TILE
        self.pieces = c.parts * self.k_tiles  # of an operand
        self.rows = 3 * c.channels
        # Of a piece of in_proj's operand, those of both parts: x0's first, with two parts in turns of eight high and
        # eight low ones, then the high ones of x1 and v, then their low ones.
        self.operand_rows = c.parts * self.rows
        self.columns = c.tile + HALO
        # |(x - mean) / deviation| <= sqrt(D)
        self.scale = 2.0 ** (numerics.TARGET_EXPONENT - math.ceil(math.log2(c.width) / 2))
        self.engine = row_product(
            arch, self.columns, self.k_tiles, c.parts, self.dtype, c.warps // 4, BARRIER, GROUP_BARRIER
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
        mZ: cute.Tensor,  # as in FilterRole.work
        mF1: cute.Tensor,
        mFb1: cute.Tensor,
        mFreq: cute.Tensor,
        mF2: cute.Tensor,
        mFb2: cute.Tensor,
        mF3: cute.Tensor,
        mFb3: cute.Tensor,
        mFf: cute.Tensor,
        mFbias: cute.Tensor,
        mDeltas: cute.Tensor,
        mK: cute.Tensor,
        mWo: cute.Tensor,  # as in WeightsRole.work
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mWoT: cute.Tensor,
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
        length: I32,  # L
        conv_length: I32,  # tokens of a row that are computed, at most L
        run: I32,  # tiles of one block
        blocks: I32,  # at least so many
        beside: I32,  # 1: with filter and weights; 0: these tensors hold them already
        eps: F32,
        norm_len: I32,
        shift: F32,
        stream: cuda.CUstream,
    ):
        c = self.config
        x_layout = sm90_utils.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (64, self.columns, K_TILE), self.dtype, self.pieces * BUFFERS
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, BUFFERS]
            rows: cute.struct.MemRange[cutlass.Int64, 1]
            empty: cute.struct.MemRange[cutlass.Int64, BUFFERS]
            done: cute.struct.MemRange[cutlass.Int64, self.engine.barriers]
            address: cute.struct.MemRange[I32, self.engine.words]
            sAffine: cute.struct.Align[cute.struct.MemRange[F32, 2 * self.rows], 16]
            sFilter: cute.struct.Align[cute.struct.MemRange[F32, c.filter.shared_floats], 16]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, self.rows * c.width * c.parts], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]

        self.Storage = Storage
        runs = cute.ceil_div(mG.shape[0] * cute.ceil_div(conv_length, c.tile), run)
        self.kernel.set_name_prefix("hyena_project", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(mX, mNw, mNb, mW, mB, mTaps, mTb, mG, mX0),
            *(mZ, mF1, mFb1, mFreq, mF2, mFb2, mF3, mFb3, mFf, mFbias, mDeltas, mK),
            *(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1),
            *(length, conv_length, run, beside, eps, norm_len, shift),
            *(self.engine.tiled_mma(), self.engine.tiled_mma(), x_layout),
        ).launch(
            grid=(cutlass.max(cute.round_up(runs, c.team) * c.slabs, cute.round_up(blocks, c.team)), 1, 1),
            block=(32 * (c.warps + c.norm_warps + c.side_warps), 1, 1),
            cluster=(c.team, 1, 1),
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
        mZ: cute.Tensor,
        mF1: cute.Tensor,
        mFb1: cute.Tensor,
        mFreq: cute.Tensor,
        mF2: cute.Tensor,
        mFb2: cute.Tensor,
        mF3: cute.Tensor,
        mFb3: cute.Tensor,
        mFf: cute.Tensor,
        mFbias: cute.Tensor,
        mDeltas: cute.Tensor,
        mK: cute.Tensor,
        mWo: cute.Tensor,
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mWoT: cute.Tensor,
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
        length: I32,
        conv_length: I32,
        run: I32,
        beside: I32,
        eps: F32,
        norm_len: I32,
        shift: F32,
        mma_new: cute.TiledMma,
        mma_add: cute.TiledMma,
        x_layout: cute.ComposedLayout,
    ):
        # No launch_dependents: mix's blocks would pile up on the first SMs that get free.
        c = self.config
        storage = memory.SmemAllocator().allocate(self.Storage)
        sX = storage.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner)  # (tile + 8, 64, buffers * parts * K tiles)
        # One tile of 64 rows; others start at other rows of it.
        w_layout = cute.make_layout(
            ((8, 8), (K_TILE, 1), (1, (self.k_tiles, c.parts))),
            stride=((K_TILE, 8 * K_TILE), (1, 0), (0, (self.operand_rows * K_TILE, 2 * c.channels * K_TILE))),
        )
        sW = storage.sW.get_tensor(w_layout, swizzle=x_layout.inner)  # (64, 64, K tiles * parts)
        sAffine = storage.sAffine.get_tensor(cute.make_layout((2, self.rows)))  # rows' factors, norm1's part of biases
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()  # barriers of the buffers
        rows = storage.rows.data_ptr()  # of others' rows
        done, address = storage.done.data_ptr(), storage.address.data_ptr()  # the product's
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = cute.arch.block_idx()[0]
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(BUFFERS):
                cute.arch.mbarrier_init(full + i, c.norm_warps)
                cute.arch.mbarrier_init(empty + i, c.warps)
            cute.arch.mbarrier_init(rows, 1)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(c.team > 1):
            cute.arch.cluster_arrive()  # who sends to other blocks waits for them
        cute.arch.sync_threads()
        tiles = mG.shape[0] * cute.ceil_div(conv_length, c.tile)
        rank, slab, first, last = self.share(block, run, tiles)
        if warp < c.warps and first - rank * run < tiles:
            self.block(
                *(mW, mB, mNw, mNb, mTaps, mTb, mG, mX0, conv_length, run, tiles, mma_new, mma_add),
                *(sX, sW, sAffine, full, empty, rows, done, address, block, warp),
            )
        else:
            if beside != 0:
                converts, unit, step = self.conversion(block, warp, run, mG.shape[0], conv_length)
                if converts and cute.arch.lane_idx() == 0:
                    for i in cutlass.range(unit, self.weights.units, step, unroll=1):
                        self.weights.bring_ahead(mWo, mW1, mW2, i)
            if warp >= c.warps and warp < c.warps + c.norm_warps and first < last:
                tokens = cute.recast_ptr(sX.iterator)
                norm_warp = warp - c.warps
                self.make_tiles(mX, tokens, full, empty, length, conv_length, eps, slab, first, last, norm_warp)
            if cutlass.const_expr(c.team > 1):
                cute.arch.cluster_wait()  # nobody may arrive and leave
            if beside != 0:
                self.beside(
                    *(mZ, mF1, mFb1, mFreq, mF2, mFb2, mF3, mFb3, mFf, mFbias, mDeltas, mK),
                    *(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1),
                    *(conv_length, norm_len, shift, storage.sFilter.data_ptr(), block, warp, run, mG.shape[0]),
                )

    @cute.jit
    def share(self, block: I32, run: I32, tiles: I32):
        """A block's rank in its cluster, which is `team` runs of one slab, its slab, and its first tile and the one
        after its last."""
        c = self.config
        rank, cluster_, slab = block % c.team, block // c.team, block // c.team % c.slabs
        first = (cluster_ // c.slabs * c.team + rank) * run
        return rank, slab, first, cutlass.min(first + run, tiles)

    @cute.jit
    def beside(
        self,
        mZ: cute.Tensor,
        mF1: cute.Tensor,
        mFb1: cute.Tensor,
        mFreq: cute.Tensor,
        mF2: cute.Tensor,
        mFb2: cute.Tensor,
        mF3: cute.Tensor,
        mFb3: cute.Tensor,
        mFf: cute.Tensor,
        mFbias: cute.Tensor,
        mDeltas: cute.Tensor,
        mK: cute.Tensor,
        mWo: cute.Tensor,
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mWoT: cute.Tensor,
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
        conv_length: I32,
        norm_len: I32,
        shift: F32,
        sFilter: cute.Pointer,
        block: I32,
        warp: I32,
        run: I32,
        batch: I32,
    ):
        """What a warp does for the filter, and then for the weights."""
        c = self.config
        blocks = cute.arch.grid_dim()[0]
        thread = cute.arch.thread_idx()[0] % 128  # the threads before are a multiple of these
        if warp >= c.warps + c.norm_warps:
            self.filter.bring_ahead(mF3, mFb3, mFf, mFbias, mDeltas, blocks - 1 - block, thread)
            tasks = self.filter.tasks(conv_length)
            # The last blocks first: they have no tokens, where some have none.
            for task in cutlass.range(blocks - 1 - block, tasks, blocks, unroll=1):
                self.filter.work(
                    *(mZ, mF1, mFb1, mFreq, mF2, mFb2, mF3, mFb3, mFf, mFbias, mDeltas, mK),
                    *(conv_length, norm_len, shift, sFilter, task, thread),
                )
        converts, unit, step = self.conversion(pin(block), warp, pin(run), batch, pin(conv_length))
        if converts:
            for i in cutlass.range(unit, self.weights.units, step, unroll=1):
                self.weights.work(
                    *(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1, i, cute.arch.lane_idx()),
                )

    @cute.jit
    def conversion(self, block: I32, warp: I32, run: I32, batch: I32, conv_length: I32):
        """If a warp converts weights, its first unit of them, and the step to its next.

        The blocks without tokens do it, where these are many; or the warps that normalise, when they have few tiles; or
        those of the filter.
        """
        c = self.config
        blocks = cute.arch.grid_dim()[0]
        tiles = batch * cute.ceil_div(conv_length, c.tile)
        first_free = cute.round_up(cute.ceil_div(tiles, run), c.team) * c.slabs  # the first block without tokens
        side, free = warp - c.warps, blocks - first_free
        first = 0 if run <= FEW_TILES else c.norm_warps
        converts, unit, step = side >= first and side < first + 4, (blocks - 1 - block) * 4 + warp % 4, blocks * 4
        if 2 * free * c.warps >= self.weights.units:
            converts, unit, step = side < 0, (block - first_free) * c.warps + warp, free * c.warps
        return converts, unit, step

    @cute.jit
    def block(
        self,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mG: cute.Tensor,
        mX0: cute.Tensor,
        conv_length: I32,
        run: I32,
        tiles: I32,
        mma_new: cute.TiledMma,
        mma_add: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sAffine: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        rows: cute.Pointer,
        done: cute.Pointer,
        address: cute.Pointer,
        block: I32,
        warp: I32,
    ):
        """The rows of in_proj to operands, then the products of a block's tiles with them."""
        c = self.config
        rank, slab, _, _ = self.share(block, run, tiles)
        channel0 = slab * c.channels
        self.engine.begin(done, address)
        lane = cute.arch.lane_idx()
        self.convert_weights(mW, mNw, mNb, cute.recast_ptr(sW.iterator), sAffine, rows, channel0, rank, warp, lane)
        # Made again, as the rows on their way need the registers.
        _, slab, first, last = self.share(pin(block), run, mG.shape[0] * cute.ceil_div(pin(conv_length), c.tile))
        channel0 = slab * c.channels
        if cutlass.const_expr(c.team == 1):
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync()  # all are there
        if first < last:
            mma_new.set(self.engine.accumulate, False)
            mma_add.set(self.engine.accumulate, True)
            rest = (mB, mTaps, mTb, conv_length, mma_new, mma_add, sX, sW, sAffine, full, empty, rows, done, address)
            if warp < 4:
                self.walk(True, mX0, *rest, channel0, first, last, warp)
            else:
                self.walk(False, mG, *rest, channel0, first, last, warp)
        elif cutlass.const_expr(c.team > 1):
            self.receive(rows)
        self.engine.end(address)
        if cutlass.const_expr(c.team > 1):
            cute.arch.cluster_wait()  # copies to other blocks read this one's memory

    @cute.jit
    def position(self, tile, conv_length):
        """A tile's batch row and its first token there."""
        per_row = cute.ceil_div(conv_length, self.config.tile)
        return tile // per_row, tile % per_row * self.config.tile

    @cute.jit
    def make_tiles(
        self,
        mX: cute.Tensor,
        tokens: cute.Pointer,  # the buffers
        full: cute.Pointer,
        empty: cute.Pointer,
        length: I32,
        conv_length: I32,
        eps: F32,
        slab: I32,
        first: I32,
        last: I32,
        warp: I32,  # of those that do this
    ):
        """LayerNorm: the operand of each tile of a block, 16 tokens at a time, four a warp."""
        c = self.config
        lane = cute.arch.lane_idx()
        groups = c.tile // 16
        b, t0 = self.position(first, conv_length)
        x, ahead = (cute.make_rmem_tensor((4, 2 * self.k_tiles), F32) for _ in range(2))
        column = 4 * warp + (lane >> 3)  # of every 16
        self.load_token(ahead, mX, b, cutlass.min(t0 + token_of(column), conv_length - 1), length, lane)
        self.bring_ahead(mX, length, conv_length, first, last, slab, warp, lane)
        if warp == 0:
            self.clear_halo(tokens, lane)
        if warp == c.norm_warps - 1:  # it has the last four tokens of each tile
            self.load_token(x, mX, b, cutlass.max(t0 - 4 + (lane >> 3), 0), length, lane)
            self.normalise(x, eps, lane)
            self.store_token(x, tokens, c.tile + 4 + (lane >> 3), lane)
        size = self.pieces * self.columns * K_TILE  # of a buffer
        for i in cutlass.range((last - first) * groups, unroll=1):
            n, group, next_group = i // groups, i % groups, (i + 1) % groups
            buffer = tokens + n % BUFFERS * size
            x.store(ahead.load())
            if next_group == 0:
                b, t0 = self.after(b, t0, conv_length)
            if i + 1 < (last - first) * groups:
                t = cutlass.min(t0 + 16 * next_group + token_of(column), conv_length - 1)  # or one that nobody uses
                self.load_token(ahead, mX, b, t, length, lane)
            self.normalise(x, eps, lane)
            if group == 0 and n > 0:
                if n >= BUFFERS:
                    cute.arch.mbarrier_wait(empty + n % BUFFERS, (n // BUFFERS - 1) % 2)
                if warp == c.norm_warps - 1:
                    self.copy_halo(tokens + (n - 1) % BUFFERS * size, buffer, lane)
            self.store_token(x, buffer, 16 * group + column, lane)
            if group == groups - 1:
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(full + n % BUFFERS)

    @cute.jit
    def after(self, b: I32, t0: I32, conv_length: I32):
        """The tile after one: batch row and first token."""
        t0 += self.config.tile
        if t0 >= conv_length:
            b, t0 = b + 1, I32(0)
        return b, t0

    @cute.jit
    def bring_ahead(self, mX, length, conv_length, first, last, slab, warp, lane):
        """A run's tokens to L2, divided among the blocks that read them: the first tile by all warps, and then a tile
        a warp."""
        c = self.config
        tokens = -(-c.tile // c.slabs)
        part = -(-tokens // c.norm_warps)
        if lane == 0:
            self.bring_tokens(mX, length, conv_length, first, slab * tokens + warp * part, part)
            for tile in cutlass.range(first + 1 + warp, last, c.norm_warps, unroll=1):
                self.bring_tokens(mX, length, conv_length, tile, slab * tokens, tokens)

    @cute.jit
    def bring_tokens(self, mX, length, conv_length, tile, offset, count):
        b, t0 = self.position(tile, conv_length)
        t = t0 + offset
        if t < conv_length:
            row = b.to(I64) * length + t
            prefetch(
                mX.iterator + row * self.config.width, cutlass.min(count, conv_length - t) * (4 * self.config.width)
            )

    @cute.jit
    def walk(
        self,
        of_x0: cutlass.Constexpr,
        mOut: cute.Tensor,  # (B, D, Lp) fp32: x0 or g
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        conv_length: I32,
        mma_new: cute.TiledMma,
        mma_add: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sAffine: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        rows: cute.Pointer,
        done: cute.Pointer,
        address: cute.Pointer,
        channel0: I32,
        first: I32,
        last: I32,
        warp: I32,
    ):
        """A warpgroup's products of a block's tiles, one after the other, and what becomes of them."""
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % 32
        # This thread's one or two rows of the product: of the slab (of sAffine), and of in_proj.
        row, channel = 16 * (warp % 4) + lane // 4, 8 * (warp % 4) + lane // 4
        joined = of_x0 and c.parts == 2  # both parts of a channel of x0, and not two channels
        if cutlass.const_expr(of_x0):
            slab_rows = (channel,) if joined else (row, row + 8)
            channel = slab_rows[0]
            proj_rows = [channel0 + r for r in slab_rows]
            row0 = I32(0)  # the first row of the warpgroup's M tile
        else:
            group = warp // 4 - 1
            slab_rows = (c.channels + 64 * group + row, c.channels + 64 * group + row + 8)
            channel += 32 * group
            proj_rows = [i * c.width + channel0 + channel for i in (1, 2)]
            row0 = self.operand_rows - 2 * c.parts * c.channels + 64 * group
        # With 32 channels and one part half of x0's M tile is of no use.
        active = True if cutlass.const_expr(joined or not of_x0) else 16 * (warp % 4) < c.channels
        own = len(slab_rows)
        taps, affine = cute.make_rmem_tensor((TAPS + 1, own), F32), cute.make_rmem_tensor((2, own), F32)
        taps.fill(0.0)
        affine.fill(0.0)
        if active:
            for r in cutlass.range_constexpr(own):
                for i in cutlass.range_constexpr(TAPS):
                    taps[i, r] = mTaps[proj_rows[r], i]
                taps[TAPS, r], affine[1, r] = mTb[proj_rows[r]], mB[proj_rows[r]]
        if cutlass.const_expr(c.team > 1):
            self.receive(rows)
        if active:
            for r in cutlass.range_constexpr(own):
                affine[0, r] = sAffine[0, slab_rows[r]]
                affine[1, r] = affine[1, r] + sAffine[1, slab_rows[r]]
        # Were they used in the loop alone, every turn would wait there, and for its own loads: an operation before it.
        zero = conv_length >> 31
        for values in (taps, affine):
            for i in cutlass.range_constexpr(cute.size(values)):
                values[i] = (values[i].bitcast(I32) | zero).bitcast(F32)

        slice_ = self.engine.slice(mma_new, tidx % 128)
        sA = cute.make_tensor(sW.iterator + cute.assume(row0 * K_TILE, divby=8 * K_TILE), sW.layout)
        fA = mma_new.make_fragment_A(slice_.partition_A(sA))  # (MMA, 1, K blocks, K tiles * parts)
        fB = mma_new.make_fragment_B(slice_.partition_B(sX))  # (MMA, 1, K blocks, buffers * parts * K tiles)
        acc, total = self.engine.accumulators(mma_new, address)
        mma = (mma_new, mma_add)

        b, t0 = self.position(first, conv_length)
        for tile in cutlass.range(first, last, unroll=1):
            n = tile - first
            buffer = n % BUFFERS
            cute.arch.mbarrier_wait(full + buffer, n // BUFFERS % 2)
            for i in cutlass.range_constexpr(self.k_tiles):
                self.engine.start(mma, acc, total, fA, fB, buffer, done, i, joined)
            self.engine.finish(mma, acc, total, fA, fB, buffer, done, n, joined)
            cute.arch.sync_warp()
            if tile + BUFFERS < last and lane == 0:
                cute.arch.mbarrier_arrive(empty + buffer)
            if active:
                self.finish(of_x0, total, affine, taps, mOut, b, channel0 + channel, t0, conv_length, lane)
            b, t0 = self.after(b, t0, conv_length)

    @cute.jit
    def sync(self):
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.config.threads)

    @cute.jit
    def load_row(self, x, start):
        """A row's elements of this thread, x (4, K tiles): four of every 64, from the first of them."""
        for i in cutlass.range_constexpr(self.k_tiles):
            cute.autovec_copy(four(start + K_TILE * i), x[None, i])

    @cute.jit
    def load_token(self, x, mX, b, t, length, lane):
        """A token's elements of this thread, x (4, 2 K tiles): four of every 32."""
        offset = (b.to(I64) * length + t) * self.config.width
        start = mX.iterator + cute.assume(offset, divby=64)
        for i in cutlass.range_constexpr(2 * self.k_tiles):
            cute.autovec_copy(four(start + (K_TILE * (i // 2) + self.element(i, lane))), x[None, i])

    @cute.jit
    def element(self, i: cutlass.Constexpr, lane):
        """The first of this thread's elements in vector i, in its 64: of neighbouring tokens one takes the lower 32
        first, one the upper, so that stores meet no bank twice."""
        return cute.assume(((lane & 15) * 4) ^ (32 * (i % 2)), divby=4)

    @cute.jit
    def normalise(self, x, eps, lane):
        """(x - mean) / deviation, times the operands' scale, in place: (4, 2 K tiles).

        Moments are taken about a number near the mean, the mean of one thread's elements: that loses 3 bits at the
        worst. With one part 4 elements do, which lose 6. A constant row becomes zeros.
        """
        d = self.config.width
        some = cute.make_tensor(x.iterator, cute.make_layout(4 if self.config.parts == 1 else cute.size(x)))
        near = cute.arch.shuffle_sync(tree_sum(some) * F32(1.0 / cute.size(some)), lane & 24)
        x.store(x.load() - near)
        squares = [x[j] * x[j] for j in range(4)]
        for j in cutlass.range_constexpr(4, cute.size(x)):
            squares[j % 4] = cute.math.fma(x[j], x[j], squares[j % 4])
        sums = [tree_sum(x), (squares[0] + squares[1]) + (squares[2] + squares[3])]
        for n in cutlass.range_constexpr(3):
            sums = [value + cute.arch.shuffle_sync_bfly(value, offset=4 >> n) for value in sums]
        rest, square = sums[0] * F32(1.0 / d), sums[1] * F32(1.0 / d)
        variance = cute.arch.fmax(cute.math.fma(-rest, rest, square), F32(0.0))
        factor = F32(self.scale) * numerics.inverse_root(variance + eps)
        offset = -rest * factor
        for j in cutlass.range_constexpr(cute.size(x)):
            x[j] = cute.math.fma(x[j], factor, offset)

    @cute.jit
    def store_token(self, x, buffer, row, lane):
        """A token's elements of this thread into a row of a buffer."""
        rounded = self.rounded(x)
        for i in cutlass.range_constexpr(2 * self.k_tiles):
            for part in cutlass.range_constexpr(self.config.parts):
                piece = buffer + (part * self.k_tiles + i // 2) * (self.columns * K_TILE)
                cute.autovec_copy(rounded[None, i, part], four(place(piece, row, self.element(i, lane))))

    def rounded(self, x):
        """x (4, n) in the operands' type, and with two parts what is left of it: (4, n, parts)."""
        parts = cute.make_rmem_tensor((*x.shape, self.config.parts), self.dtype)
        parts[None, None, 0].store(x.load().to(self.dtype))
        if cutlass.const_expr(self.config.parts == 2):
            parts[None, None, 1].store((x.load() - parts[None, None, 0].load().to(F32)).to(self.dtype))
        return parts

    @cute.jit
    def copy_halo(self, buffer, following, lane):
        """The last tokens of a tile are those before the next one. A thread copies what it has stored."""
        c = self.config
        values = cute.make_rmem_tensor((4, 2 * self.pieces), self.dtype)
        for row, there in ((c.tile - 4 + (lane >> 3), buffer), (c.tile + 4 + (lane >> 3), following)):
            for i in cutlass.range_constexpr(2 * self.pieces):  # all loads before the first store: they take long
                piece = there + i // 2 * (self.columns * K_TILE)
                some = four(place(piece, row, self.element(i, lane)))
                if cutlass.const_expr(there is buffer):
                    cute.autovec_copy(some, values[None, i])
                else:
                    cute.autovec_copy(values[None, i], some)

    @cute.jit
    def clear_halo(self, tokens, lane):
        """The four columns before the tokens before a tile, in every piece of every buffer."""
        zero = cute.make_rmem_tensor(4, self.dtype)
        zero.fill(0.0)
        for i in cutlass.range_constexpr(2):
            row = place(tokens, self.config.tile + 2 * i + (lane >> 4), self.element(0, lane))
            for j in cutlass.range_constexpr(BUFFERS * self.pieces):
                cute.autovec_copy(zero, four(row + j * (self.columns * K_TILE)))

    @cute.jit
    def convert_weights(self, mW, mNw, mNb, sW, sAffine, rows, channel0, rank, warp, lane):
        """The slab's rows of in_proj, times norm1's weight, as operands, their scales, and what norm1's bias
        adds to theirs.

        The blocks of a team convert a share each.
        """
        c = self.config
        share = self.rows // c.team
        row0 = rank * share
        even = share % (2 * c.warps * c.rows_at_once) == 0
        if cutlass.const_expr(c.team > 1) and warp == 0 and lane == 0:
            expected = (self.rows - share) * (c.parts * self.k_tiles * ROW_BYTES + 8)
            cute.arch.mbarrier_arrive_and_expect_tx(rows, expected)
        w = cute.make_rmem_tensor((4, self.k_tiles, c.rows_at_once), F32)
        biases = cute.make_rmem_tensor(c.rows_at_once, F32)
        for start in cutlass.range(cute.ceil_div(c.row_passes, c.rows_at_once), unroll=1):
            first = 2 * c.rows_at_once * (warp + c.warps * start)
            for i in cutlass.range_constexpr(c.rows_at_once):
                at = first + 2 * i + (lane >> 4)
                if cutlass.const_expr(even) or at < share:
                    source = self.source_row(row0 + at, channel0)
                    start = cute.assume(source * c.width + (lane & 15) * 4, divby=4)
                    self.load_row(w[None, None, i], mW.iterator + start)
            self.apply_norm(w, biases, mNw, mNb, lane)
            for i in cutlass.range_constexpr(c.rows_at_once):
                at = first + 2 * i + (lane >> 4)
                if cutlass.const_expr(even) or at < share:
                    self.store_operand(w[None, None, i], biases[i], sW, sAffine, row0 + at, lane)
        if cutlass.const_expr(c.team > 1):
            self.send_rows(sW, sAffine, rows, row0, rank, warp, lane)

    @cute.jit
    def apply_norm(self, w, biases, mNw, mNb, lane):
        """norm1's weight into some rows of in_proj, w (4, K tiles, rows), and this thread's share of what its bias
        adds to theirs. Its elements come last: registers are for the rows that are on their way."""
        nw, nb = cute.make_rmem_tensor(4, F32), cute.make_rmem_tensor(4, F32)
        for k in cutlass.range_constexpr(self.k_tiles):
            for m, x in ((mNw, nw), (mNb, nb)):
                cute.autovec_copy(four(m.iterator + K_TILE * k + cute.assume((lane & 15) * 4, divby=4)), x)
            for i in cutlass.range_constexpr(cute.size(biases)):
                if cutlass.const_expr(k == 0):
                    biases[i] = F32(0.0)
                for j in cutlass.range_constexpr(4):
                    biases[i] = cute.math.fma(w[j, k, i], nb[j], biases[i])
                    w[j, k, i] = w[j, k, i] * nw[j]

    @cute.jit
    def store_operand(self, x, bias, sW, sAffine, row, lane):
        c = self.config
        scale, inverse = numerics.scale_of(numerics.max_over(numerics.largest(x), LANES))
        x.store(x.load() * scale)
        rounded = self.rounded(x)
        high, low = row, I32(0)  # `low`: rows from a high part to its low part
        if cutlass.const_expr(c.parts == 2):
            high, low = row + c.channels, I32(2 * c.channels)
            if row < c.channels:
                high, low = 2 * row - (row & 7), I32(8)
        start, low = place(sW, high, self.element(0, lane)), cute.assume(low * K_TILE, divby=8 * K_TILE)
        for i in cutlass.range_constexpr(self.k_tiles):
            at = start + i * (self.operand_rows * K_TILE)
            for part in cutlass.range_constexpr(c.parts):
                cute.autovec_copy(rounded[None, i, part], four(at + low if part == 1 else at))
        bias = numerics.sum_over(bias, LANES)
        if (lane & 15) == 0:
            sAffine[0, row], sAffine[1, row] = inverse * F32(1.0 / self.scale), bias

    @cute.jit
    def receive(self, rows):
        """Waits for the rows that the other blocks of the team convert, and lets them know."""
        cute.arch.mbarrier_wait(rows, 0)
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def send_rows(self, sW, sAffine, rows, row, rank, warp, lane):
        """This block's share of the rows, from `row`, to the other blocks of the team, a piece a warp."""
        c = self.config
        share = self.rows // c.team
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()  # all are there
        cute.arch.cluster_wait()  # the others' barriers are initialised
        runs = ((row, share),)
        if cutlass.const_expr(c.parts == 2):
            first = cutlass.min(c.channels - row, share)  # of x0
            first = cutlass.max(first, 0)
            other = row + first + c.channels
            runs = ((2 * row, 2 * first), (other, share - first), (other + 2 * c.channels, share - first))
        if warp < self.k_tiles and lane == 0:
            for peer in cutlass.range(1, c.team, unroll=1):
                to = (rank + peer) % c.team
                for start, count in runs:
                    if count > 0:
                        source = sW + cute.assume((warp * self.operand_rows + start) * K_TILE, divby=8 * K_TILE)
                        cluster.copy_to_peer(source, rows, to, count * ROW_BYTES)
                if warp == 0:
                    affine = sAffine.iterator + cute.assume(2 * row, divby=4)
                    cluster.copy_to_peer(affine, rows, to, 8 * share)

    @cute.jit
    def source_row(self, row: I32, channel0: I32):
        """The row of in_proj behind a row of the slab: first x0, then x1 and v in turns of eight channels."""
        c = self.config
        pair = row - c.channels
        other = channel0 + (pair >> 4) * 8 + (pair & 7) + (1 + ((pair >> 3) & 1)) * c.width
        return channel0 + row if row < c.channels else other

    @cute.jit
    def finish(self, of_x0: cutlass.Constexpr, total, affine, taps, mOut, b, d, t0, conv_length, lane):
        """Bias, short convolution, gate, stores. A thread has four neighbouring tokens in each 16 columns."""
        c = self.config
        own = affine.shape[1]  # rows
        u = cute.make_tensor(total.iterator, cute.make_layout((2, 2, self.columns // 8)))  # (pair, row, columns / 8)
        q = lane % 4
        before = (lane & 28) | ((lane + 3) & 3)  # the lane with the four tokens before
        tail = cute.make_rmem_tensor((2, own), F32)  # the two tokens before the next 16
        for r in cutlass.range_constexpr(own):
            for j in cutlass.range_constexpr(self.columns // 8):
                for e in cutlass.range_constexpr(2):
                    value = u[e, 0, j] + u[e, 1, j] if cutlass.const_expr(own == 1) else u[e, r, j]
                    u[e, r, j] = cute.math.fma(value, affine[0, r], affine[1, r])
            for e in cutlass.range_constexpr(2):
                tail[e, r] = u[e, r, c.tile // 8]
                if t0 == 0:
                    tail[e, r] = F32(0.0)
        out = cute.make_rmem_tensor((4, own), F32)
        past = cute.make_rmem_tensor(6, F32)
        pitch = mOut.shape[2]
        start = mOut.iterator + cute.assume((b.to(I64) * c.width + d) * pitch + (t0 + 4 * q), divby=4)
        rest = conv_length - t0 - 4 * q
        for i in cutlass.range_constexpr(c.tile // 16):
            for r in cutlass.range_constexpr(own):
                for e in cutlass.range_constexpr(2):
                    last = u[e, r, 2 * i + 1]
                    past[e] = cute.arch.shuffle_sync(select(q == 3, tail[e, r], last), before)
                    past[2 + e], past[4 + e] = u[e, r, 2 * i], last
                    tail[e, r] = last
                for j in cutlass.range_constexpr(4):
                    value = taps[TAPS, r]
                    for k in cutlass.range_constexpr(TAPS):
                        value = cute.math.fma(taps[k, r], past[j + k], value)
                    out[j, r] = value
            if cutlass.const_expr(of_x0):
                for r in cutlass.range_constexpr(own):
                    store_if(16 * i < rest, out[None, r], start + (8 * r * pitch + 16 * i))
            else:
                for j in cutlass.range_constexpr(4):
                    out[j, 0] = out[j, 0] * out[j, 1]
                store_if(16 * i < rest, out[None, 0], start + 16 * i)


@cute.jit
def tree_sum(x):
    """The sum of a register tensor in pairs: exact where all elements are equal and their number a power of two."""
    y = [x[i] for i in range(cute.size(x))]
    while cutlass.const_expr(len(y) > 1):
        y = [y[i] + y[i + 1] for i in range(0, len(y) - 1, 2)] + y[len(y) // 2 * 2 :]
    return y[0]


def token_of(n):
    """The token of a tile in a column of the product: a thread's neighbouring columns are neighbouring tokens."""
    return (n & -16) | ((n & 6) << 1) | ((n & 8) >> 2) | (n & 1)


def place(s: cute.Pointer, row, element):
    """Where four elements of a row, from `element` of its 64 on, lie in the swizzled piece that starts at `s`."""
    return s + cute.assume(row * K_TILE + (element ^ (row & 7) * 8), divby=4)


def four(start: cute.Pointer):
    return cute.make_tensor(start, cute.make_layout(4))


def compile_project(config: Project, arch: str):
    d, batch, tokens = config.width, cute.sym_int(), cute.sym_int()
    pitch = cute.sym_int(divisibility=4)
    tensors = [compact(F32, tokens, d), compact(F32, d), compact(F32, d), compact(F32, 3 * d, d), compact(F32, 3 * d)]
    tensors += [compact(F32, 3 * d, TAPS), compact(F32, 3 * d)]
    tensors += [compact(F32, batch, d, pitch), compact(F32, batch, d, pitch)]
    tensors += filter_arguments(config.filter) + weights_arguments(config.weights)
    scalars = [I32(1), I32(1), I32(1), I32(1), I32(1), F32(1e-5), I32(1), F32(0.05)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ProjectKernel(config, arch), *tensors, *scalars, stream, options=compile_options(arch))
