"""Mamba-2's segment sum in one launch, for few chunks (device code).

The blocks that divide the columns of the same rows form a cluster. Each sums the decays of its share of the heads, of
which it writes L: whole rows. What the others need of these heads for their columns of M it stores to their shared
memory while they write what needs no sums: zeros above the diagonal, and L of their own heads, and G.

L and M are made as in `segsum_kernel`, with the same bits.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.cluster import store_to_peer
from cute_kernels.device.copy import store_bulk_evict_first, store_evict_first
from cute_kernels.device.engine import ring_state
from cute_kernels.device.math import select
from cute_kernels.mamba.segsum_config import BLOCK, PIECE, SegsumKernel
from cute_kernels.mamba.segsum_scan import Steps, decay, difference, scan_lanes, steps_layout, write_states
from cute_kernels.mamba.segsum_tile import VECTOR, Tile, aligned_size, tensors_at

ENGINE_WARPS = 4  # wait for the product


def pairs_layout(rows, heads):
    """(hi | lo, head, row) in shared memory, with a gap that spreads the heads over the banks."""
    return cute.make_layout((2, heads, rows), stride=(1, 2 * rows + 4, 2))


class SegsumCluster(Tile):
    """``__call__`` is the host function that gets compiled, ``kernel`` the device code."""

    def __init__(self, key: SegsumKernel, arch: str):
        super().__init__(key, arch)
        self.pieces = key.tile_j // PIECE
        self.products = self.pieces * self.group_tile
        self.own_heads = key.head_tile // key.cluster
        self.steps = Steps(key.chunk_size, self.own_heads, key.threads)

    @cute.jit
    def __call__(
        self,
        mdt: cute.Tensor,  # (b, c, Q, H)
        mA_log: cute.Tensor,  # (H,)
        mbias: cute.Tensor | None,  # (H,)
        mB: cute.Tensor,  # (b, c, Q, G, N)
        mC: cute.Tensor,  # (b, c, Q, G, N)
        mL: cute.Tensor,  # (b, H, c, Q, Q)
        mG: cute.Tensor,  # (b, c, Q, Q, H), or (b, c, Q, Q, G) per group
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        mA_cumsum: cute.Tensor,  # (b, H, c, Q)
        mstates: cute.Tensor,  # (b, H, c, Q)
        dt_min: Float32,
        dt_max: Float32,
        stream: cuda.CUstream,
    ):
        key, engine = self.key, self.engine
        b_layout, c_layout = engine.smem_layouts()
        atom_b, tma_b, atom_c, tma_c = self.operand_copies(mB, mC, b_layout, c_layout)

        @cute.struct
        class Storage:
            ab_mbar: cute.struct.MemRange[Int64, engine.stages * 2]
            acc_mbar: cute.struct.MemRange[Int64, 2]
            tile_mbar: cute.struct.MemRange[Int64, 1]
            tmem_ptr: Int32
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]
            sC: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(c_layout)], 1024]
            zeros: cute.struct.Align[cute.struct.MemRange[Float32, PIECE * key.head_tile // 2], 16]
            floats: cute.struct.Align[cute.struct.MemRange[Float32, sum(map(aligned_size, self.float_layouts()))], 16]

        self.Storage = Storage
        chunks = mdt.shape[0] * mdt.shape[1]
        self.kernel.set_name_prefix("mamba_segsum_cluster", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            engine.tiled_mma(), atom_b, tma_b, atom_c, tma_c, b_layout, c_layout, mdt, mA_log, mbias,
            mL, mG, mM, mA_cumsum, mstates, dt_min, dt_max, cute.fast_divmod_create_divisor_v2(mdt.shape[1]),
        ).launch(
            grid=(chunks * self.tasks, 1, 1), block=(key.threads, 1, 1), cluster=(key.cluster, 1, 1), stream=stream,
            # at most 64 registers a thread; naming the carveout keeps the compiler from asking a driver for it
            min_blocks_per_mp=1024 // key.threads, preferred_smem_carveout=100,
        )  # fmt: skip

    def float_layouts(self):
        """A block's fp32 in shared memory.

        Of its own heads: steps, replaced by decays from each to the last of its block (Q, head); sums of the rows'
        block (hi | lo, head, row) and of the last row of every block (hi | lo, head, block); decays to the rows from
        those (head, row, block); L over the diagonal's block, rounded in pairs (word, row, head).
        Of all heads, over its columns: the decays (column, head) and (head, row, block), and, where the diagonal is, L
        over its block (head, column, row). And the product (i, j, group).
        """
        key, own, heads = self.key, self.own_heads, self.key.head_tile
        blocks, of_tile = key.chunk_size // BLOCK, key.tile_j // BLOCK
        pitch = PIECE + 4  # spreads an accumulator's (i, j) over the banks
        return (
            steps_layout(key.chunk_size, own),
            pairs_layout(max(key.tile_i, BLOCK), own),
            pairs_layout(blocks, own),
            cute.make_layout((own, key.tile_i, blocks), stride=(1, own, own * key.tile_i + 4)),
            cute.make_layout((BLOCK // 2, key.tile_i, own)),
            cute.make_layout((key.tile_j, heads), stride=(1, key.tile_j + 4)),
            cute.make_layout((heads, key.tile_i, of_tile), stride=(1, heads, heads * key.tile_i + 4)),
            cute.make_layout((heads, BLOCK, key.tile_i)),
            cute.make_layout((key.tile_i, PIECE, self.group_tile), stride=(pitch, 1, key.tile_i * pitch)),
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        atom_b: cute.CopyAtom,
        tma_b: cute.Tensor,  # (Q, N, G, c, b)
        atom_c: cute.CopyAtom,
        tma_c: cute.Tensor,  # (Q, N, G, c, b)
        b_layout: cute.ComposedLayout,
        c_layout: cute.ComposedLayout,
        mdt: cute.Tensor,  # (b, c, Q, H)
        mA_log: cute.Tensor,  # (H,)
        mbias: cute.Tensor | None,  # (H,)
        mL: cute.Tensor,  # (b, H, c, Q, Q)
        mG: cute.Tensor,  # (b, c, Q, Q, H or G)
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        mA_cumsum: cute.Tensor,  # (b, H, c, Q)
        mstates: cute.Tensor,  # (b, H, c, Q)
        dt_min: Float32,
        dt_max: Float32,
        batch_row: cute.FastDivmodDivisorV2,  # its chunks
    ):
        """``tile_i`` x ``tile_j`` of G and M of one chunk for ``head_tile`` heads, and rows of L of its own heads."""
        key, engine, own = self.key, self.engine, self.own_heads
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bidx = cute.arch.block_idx()[0]
        chunk = bidx // self.tasks
        task = bidx - chunk * self.tasks
        b, c = divmod(chunk, batch_row)
        it = task // (self.grid_h * self.grid_j)
        rest = task - it * (self.grid_h * self.grid_j)
        ht = rest // self.grid_j
        jt = rest - ht * self.grid_j  # the block's number in its cluster
        i0, j0, h0 = it * key.tile_i, jt * key.tile_j, ht * key.head_tile
        g0 = h0 // self.heads_per_group
        first_own = h0 + jt * own
        end, diagonal = i0 + key.tile_i, i0 // BLOCK * BLOCK

        gdt, gA_log = (
            cute.domain_offset((0, first_own), mdt[b, c, None, None]),
            cute.domain_offset((first_own,), mA_log),
        )
        gbias = None if cutlass.const_expr(mbias is None) else cute.domain_offset((first_own,), mbias)
        dt = self.steps.load(gdt, end, 0)
        A_log, bias = self.steps.rate(gA_log, gbias)

        storage = memory.SmemAllocator().allocate(self.Storage)
        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)  # (PIECE, kt, stage and piece of K)
        sC = storage.sC.get_tensor(c_layout.outer, swizzle=c_layout.inner)  # (tile_i, kt, stage and piece of K)
        tensors = tensors_at(storage.floats.data_ptr(), self.float_layouts())
        sDecay, sNear, sEnd, sFactor, sDiagonal, sTileDecay, sTileFactor, sTileDiagonal, sG = tensors

        ring = engine.ring(storage.ab_mbar.data_ptr())
        tile_mbar = storage.tile_mbar.data_ptr()
        if tidx == 0:
            cute.arch.mbarrier_init(tile_mbar, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()  # others may store here once all have come so far
        one = cute.make_layout(1)
        tiles_b = cute.local_tile(tma_b[None, None, None, c, b], (PIECE, self.kt), (None, None, None))
        tiles_c = cute.local_tile(tma_c[None, None, None, c, b], (key.tile_i, self.kt), (it, None, None))
        # (tile, stage and piece of K), (tile, [piece,] piece of K, group)
        tBsB, tBgB = cpasync.tma_partition(atom_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(tiles_b, 0, 2))
        tCsC, tCgC = cpasync.tma_partition(atom_c, 0, one, cute.group_modes(sC, 0, 2), cute.group_modes(tiles_c, 0, 2))
        operands = (atom_b, tBgB, tBsB, atom_c, tCgC, tCsC)
        first_piece = jt * self.pieces
        if warp == 0:
            cute.arch.sync_warp()
            for n in cutlass.range_constexpr(min(engine.stages, self.products)):
                self.load_operands(ring, n, operands, first_piece, g0)
        engine.begin(storage)
        cute.arch.mbarrier_init_fence()
        sZeros = cute.make_tensor(storage.zeros.data_ptr(), cute.make_layout((4, PIECE * key.head_tile // VECTOR)))
        if cutlass.const_expr(not key.zeros_first):
            # The fence in it also waits for dt: loads among the zeros of many blocks take longer.
            self.make_zeros(sZeros, tidx, key.threads)
        cute.arch.sync_threads()
        if tidx == 0:
            before = cutlass.max(cutlass.min((diagonal - j0) // BLOCK, key.tile_j // BLOCK), 0)
            on = Int32((diagonal >= j0) & (diagonal < j0 + key.tile_j))
            columns = before * BLOCK + (before + on * BLOCK) * key.tile_i
            cute.arch.mbarrier_arrive_and_expect_tx(tile_mbar, 4 * key.head_tile * columns)
        acc = engine.accumulator(tiled_mma)
        tCrB, tCrC = engine.operands(tiled_mma, sB, sC)

        # Zeros are written while the loads are on their way: whole lines of L, whole pieces of M.
        first_zero = -(-end // PIECE) * PIECE
        gL = self.rows_of_L(mL, b, c, first_own, i0)
        self.write_zeros_of_L(gL, first_zero)
        writes_zeros = warp == key.threads // 32 - 1
        if writes_zeros:
            if cutlass.const_expr(key.zeros_first):
                self.make_zeros(sZeros, cute.arch.lane_idx(), 32)
                cute.arch.sync_warp()
            self.write_zeros_of_M(sZeros, mM, chunk, i0, j0, first_zero)

        self.steps.make(dt, A_log, bias, gdt, sDecay, end, dt_min, dt_max)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        gA_cumsum, gstates = self.sums_of_chunk(mA_cumsum, mstates, b, c, first_own)
        self.scan(sDecay, sNear, sEnd, sTileDecay, tile_mbar, i0, jt * own, gA_cumsum, gstates)
        self.multiply(tiled_mma, acc, tCrB, tCrC, ring, Int32(0), sG, operands, first_piece, g0)
        cute.arch.sync_threads()
        self.make_factors(sNear, sEnd, sFactor, sTileFactor, tile_mbar, i0, jt * own)
        self.make_diagonal(sNear, sDiagonal, sTileDiagonal, tile_mbar, i0, jt * own)
        cute.arch.sync_threads()
        self.write_decays(sDecay, sFactor, sDiagonal, gL, i0, first_zero)
        for p in cutlass.range(self.pieces, unroll=1):
            j = j0 + p * PIECE
            if p > 0:
                cute.arch.sync_threads()
                self.multiply(tiled_mma, acc, tCrB, tCrC, ring, p, sG, operands, first_piece, g0)
                cute.arch.sync_threads()
            if cutlass.const_expr(key.per_group):
                self.write_groups(sG, mG, chunk, i0, j, g0, key.threads)
            else:
                self.write_products(sG, mG, chunk, i0, j, h0, key.threads)
            if p == 0:
                cute.arch.mbarrier_wait(tile_mbar, 0)
            if j < first_zero:
                self.write_masked(sG, sTileDecay, sTileFactor, sTileDiagonal, mM, chunk, i0, j, h0, p * PIECE)
        cute.arch.sync_threads()
        self.engine.end(acc)
        if writes_zeros:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrB: cute.Tensor,
        tCrC: cute.Tensor,
        ring: pipeline.PipelineAsync,
        p: Int32,
        sG: cute.Tensor,  # (i, j, group)
        operands,
        first_piece: Int32,
        g0: Int32,
    ):
        """The p-th piece of the product, to shared memory; and starts loading what the next one needs."""
        if cute.arch.thread_idx()[0] < self.engine.threads:
            for g in cutlass.range_constexpr(self.group_tile):
                n = p * self.group_tile + g
                self.engine.multiply(acc, tCrB, tCrC, ring, n)
                ahead = n + self.engine.stages
                if (cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0) & (ahead < self.products):
                    self.load_operands(ring, ahead, operands, first_piece, g0)
                values, coords = self.engine.read(tiled_mma, acc, n)
                for v in cutlass.range_constexpr(cute.size(values)):
                    j, i = coords[v]
                    sG[i, j, g] = values[v]

    @cute.jit
    def load_operands(
        self,
        ring: pipeline.PipelineAsync,
        n: Int32,
        operands,  # of B and C: copy, (tile, [piece,] piece of K, group), (tile, stage and piece of K)
        first_piece: Int32,
        g0: Int32,
    ):
        """Starts loading the n-th product's operands (one warp calls)."""
        atom_b, tBgB, tBsB, atom_c, tCgC, tCsC = operands
        state = ring_state(n, self.engine.stages, producer=True)
        ring.producer_acquire(state)
        mbar = ring.producer_get_barrier(state)
        p, g = first_piece + n // self.group_tile, g0 + n % self.group_tile
        for k in cutlass.range_constexpr(self.engine.k_tiles):
            piece = state.index * self.engine.k_tiles + k
            cute.copy(atom_b, tBgB[None, p, k, g], tBsB[None, piece], tma_bar_ptr=mbar)
            cute.copy(atom_c, tCgC[None, k, g], tCsC[None, piece], tma_bar_ptr=mbar)
        ring.producer_commit(state)

    @cute.jit
    def scan(
        self,
        sDecay: cute.Tensor,  # (Q, head)
        sNear: cute.Tensor,  # (hi | lo, head, row)
        sEnd: cute.Tensor,  # (hi | lo, head, block)
        sTileDecay: cute.Tensor,  # (column, head)
        tile_mbar: cute.Pointer,
        i0: Int32,
        h0: Int32,
        gA_cumsum: cute.Tensor,  # (Q, head)
        gstates: cute.Tensor,  # (Q, head)
    ):
        """Sums of the block's own heads; the last rows' block also writes A_cumsum and decay_states."""
        key = self.key
        values, warps = key.chunk_size // 32, key.threads // 32
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        lanes = BLOCK // values  # of a block of rows
        diagonal = i0 // BLOCK * BLOCK
        for h in cutlass.range((warp + warps - ENGINE_WARPS) % warps, self.own_heads, warps, unroll=1):
            steps = cute.make_rmem_tensor(values, Float32)
            sMine = cute.flat_divide(sDecay[None, h], (values,))[None, lane]
            cute.autovec_copy(sMine, steps)
            pairs, total = scan_lanes(steps)
            end_hi = cute.arch.shuffle_sync(pairs[0, values - 1], lane | (lanes - 1))
            end_lo = cute.arch.shuffle_sync(pairs[1, values - 1], lane | (lanes - 1))
            for k in cutlass.range_constexpr(values):
                steps[k] = decay(difference(end_hi, end_lo, pairs[0, k], pairs[1, k]))
            cute.autovec_copy(steps, sMine)
            row = lane * values - diagonal
            if (row >= 0) & (row < cute.size(sNear, mode=[2])):
                cute.autovec_copy(
                    pairs, cute.flat_divide(sNear[None, h, None], (2, values))[None, None, 0, row // values]
                )
            if lane % lanes == lanes - 1:
                cute.autovec_copy(pairs[None, values - 1], sEnd[None, h, lane // lanes])
            if lane * values < diagonal:
                peer, column, width = lane * values // key.tile_j, lane * values % key.tile_j, min(values, 4)
                for k in cutlass.range_constexpr(0, values, width):
                    place = sTileDecay[None, h0 + h].iterator + cute.assume(column + k, divby=width)
                    store_to_peer(place, tile_mbar, peer, cute.flat_divide(steps, (width,))[None, k // width])
            if i0 + key.tile_i == key.chunk_size:
                write_states(pairs, total, gA_cumsum[None, h], gstates[None, h])

    @cute.jit
    def make_factors(
        self,
        sNear: cute.Tensor,  # (hi | lo, head, row)
        sEnd: cute.Tensor,  # (hi | lo, head, block)
        sFactor: cute.Tensor,  # (head, row, block)
        sTileFactor: cute.Tensor,  # (head, row, block of the tile)
        tile_mbar: cute.Pointer,
        i0: Int32,
        h0: Int32,
    ):
        """Decays to each row from the last column of each block left of the diagonal's."""
        key, own, width = self.key, self.own_heads, math.gcd(self.own_heads, 4)
        of_tile = key.tile_j // BLOCK
        factor = cute.make_rmem_tensor(width, Float32)
        total = i0 // BLOCK * (own // width * key.tile_i)
        for n in cutlass.range(cute.arch.thread_idx()[0], total, key.threads, unroll=1):
            h, rest = n % (own // width) * width, n // (own // width)
            row, block = rest % key.tile_i, rest // key.tile_i
            for k in cutlass.range_constexpr(width):
                sum_i, sum_j = sNear[None, h + k, i0 % BLOCK + row], sEnd[None, h + k, block]
                factor[k] = decay(difference(sum_i[0], sum_i[1], sum_j[0], sum_j[1]))
            cute.autovec_copy(factor, cute.flat_divide(sFactor[None, row, block], (width,))[None, h // width])
            place = cute.assume(cute.crd2idx((h0 + h, row, block % of_tile), sTileFactor.layout), divby=width)
            store_to_peer(sTileFactor.iterator + place, tile_mbar, block // of_tile, factor)

    @cute.jit
    def make_diagonal(
        self,
        sNear: cute.Tensor,  # (hi | lo, head, row)
        sDiagonal: cute.Tensor,  # (word, row, head)
        sTileDiagonal: cute.Tensor,  # (head, column, row)
        tile_mbar: cute.Pointer,
        i0: Int32,
        h0: Int32,
    ):
        """L of the block's rows over the block of columns that holds the diagonal."""
        key, own, width = self.key, self.own_heads, math.gcd(self.own_heads, 4)
        values = cute.make_rmem_tensor(width, Float32)
        elements = cute.make_tensor(
            cute.recast_ptr(sDiagonal.iterator, dtype=self.dtype), cute.make_layout((BLOCK, key.tile_i, own))
        )
        total = BLOCK * key.tile_i * (own // width)
        for n in cutlass.range(cute.arch.thread_idx()[0], total, key.threads, unroll=1):
            h, rest = n % (own // width) * width, n // (own // width)
            j, row = rest % BLOCK, rest // BLOCK
            i = i0 % BLOCK + row
            for k in cutlass.range_constexpr(width):
                sum_i, sum_j = sNear[None, h + k, i], sNear[None, h + k, j]
                value = decay(difference(sum_i[0], sum_i[1], sum_j[0], sum_j[1]))
                values[k] = select(i >= j, value, Float32(0.0))
            rounded = self.rounded(values)
            for k in cutlass.range_constexpr(width):
                elements[j, row, h + k] = rounded[k]
            place = cute.assume(cute.crd2idx((h0 + h, j, row), sTileDiagonal.layout), divby=width)
            store_to_peer(sTileDiagonal.iterator + place, tile_mbar, i0 // key.tile_j, values)

    def rows_of_L(self, mL, b, c, h0, i0):
        """``tile_i`` rows of L of the heads from h0 on as (VECTOR, vector, row, head)."""
        Q, H, n_chunks = self.key.chunk_size, self.key.num_heads, mL.shape[2]
        offset = ((Int64(b) * H + h0) * n_chunks + c) * (Q * Q) + i0 * Q
        head = cute.assume(Int64(n_chunks) * (Q * Q), divby=Q * Q)
        shape = (VECTOR, Q // VECTOR, self.key.tile_i, self.own_heads)
        layout = cute.make_layout(shape, stride=(1, VECTOR, Q, head))
        return cute.make_tensor(mL.iterator + cute.assume(offset, divby=Q), layout)

    def walk_over_L(self):
        """How warps walk over L's rows: lanes of a row, rows at once, parts of a head's rows."""
        lanes = self.key.chunk_size // VECTOR
        at_once = 32 // lanes
        parts = max(1, min(self.key.threads // 32 // self.own_heads, self.key.tile_i // at_once))
        return lanes, at_once, parts

    @cute.jit
    def write_zeros_of_L(
        self,
        gL: cute.Tensor,  # (VECTOR, vector, row, head)
        first_zero: Int32,
    ):
        """The columns from ``first_zero`` on."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lanes, at_once, parts = self.walk_over_L()
        v = lane % lanes
        words = cute.make_rmem_tensor(4, Int32)
        words.fill(0)
        if v * VECTOR >= first_zero:
            for n in cutlass.range(warp, self.own_heads * parts, self.key.threads // 32, unroll=1):
                first = n % parts * at_once + lane // lanes
                for row in cutlass.range(first, self.key.tile_i, parts * at_once, unroll=4):
                    store_evict_first(words, gL[None, v, row, n // parts])

    @cute.jit
    def write_decays(
        self,
        sDecay: cute.Tensor,  # (Q, head)
        sFactor: cute.Tensor,  # (head, row, block)
        sDiagonal: cute.Tensor,  # (word, row, head)
        gL: cute.Tensor,  # (VECTOR, vector, row, head)
        i0: Int32,
        columns: Int32,
    ):
        """The first ``columns`` of L's rows."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lanes, at_once, parts = self.walk_over_L()
        v = lane % lanes
        block, vector, row_block = v // (BLOCK // VECTOR), v % (BLOCK // VECTOR), i0 // BLOCK
        left, on = block < row_block, block == row_block
        tJ, values = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
        if v * VECTOR < columns:
            for n in cutlass.range(warp, self.own_heads * parts, self.key.threads // 32, unroll=1):
                h, first = n // parts, n % parts * at_once + lane // lanes
                tJ.fill(0.0)
                if left:
                    cute.autovec_copy(cute.flat_divide(sDecay[None, h], (VECTOR,))[None, v], tJ)
                for row in cutlass.range(first, self.key.tile_i, parts * at_once, unroll=2):
                    factor = Float32(0.0)
                    if left:
                        factor = sFactor[h, row, block]
                    for k in cutlass.range_constexpr(VECTOR):
                        values[k] = factor * tJ[k]
                    words = cute.recast_tensor(self.rounded(values), Int32)
                    if on:
                        diagonal = cute.flat_divide(sDiagonal[None, row, h], (4,))[None, vector]
                        cute.autovec_copy(cute.recast_tensor(diagonal, Int32), words)
                    store_evict_first(words, gL[None, v, row, h])

    @cute.jit
    def make_zeros(
        self,
        sZeros: cute.Tensor,  # (4, 16-byte vector)
        thread: Int32,
        threads: cutlass.Constexpr,
    ):
        """What `write_zeros_of_M` copies, and lets bulk copies see it."""
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for n in cutlass.range(thread, cute.size(sZeros, mode=[1]), threads, unroll=1):
            cute.autovec_copy(nothing, sZeros[None, n])
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def write_zeros_of_M(
        self,
        sZeros: cute.Tensor,  # (4, 16-byte vector): a row of a piece
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        first_zero: Int32,
    ):
        """Starts writing the pieces from column ``first_zero`` on (one warp).

        By bulk copies, for stores of all threads stand in the way of the scan's shuffles and shared memory.
        """
        key, lane = self.key, cute.arch.lane_idx()
        first = cutlass.max(first_zero - j0, 0) // PIECE
        for n in cutlass.range(lane, cutlass.max(self.pieces - first, 0) * key.tile_i, 32, unroll=1):
            row, p = n % key.tile_i, first + n // key.tile_i
            offset = ((Int64(chunk) * key.chunk_size + i0 + row) * key.chunk_size + j0 + p * PIECE) * key.num_heads
            gM = cute.make_tensor(mM.iterator + cute.assume(offset, divby=PIECE), cute.make_layout(1))
            store_bulk_evict_first(sZeros, gM, PIECE * key.head_tile * 2)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def write_masked(
        self,
        sG: cute.Tensor,  # (i, j, group)
        sTileDecay: cute.Tensor,  # (column, head)
        sTileFactor: cute.Tensor,  # (head, row, block)
        sTileDiagonal: cute.Tensor,  # (head, column, row)
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        h0: Int32,
        first_column: Int32,
    ):
        """``tile_i`` rows of a piece of M = G * L: a thread keeps neighbouring elements (j, h) and walks over i."""
        key = self.key
        tidx = cute.arch.thread_idx()[0]
        width, uniform = self.widths()
        whole = key.head_tile % width == 0  # a vector's elements share a column
        vectors, rows_per_pass = self.walk(width, key.threads)
        gM = self.rows_of_elements(mM, chunk, i0, j0, h0, width)
        tJ, value = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)
        factor, product = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range_constexpr(-(-vectors // key.threads)):
            v, first = tidx % vectors + n * key.threads, tidx // vectors
            if (v < vectors) & (first < rows_per_pass):
                j, h, g = self.elements(v, width)
                block, row_block = (j0 + j[0]) // BLOCK, i0 // BLOCK
                q = (first_column + j[0]) // BLOCK
                if block < row_block:
                    for k in cutlass.range_constexpr(width):
                        tJ[k] = sTileDecay[first_column + j[k], h[k]]
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=2):
                        self.of_heads(sTileFactor[None, row, q], h, factor)
                        for k in cutlass.range_constexpr(width):
                            product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                            value[k] = product[k] * (factor[k] * tJ[k])
                        self.write(value, gM[None, v, row])
                elif block == row_block:
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=2):
                        if cutlass.const_expr(whole):
                            self.of_heads(sTileDiagonal[None, j[0] % BLOCK, row], h, factor)
                        for k in cutlass.range_constexpr(width):
                            product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                            if cutlass.const_expr(not whole):
                                factor[k] = sTileDiagonal[h[k], j[k] % BLOCK, row]
                            below = i0 + row >= j0 + j[0 if whole else k]
                            value[k] = select(below, product[k] * factor[k], Float32(0.0))
                        self.write(value, gM[None, v, row])
                else:
                    value.fill(0.0)
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=4):
                        self.write(value, gM[None, v, row])

    @cute.jit
    def of_heads(self, sX: cute.Tensor, h, x: cute.Tensor):  # (head,), heads of a vector, (width,)
        """What a vector's heads have in shared memory."""
        width = cute.size(x)
        if cutlass.const_expr(self.key.head_tile % width == 0):
            cute.autovec_copy(cute.flat_divide(sX, (width,))[None, h[0] // width], x)
        else:
            for k in cutlass.range_constexpr(width):
                x[k] = sX[h[k]]
