"""Mamba-2's parameter discretization and segment sum (device code).

One launch with two kinds of task, each of which writes long contiguous runs, which is what DRAM wants:

- a *products* task: ``tile_i`` rows and ``tile_j`` columns of G = C B^T and M = G * L for all its heads. The product is
  taken transposed (j on the tensor core's M side), passed through shared memory, and repeated over the heads.
- a *decays* task: ``rows_l`` rows of L for one head.

An element of L is 2^(sum_i - sum_j). The sums are pairs of floats (``segsum_scan``); away from the diagonal the pairs
are first taken relative to a row between j and i, where nothing cancels, so that one fp32 subtraction is exact enough.

The sums come from one of two places. With few chunks every task sums the decays that it needs itself. With many chunks
or heads that would cost more than the outputs, so a small first kernel writes the sums to a workspace, and the main
kernel, launched before that one ends, reads them there.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from cute_kernels.device.engine import mma_engine, ring_state
from cute_kernels.device.math import exp2_approx, select
from cute_kernels.mamba.segsum_config import SegsumKernel, k_tile
from cute_kernels.mamba.segsum_scan import decay, scan_heads
from cute_kernels.runtime.kernel import compile_options

THREADS = 256
VECTOR = 8  # elements of a 16-byte store


class Segsum:
    """The launch: ``__call__`` is the host function that gets compiled, ``kernel`` and ``scan_kernel`` the device code."""

    def __init__(self, key: SegsumKernel, arch: str):
        self.key = key
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[key.dtype]
        Q, H, G = key.chunk_size, key.num_heads, key.n_groups
        self.kt = k_tile(key.d_state)
        self.k_tiles = key.d_state // self.kt
        self.heads_per_group = H // G
        self.group_tile = key.head_tile // self.heads_per_group
        self.engine = mma_engine(arch, (key.tile_j, key.tile_i, self.kt), self.dtype, key.stages)
        self.grid_i, self.grid_j, self.grid_h = Q // key.tile_i, Q // key.tile_j, H // key.head_tile
        self.products_tasks = self.grid_i * self.grid_j * self.grid_h
        self.decays_per_head = Q // key.rows_l
        self.tasks = self.products_tasks + H * self.decays_per_head
        self.scan_tile = max(d for d in range(1, 9) if H % d == 0)
        self.g_pitch = key.tile_j + 4  # spreads the accumulators' (i, j) over the banks

    def sums_layout(self, heads):
        """(hi | lo, Q, head) in shared memory, with a gap after the rows of each scanning lane that spreads the banks."""
        V = self.key.chunk_size // 32
        lane = 2 * V + 2
        return cute.make_layout((2, (V, 32), heads), stride=(1, (2, lane), 32 * lane + 2))

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
        mdecay: cute.Tensor,  # (b, H, c, Q)
        msums: cute.Tensor | None,  # (b, c, H, Q, 2): workspace
        dt_min: Float32,
        dt_max: Float32,
        stream: cuda.CUstream,
    ):
        key, engine = self.key, self.engine
        b_layout, c_layout = engine.smem_layouts()
        g2s = cpasync.CopyBulkTensorTileG2SOp()
        tma_b_src, tma_c_src = (  # (Q, N, G, c, b): a tile is (rows, k tile) of one group and chunk
            cute.make_tensor(m.iterator, cute.select(m.layout, mode=[2, 4, 3, 1, 0])) for m in (mB, mC)
        )
        atom_b, tma_b = cpasync.make_tiled_tma_atom(
            g2s, tma_b_src, cute.slice_(b_layout, (None, None, 0)), (key.tile_j, self.kt)
        )
        atom_c, tma_c = cpasync.make_tiled_tma_atom(
            g2s, tma_c_src, cute.slice_(c_layout, (None, None, 0)), (key.tile_i, self.kt)
        )
        sums_size = cute.cosize(self.sums_layout(key.head_tile)) if key.fused_scan else 0

        @cute.struct
        class Storage:
            ab_mbar: cute.struct.MemRange[Int64, engine.stages * 2]
            acc_mbar: cute.struct.MemRange[Int64, 2]
            tmem_ptr: Int32
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]
            sC: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(c_layout)], 1024]
            sG: cute.struct.Align[cute.struct.MemRange[Float32, self.group_tile * key.tile_i * self.g_pitch], 16]
            sRow: cute.struct.Align[cute.struct.MemRange[Float32, 3 * key.head_tile * key.tile_i], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, sums_size], 16]

        self.Storage = Storage
        chunks = mdt.shape[0] * mdt.shape[1]
        if cutlass.const_expr(not key.fused_scan):
            self.scan_kernel.set_name_prefix("mamba_segsum_scan", remove_cutlass_symbol=True, keep_mangled_name=False)
            self.scan_kernel(mdt, mA_log, mbias, mA_cumsum, mdecay, msums, dt_min, dt_max).launch(
                grid=(chunks * (key.num_heads // self.scan_tile), 1, 1), block=(THREADS, 1, 1), stream=stream
            )
        self.kernel.set_name_prefix("mamba_segsum", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            engine.tiled_mma(), atom_b, tma_b, atom_c, tma_c, b_layout, c_layout,
            mdt, mA_log, mbias, mL, mG, mM, mA_cumsum, mdecay, msums, dt_min, dt_max,
        ).launch(
            grid=(chunks * self.tasks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=not key.fused_scan
        )  # fmt: skip

    def states_of(self, mstates, b, c):
        """(Q, H) of one chunk of A_cumsum or decay_states."""
        Q, H, n_chunks = self.key.chunk_size, self.key.num_heads, mstates.shape[2]
        row = (Int64(b) * H) * n_chunks + c
        layout = cute.make_layout((Q, H), stride=(1, cute.assume(Int64(n_chunks) * Q, divby=Q)))
        return cute.make_tensor(mstates.iterator + cute.assume(row * Q, divby=Q), layout)

    def workspace_of(self, msums, chunk):
        """(hi | lo, Q, H) of one chunk."""
        Q, H = self.key.chunk_size, self.key.num_heads
        offset = cute.assume(Int64(chunk) * (H * Q * 2), divby=Q)
        return cute.make_tensor(msums.iterator + offset, cute.make_layout((2, Q, H)))

    @cute.kernel
    def scan_kernel(
        self,
        mdt: cute.Tensor,  # (b, c, Q, H)
        mA_log: cute.Tensor,  # (H,)
        mbias: cute.Tensor | None,  # (H,)
        mA_cumsum: cute.Tensor,  # (b, H, c, Q)
        mdecay: cute.Tensor,  # (b, H, c, Q)
        msums: cute.Tensor,  # (b, c, H, Q, 2)
        dt_min: Float32,
        dt_max: Float32,
    ):
        """Sums of ``scan_tile`` heads of one chunk into the workspace."""
        cute.arch.griddepcontrol_launch_dependents()
        per_chunk = self.key.num_heads // self.scan_tile
        bidx = cute.arch.block_idx()[0]
        chunk = bidx // per_chunk
        h0 = (bidx - chunk * per_chunk) * self.scan_tile
        b = chunk // mdt.shape[1]
        c = chunk - b * mdt.shape[1]
        Q = self.key.chunk_size
        sums = memory.SmemAllocator().allocate_tensor(Float32, self.sums_layout(self.scan_tile), byte_alignment=16)
        out = cute.domain_offset((0, 0, h0), self.workspace_of(msums, chunk))
        scan_heads(
            mdt[b, c, None, None], mA_log, mbias, sums, out,
            self.states_of(mA_cumsum, b, c), self.states_of(mdecay, b, c), cutlass.Boolean(True),
            Int32(0), Int32(Q), h0, dt_min, dt_max, THREADS,
        )  # fmt: skip

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
        mdt: cute.Tensor,
        mA_log: cute.Tensor,
        mbias: cute.Tensor | None,
        mL: cute.Tensor,
        mG: cute.Tensor,
        mM: cute.Tensor,
        mA_cumsum: cute.Tensor,
        mdecay: cute.Tensor,
        msums: cute.Tensor | None,
        dt_min: Float32,
        dt_max: Float32,
    ):
        storage = memory.SmemAllocator().allocate(self.Storage)
        bidx = cute.arch.block_idx()[0]
        chunk = bidx // self.tasks
        task = bidx - chunk * self.tasks
        b = chunk // mdt.shape[1]
        c = chunk - b * mdt.shape[1]
        if task < self.products_tasks:
            self.products(
                storage, tiled_mma, atom_b, tma_b[None, None, None, c, b], atom_c, tma_c[None, None, None, c, b],
                b_layout, c_layout, mdt[b, c, None, None], mA_log, mbias, mG, mM, msums, dt_min, dt_max, chunk, task,
            )  # fmt: skip
        else:
            self.decays(
                storage, mdt[b, c, None, None], mA_log, mbias, mL, mA_cumsum, mdecay, msums, dt_min, dt_max,
                chunk, b, c, task - self.products_tasks,
            )  # fmt: skip

    @cute.jit
    def decays(
        self,
        storage,
        mdt: cute.Tensor,  # (Q, H)
        mA_log: cute.Tensor,
        mbias: cute.Tensor | None,
        mL: cute.Tensor,
        mA_cumsum: cute.Tensor,
        mdecay: cute.Tensor,
        msums: cute.Tensor | None,
        dt_min: Float32,
        dt_max: Float32,
        chunk: Int32,
        b: Int32,
        c: Int32,
        task: Int32,
    ):
        """``rows_l`` rows of L of one head."""
        Q, H, rows = self.key.chunk_size, self.key.num_heads, self.key.rows_l
        tidx = cute.arch.thread_idx()[0]
        h = task // self.decays_per_head
        i0 = (task - h * self.decays_per_head) * rows
        if cutlass.const_expr(self.key.fused_scan):
            sums = storage.sums.get_tensor(self.sums_layout(1))
            scan_heads(
                mdt, mA_log, mbias, sums, None, self.states_of(mA_cumsum, b, c), self.states_of(mdecay, b, c),
                i0 + rows == Q, Int32(0), i0 + rows, h, dt_min, dt_max, THREADS,
            )  # fmt: skip
            sums = sums[None, None, 0]  # (hi | lo, Q)
        else:
            cute.arch.griddepcontrol_wait()
            sums = self.workspace_of(msums, chunk)[None, None, h]

        # A warp covers 64 columns and 4 rows, so that half of the warps' steps lie above the diagonal and only write
        # zeros. A thread keeps 8 columns j ... j + 7, relative to the last, and walks over the rows.
        columns = min(Q, 64) // VECTOR
        warp_rows, warp_cols = 32 // columns, Q // (columns * VECTOR)
        rows_per_pass = THREADS // 32 // warp_cols * warp_rows
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        v = (warp % warp_cols) * columns + lane % columns
        j = v * VECTOR
        pairs = cute.make_rmem_tensor((2, VECTOR), Float32)
        cute.autovec_copy(cute.flat_divide(sums, (2, VECTOR))[None, None, 0, v], pairs)
        base_hi, base_lo = pairs[0, VECTOR - 1], pairs[1, VECTOR - 1]
        tJ = cute.make_rmem_tensor(VECTOR, Float32)
        for k in cutlass.range_constexpr(VECTOR):
            tJ[k] = (pairs[0, k] - base_hi) + (pairs[1, k] - base_lo)

        offset = ((Int64(b) * H + h) * mL.shape[2] + c) * (Q * Q) + i0 * Q
        gL = cute.make_tensor(
            mL.iterator + cute.assume(offset, divby=Q), cute.make_layout((VECTOR, Q // VECTOR, rows))
        )
        values = cute.make_rmem_tensor(VECTOR, Float32)
        row0 = (warp // warp_cols) * warp_rows + lane // columns
        passes = rows // rows_per_pass
        tI = cute.make_rmem_tensor(passes, Float32)
        for p in cutlass.range_constexpr(passes):
            i = i0 + row0 + p * rows_per_pass
            tI[p] = (sums[0, i] - base_hi) + (sums[1, i] - base_lo)
        for p in cutlass.range_constexpr(passes):
            row = row0 + p * rows_per_pass
            i = i0 + row
            values.fill(0.0)
            if i >= j + VECTOR - 1:
                for k in cutlass.range_constexpr(VECTOR):
                    values[k] = exp2_approx(tI[p] - tJ[k])
            if (i >= j + VECTOR - 1) | (i < j):
                self.write(values, gL[None, v, row])

        # the vectors on the diagonal, one a row
        for p in cutlass.range_constexpr(-(-rows // THREADS)):
            row = tidx + p * THREADS
            if row < rows:
                i = i0 + row
                v = i // VECTOR
                if i < v * VECTOR + VECTOR - 1:
                    for k in cutlass.range_constexpr(VECTOR):
                        j = v * VECTOR + k
                        value = decay(sums[0, i], sums[1, i], sums[0, j], sums[1, j])
                        values[k] = select(i >= j, value, Float32(0.0))
                    self.write(values, gL[None, v, row])

    @cute.jit
    def products(
        self,
        storage,
        tiled_mma: cute.TiledMma,
        atom_b: cute.CopyAtom,
        tma_b: cute.Tensor,  # (Q, N, G)
        atom_c: cute.CopyAtom,
        tma_c: cute.Tensor,  # (Q, N, G)
        b_layout: cute.ComposedLayout,
        c_layout: cute.ComposedLayout,
        mdt: cute.Tensor,  # (Q, H)
        mA_log: cute.Tensor,
        mbias: cute.Tensor | None,
        mG: cute.Tensor,
        mM: cute.Tensor,
        msums: cute.Tensor | None,
        dt_min: Float32,
        dt_max: Float32,
        chunk: Int32,
        task: Int32,
    ):
        """``tile_i`` x ``tile_j`` of G and M for ``head_tile`` heads."""
        key, engine = self.key, self.engine
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        it = task // (self.grid_j * self.grid_h)
        rest = task - it * (self.grid_j * self.grid_h)
        jt = rest // self.grid_h
        ht = rest - jt * self.grid_h
        i0, j0, h0 = it * key.tile_i, jt * key.tile_j, ht * key.head_tile
        g0 = ht * self.group_tile
        causal = i0 + key.tile_i > j0  # some of the tile lies on or below the diagonal

        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)  # (tile_j, kt, stage)
        sC = storage.sC.get_tensor(c_layout.outer, swizzle=c_layout.inner)  # (tile_i, kt, stage)
        pipe = engine.tile_pipeline(storage.ab_mbar.data_ptr())
        engine.begin(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        acc = engine.accumulator(tiled_mma, storage)
        tCrB, tCrC = engine.operands(tiled_mma, sB, sC)

        one = cute.make_layout(1)
        tBsB, tBgB = cpasync.tma_partition(
            atom_b, 0, one, cute.group_modes(sB, 0, 2),
            cute.group_modes(cute.local_tile(tma_b, (key.tile_j, self.kt), (jt, None, None)), 0, 2),
        )  # fmt: skip
        tCsC, tCgC = cpasync.tma_partition(
            atom_c, 0, one, cute.group_modes(sC, 0, 2),
            cute.group_modes(cute.local_tile(tma_c, (key.tile_i, self.kt), (it, None, None)), 0, 2),
        )  # fmt: skip
        tiles = self.group_tile * self.k_tiles

        if warp == 0:
            for n in cutlass.range_constexpr(key.stages):
                self.load_tile(pipe, atom_b, tBgB, tBsB, atom_c, tCgC, tCsC, g0, n)

        # fused: sums from j0 on, which is all that differences inside the tile need
        if cutlass.const_expr(key.fused_scan):
            sums = storage.sums.get_tensor(self.sums_layout(key.head_tile))  # (hi | lo, row from j0, head)
            if causal:
                scan_heads(
                    mdt, mA_log, mbias, sums, None, None, None, causal, j0, i0 + key.tile_i - j0, h0,
                    dt_min, dt_max, THREADS,
                )  # fmt: skip

        sG = storage.sG.get_tensor(  # (i, j, group)
            cute.make_layout(
                (key.tile_i, key.tile_j, self.group_tile), stride=(self.g_pitch, 1, key.tile_i * self.g_pitch)
            )
        )
        if tidx < self.engine.threads:
            for g in cutlass.range_constexpr(self.group_tile):
                self.engine.start(g)
                for k in cutlass.range_constexpr(self.k_tiles):
                    n = g * self.k_tiles + k
                    self.engine.step(tiled_mma, acc, tCrB, tCrC, pipe, n, k == 0)
                    if cutlass.const_expr(n + key.stages < tiles):
                        if warp == 0:
                            self.load_tile(pipe, atom_b, tBgB, tBsB, atom_c, tCgC, tCsC, g0, n + key.stages)
                self.engine.finish(g)
                values, coords = self.engine.read(tiled_mma, acc, g)
                for v in cutlass.range_constexpr(cute.size(values)):
                    j, i = coords[v]
                    sG[i, j, g] = values[v]
        # (head, row from i0, part): the sums relative to row i0, and the pairs hi, lo
        sRow = storage.sRow.get_tensor(cute.make_layout((key.head_tile, key.tile_i, 3)))
        if cutlass.const_expr(not key.fused_scan):
            cute.arch.griddepcontrol_wait()
            sums = cute.domain_offset((0, j0, h0), self.workspace_of(msums, chunk))
        base = i0 - j0  # not negative where the tile is causal: tile_i divides tile_j
        if causal:
            for n in cutlass.range_constexpr(-(-key.head_tile * key.tile_i // THREADS)):
                e = tidx + n * THREADS
                h, row = e % key.head_tile, e // key.head_tile
                if row < key.tile_i:
                    hi, lo = sums[0, base + row, h], sums[1, base + row, h]
                    sRow[h, row, 0] = (hi - sums[0, base, h]) + (lo - sums[1, base, h])
                    sRow[h, row, 1], sRow[h, row, 2] = hi, lo
        cute.arch.sync_threads()
        self.engine.end(acc)
        self.write_products(sG, sums, sRow, mG, mM, chunk, i0, j0, h0, base, causal)
        if cutlass.const_expr(key.per_group):
            self.write_groups(sG, mG, chunk, i0, j0, ht * self.group_tile)

    @cute.jit
    def load_tile(
        self,
        pipe: pipeline.PipelineAsync,
        atom_b: cute.CopyAtom,
        tBgB: cute.Tensor,  # (tile, k, group)
        tBsB: cute.Tensor,  # (tile, stage)
        atom_c: cute.CopyAtom,
        tCgC: cute.Tensor,
        tCsC: cute.Tensor,
        g0: Int32,
        n: cutlass.Constexpr,
    ):
        """Tile n of the ring: k tile n % k_tiles of group n // k_tiles (one warp calls)."""
        stages = self.key.stages
        state = ring_state(n, stages, producer=True)
        k, g = n % self.k_tiles, g0 + n // self.k_tiles
        pipe.producer_acquire(state)
        mbar = pipe.producer_get_barrier(state)
        cute.copy(atom_b, tBgB[None, k, g], tBsB[None, n % stages], tma_bar_ptr=mbar)
        cute.copy(atom_c, tCgC[None, k, g], tCsC[None, n % stages], tma_bar_ptr=mbar)
        pipe.producer_commit(state)

    @cute.jit
    def write_products(
        self,
        sG: cute.Tensor,  # (i, j, group)
        sums: cute.Tensor,  # (hi | lo, row from j0, head)
        sRow: cute.Tensor,  # (head, row from i0, relative | hi | lo)
        mG: cute.Tensor,
        mM: cute.Tensor,
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        h0: Int32,
        base: Int32,
        causal: cutlass.Boolean,
    ):
        """Rows of M, and of G over all heads: a thread keeps neighbouring elements (j, h) and walks over i."""
        key = self.key
        Q, H, heads = key.chunk_size, key.num_heads, key.head_tile
        tidx = cute.arch.thread_idx()[0]
        width = VECTOR if heads == H else math.gcd(VECTOR, heads)
        vectors = key.tile_j * heads // width
        rows_per_pass = max(1, THREADS // vectors)
        passes = -(-key.tile_i // rows_per_pass)
        one_j = heads % width == 0
        one_group = one_j and self.heads_per_group % width == 0
        if cutlass.const_expr(heads == H):
            layout = cute.make_layout((width, vectors, key.tile_i), stride=(1, width, Q * H))
        else:
            per_j = heads // width
            layout = cute.make_layout(
                (width, (per_j, key.tile_j), key.tile_i), stride=(1, (width, H), Q * H)
            )
        row0 = cute.assume(((Int64(chunk) * Q + i0) * Q + j0) * H + h0, divby=width)
        gG, gM = cute.make_tensor(mG.iterator + row0, layout), cute.make_tensor(mM.iterator + row0, layout)
        tJ, tJ_lo = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)
        product, value = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)

        for n in cutlass.range_constexpr(-(-vectors // THREADS)):
            v = tidx % vectors if vectors < THREADS else tidx + n * THREADS
            first = tidx // vectors if vectors < THREADS else Int32(0)
            e = [v * width + k for k in range(width)]
            j, h = [x // heads for x in e], [x % heads for x in e]
            g = [x // self.heads_per_group for x in h]
            # columns up to row i0 have it between j and i, so that sums relative to it may be rounded
            relative = causal & (j0 + j[width - 1] <= i0)
            rows = cutlass.min(rows_per_pass * passes, key.tile_i)
            if (first >= rows_per_pass) | (v >= vectors):
                rows = Int32(0)
            if relative:
                for k in cutlass.range_constexpr(width):
                    hi, lo = sums[0, j[k], h[k]], sums[1, j[k], h[k]]
                    tJ[k] = (hi - sums[0, base, h[k]]) + (lo - sums[1, base, h[k]])
                for row in cutlass.range(first, rows, rows_per_pass, unroll=4):
                    for k in cutlass.range_constexpr(width):
                        product[k] = product[0] if k and one_group else sG[row, j[k], g[k]]
                        value[k] = product[k] * exp2_approx(sRow[h[k], row, 0] - tJ[k])
                    self.write_row(product, value, gG[None, v, row], gM[None, v, row])
            elif causal:
                for k in cutlass.range_constexpr(width):
                    tJ[k], tJ_lo[k] = sums[0, j[k], h[k]], sums[1, j[k], h[k]]
                for row in cutlass.range(first, rows, rows_per_pass, unroll=2):
                    for k in cutlass.range_constexpr(width):
                        product[k] = product[0] if k and one_group else sG[row, j[k], g[k]]
                        factor = decay(sRow[h[k], row, 1], sRow[h[k], row, 2], tJ[k], tJ_lo[k])
                        value[k] = select(i0 + row >= j0 + j[k], product[k] * factor, Float32(0.0))
                    self.write_row(product, value, gG[None, v, row], gM[None, v, row])
            else:
                value.fill(0.0)
                for row in cutlass.range(first, rows, rows_per_pass, unroll=4):
                    for k in cutlass.range_constexpr(width):
                        product[k] = product[0] if k and one_group else sG[row, j[k], g[k]]
                    self.write_row(product, value, gG[None, v, row], gM[None, v, row])

    @cute.jit
    def write_row(self, product: cute.Tensor, value: cute.Tensor, gG: cute.Tensor, gM: cute.Tensor):  # each (width,)
        if cutlass.const_expr(not self.key.per_group):
            self.write(product, gG)
        self.write(value, gM)

    @cute.jit
    def write(self, values: cute.Tensor, gOut: cute.Tensor):  # each (width,)
        """Rounds once and stores, 16 bytes at a time where the width allows."""
        out = cute.make_rmem_tensor(values.shape, self.dtype)
        out.store(values.load().to(self.dtype))
        cute.autovec_copy(out, gOut)

    @cute.jit
    def write_groups(
        self,
        sG: cute.Tensor,  # (i, j, group)
        mG: cute.Tensor,  # (b, c, Q, Q, G)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        g0: Int32,
    ):
        """G without the repetition over heads."""
        key = self.key
        Q, G, groups = key.chunk_size, key.n_groups, self.group_tile
        tidx = cute.arch.thread_idx()[0]
        width = VECTOR if groups == G else math.gcd(VECTOR, groups)
        vectors = key.tile_j * groups // width
        row0 = cute.assume(((Int64(chunk) * Q + i0) * Q + j0) * G + g0, divby=width)
        shape = (width, (groups // width, key.tile_j) if groups < G else vectors, key.tile_i)
        stride = (1, (width, G) if groups < G else width, Q * G)
        gG = cute.make_tensor(mG.iterator + row0, cute.make_layout(shape, stride=stride))
        product = cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range_constexpr(-(-vectors * key.tile_i // THREADS)):
            e = tidx + n * THREADS
            v, row = e % vectors, e // vectors
            if row < key.tile_i:
                for k in cutlass.range_constexpr(width):
                    x = v * width + k
                    product[k] = sG[row, x // groups, x % groups]
                self.write(product, gG[None, v, row])


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

    operand = lambda: strided(dtype, (b, c, Q, G, N), divby=VECTOR, inner=1)
    return cute.compile(
        Segsum(key, arch),
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
        None if key.fused_scan else packed(Float32, b, c, H, Q, 2),
        Float32(0.0),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
