"""Mamba-2's parameter discretization and segment sum (device code).

Two kernels, the second launched before the first one ends (programmatic dependent launch):

- ``scan_kernel`` writes A_cumsum, decay_states, and to a workspace the same sums as pairs of floats (``segsum_scan``).
- ``kernel`` writes L, G and M. Every block owns runs of each: a few rows of G and M over 64 columns and all heads, and
  as large a part of L. The product C B^T is taken transposed (j on the tensor core's M side), passed through shared
  memory, and repeated over the heads. The warps of the tensor core write G, the others L as soon as they have its sums,
  all of them M. The first blocks also have the operands of later ones brought to the L2 cache.

An element of L is 2^(sum_i - sum_j). Away from the diagonal it is a product of two decays, over and under a row between
j and i, so that rows and columns cost an exponential and an element one multiplication; near the diagonal it is not.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_kernels.device.copy import prefetch_evict_last, store_evict_first
from cute_kernels.device.engine import ring_state
from cute_kernels.device.math import select
from cute_kernels.mamba.segsum_cluster import SegsumCluster
from cute_kernels.mamba.segsum_config import BLOCK, SegsumKernel
from cute_kernels.mamba.segsum_scan import Steps, decay, difference, scan_lanes, steps_layout, write_states
from cute_kernels.mamba.segsum_tile import VECTOR, Tile, aligned_size, tensors_at
from cute_kernels.runtime.kernel import compile_options

SCAN_THREADS = 256
PREFETCHED_BYTES = 24 << 20  # less than half of an H200's L2 cache
AT_ONCE = 512  # blocks that start together: they load what they need as early as a prefetch would


class Segsum(Tile):
    """``__call__`` is the host function that gets compiled, ``scan_kernel`` and ``kernel`` the device code."""

    def __init__(self, key: SegsumKernel, arch: str):
        super().__init__(key, arch)
        Q, H, G = key.chunk_size, key.num_heads, key.n_groups
        self.scan_tile = max(d for d in range(1, 5) if H % d == 0)
        self.steps = Steps(Q, self.scan_tile, SCAN_THREADS)
        # chunks whose B and C the first blocks bring to L2: those after them would drive out the first
        prefetched = PREFETCHED_BYTES // (2 * Q * G * key.d_state * self.dtype.width // 8)
        self.prefetched = range(AT_ONCE // self.tasks, prefetched)
        self.l_threads = key.threads - self.engine.threads
        # rows of L of one task: a part of one head, or whole heads
        share = -(-H * Q // self.tasks)
        one_pass = self.l_threads * VECTOR // Q  # rows of L that its threads cover at once
        self.l_rows = min(Q, max(one_pass, 1 << (share - 1).bit_length()))
        self.l_heads = -(-share // Q)

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
        msums: cute.Tensor,  # (b, c, H, Q, 2): workspace
        dt_min: Float32,
        dt_max: Float32,
        stream: cuda.CUstream,
    ):
        key, engine = self.key, self.engine
        b_layout, c_layout = engine.smem_layouts()
        atom_b, tma_b, atom_c, tma_c = self.operand_copies(mB, mC, b_layout, c_layout)
        # once the only tile of B is multiplied, the product takes its place, and the decays to rows
        self.over_b = self.group_tile == 1
        made = sum(aligned_size(layout) for layout in self.made_layouts())
        b_size = max(cute.cosize(b_layout), 2 * made if self.over_b else 0)

        @cute.struct
        class Storage:
            ab_mbar: cute.struct.MemRange[Int64, engine.stages * 2]
            acc_mbar: cute.struct.MemRange[Int64, 2]
            sums_mbar: cute.struct.MemRange[Int64, 2]
            tmem_ptr: Int32
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, b_size], 1024]
            sC: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(c_layout)], 1024]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, sum(map(aligned_size, self.sums_layouts()))], 16]
            made: cute.struct.Align[cute.struct.MemRange[Float32, 0 if self.over_b else made], 16]

        self.Storage = Storage
        chunks = mdt.shape[0] * mdt.shape[1]
        self.scan_kernel.set_name_prefix("mamba_segsum_scan", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.scan_kernel(
            mdt,
            mA_log,
            mbias,
            mA_cumsum,
            mstates,
            msums,
            dt_min,
            dt_max,
        ).launch(grid=(chunks * (key.num_heads // self.scan_tile), 1, 1), block=(SCAN_THREADS, 1, 1), stream=stream)
        self.kernel.set_name_prefix("mamba_segsum", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            engine.tiled_mma(), atom_b, tma_b, atom_c, tma_c, b_layout, c_layout, mB, mC, mL, mG, mM, msums
        ).launch(
            grid=(chunks * self.tasks, 1, 1), block=(key.threads, 1, 1), stream=stream, use_pdl=True,
            # at most 64 registers a thread; naming the carveout keeps the compiler from asking a driver for it
            min_blocks_per_mp=1024 // key.threads, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def scan_kernel(
        self,
        mdt: cute.Tensor,  # (b, c, Q, H)
        mA_log: cute.Tensor,  # (H,)
        mbias: cute.Tensor | None,  # (H,)
        mA_cumsum: cute.Tensor,  # (b, H, c, Q)
        mstates: cute.Tensor,  # (b, H, c, Q)
        msums: cute.Tensor,  # (b, c, H, Q, 2)
        dt_min: Float32,
        dt_max: Float32,
    ):
        """``scan_tile`` heads of one chunk."""
        cute.arch.griddepcontrol_launch_dependents()
        Q, H, heads = self.key.chunk_size, self.key.num_heads, self.scan_tile
        bidx = cute.arch.block_idx()[0]
        chunk = bidx // (H // heads)
        h0 = (bidx - chunk * (H // heads)) * heads
        n_chunks = mdt.shape[1]
        b = chunk // n_chunks
        c = chunk - b * n_chunks
        gdt, gA_log = cute.domain_offset((0, h0), mdt[b, c, None, None]), cute.domain_offset((h0,), mA_log)
        gbias = None if cutlass.const_expr(mbias is None) else cute.domain_offset((h0,), mbias)
        dt = self.steps.load(gdt, Int32(Q), 0)
        A_log, bias = self.steps.rate(gA_log, gbias)
        sSteps = memory.SmemAllocator().allocate_tensor(Float32, steps_layout(Q, heads), byte_alignment=16)
        self.steps.make(dt, A_log, bias, gdt, sSteps, Int32(Q), dt_min, dt_max)
        cute.arch.sync_threads()
        sums = cute.domain_offset((0, 0, h0), self.workspace(msums, chunk))
        gA_cumsum, gstates = self.sums_of_chunk(mA_cumsum, mstates, b, c, h0)
        values, lane = Q // 32, cute.arch.lane_idx()
        for h in cutlass.range(cute.arch.make_warp_uniform(cute.arch.warp_idx()), heads, SCAN_THREADS // 32, unroll=1):
            steps = cute.make_rmem_tensor(values, Float32)
            cute.autovec_copy(cute.flat_divide(sSteps[None, h], (values,))[None, lane], steps)
            pairs, total = scan_lanes(steps)
            cute.autovec_copy(pairs, cute.flat_divide(sums[None, None, h], (2, values))[None, None, 0, lane])
            write_states(pairs, total, gA_cumsum[None, h], gstates[None, h])

    @cute.jit
    def prefetch_operands(
        self,
        mB: cute.Tensor,  # (b, c, Q, G, N)
        mC: cute.Tensor,  # (b, c, Q, G, N)
        part: Int32,
    ):
        """One of the first blocks' part of the operands of later ones, from DRAM to L2 (one warp).

        Reads from DRAM among all stores cost more than their bytes; now little is written. The first kernel would end
        later for them, and with it the wait for its sums.
        """
        n_chunks, rows = mB.shape[1], self.key.chunk_size * self.key.n_groups
        first, stop = self.prefetched.start, cutlass.min(mB.shape[0] * n_chunks, self.prefetched.stop)
        for n in cutlass.range(first * rows + part * 32 + cute.arch.lane_idx(), stop * rows, AT_ONCE * 32, unroll=1):
            chunk, row = n // rows, n % rows
            b = chunk // n_chunks
            c = chunk - b * n_chunks
            for mX in (mB, mC):
                gX = mX[b, c, row // self.key.n_groups, row % self.key.n_groups, None]
                prefetch_evict_last(gX, self.key.d_state * self.dtype.width // 8)

    def heads_of_share(self, l0):
        """Heads of a block's part of L that exist: the last block's part may reach past them."""
        return cutlass.min(cutlass.max(self.key.num_heads - l0 // self.key.chunk_size, 0), self.l_heads)

    def sums_layouts(self):
        """A block's sums in shared memory: of its rows (hi | lo, head, row), of its columns (hi | lo, head, column) and
        of its part of L (hi | lo, Q, head); and of one head at a time L's vectors on the diagonal (4 words, vector of
        the block, row)."""
        key, heads = self.key, self.key.head_tile
        row_pitch, pitch = 2 * key.tile_i + 4, 2 * key.tile_j + 4  # spread the heads over the banks
        return (
            cute.make_layout((2, heads, key.tile_i), stride=(1, row_pitch, 2)),
            cute.make_layout((2, heads, key.tile_j), stride=(1, pitch, 2)),
            cute.make_layout((2, key.chunk_size, self.l_heads)),
            cute.make_layout((4, BLOCK // VECTOR, self.l_rows)),
        )

    def made_layouts(self):
        """What a block makes for M: decays to its rows from blocks of columns (head, row, block), and the product
        (i, j, group)."""
        key = self.key
        pitch = key.tile_j + 4  # spreads an accumulator's (i, j) over the banks
        return (
            cute.make_layout((key.head_tile, key.tile_i, key.tile_j // BLOCK)),
            cute.make_layout((key.tile_i, key.tile_j, self.group_tile), stride=(pitch, 1, key.tile_i * pitch)),
        )

    def workspace(self, msums, chunk):
        """(hi | lo, Q, H) of one chunk."""
        Q, H = self.key.chunk_size, self.key.num_heads
        offset = cute.assume(Int64(chunk) * (H * Q * 2), divby=2 * Q)
        return cute.make_tensor(msums.iterator + offset, cute.make_layout((2, Q, H)))

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
        mB: cute.Tensor,  # (b, c, Q, G, N)
        mC: cute.Tensor,  # (b, c, Q, G, N)
        mL: cute.Tensor,  # (b, H, c, Q, Q)
        mG: cute.Tensor,  # (b, c, Q, Q, H or G)
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        msums: cute.Tensor,  # (b, c, H, Q, 2)
    ):
        """``tile_i`` x ``tile_j`` of G and M of one chunk for ``head_tile`` heads, and a part of its L."""
        key, engine = self.key, self.engine
        heads, groups = key.head_tile, self.group_tile
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bidx = cute.arch.block_idx()[0]
        chunk = bidx // self.tasks
        task = bidx - chunk * self.tasks
        n_chunks = mL.shape[2]
        b = chunk // n_chunks
        c = chunk - b * n_chunks
        it = task // (self.grid_j * self.grid_h)
        rest = task - it * (self.grid_j * self.grid_h)
        jt = rest // self.grid_h
        ht = rest - jt * self.grid_h
        i0, j0, h0, g0 = it * key.tile_i, jt * key.tile_j, ht * heads, ht * groups
        causal = i0 + key.tile_i > j0  # else every element lies above the diagonal: M is zero and needs no sums

        storage = memory.SmemAllocator().allocate(self.Storage)
        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)  # (tile_j, kt, stage and piece)
        sC = storage.sC.get_tensor(c_layout.outer, swizzle=c_layout.inner)  # (tile_i, kt, stage and piece)
        sRow, sColumn, sL, sDiagonal = tensors_at(storage.sums.data_ptr(), self.sums_layouts())
        made = storage.sB if self.over_b else storage.made
        sFactor, sG = tensors_at(cute.recast_ptr(made.data_ptr(), dtype=Float32), self.made_layouts())

        ring = engine.ring(storage.ab_mbar.data_ptr())
        m_mbar = storage.sums_mbar.data_ptr()  # the sums of rows and columns are there
        l_mbar = m_mbar + 1  # those of L
        if tidx == 0:
            cute.arch.mbarrier_init(m_mbar, 1)
            cute.arch.mbarrier_init(l_mbar, 1)
        cute.arch.mbarrier_init_fence()
        one = cute.make_layout(1)
        pieces_b = cute.local_tile(tma_b[None, None, None, c, b], (key.tile_j, self.kt), (jt, None, None))
        pieces_c = cute.local_tile(tma_c[None, None, None, c, b], (key.tile_i, self.kt), (it, None, None))
        # (piece, stage and piece), (piece, k, group)
        tBsB, tBgB = cpasync.tma_partition(atom_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(pieces_b, 0, 2))
        tCsC, tCgC = cpasync.tma_partition(atom_c, 0, one, cute.group_modes(sC, 0, 2), cute.group_modes(pieces_c, 0, 2))
        if warp == 0:
            cute.arch.sync_warp()
            for n in cutlass.range_constexpr(engine.stages):
                self.load_operands(
                    ring, n, atom_b, tBgB[None, None, g0 + n], tBsB, atom_c, tCgC[None, None, g0 + n], tCsC
                )
        engine.begin(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        acc = engine.accumulator(tiled_mma)
        tCrB, tCrC = engine.operands(tiled_mma, sB, sC)

        if tidx < engine.threads:
            for g in cutlass.range_constexpr(groups):
                self.engine.multiply(acc, tCrB, tCrC, ring, g)
                if cutlass.const_expr(g + engine.stages < groups):  # noqa: SIM102
                    if warp == 0:
                        ahead = g + engine.stages
                        gB, gC = tBgB[None, None, g0 + ahead], tCgC[None, None, g0 + ahead]
                        self.load_operands(ring, ahead, atom_b, gB, tBsB, atom_c, gC, tCsC)
                values, coords = self.engine.read(tiled_mma, acc, g)
                if cutlass.const_expr(self.over_b):
                    self.engine.sync()
                for v in cutlass.range_constexpr(cute.size(values)):
                    j, i = coords[v]
                    sG[i, j, g] = values[v]
            self.engine.sync()
            if cutlass.const_expr(key.per_group):
                self.write_groups(sG, mG, chunk, i0, j0, g0, engine.threads)
            else:
                self.write_products(sG, mG, chunk, i0, j0, h0, engine.threads)
            if causal:
                cute.arch.mbarrier_wait(m_mbar, 0)
                self.make_factors(sRow, sColumn, sFactor)
        else:
            l0 = task * self.l_rows * self.l_heads  # first row of the block's part of L among the chunk's H * Q
            if warp == key.threads // 32 - 1:
                if bidx < AT_ONCE:
                    self.prefetch_operands(mB, mC, bidx)
                cute.arch.griddepcontrol_wait()
                gsums = self.workspace(msums, chunk)
                self.load_sums_of_L(gsums, l_mbar, sL, l0)
                if causal:
                    self.load_sums(gsums, m_mbar, sRow, sColumn, i0, j0, h0)
            cute.arch.mbarrier_wait(l_mbar, 0)
            self.write_decays(sL, sDiagonal, mL, b, c, l0, warp - engine.threads // 32)
            if causal:
                cute.arch.mbarrier_wait(m_mbar, 0)
        cute.arch.sync_threads()
        self.engine.end(acc)
        self.write_masked(sG, sRow, sFactor, sColumn, mM, chunk, i0, j0, h0)

    @cute.jit
    def load_operands(
        self,
        ring: pipeline.PipelineAsync,
        n: cutlass.Constexpr,
        atom_b: cute.CopyAtom,
        gB: cute.Tensor,  # (piece, k)
        tBsB: cute.Tensor,  # (piece, stage and piece)
        atom_c: cute.CopyAtom,
        gC: cute.Tensor,
        tCsC: cute.Tensor,
    ):
        """Starts loading the n-th product's operands (one warp calls)."""
        state = ring_state(n, self.engine.stages, producer=True)
        ring.producer_acquire(state)
        mbar = ring.producer_get_barrier(state)
        for k in cutlass.range_constexpr(self.engine.k_tiles):
            piece = n % self.engine.stages * self.engine.k_tiles + k
            cute.copy(atom_b, gB[None, k], tBsB[None, piece], tma_bar_ptr=mbar)
            cute.copy(atom_c, gC[None, k], tCsC[None, piece], tma_bar_ptr=mbar)
        ring.producer_commit(state)

    # The sums come by bulk copies: ordinary loads would queue behind the stores of all blocks of the SM.

    @cute.jit
    def load_sums_of_L(
        self,
        gsums: cute.Tensor,  # (hi | lo, Q, H)
        mbar: cute.Pointer,
        sL: cute.Tensor,  # (hi | lo, Q, head)
        l0: Int32,
    ):
        """Starts copying the sums of the block's part of L to shared memory (one warp)."""
        lane, heads = cute.arch.lane_idx(), self.heads_of_share(l0)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(mbar, heads * self.key.chunk_size * 8)
        cute.arch.sync_warp()
        for h in cutlass.range(lane, heads, 32, unroll=1):
            self.copy_pairs(gsums[None, None, l0 // self.key.chunk_size + h], sL[None, None, h], mbar)

    @cute.jit
    def load_sums(
        self,
        gsums: cute.Tensor,  # (hi | lo, Q, H)
        mbar: cute.Pointer,
        sRow: cute.Tensor,  # (hi | lo, head, row)
        sColumn: cute.Tensor,  # (hi | lo, head, column)
        i0: Int32,
        j0: Int32,
        h0: Int32,
    ):
        """The same for the sums of its rows and columns."""
        key, lane = self.key, cute.arch.lane_idx()
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(mbar, key.head_tile * (key.tile_i + key.tile_j) * 8)
        cute.arch.sync_warp()
        gRow = cute.local_tile(gsums, (2, key.tile_i, 1), (0, i0 // key.tile_i, None))
        gColumn = cute.local_tile(gsums, (2, key.tile_j, 1), (0, j0 // key.tile_j, None))
        for h in cutlass.range(lane, key.head_tile, 32, unroll=1):
            self.copy_pairs(gRow[None, None, 0, h0 + h], sRow[None, h, None], mbar)
            self.copy_pairs(gColumn[None, None, 0, h0 + h], sColumn[None, h, None], mbar)

    @cute.jit
    def copy_pairs(
        self,
        gPairs: cute.Tensor,  # (hi | lo, n), contiguous
        sPairs: cute.Tensor,  # (hi | lo, n)
        mbar: cute.Pointer,
    ):
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        cute.copy(bulk, cute.group_modes(gPairs, 0, 2), cute.group_modes(sPairs, 0, 2), mbar_ptr=mbar)

    @cute.jit
    def make_factors(
        self,
        sRow: cute.Tensor,  # (hi | lo, head, row)
        sColumn: cute.Tensor,  # (hi | lo, head, column)
        sFactor: cute.Tensor,  # (head, row, block)
    ):
        """Decays to each row from the last column of each block, used for rows below it alone (engine's threads)."""
        key = self.key
        for n in cutlass.range(cute.arch.thread_idx()[0], cute.size(sFactor), self.engine.threads, unroll=1):
            h, rest = n % key.head_tile, n // key.head_tile
            row, block = rest % key.tile_i, rest // key.tile_i
            end = block * BLOCK + BLOCK - 1
            sum_i, sum_j = sRow[None, h, row], sColumn[None, h, end]
            sFactor[h, row, block] = decay(difference(sum_i[0], sum_i[1], sum_j[0], sum_j[1]))

    @cute.jit
    def write_decays(
        self,
        sL: cute.Tensor,  # (hi | lo, Q, head)
        sDiagonal: cute.Tensor,  # (4 words, vector, row)
        mL: cute.Tensor,  # (b, H, c, Q, Q)
        b: Int32,
        c: Int32,
        l0: Int32,
        warp: Int32,  # among those that write L
    ):
        """``l_rows`` rows of L of ``l_heads`` heads."""
        Q, H, rows, lane = self.key.chunk_size, self.key.num_heads, self.l_rows, cute.arch.lane_idx()
        # The warps write neighbouring rows at the same time, which the DRAM takes better than runs for each; a lane
        # keeps its 8 columns. Left of the diagonal's block their elements are products of two decays: from each column
        # to the last of its block, and on to the row.
        lanes = Q // VECTOR
        v, warp_rows, apart = lane % lanes, 32 // lanes, self.l_threads * VECTOR // Q
        i0, block, vector = l0 % Q, v // (BLOCK // VECTOR), v % (BLOCK // VECTOR)
        tJ, values = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
        pairs = cute.make_rmem_tensor((2, VECTOR), Float32)
        diagonal = cute.make_rmem_tensor(4, Int32)
        for head in cutlass.range(self.l_heads, unroll=1):
            h = l0 // Q + head
            if h < H:
                offset = ((Int64(b) * H + h) * mL.shape[2] + c) * (Q * Q) + i0 * Q
                gL = cute.make_tensor(
                    mL.iterator + cute.assume(offset, divby=Q), cute.make_layout((VECTOR, lanes, rows))
                )
                sums = sL[None, None, head]  # (hi | lo, Q)
                cute.arch.sync_warp()
                self.make_diagonal(sums, sDiagonal, i0, warp * warp_rows, warp_rows, apart)
                cute.arch.sync_warp()
                cute.autovec_copy(cute.flat_divide(sums, (2, VECTOR))[None, None, 0, v], pairs)
                hi_j, lo_j = sums[0, block * BLOCK + BLOCK - 1], sums[1, block * BLOCK + BLOCK - 1]
                for k in cutlass.range_constexpr(VECTOR):
                    tJ[k] = decay(difference(hi_j, lo_j, pairs[0, k], pairs[1, k]))
                for row in cutlass.range(warp * warp_rows + lane // lanes, rows, apart, unroll=2):
                    i = i0 + row
                    factor = decay(difference(sums[0, i], sums[1, i], hi_j, lo_j))
                    for k in cutlass.range_constexpr(VECTOR):
                        values[k] = factor * tJ[k]
                    words = cute.recast_tensor(self.rounded(values), Int32)
                    cute.autovec_copy(cute.recast_tensor(sDiagonal[None, vector, row], Int32), diagonal)
                    for w in cutlass.range_constexpr(4):
                        on_or_above = cutlass.select_(i // BLOCK == block, diagonal[w], Int32(0))
                        words[w] = cutlass.select_(i // BLOCK > block, words[w], on_or_above)
                    store_evict_first(words, gL[None, v, row])

    @cute.jit
    def make_diagonal(
        self,
        sums: cute.Tensor,  # (hi | lo, Q)
        sDiagonal: cute.Tensor,  # (4 words, vector, row)
        i0: Int32,
        first: Int32,
        together: cutlass.Constexpr,
        apart: cutlass.Constexpr,
    ):
        """The vectors of the block of columns that holds a row's last element: of a warp's rows, ``together`` of them
        from ``first`` on, and again every ``apart`` rows."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        vectors, count = BLOCK // VECTOR, self.l_rows // apart * together
        for n in cutlass.range(cute.arch.lane_idx(), count * vectors, 32, unroll=1):
            vector, m = n % vectors, n // vectors
            row = first + m // together * apart + m % together
            i = i0 + row
            j = i // BLOCK * BLOCK + vector * VECTOR
            for k in cutlass.range_constexpr(VECTOR):
                value = decay(difference(sums[0, i], sums[1, i], sums[0, j + k], sums[1, j + k]))
                values[k] = select(i >= j + k, value, Float32(0.0))
            cute.autovec_copy(cute.recast_tensor(self.rounded(values), Float32), sDiagonal[None, vector, row])

    @cute.jit
    def write_masked(
        self,
        sG: cute.Tensor,  # (i, j, group)
        sRow: cute.Tensor,  # (hi | lo, head, row)
        sFactor: cute.Tensor,  # (head, row, block)
        sColumn: cute.Tensor,  # (hi | lo, head, column)
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        h0: Int32,
    ):
        """``tile_i`` rows of M = G * L: a thread keeps neighbouring elements (j, h) and walks over i."""
        key = self.key
        tidx = cute.arch.thread_idx()[0]
        width, uniform = self.widths()
        vectors, rows_per_pass = self.walk(width, key.threads)
        gM = self.rows_of_elements(mM, chunk, i0, j0, h0, width)
        tJ, tJ_lo = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)
        value = cute.make_rmem_tensor(width, Float32)
        product = cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range_constexpr(-(-vectors // key.threads)):
            v, first = tidx % vectors + n * key.threads, tidx // vectors
            if (v < vectors) & (first < rows_per_pass):
                j, h, g = self.elements(v, width)
                # the block of columns lies left of the block of rows: decay to its end, times decay from there
                block, row_block = (j0 + j[0]) // BLOCK, i0 // BLOCK
                if block < row_block:
                    q = j[0] // BLOCK
                    for k in cutlass.range_constexpr(width):
                        end, column = sColumn[None, h[k], q * BLOCK + BLOCK - 1], sColumn[None, h[k], j[k]]
                        tJ[k] = decay(difference(end[0], end[1], column[0], column[1]))
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=2):
                        for k in cutlass.range_constexpr(width):
                            product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                            value[k] = product[k] * (sFactor[h[k], row, q] * tJ[k])
                        self.write(value, gM[None, v, row])
                elif block == row_block:
                    for k in cutlass.range_constexpr(width):
                        tJ[k], tJ_lo[k] = sColumn[0, h[k], j[k]], sColumn[1, h[k], j[k]]
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=1):
                        for k in cutlass.range_constexpr(width):
                            product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                            factor = decay(difference(sRow[0, h[k], row], sRow[1, h[k], row], tJ[k], tJ_lo[k]))
                            value[k] = select(i0 + row >= j0 + j[k], product[k] * factor, Float32(0.0))
                        self.write(value, gM[None, v, row])
                else:
                    value.fill(0.0)
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=4):
                        self.write(value, gM[None, v, row])


def compile_segsum(key: SegsumKernel, arch: str):
    """Compiles for ``arch`` without a GPU."""
    dtypes = {
        "bfloat16": cutlass.BFloat16,
        "float16": cutlass.Float16,
        "float32": Float32,
    }
    dtype = dtypes[key.dtype]
    Q, H, G, N = key.chunk_size, key.num_heads, key.n_groups, key.d_state
    b, c = cute.sym_int(), cute.sym_int()

    def strided(dt, shape, divby=1, inner=None):
        stride = [cute.sym_int64(divisibility=divby) for _ in shape]
        if inner is not None:
            stride[-1] = inner
        return make_fake_tensor(dt, shape, stride=tuple(stride), assumed_align=16 if inner else dt.width // 8)

    def packed(dt, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dt, shape, stride_order=order, assumed_align=16)

    def operand():
        return strided(dtype, (b, c, Q, G, N), divby=VECTOR, inner=1)

    workspace = [] if key.cluster > 1 else [packed(Float32, b, c, H, Q, 2)]
    return cute.compile(
        (SegsumCluster if key.cluster > 1 else Segsum)(key, arch),
        strided(dtypes[key.dt_dtype], (b, c, Q, H)),
        strided(dtypes[key.A_dtype], (H,)),
        None if key.bias_dtype == "none" else strided(dtypes[key.bias_dtype], (H,)),
        operand(),
        operand(),
        packed(dtype, b, H, c, Q, Q),
        packed(dtype, b, c, Q, Q, G if key.per_group else H),
        packed(dtype, b, c, Q, Q, H),
        packed(Float32, b, H, c, Q),
        packed(Float32, b, H, c, Q),
        *workspace,
        Float32(0.0),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
