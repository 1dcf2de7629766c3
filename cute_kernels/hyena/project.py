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
from cute_kernels.device.copy import prefetch
from cute_kernels.device.math import select
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
BARRIER = 1  # of the threads without those beside them; 2 is the filter's
GROUP_BARRIER = 3  # of the first warpgroup, the next ones follow


class ProjectKernel:
    def __init__(self, config: Project, arch: str):
        self.config = c = config
        self.filter, self.weights = FilterRole(c.filter), WeightsRole(c.weights)
        self.dtype = operand_type(c.dtype)
        self.k_tiles = c.width // K_TILE
        self.rows = 3 * c.channels
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
            LayoutEnum.ROW_MAJOR, (64, self.columns, K_TILE), self.dtype, self.k_tiles * c.parts * c.buffers
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, c.buffers]
            rows: cute.struct.MemRange[cutlass.Int64, 1]
            empty: cute.struct.MemRange[cutlass.Int64, c.buffers]
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
            grid=(cutlass.max(cute.round_up(runs, c.team) * c.slabs, cute.round_up(blocks, c.cluster)), 1, 1),
            block=(c.threads + 32 * c.side_warps, 1, 1),
            cluster=(c.cluster, 1, 1),
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
        cute.arch.griddepcontrol_launch_dependents()
        c = self.config
        storage = memory.SmemAllocator().allocate(self.Storage)
        sX = storage.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner)  # (tile + 8, 64, buffers * parts * K tiles)
        # One tile of 64 rows; others start at other rows of it.
        w_layout = cute.make_layout(
            ((8, self.rows // 8), (K_TILE, 1), (1, self.k_tiles * c.parts)),
            stride=((K_TILE, 8 * K_TILE), (1, 0), (0, self.rows * K_TILE)),
        )
        sW = storage.sW.get_tensor(w_layout, swizzle=x_layout.inner)  # (rows, 64, parts * K tiles)
        sAffine = storage.sAffine.get_tensor(cute.make_layout((2, self.rows)))  # each row's factor and bias
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()  # barriers of the buffers
        rows = storage.rows.data_ptr()  # of the rows that other blocks convert
        done, address = storage.done.data_ptr(), storage.address.data_ptr()  # the product's
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block = cute.arch.block_idx()[0]
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(c.buffers):
                cute.arch.mbarrier_init(full + i, c.units + 1)
                cute.arch.mbarrier_init(empty + i, c.share * c.warps)
            cute.arch.mbarrier_init(rows, 1)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(c.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        # A cluster is `share` slabs of `team` runs.
        rank, slab_groups = block % c.cluster, c.slabs // c.share
        slab = block // c.cluster % slab_groups * c.share + rank % c.share
        first_run = block // c.cluster // slab_groups * c.team
        tiles = mG.shape[0] * cute.ceil_div(conv_length, c.tile)
        if warp < c.warps and first_run * run < tiles:
            self.block(
                *(mX, mNw, mNb, mW, mB, mTaps, mTb, mG, mX0, length, conv_length, run, eps, mma_new, mma_add),
                *(sX, sW, sAffine, full, empty, rows, done, address, slab, first_run + rank // c.share, rank, warp),
            )
        elif beside != 0:
            self.beside(
                *(mZ, mF1, mFb1, mFreq, mF2, mFb2, mF3, mFb3, mFf, mFbias, mDeltas, mK),
                *(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1),
                *(conv_length, norm_len, shift, storage.sFilter.data_ptr(), block, warp),
                cute.round_up(cute.ceil_div(tiles, run), c.team) * c.slabs,
            )

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
        first_free: I32,  # the first block without tokens
    ):
        """A warpgroup makes the filter. The weights are converted by another one, or where there is none by the warps
        of blocks without tokens, or where these are few by the first, before the filter."""
        c = self.config
        blocks = cute.arch.grid_dim()[0]
        last = blocks - 1 - block  # the last have no tokens, where some have none
        side = warp - c.warps
        converts, unit, step = side >= c.side_warps - 4, last * 4 + warp % 4, blocks * 4
        if cutlass.const_expr(c.side_warps == 4):
            free = blocks - first_free
            if 2 * free * c.warps >= self.weights.units:
                converts, unit, step = side < 0, (block - first_free) * c.warps + warp, free * c.warps
        if converts:
            for i in cutlass.range(unit, self.weights.units, step, unroll=1):
                self.weights.work(
                    *(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1, i, cute.arch.lane_idx()),
                )
        if side >= 0 and side < 4:
            tasks = cute.arch.make_warp_uniform(self.filter.tasks(conv_length))  # the filter needs the registers
            for task in cutlass.range(last, tasks, blocks, unroll=1):
                self.filter.work(
                    *(mZ, mF1, mFb1, mFreq, mF2, mFb2, mF3, mFb3, mFf, mFbias, mDeltas, mK),
                    *(conv_length, norm_len, shift, sFilter, task),
                    cute.arch.thread_idx()[0] % 128,  # the threads before are a multiple of these
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
        sAffine: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        rows: cute.Pointer,
        done: cute.Pointer,
        address: cute.Pointer,
        slab: I32,
        run_index: I32,
        rank: I32,  # in the cluster
        warp: I32,
    ):
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % 32
        channel0 = slab * c.channels
        per_row = cute.ceil_div(conv_length, c.tile)  # tiles
        first = run_index * run
        last = cutlass.min(first + run, mG.shape[0] * per_row)
        self.engine.begin(done, address)
        if warp == c.warps - 1:
            runs = cute.ceil_div(mG.shape[0] * per_row, run)
            self.bring_ahead(mX, mW, length, conv_length, per_row, first, last, run_index, runs, channel0, lane)

        # Loads of the first tile and of the two tokens before it are on their way while the weights are converted, if
        # there are registers for both.
        x = cute.make_rmem_tensor((4, self.k_tiles, c.passes), F32)
        first_x = cute.make_rmem_tensor((4, self.k_tiles, c.passes + 1), F32)
        b, t0 = first // per_row, first % per_row * c.tile
        early = 4 * self.k_tiles * (c.rows_at_once + c.passes + 1) <= 80
        if cutlass.const_expr(early):
            self.load_first(first_x, mX, b, t0, length, conv_length, first < last, rank, warp, lane)
        self.convert_weights(mW, mB, mNw, mNb, sW, sAffine, rows, channel0, rank, warp, lane)
        if cutlass.const_expr(not early):
            self.load_first(first_x, mX, b, t0, length, conv_length, first < last, rank, warp, lane)
        if first < last:
            self.walk(
                *(mX, mTaps, mTb, mG, mX0, length, conv_length, eps, mma_new, mma_add, x, first_x),
                *(sX, sW, sAffine, full, empty, rows, done, address, channel0, b, t0, first, last, rank, warp),
            )
        elif cutlass.const_expr(c.team > 1):
            cute.arch.mbarrier_wait(rows, 0)
        self.engine.end(address)
        if cutlass.const_expr(c.cluster > 1):
            # Copies to other blocks read this one's memory.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def bring_ahead(self, mX, mW, length, conv_length, per_row, first, last, run_index, runs, channel0, lane):
        """All of a run's tokens and its slab's rows of in_proj to L2, divided among the blocks that read them."""
        c = self.config
        row_bytes = 4 * c.width
        for row in cutlass.range(run_index + runs * lane, self.rows, 32 * runs, unroll=1):
            prefetch(mW.iterator + self.source_row(row, channel0) * c.width, row_bytes)
        tokens = -(-c.tile // c.slabs)
        for tile in cutlass.range(first + lane, last, 32, unroll=1):
            t = tile % per_row * c.tile + channel0 // c.channels * tokens
            if t < conv_length:
                start = mX.iterator + ((tile // per_row).to(I64) * length + t) * c.width
                prefetch(start, cutlass.min(tokens, conv_length - t) * row_bytes)

    @cute.jit
    def walk(
        self,
        mX: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mG: cute.Tensor,
        mX0: cute.Tensor,
        length: I32,
        conv_length: I32,
        eps: F32,
        mma_new: cute.TiledMma,
        mma_add: cute.TiledMma,
        x: cute.Tensor,  # (4, K tiles, passes) for the next tile
        first_x: cute.Tensor,  # (4, K tiles, passes + 1): the first tile, loaded, and the two tokens before it
        sX: cute.Tensor,
        sW: cute.Tensor,
        sAffine: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        rows: cute.Pointer,
        done: cute.Pointer,
        address: cute.Pointer,
        channel0: I32,
        b: I32,
        t0: I32,
        first: I32,
        last: I32,
        rank: I32,
        warp: I32,
    ):
        """A block's tiles, one after the other, the operand of each made beside the product of the one before."""
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % 32
        self.normalise(first_x, eps)
        self.store_tile(first_x, sX, full, 0, rank, warp, lane)
        if warp == 0:
            for i in cutlass.range_constexpr(c.buffers):
                self.clear_halo(sX, i, lane)
            self.store_row(first_x[None, None, c.passes], sX, c.tile + HALO - 2 + lane // LANES, 0, lane)
            self.expect(full, lane)
        next_b, next_t0 = self.after(b, t0, conv_length)
        if first + 1 < last:
            self.load_tile(x, mX, next_b, next_t0, length, conv_length, rank, warp, lane)

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
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync()
        if cutlass.const_expr(c.team > 1):
            cute.arch.mbarrier_wait(rows, 0)
        if active:
            for i in cutlass.range_constexpr(2):
                affine[0, i], affine[1, i] = sAffine[0, row0 + row + 8 * i], sAffine[1, row0 + row + 8 * i]

        mma_new.set(self.engine.accumulate, False)
        mma_add.set(self.engine.accumulate, True)
        slice_ = self.engine.slice(mma_new, thread)
        m_layout = cute.make_layout(((8, 8), *sW.shape[1:]), stride=sW.stride)
        sA = cute.make_tensor(sW.iterator + cute.assume(row0 * K_TILE, divby=8 * K_TILE), m_layout)
        fA = mma_new.make_fragment_A(slice_.partition_A(sA))  # (MMA, 1, K blocks, parts * K tiles)
        fB = mma_new.make_fragment_B(slice_.partition_B(sX))  # (MMA, 1, K blocks, buffers * parts * K tiles)
        acc, total = self.engine.accumulators(mma_new, address)

        old = cute.make_rmem_tensor((4, self.k_tiles * c.parts), self.dtype)
        for tile in cutlass.range(first, last, unroll=1):
            buffer, use = (tile - first) % c.buffers, (tile - first) // c.buffers
            following, next_use = (tile + 1 - first) % c.buffers, (tile + 1 - first) // c.buffers
            cute.arch.mbarrier_wait(full + buffer, use % 2)
            self.engine.start((mma_new, mma_add), acc, total, fA, fB, buffer, done, tile - first)
            if warp == 0 and tile + 1 < last:
                self.read_halo(old, sX, buffer, lane)
            if cutlass.const_expr(c.buffers == 1):
                self.release(empty + buffer, tile + c.buffers < last, rank, lane)
            far_b, far_t0 = self.after(next_b, next_t0, conv_length)
            if tile + 1 < last:
                self.normalise(x, eps)
                if next_use > 0:
                    cute.arch.mbarrier_wait(empty + following, (next_use - 1) % 2)
                if warp == 0:
                    self.write_halo(old, sX, following, lane)
                    self.expect(full + following, lane)
                self.store_tile(x, sX, full + following, following, rank, warp, lane)
                if tile + 2 < last:
                    self.load_tile(x, mX, far_b, far_t0, length, conv_length, rank, warp, lane)
            if cutlass.const_expr(c.buffers == 2):
                self.engine.finish(acc, total, done, tile - first)
                self.release(empty + buffer, tile + c.buffers < last, rank, lane)
            if active:
                self.finish(total, affine, taps, mG, mX0, wg, b, out0, t0, conv_length, lane)
            b, t0, next_b, next_t0 = next_b, next_t0, far_b, far_t0

    @cute.jit
    def after(self, b: I32, t0: I32, conv_length: I32):
        """The tile after one: batch row and first token."""
        t0 += self.config.tile
        if t0 >= conv_length:
            b, t0 = b + 1, I32(0)
        return b, t0

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
    def column(self, i: cutlass.Constexpr, rank, warp, lane):
        """This thread's row of a tile's operand in pass i, a column of the product; the tile's width if it has none."""
        c = self.config
        unit = warp + c.warps * i
        n = 2 * (rank % c.share * c.units + unit) + lane // LANES
        if unit >= c.units:
            n = I32(c.tile)
        return n

    @cute.jit
    def load_tile(self, x, mX, b, t0, length, conv_length, rank, warp, lane):
        """The tokens of this thread in a tile, one in every pass; zeros beyond the end."""
        c = self.config
        for i in cutlass.range_constexpr(c.passes):
            x[None, None, i].fill(0.0)
            n = self.column(i, rank, warp, lane)
            t = t0 + token_of(n)
            if n < c.tile and t < conv_length:
                self.load_row(x[None, None, i], mX, b.to(I64) * length + t, lane)

    @cute.jit
    def load_first(self, x, mX, b, t0, length, conv_length, any_tokens, rank, warp, lane):
        """A tile, and in another pass of the first warp the two tokens before it."""
        c = self.config
        if any_tokens:
            self.load_tile(x, mX, b, t0, length, conv_length, rank, warp, lane)
        x[None, None, c.passes].fill(0.0)
        if warp == 0 and any_tokens and t0 > 0:
            self.load_row(x[None, None, c.passes], mX, b.to(I64) * length + (t0 - 2 + lane // LANES), lane)

    @cute.jit
    def normalise(self, x, eps):
        """(x - mean) / deviation, times the operands' scale, in place: a row in each pass (4, K tiles, passes)."""
        d = self.config.width
        for i in cutlass.range_constexpr(cute.size(x, mode=[2])):
            row = x[None, None, i]
            mean = numerics.sum_over(tree_sum(row), LANES) * F32(1.0 / d)
            row.store(row.load() - mean)
            # The mean's rounding error would be all there is of a row that is nearly constant.
            squares = cute.make_rmem_tensor_like(row)
            squares.store(row.load() * row.load())
            rest = numerics.sum_over(tree_sum(row), LANES) * F32(1.0 / d)
            square = numerics.sum_over(tree_sum(squares), LANES) * F32(1.0 / d)
            variance = cute.arch.fmax(cute.math.fma(-rest, rest, square), F32(0.0))
            factor = F32(self.scale) * numerics.inverse_root(variance + eps)
            offset = -rest * factor
            for j in cutlass.range_constexpr(cute.size(row)):
                row[j] = cute.math.fma(row[j], factor, offset)

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
    def store_tile(self, x, sX, full, buffer, rank, warp, lane):
        """Normalised tokens into a buffer, of every block that shares the work."""
        c = self.config
        pieces = c.parts * self.k_tiles
        for i in cutlass.range_constexpr(c.passes):
            n = self.column(i, rank, warp, lane)
            if n < c.tile:
                self.store_row(x[None, None, i], sX, n, buffer * pieces, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(c.passes):
            n = self.column(i, rank, warp, lane)
            if n < c.tile:
                if cutlass.const_expr(c.share > 1):
                    copies = (c.share - 1) * pieces
                    for j in cutlass.range_constexpr(cute.ceil_div(copies, 32)):
                        copy = lane + 32 * j
                        if copy < copies:
                            peer = rank // c.share * c.share + (rank + 1 + copy // pieces) % c.share
                            row0 = (buffer * pieces + copy % pieces) * self.columns + n // 2 * 2
                            source = sX.iterator + cute.assume(row0 * K_TILE, divby=2 * K_TILE)
                            cluster.copy_to_peer(source, full, peer, 2 * ROW_BYTES)
                if lane == 0:
                    cute.arch.mbarrier_arrive(full)

    @cute.jit
    def expect(self, full, lane):
        """What other blocks will send, and this warp's own rows of the halo."""
        c = self.config
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            if cutlass.const_expr(c.share > 1):
                rows = (c.tile - 2 * c.units) * c.parts * self.k_tiles
                cute.arch.mbarrier_arrive_and_expect_tx(full, rows * ROW_BYTES)
            else:
                cute.arch.mbarrier_arrive(full)

    @cute.jit
    def release(self, empty, awaited, rank, lane):
        """Tells every block that fills this buffer that the warp is done with it, if it will be filled again."""
        c = self.config
        cute.arch.sync_warp()  # other lanes have read the halo
        if awaited and lane == 0:
            if cutlass.const_expr(c.share > 1):
                for peer in cutlass.range_constexpr(c.share):
                    cute.arch.mbarrier_arrive(empty, rank // c.share * c.share + peer)
            else:
                cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def read_halo(self, x, sX, buffer, lane):
        """The last two tokens of a tile."""
        c = self.config
        pieces = c.parts * self.k_tiles
        for j in cutlass.range_constexpr(pieces):
            cute.autovec_copy(piece_of(sX, c.tile - 2 + lane // LANES, buffer * pieces + j, lane), x[None, j])

    @cute.jit
    def write_halo(self, x, sX, buffer, lane):
        c = self.config
        pieces = c.parts * self.k_tiles
        for j in cutlass.range_constexpr(pieces):
            cute.autovec_copy(x[None, j], piece_of(sX, c.tile + HALO - 2 + lane // LANES, buffer * pieces + j, lane))

    @cute.jit
    def clear_halo(self, sX, buffer, lane):
        """The six columns before the two tokens."""
        zero = cute.make_rmem_tensor(4, self.dtype)
        zero.fill(0.0)
        pieces = self.config.parts * self.k_tiles
        for i in cutlass.range_constexpr(HALO // 2 - 1):
            for j in cutlass.range_constexpr(pieces):
                n = self.config.tile + 2 * i + lane // LANES
                cute.autovec_copy(zero, piece_of(sX, n, buffer * pieces + j, lane))

    @cute.jit
    def convert_weights(self, mW, mB, mNw, mNb, sW, sAffine, rows, channel0, rank, warp, lane):
        """The slab's rows of in_proj, times norm1's weight, as operands; their scales; their biases with norm1's.

        The blocks of a team convert a share each.
        """
        c = self.config
        share = self.rows // c.team
        row0 = rank // c.share * share
        even = share % (2 * c.warps * c.rows_at_once) == 0
        if cutlass.const_expr(c.team > 1) and warp == 0 and lane == 0:
            expected = (self.rows - share) * (c.parts * self.k_tiles * ROW_BYTES + 8)
            cute.arch.mbarrier_arrive_and_expect_tx(rows, expected)
        w = cute.make_rmem_tensor((4, self.k_tiles, c.rows_at_once), F32)
        biases = cute.make_rmem_tensor(c.rows_at_once, F32)
        for start in cutlass.range(cute.ceil_div(c.row_passes, c.rows_at_once), unroll=1):
            for i in cutlass.range_constexpr(c.rows_at_once):
                at = 2 * (warp + c.warps * (start * c.rows_at_once + i)) + lane // LANES
                if cutlass.const_expr(even) or at < share:
                    source = self.source_row(row0 + at, channel0)
                    self.load_row(w[None, None, i], mW, source, lane)
                    biases[i] = mB[source]
            self.apply_norm(w, biases, mNw, mNb, lane)
            for i in cutlass.range_constexpr(c.rows_at_once):
                at = 2 * (warp + c.warps * (start * c.rows_at_once + i)) + lane // LANES
                if cutlass.const_expr(even) or at < share:
                    self.store_operand(w[None, None, i], biases[i], sW, sAffine, row0 + at, lane)
                    if cutlass.const_expr(c.team > 1):
                        self.send_rows(sW, sAffine, rows, (row0 + at) // 2 * 2, rank, lane)

    @cute.jit
    def apply_norm(self, w, biases, mNw, mNb, lane):
        """norm1's weight into some rows of in_proj, w (4, K tiles, rows), and this thread's share of its bias into
        theirs. Its elements come last: registers are for the rows that are on their way."""
        nw, nb = cute.make_rmem_tensor(4, F32), cute.make_rmem_tensor(4, F32)
        for k in cutlass.range_constexpr(self.k_tiles):
            for m, x in ((mNw, nw), (mNb, nb)):
                cute.autovec_copy(cute.local_tile(m, (4,), (LANES * k + lane % LANES,)), x)
            for i in cutlass.range_constexpr(cute.size(biases)):
                if cutlass.const_expr(k == 0):
                    biases[i] = select(lane % LANES == 0, biases[i], F32(0.0))
                for j in cutlass.range_constexpr(4):
                    biases[i] = cute.math.fma(w[j, k, i], nb[j], biases[i])
                    w[j, k, i] = w[j, k, i] * nw[j]

    @cute.jit
    def store_operand(self, x, bias, sW, sAffine, row, lane):
        amax = F32(0.0)
        for j in cutlass.range_constexpr(cute.size(x)):
            amax = cute.arch.fmax(amax, cute.arch.fmax(x[j], -x[j]))
        scale, inverse = numerics.scale_of(numerics.max_over(amax, LANES))
        x.store(x.load() * scale)
        self.store_row(x, sW, row, 0, lane)
        bias = numerics.sum_over(bias, LANES)
        if lane % LANES == 0:
            sAffine[0, row], sAffine[1, row] = inverse * F32(1.0 / self.scale), bias

    @cute.jit
    def send_rows(self, sW, sAffine, rows, row, rank, lane):
        """A pair of rows that this warp has written, to the other blocks of the team."""
        c = self.config
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        pieces = c.parts * self.k_tiles
        copies = (c.team - 1) * (pieces + 1)
        for j in cutlass.range_constexpr(cute.ceil_div(copies, 32)):
            copy = lane + 32 * j
            if copy < copies:
                peer = (rank + (1 + copy // (pieces + 1)) * c.share) % c.cluster
                piece = copy % (pieces + 1)
                if piece < pieces:
                    source = sW.iterator + cute.assume((piece * self.rows + row) * K_TILE, divby=2 * K_TILE)
                    cluster.copy_to_peer(source, rows, peer, 2 * ROW_BYTES)
                else:
                    cluster.copy_to_peer(sAffine.iterator + cute.assume(2 * row, divby=4), rows, peer, 16)

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
    def finish(self, total, affine, taps, mG, mX0, wg, b, d, t0, conv_length, lane):
        """Bias, short convolution, gate, stores. A thread has four neighbouring tokens in each 16 columns."""
        c = self.config
        u = cute.make_tensor(total.iterator, cute.make_layout((2, 2, self.columns // 8)))  # (pair, row, columns / 8)
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


def token_of(n):
    """The token of a tile in a column of the product: a thread's neighbouring columns are neighbouring tokens."""
    return n // 16 * 16 + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2


def piece_of(s: cute.Tensor, row, piece, lane):
    """This thread's four elements of a row in one piece of an operand."""
    return cute.local_tile(s, (1, 4, 1), (row, lane % LANES, piece))[0, None, 0]


def four_at(m: cute.Tensor, b, d, t):
    """Four neighbouring tokens of a channel, from a multiple of four."""
    return cute.zipped_divide(m, (1, 1, 4))[(0, 0, None), (b.to(I64), d.to(I64), t // 4)]


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
