"""The block's first part: LayerNorm, in_proj, the short convolution and the gate, from x to g = v * x1 and x0.

A block owns a tile of tokens and a run of slabs. A slab is some channels, with the rows of in_proj that make x0, x1 and
v of them, converted by the launch in front (`in_proj.py`). The block normalises its tokens to an operand, once; then
the rows of one slab after the other stream through shared memory. Channels are the rows of the product and tokens its
columns: a thread holds whole pieces of time of its channels, so the short convolution needs a shuffle, the gate
nothing, and the results leave channels first.

The weight of norm1 is in the rows of in_proj, and its bias in in_proj's: what is left of LayerNorm is
(x - mean) / deviation, which is at most sqrt(D), so one scale serves every token.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.runtime import make_fake_stream
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.device.copy import load, store_if
from cute_kernels.device.math import select, tree_sum
from cute_kernels.device.pin import block_again, pin
from cute_kernels.device.product import row_product
from cute_kernels.hyena import numerics
from cute_kernels.hyena.arguments import compact, operand_type
from cute_kernels.hyena.config import Project
from cute_kernels.hyena.filter import FilterRole, filter_arguments
from cute_kernels.hyena.in_proj import GRANULE, K_TILE, TAPS, InProjKernel, four
from cute_kernels.hyena.weights import WeightsRole, weights_arguments
from cute_kernels.hyena.workspace import IN_PROJ_RECORD
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
ROW_BYTES = 128
HALO = 8  # columns for the two tokens before a tile: the last two of them
BARRIER = 1  # of the threads that multiply; the filter's are 8 and up
GROUP_BARRIER = 3  # of the first warpgroup, the next ones follow


class ProjectKernel:
    def __init__(self, config: Project, arch: str):
        self.config = c = config
        self.filter, self.weights = FilterRole(c.filter, arch), WeightsRole(c.weights)
        self.in_proj = InProjKernel(c.weights, c.filter)
        self.dtype = operand_type(c.dtype)
        self.k_tiles = c.width // K_TILE
        self.pieces = c.parts * self.k_tiles  # of the tokens' operand
        self.columns = c.tile + HALO
        self.scale = numerics.normalised_scale(c.width)
        # Blackwell's code would spill, and whether blocks lie beside each other there is not known.
        self.register_threads = c.register_threads if arch == "sm_90a" else c.block_threads
        self.share = -(-self.filter.items // (1 + c.warps // 4))  # of the filter's last layer, where all do it
        self.engine = row_product(
            arch, self.columns, self.k_tiles, c.parts, self.dtype, c.warps // 4, c.depth, BARRIER, GROUP_BARRIER
        )

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (T, D) fp32, T = B * L
        mG: cute.Tensor,  # (B, D, Lp) fp32: v * x1, rows padded to Lp
        mX0: cute.Tensor,  # (B, D, Lp) fp32
        mZ: cute.Tensor,  # as FilterKernel takes them
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
        mFo: cute.Tensor,
        mK: cute.Tensor,
        mNw: cute.Tensor,  # as ConvertWeightsKernel takes what follows
        mNb: cute.Tensor,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mWo: cute.Tensor,
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mWT: cute.Tensor,
        mRecords: cute.Tensor,
        mWoT: cute.Tensor,
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
        length: I32,  # L
        conv_length: I32,  # tokens of a row that are computed, at most L
        run: I32,  # slabs of one block
        blocks: I32,  # at least so many
        beside: I32,  # 1: with the weights in front and the filter beside; 0: these tensors hold them already
        eps: F32,
        norm_len: I32,
        shift: F32,
        stream: cuda.CUstream,
    ):
        c = self.config
        x_layout = sm90_utils.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (64, self.columns, K_TILE), self.dtype, self.pieces
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[cutlass.Int64, c.boxes]
            empty: cute.struct.MemRange[cutlass.Int64, c.boxes]
            done: cute.struct.MemRange[cutlass.Int64, self.engine.barriers]
            ready: cute.struct.MemRange[cutlass.Int64, 1]
            address: cute.struct.MemRange[I32, self.engine.words]
            # 128: bulk copies to less aligned places are slower.
            sFilter: cute.struct.Align[cute.struct.MemRange[F32, c.filter.shared_floats], 128]
            sW: cute.struct.Align[cute.struct.MemRange[self.dtype, c.stages * c.stage_rows * K_TILE], 1024]
            sX: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(x_layout)], 1024]

        self.Storage = Storage
        if beside != 0:
            self.in_proj.launch(
                (mNw, mNb, mW, mB, mTaps, mTb, mWT, mRecords),
                (mFreq, mF2, mFb2, mF3, mFb3, mFf, mFbias, mDeltas, mFo),
                stream,
            )
        tiles = mG.shape[0] * cute.ceil_div(conv_length, c.tile)
        with_tokens = tiles * cute.ceil_div(c.slabs, run)
        self.kernel.set_name_prefix("hyena_project", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(mX, mG, mX0, mZ, mF1, mFb1, mFreq, mFo, mK, mWT, mRecords),
            *(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1),
            *(length, conv_length, run, with_tokens, beside, eps, norm_len, shift),
            *(self.engine.tiled_mma(), self.engine.tiled_mma(), x_layout),
        ).launch(
            grid=(cutlass.max(with_tokens, blocks), 1, 1),
            block=(c.block_threads, 1, 1),
            stream=stream,
            use_pdl=True,
            max_number_threads=[self.register_threads, 1, 1],
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mG: cute.Tensor,
        mX0: cute.Tensor,
        mZ: cute.Tensor,
        mF1: cute.Tensor,
        mFb1: cute.Tensor,
        mFreq: cute.Tensor,
        mFo: cute.Tensor,
        mK: cute.Tensor,
        mWT: cute.Tensor,
        mRecords: cute.Tensor,
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
        with_tokens: I32,  # blocks, the last ones
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
        sX = storage.sX.get_tensor(x_layout.outer, swizzle=x_layout.inner)  # (tile + 8, 64, parts * K tiles)
        # One tile of 64 rows of each stage; others start at other rows of it.
        w_layout = cute.make_layout(
            ((8, 8), (K_TILE, 1), (1, (c.stages, c.parts))),
            stride=((K_TILE, 8 * K_TILE), (1, 0), (0, (c.stage_rows * K_TILE, 2 * c.channels * K_TILE))),
        )
        sW = storage.sW.get_tensor(w_layout, swizzle=x_layout.inner)  # (64, 64, stages * parts)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()  # barriers of the boxes
        done, address = storage.done.data_ptr(), storage.address.data_ptr()  # the product's
        ready, sFilter = storage.ready.data_ptr(), storage.sFilter.data_ptr()  # the filter's
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(c.boxes):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, self.engine.releases)
            cute.arch.mbarrier_init(ready, c.filter_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if beside == 0:  # or the launch in front has waited for what x and the weights come from
            cute.arch.griddepcontrol_wait()
        index = block - (blocks - with_tokens)
        runs = cute.ceil_div(c.slabs, run)
        first = index % runs * run  # slab
        last = cutlass.min(first + run, c.slabs)
        b, t0 = self.position(index // runs, conv_length)
        if warp < c.warps:
            if index >= 0:
                self.engine.begin(done, address)
                self.make_operand(mX, cute.recast_ptr(sX.iterator), length, conv_length, eps, b, t0, warp)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=BARRIER, number_of_threads=c.threads + 32)  # and the one for the halo
                cute.arch.griddepcontrol_wait()  # the weights
                mma_new.set(self.engine.accumulate, False)
                mma_add.set(self.engine.accumulate, True)
                rest = (mRecords, conv_length, mma_new, mma_add, sX, sW, full, empty, done, address, b, t0, first, last)
                if warp < 4:
                    self.walk(True, mX0, *rest, warp)
                else:
                    self.walk(False, mG, *rest, warp)
                self.engine.end(address)
            if cutlass.const_expr(self.filter.items > 1):
                tasks, own = self.share_of_filter(pin(run), pin(conv_length))
                block = block_again()
                if beside != 0 and own < self.filter.items and block < tasks:
                    self.filter.help(
                        *(mFo, mK, conv_length, shift, sFilter, block, cute.arch.thread_idx()[0] % 128),
                        *(self.share, (warp // 4 + 1) * self.share, ready),
                    )
        elif warp < c.warps + c.filter_warps:
            if beside != 0:
                thread = cute.arch.thread_idx()[0] - c.threads
                tasks, own = self.share_of_filter(run, conv_length)
                for task in cutlass.range(block, tasks, blocks, unroll=1):
                    self.filter.work(
                        *(mZ, mF1, mFb1, mFreq, mFo, mK, conv_length, norm_len, shift, sFilter, task, thread),
                        *((own, ready) if cutlass.const_expr(self.filter.items > 1) else (1, None)),
                    )
        elif warp == c.warps + c.filter_warps:
            if index >= 0:
                self.make_halo(mX, cute.recast_ptr(sX.iterator), length, eps, b, t0)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier_arrive(barrier_id=BARRIER, number_of_threads=c.threads + 32)
                if cute.arch.lane_idx() == 0:
                    cute.arch.griddepcontrol_wait()  # the weights
                    self.stream_rows(mWT.iterator, cute.recast_ptr(sW.iterator), full, empty, first, last)
        elif beside != 0:
            count = c.other_warps - 1
            unit = block * count + warp - (c.warps + c.filter_warps + 1)
            for i in cutlass.range(unit, self.weights.units, blocks * count, unroll=1):
                self.weights.work(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1, i, cute.arch.lane_idx())

    @cute.jit
    def share_of_filter(self, run: I32, conv_length: I32):
        """Tasks of the filter, and the last layer's items that a warpgroup does: who multiplies helps the filter then,
        if that takes longer."""
        c = self.config
        tasks, items = self.filter.tasks(conv_length), self.filter.items
        own = I32(items)
        if tasks <= cute.arch.grid_dim()[0] and (run < c.slabs or c.positions == 32):
            own = I32(self.share)
        return tasks, own

    @cute.jit
    def position(self, tile: I32, conv_length: I32):
        """A tile's batch row and its first token there."""
        per_row = cute.ceil_div(conv_length, self.config.tile)
        return tile // per_row, tile % per_row * self.config.tile

    @cute.jit
    def stream_rows(
        self, mWT: cute.Pointer, sW: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, first: I32, last: I32
    ):
        """One thread: the rows of in_proj, slab after slab, piece after piece."""
        c = self.config
        granules = c.channels // GRANULE  # of a slab
        x0, others = GRANULE * c.parts, 2 * GRANULE * c.parts  # rows of a granule's piece
        rows = ((c.x0_rows, x0, 0), *((others, others, x0) for _ in range(granules)))  # of boxes; see below
        for n in cutlass.range(last - first, unroll=1):
            start = 0  # row of a stage
            for group, (count, step, skipped) in enumerate(rows):
                box, phase = self.engine.box(n, group)
                for k in cutlass.range_constexpr(self.k_tiles):
                    if n >= c.depth:
                        cute.arch.mbarrier_wait(empty + (box + k), phase ^ 1)
                    cute.arch.mbarrier_arrive_and_expect_tx(full + (box + k), count * ROW_BYTES)
                    stage = n % c.depth * self.k_tiles + k
                    for i in cutlass.range_constexpr(count // step):  # pieces of granules: x0's, or others
                        granule = (first + n) * granules + (i % granules if group == 0 else group - 1)
                        source = (granule * self.k_tiles + k) * (x0 + others) + skipped
                        target = stage * c.stage_rows + start + i * step
                        load(
                            sW + cute.assume(target * K_TILE, divby=8 * K_TILE),
                            mWT + cute.assume(source * K_TILE, divby=8 * K_TILE),
                            *(step * ROW_BYTES, full + (box + k)),
                        )
                start += count

    @cute.jit
    def make_operand(
        self,
        mX: cute.Tensor,
        tokens: cute.Pointer,  # the operand
        length: I32,
        conv_length: I32,
        eps: F32,
        b: I32,
        t0: I32,
        warp: I32,
    ):
        """LayerNorm: the tile's operand, four tokens a warp at a time."""
        c = self.config
        lane = cute.arch.lane_idx()
        groups = c.tile // 4
        rounds = -(-groups // c.warps)
        x = cute.make_rmem_tensor((4, 2 * self.k_tiles, rounds), F32)
        for i in cutlass.range_constexpr(rounds):  # all loads first: they take longer than the rest
            t = t0 + token_of(4 * (warp + i * c.warps) + (lane >> 3))
            t = cutlass.min(t, conv_length - 1)  # or one that nobody uses
            self.load_token(x[None, None, i], mX, b, t, length, lane)
        for i in cutlass.range_constexpr(rounds):
            group = warp + i * c.warps
            if cutlass.const_expr(groups % c.warps == 0) or group < groups:
                self.normalise(x[None, None, i], eps, lane)
                self.store_token(x[None, None, i], tokens, 4 * group + (lane >> 3), lane)

    @cute.jit
    def make_halo(self, mX, tokens, length, eps, b, t0):
        """The four tokens before a tile, by one warp, and the zeros before them."""
        c = self.config
        lane = cute.arch.lane_idx()
        x = cute.make_rmem_tensor((4, 2 * self.k_tiles), F32)
        t = cutlass.max(t0 - 4 + (lane >> 3), 0)
        self.load_token(x, mX, b, t, length, lane)
        self.clear_halo(tokens, lane)
        self.normalise(x, eps, lane)
        self.store_token(x, tokens, c.tile + 4 + (lane >> 3), lane)

    @cute.jit
    def walk(
        self,
        of_x0: cutlass.Constexpr,
        mOut: cute.Tensor,  # (B, D, Lp) fp32: x0 or g
        mRecords: cute.Tensor,
        conv_length: I32,
        mma_new: cute.TiledMma,
        mma_add: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        done: cute.Pointer,
        address: cute.Pointer,
        b: I32,
        t0: I32,
        first: I32,
        last: I32,
        warp: I32,
    ):
        """A warpgroup's products of a block's slabs, one after the other, and what becomes of them."""
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % 32
        joined = of_x0 and c.parts == 2  # both parts of a channel of x0, and not two channels
        # This thread's first channel, and the first row of its warpgroup's M tile.
        channel, row0 = row_of(warp, lane, 8 if joined or not of_x0 else 16), I32(0)
        rows = self.record_rows(of_x0, joined, warp, lane)
        if cutlass.const_expr(not of_x0):
            channel += GRANULE * (warp // 4 - 1)
            row0 = c.x0_rows + 64 * (warp // 4 - 1)
        # With 32 channels and one part x0's rows are there twice.
        active = True if cutlass.const_expr(joined or not of_x0) else 16 * (warp % 4) < c.channels
        record = cute.make_rmem_tensor((IN_PROJ_RECORD, len(rows)), F32)
        record.fill(0.0)

        slice_ = self.engine.slice(mma_new, tidx % 128)
        sA = cute.make_tensor(sW.iterator + cute.assume(row0 * K_TILE, divby=8 * K_TILE), sW.layout)
        fA = mma_new.make_fragment_A(slice_.partition_A(sA))  # (MMA, 1, K blocks, stages * parts)
        fB = mma_new.make_fragment_B(slice_.partition_B(sX))  # (MMA, 1, K blocks, parts * K tiles)
        acc, total = self.engine.accumulators(mma_new, address)
        mma = (mma_new, mma_add)
        for slab in cutlass.range(first, last, unroll=1):
            if cutlass.const_expr(c.parts == 1):  # with two parts registers do not last for them
                self.load_records(mRecords, record, slab * (3 * c.channels), rows, active)
            self.engine.multiply(mma, acc, total, fA, fB, full, empty, done, slab - first, slab + 1 == last, joined)
            if cutlass.const_expr(c.parts == 2):
                rows = self.record_rows(of_x0, joined, warp, pin(lane))
                self.load_records(mRecords, record, pin(slab) * (3 * c.channels), rows, active)
            if active:
                self.finish(of_x0, total, record, mOut, b, slab * c.channels + channel, t0, conv_length, lane)

    def record_rows(self, of_x0, joined, warp, lane):
        """Where the records of this thread's one or two rows of a product lie, in rows from a slab's first."""
        row = row_of(warp, lane, 8 if joined else 16)
        if not of_x0:
            return [(warp // 4 - 1) * (3 * GRANULE) + GRANULE + r for r in (row, row + 8)]
        rows = (row,) if joined else (row, row + 8)
        # Granule by granule, as if each had three rows a channel.
        return [r // GRANULE * (3 * GRANULE) + r % GRANULE for r in rows]

    @cute.jit
    def load_records(self, mRecords, record, first, rows, active):
        """The records of this thread's rows, which count from `first`: (8, rows)."""
        if active:
            for r in cutlass.range_constexpr(len(rows)):
                for i in cutlass.range_constexpr(IN_PROJ_RECORD // 4):
                    at = cute.assume((first + rows[r]) * IN_PROJ_RECORD + 4 * i, divby=4)
                    cute.autovec_copy(four(mRecords.iterator + at), cute.local_tile(record[None, r], (4,), (i,)))

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
        near = cute.arch.shuffle_sync(tree_sum(elements(some)) * F32(1.0 / cute.size(some)), lane & 24)
        x.store(x.load() - near)
        squares = [x[j] * x[j] for j in range(4)]
        for j in cutlass.range_constexpr(4, cute.size(x)):
            squares[j % 4] = cute.math.fma(x[j], x[j], squares[j % 4])
        sums = [tree_sum(elements(x)), (squares[0] + squares[1]) + (squares[2] + squares[3])]
        for n in cutlass.range_constexpr(3):
            sums = [value + cute.arch.shuffle_sync_bfly(value, offset=4 >> n) for value in sums]
        rest, square = sums[0] * F32(1.0 / d), sums[1] * F32(1.0 / d)
        variance = cute.arch.fmax(cute.math.fma(-rest, rest, square), F32(0.0))
        factor = F32(self.scale) * numerics.inverse_root(variance + eps)
        offset = -rest * factor
        for j in cutlass.range_constexpr(cute.size(x)):
            x[j] = cute.math.fma(x[j], factor, offset)

    @cute.jit
    def store_token(self, x, tokens, row, lane):
        """A token's elements of this thread into a row of the operand."""
        rounded = self.rounded(x)
        for i in cutlass.range_constexpr(2 * self.k_tiles):
            for part in cutlass.range_constexpr(self.config.parts):
                piece = tokens + (part * self.k_tiles + i // 2) * (self.columns * K_TILE)
                cute.autovec_copy(rounded[None, i, part], four(place(piece, row, self.element(i, lane))))

    def rounded(self, x):
        """x (4, n) in the operands' type, and with two parts what is left of it: (4, n, parts)."""
        parts = cute.make_rmem_tensor((*x.shape, self.config.parts), self.dtype)
        parts[None, None, 0].store(x.load().to(self.dtype))
        if cutlass.const_expr(self.config.parts == 2):
            parts[None, None, 1].store((x.load() - parts[None, None, 0].load().to(F32)).to(self.dtype))
        return parts

    @cute.jit
    def clear_halo(self, tokens, lane):
        """The four columns before the tokens before a tile, in every piece."""
        zero = cute.make_rmem_tensor(4, self.dtype)
        zero.fill(0.0)
        for i in cutlass.range_constexpr(2):
            row = place(tokens, self.config.tile + 2 * i + (lane >> 4), self.element(0, lane))
            for j in cutlass.range_constexpr(self.pieces):
                cute.autovec_copy(zero, four(row + j * (self.columns * K_TILE)))

    @cute.jit
    def finish(self, of_x0: cutlass.Constexpr, total, record, mOut, b, d, t0, conv_length, lane):
        """Bias, short convolution, gate, stores. A thread has four neighbouring tokens in each 16 columns."""
        c = self.config
        own = record.shape[1]  # rows
        u = cute.make_tensor(total.iterator, cute.make_layout((2, 2, self.columns // 8)))  # (pair, row, columns / 8)
        q = lane % 4
        before = (lane & 28) | ((lane + 3) & 3)  # the lane with the four tokens before
        tail = cute.make_rmem_tensor((2, own), F32)  # the two tokens before the next 16
        for r in cutlass.range_constexpr(own):
            for j in cutlass.range_constexpr(self.columns // 8):
                for e in cutlass.range_constexpr(2):
                    value = u[e, 0, j] + u[e, 1, j] if cutlass.const_expr(own == 1) else u[e, r, j]
                    u[e, r, j] = cute.math.fma(value, record[0, r], record[1, r])
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
                    value = record[2 + TAPS, r]
                    for k in cutlass.range_constexpr(TAPS):
                        value = cute.math.fma(record[2 + k, r], past[j + k], value)
                    out[j, r] = value
            if cutlass.const_expr(of_x0):
                for r in cutlass.range_constexpr(own):
                    store_if(16 * i < rest, out[None, r], start + (8 * r * pitch + 16 * i))
            else:
                for j in cutlass.range_constexpr(4):
                    out[j, 0] = out[j, 0] * out[j, 1]
                store_if(16 * i < rest, out[None, 0], start + 16 * i)


def elements(x):
    """A register tensor's numbers."""
    return [x[i] for i in range(cute.size(x))]


def row_of(warp, lane, rows):
    """The first of a thread's rows of a product, of which each warp of its warpgroup has `rows`."""
    return rows * (warp % 4) + lane // 4


def token_of(n):
    """The token of a tile in a column of the product: a thread's neighbouring columns are neighbouring tokens."""
    return (n & -16) | ((n & 6) << 1) | ((n & 8) >> 2) | (n & 1)


def place(s: cute.Pointer, row, element):
    """Where four elements of a row, from `element` of its 64 on, lie in the swizzled piece that starts at `s`."""
    return s + cute.assume(row * K_TILE + (element ^ (row & 7) * 8), divby=4)


def compile_project(config: Project, arch: str):
    d, batch, tokens = config.width, cute.sym_int(), cute.sym_int()
    pitch = cute.sym_int(divisibility=4)
    tensors = [compact(F32, tokens, d), compact(F32, batch, d, pitch), compact(F32, batch, d, pitch)]
    read, made = weights_arguments(config.weights)
    tensors += filter_arguments(config.filter) + read + made
    scalars = [I32(1), I32(1), I32(1), I32(1), I32(1), F32(1e-5), I32(1), F32(0.05)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ProjectKernel(config, arch), *tensors, *scalars, stream, options=compile_options(arch))
