"""Mamba-2's parameter discretization and segment sum (device code).

Two kernels, the second launched before the first one ends (programmatic dependent launch):

- ``scan_kernel`` writes A_cumsum, decay_states, and to a workspace the same sums as pairs of floats (``segsum_scan``).
- ``kernel`` writes L, G and M. Every block owns long contiguous runs of each, which is what DRAM wants: a few rows of G
  and M over many columns and all heads, and as large a part of L. The product C B^T is taken transposed (j on the tensor
  core's M side), passed through shared memory, and repeated over the heads. What does not need the sums is done first.

An element of L is 2^(sum_i - sum_j). Away from the diagonal the sums are first taken relative to a row between j and i,
where nothing cancels, so that one fp32 subtraction is exact enough; near it the pairs are subtracted part by part.
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
from cute_kernels.mamba.segsum_scan import decay, scan_heads, sums_layout
from cute_kernels.runtime.kernel import compile_options

VECTOR = 8  # elements of a 16-byte store
SCAN_THREADS = 256


class Segsum:
    """``__call__`` is the host function that gets compiled, ``scan_kernel`` and ``kernel`` the device code."""

    def __init__(self, key: SegsumKernel, arch: str):
        self.key = key
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[key.dtype]
        Q, H, G = key.chunk_size, key.num_heads, key.n_groups
        self.heads_per_group = H // G
        self.group_tile = key.head_tile // self.heads_per_group  # groups of one task
        self.kt = k_tile(key.d_state)
        stages = 1 if self.group_tile == 1 else 2
        self.engine = mma_engine(arch, (key.tile_j, key.tile_i, self.kt), key.d_state // self.kt, self.dtype, stages)
        self.grid_i, self.grid_j, self.grid_h = Q // key.tile_i, Q // key.tile_j, H // key.head_tile
        self.tasks = self.grid_i * self.grid_j * self.grid_h  # of one chunk
        self.scan_tile = max(d for d in range(1, 5) if H % d == 0)
        # rows of L of one task: a part of one head, or whole heads
        share = -(-H * Q // self.tasks)
        one_pass = key.threads * VECTOR // Q  # rows that the block writes at once
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
        max_blocks: Int32,  # that fit on the GPU at a time
        stream: cuda.CUstream,
    ):
        key, engine = self.key, self.engine
        b_layout, c_layout = engine.smem_layouts()
        g2s = cpasync.CopyBulkTensorTileG2SOp()
        gB, gC = (  # (Q, N, G, c, b): a piece is (rows, kt) of one group and chunk
            cute.make_tensor(m.iterator, cute.select(m.layout, mode=[2, 4, 3, 1, 0])) for m in (mB, mC)
        )
        piece = (None, None, 0)
        atom_b, tma_b = cpasync.make_tiled_tma_atom(g2s, gB, cute.slice_(b_layout, piece), (key.tile_j, self.kt))
        atom_c, tma_c = cpasync.make_tiled_tma_atom(g2s, gC, cute.slice_(c_layout, piece), (key.tile_i, self.kt))
        Q, heads = key.chunk_size, key.head_tile

        @cute.struct
        class Storage:
            ab_mbar: cute.struct.MemRange[Int64, engine.stages * 2]
            acc_mbar: cute.struct.MemRange[Int64, 2]
            tmem_ptr: Int32
            sB: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(b_layout)], 1024]
            sC: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(c_layout)], 1024]
            sG: cute.struct.Align[cute.struct.MemRange[Float32, self.group_tile * key.tile_i * (key.tile_j + 4)], 16]
            sRelative: cute.struct.Align[cute.struct.MemRange[Float32, heads * key.tile_i], 16]
            # sums of this task and of the next
            sRow: cute.struct.Align[cute.struct.MemRange[Float32, 2 * 2 * heads * key.tile_i], 16]
            sColumn: cute.struct.Align[cute.struct.MemRange[Float32, 2 * heads * (2 * key.tile_j + 2)], 16]
            sL: cute.struct.Align[cute.struct.MemRange[Float32, 2 * 2 * Q * self.l_heads], 16]

        self.Storage = Storage
        chunks = mdt.shape[0] * mdt.shape[1]
        self.scan_kernel.set_name_prefix("mamba_segsum_scan", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.scan_kernel(mdt, mA_log, mbias, mA_cumsum, mstates, msums, dt_min, dt_max).launch(
            grid=(chunks * (key.num_heads // self.scan_tile), 1, 1), block=(SCAN_THREADS, 1, 1), stream=stream
        )
        self.kernel.set_name_prefix("mamba_segsum", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            engine.tiled_mma(), atom_b, tma_b, atom_c, tma_c, b_layout, c_layout, mL, mG, mM, msums
        ).launch(
            grid=(cutlass.min(chunks * self.tasks, max_blocks), 1, 1), block=(key.threads, 1, 1), stream=stream,
            use_pdl=True,
            # limits the registers; naming the carveout keeps the compiler from asking a driver for it
            min_blocks_per_mp=key.blocks_per_sm, preferred_smem_carveout=100,
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
        work = memory.SmemAllocator().allocate_tensor(Float32, sums_layout(Q, heads), byte_alignment=16)
        sums = cute.domain_offset((0, 0, h0), self.workspace(msums, chunk))
        # the fixed inner stride lets a lane store its rows in vectors
        states = cute.make_layout((Q, H), stride=(1, cute.assume(Int64(n_chunks) * Q, divby=Q)))
        offset = cute.assume((Int64(b) * H * n_chunks + c) * Q, divby=Q)
        gA_cumsum, gstates = (
            cute.domain_offset((0, h0), cute.make_tensor(m.iterator + offset, states)) for m in (mA_cumsum, mstates)
        )
        scan_heads(
            cute.domain_offset((0, h0), mdt[b, c, None, None]),
            cute.domain_offset((h0,), mA_log),
            None if cutlass.const_expr(mbias is None) else cute.domain_offset((h0,), mbias),
            work, sums, gA_cumsum, gstates, dt_min, dt_max, heads, SCAN_THREADS,
        )  # fmt: skip

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
        mL: cute.Tensor,  # (b, H, c, Q, Q)
        mG: cute.Tensor,  # (b, c, Q, Q, H or G)
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        msums: cute.Tensor,  # (b, c, H, Q, 2)
    ):
        """Tasks ``block``, ``block`` + grid, ...: loads for the next one are under way while one is written."""
        key, engine = self.key, self.engine
        Q, heads, groups = key.chunk_size, key.head_tile, self.group_tile
        tidx = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, grid = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        total = mL.shape[0] * mL.shape[2] * self.tasks

        storage = memory.SmemAllocator().allocate(self.Storage)
        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)  # (tile_j, kt, stage and piece)
        sC = storage.sC.get_tensor(c_layout.outer, swizzle=c_layout.inner)  # (tile_i, kt, stage and piece)
        g_pitch = key.tile_j + 4  # spreads an accumulator's (i, j) over the banks
        sG = storage.sG.get_tensor(
            cute.make_layout((key.tile_i, key.tile_j, groups), stride=(g_pitch, 1, key.tile_i * g_pitch))
        )
        # sums of the rows, the same relative to the first row, of the columns, and of the rows of L; the last mode
        # has this task's and the next one's
        sRelative = storage.sRelative.get_tensor(cute.make_layout((heads, key.tile_i)))
        sRow = storage.sRow.get_tensor(cute.make_layout((2, heads, key.tile_i, 2)))
        pitch = 2 * key.tile_j + 2
        sColumn = storage.sColumn.get_tensor(
            cute.make_layout((2, heads, key.tile_j, 2), stride=(1, pitch, 2, heads * pitch))
        )
        sL = storage.sL.get_tensor(cute.make_layout((2, Q, self.l_heads, 2)))

        ring = engine.ring(storage.ab_mbar.data_ptr())
        engine.begin(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        acc = engine.accumulator(tiled_mma)
        tCrB, tCrC = engine.operands(tiled_mma, sB, sC)
        one, every = cute.make_layout(1), (None,) * 5
        pieces_b = cute.group_modes(cute.local_tile(tma_b, (key.tile_j, self.kt), every), 0, 2)
        pieces_c = cute.group_modes(cute.local_tile(tma_c, (key.tile_i, self.kt), every), 0, 2)
        # (piece, stage and piece), (piece, tile, k, group, c, b)
        tBsB, tBgB = cpasync.tma_partition(atom_b, 0, one, cute.group_modes(sB, 0, 2), pieces_b)
        tCsC, tCgC = cpasync.tma_partition(atom_c, 0, one, cute.group_modes(sC, 0, 2), pieces_c)
        if warp == 0:
            for n in cutlass.range_constexpr(engine.stages):
                self.load_product(ring, n, block + n // groups * grid, atom_b, tBgB, tBsB, atom_c, tCgC, tCsC, total)

        for task in cutlass.range(block, total, grid, unroll=1):
            nth = (task - block) // grid
            chunk, b, c, it, jt, ht = self.place(task, mL.shape[2])
            i0, j0, h0 = it * key.tile_i, jt * key.tile_j, ht * heads
            if tidx < self.engine.threads:
                for g in cutlass.range_constexpr(groups):
                    n = nth * groups + g
                    self.engine.multiply(acc, tCrB, tCrC, ring, n)
                    if warp == 0:
                        ahead = n + self.engine.stages
                        self.load_product(
                            ring, ahead, block + ahead // groups * grid, atom_b, tBgB, tBsB, atom_c, tCgC, tCsC, total
                        )
                    values, coords = self.engine.read(tiled_mma, acc, n)
                    for v in cutlass.range_constexpr(cute.size(values)):
                        j, i = coords[v]
                        sG[i, j, g] = values[v]
            cute.arch.sync_threads()
            if cutlass.const_expr(key.per_group):
                self.write_groups(sG, mG, chunk, i0, j0, ht * groups)
            else:
                self.write_products(sG, mG, chunk, i0, j0, h0)
            if nth == 0:
                cute.arch.griddepcontrol_wait()
                self.load_sums(msums, sRow, sColumn, sL, task, 0, total, mL.shape[2])
            self.load_sums(msums, sRow, sColumn, sL, task + grid, (nth + 1) % 2, total, mL.shape[2])
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_threads()
            half = nth % 2
            if i0 + key.tile_i > j0:
                self.make_relative(sRow[None, None, None, half], sRelative)
            self.write_decays(sL[None, None, None, half], mL, b, c, task % self.tasks)
            cute.arch.sync_threads()
            self.write_masked(
                sG, sRow[None, None, None, half], sRelative, sColumn[None, None, None, half], mM, chunk, i0, j0, h0
            )
            cute.arch.sync_threads()
        self.engine.end(acc)

    def place(self, task, n_chunks):
        """(chunk, its b and c, tile of rows, of columns, of heads) of a task."""
        chunk = task // self.tasks
        rest = task - chunk * self.tasks
        b = chunk // n_chunks
        it = rest // (self.grid_j * self.grid_h)
        rest = rest - it * (self.grid_j * self.grid_h)
        jt = rest // self.grid_h
        return chunk, b, chunk - b * n_chunks, it, jt, rest - jt * self.grid_h

    @cute.jit
    def load_product(
        self,
        ring: pipeline.PipelineAsync,
        n: Int32,
        task: Int32,
        atom_b: cute.CopyAtom,
        tBgB: cute.Tensor,  # (piece, tile, k, group, c, b)
        tBsB: cute.Tensor,  # (piece, stage and piece)
        atom_c: cute.CopyAtom,
        tCgC: cute.Tensor,
        tCsC: cute.Tensor,
        total: Int32,
    ):
        """Starts loading the operands of the block's n-th product (one warp calls)."""
        if task < total:
            chunk, b, c, it, jt, ht = self.place(task, tBgB.shape[4])
            group = ht * self.group_tile + n % self.group_tile
            state = ring_state(n, self.engine.stages, producer=True)
            ring.producer_acquire(state)
            mbar = ring.producer_get_barrier(state)
            for k in cutlass.range_constexpr(self.engine.k_tiles):
                piece = state.index * self.engine.k_tiles + k
                cute.copy(atom_b, tBgB[None, jt, k, group, c, b], tBsB[None, piece], tma_bar_ptr=mbar)
                cute.copy(atom_c, tCgC[None, it, k, group, c, b], tCsC[None, piece], tma_bar_ptr=mbar)
            ring.producer_commit(state)

    def rows_of_L(self, task):
        """First head and row of a task's part of L, by its number in the chunk."""
        l0 = task * self.l_rows * self.l_heads
        return l0 // self.key.chunk_size, l0 % self.key.chunk_size

    @cute.jit
    def load_sums(
        self,
        msums: cute.Tensor,  # (b, c, H, Q, 2)
        sRow: cute.Tensor,  # (hi | lo, head, row, half)
        sColumn: cute.Tensor,  # (hi | lo, head, column, half)
        sL: cute.Tensor,  # (hi | lo, Q, head, half)
        task: Int32,
        half: Int32,
        total: Int32,
        n_chunks: Int32,
    ):
        """Starts copying a task's sums to shared memory: one group of asynchronous copies."""
        key, threads = self.key, self.key.threads
        tidx = cute.arch.thread_idx()[0]
        pair = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=64)
        if task < total:
            chunk, b, c, it, jt, ht = self.place(task, n_chunks)
            i0, j0, h0 = it * key.tile_i, jt * key.tile_j, ht * key.head_tile
            gsums = self.workspace(msums, chunk)  # (hi | lo, Q, H)
            head, _ = self.rows_of_L(task % self.tasks)
            for n in cutlass.range(tidx, key.chunk_size * self.l_heads, threads, unroll=1):
                h, r = n // key.chunk_size, n % key.chunk_size
                if head + h < key.num_heads:
                    cute.copy(pair, gsums[None, r, head + h], sL[None, r, h, half])
            # where no element lies on or below the diagonal, M is zero
            if i0 + key.tile_i > j0:
                for n in cutlass.range(tidx, key.tile_i * key.head_tile, threads, unroll=1):
                    h, row = n // key.tile_i, n % key.tile_i
                    cute.copy(pair, gsums[None, i0 + row, h0 + h], sRow[None, h, row, half])
                for n in cutlass.range(tidx, key.tile_j * key.head_tile, threads, unroll=1):
                    h, column = n // key.tile_j, n % key.tile_j
                    cute.copy(pair, gsums[None, j0 + column, h0 + h], sColumn[None, h, column, half])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def make_relative(self, sRow: cute.Tensor, sRelative: cute.Tensor):  # (hi | lo, head, row), (head, row)
        key = self.key
        for n in cutlass.range(cute.arch.thread_idx()[0], key.tile_i * key.head_tile, key.threads, unroll=1):
            h, row = n % key.head_tile, n // key.head_tile
            sRelative[h, row] = (sRow[0, h, row] - sRow[0, h, 0]) + (sRow[1, h, row] - sRow[1, h, 0])

    @cute.jit
    def write_decays(
        self,
        sL: cute.Tensor,  # (hi | lo, Q, head)
        mL: cute.Tensor,  # (b, H, c, Q, Q)
        b: Int32,
        c: Int32,
        task: Int32,
    ):
        """``l_rows`` rows of L of ``l_heads`` heads."""
        Q, H, rows, threads = self.key.chunk_size, self.key.num_heads, self.l_rows, self.key.threads
        tidx = cute.arch.thread_idx()[0]
        # The block writes whole neighbouring rows at once, and every warp does the same work, so that they stay
        # together: DRAM likes runs of 4 KB that come at one time, and warps that skip what lies above the diagonal
        # would break them into pieces.
        row_vectors = Q // VECTOR
        step = threads // row_vectors
        v, first = tidx % row_vectors, tidx // row_vectors
        j = v * VECTOR
        h0, i0 = self.rows_of_L(task)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        pairs = cute.make_rmem_tensor((2, VECTOR), Float32)
        for head in cutlass.range(self.l_heads, unroll=1):
            h = h0 + head
            if h < H:
                offset = ((Int64(b) * H + h) * mL.shape[2] + c) * (Q * Q) + i0 * Q
                gL = cute.make_tensor(
                    mL.iterator + cute.assume(offset, divby=Q), cute.make_layout((VECTOR, row_vectors, rows))
                )
                sums = sL[None, None, head]  # (hi | lo, Q)
                cute.autovec_copy(cute.flat_divide(sums, (2, VECTOR))[None, None, 0, v], pairs)
                for p in cutlass.range(rows // step, unroll=2):
                    row = first + p * step
                    hi, lo = sums[0, i0 + row], sums[1, i0 + row]
                    for k in cutlass.range_constexpr(VECTOR):
                        value = decay(hi, lo, pairs[0, k], pairs[1, k])
                        values[k] = select(i0 + row >= j + k, value, Float32(0.0))
                    self.write(values, gL[None, v, row])

    def element_layout(self, width):
        """A row of G or M over the task's columns and heads as (width, vectors), with ``tile_i`` rows: its layout."""
        key = self.key
        Q, H, heads = key.chunk_size, key.num_heads, key.head_tile
        if heads == H:
            return cute.make_layout((width, key.tile_j * H // width, key.tile_i), stride=(1, width, Q * H))
        return cute.make_layout((width, (heads // width, key.tile_j), key.tile_i), stride=(1, (width, H), Q * H))

    def elements(self, v, width):
        """Column, head and group of each element of vector v."""
        heads = self.key.head_tile
        e = [v * width + k for k in range(width)]
        return [x // heads for x in e], [x % heads for x in e], [x % heads // self.heads_per_group for x in e]

    def widths(self):
        """Elements of a vector, and whether they always share a column and a group."""
        heads = self.key.head_tile
        width = VECTOR if heads == self.key.num_heads else math.gcd(VECTOR, heads)
        return width, heads % width == 0 and self.heads_per_group % width == 0

    def walk(self, width):
        """How threads walk over ``tile_i`` rows of vectors: vectors a row, rows a pass."""
        vectors = self.key.tile_j * self.key.head_tile // width
        return vectors, max(1, self.key.threads // vectors)

    @cute.jit
    def write_products(
        self,
        sG: cute.Tensor,  # (i, j, group)
        mG: cute.Tensor,  # (b, c, Q, Q, H)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        h0: Int32,
    ):
        """``tile_i`` rows of G, repeated over the heads."""
        key = self.key
        Q, H = key.chunk_size, key.num_heads
        tidx = cute.arch.thread_idx()[0]
        width, uniform = self.widths()
        vectors, rows_per_pass = self.walk(width)
        offset = cute.assume(((Int64(chunk) * Q + i0) * Q + j0) * H + h0, divby=width)
        gG = cute.make_tensor(mG.iterator + offset, self.element_layout(width))
        product = cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range_constexpr(-(-vectors // key.threads)):
            v, first = tidx % vectors + n * key.threads, tidx // vectors
            if (v < vectors) & (first < rows_per_pass):
                j, h, g = self.elements(v, width)
                for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=4):
                    for k in cutlass.range_constexpr(width):
                        product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                    self.write(product, gG[None, v, row])

    @cute.jit
    def write_masked(
        self,
        sG: cute.Tensor,  # (i, j, group)
        sRow: cute.Tensor,  # (hi | lo, head, row)
        sRelative: cute.Tensor,  # (head, row)
        sColumn: cute.Tensor,  # (hi | lo, head, column)
        mM: cute.Tensor,  # (b, c, Q, Q, H)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        h0: Int32,
    ):
        """``tile_i`` rows of M = G * L: a thread keeps neighbouring elements (j, h) and walks over i."""
        key = self.key
        Q, H = key.chunk_size, key.num_heads
        tidx = cute.arch.thread_idx()[0]
        width, uniform = self.widths()
        vectors, rows_per_pass = self.walk(width)
        offset = cute.assume(((Int64(chunk) * Q + i0) * Q + j0) * H + h0, divby=width)
        gM = cute.make_tensor(mM.iterator + offset, self.element_layout(width))
        tJ, tJ_lo = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)
        value = cute.make_rmem_tensor(width, Float32)
        product = cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range_constexpr(-(-vectors // key.threads)):
            v, first = tidx % vectors + n * key.threads, tidx // vectors
            if (v < vectors) & (first < rows_per_pass):
                j, h, g = self.elements(v, width)
                # columns up to row i0 have it between j and i: sums relative to it may be rounded
                if j0 + j[width - 1] <= i0:
                    for k in cutlass.range_constexpr(width):
                        hi, lo = sRow[0, h[k], 0], sRow[1, h[k], 0]
                        tJ[k] = (sColumn[0, h[k], j[k]] - hi) + (sColumn[1, h[k], j[k]] - lo)
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=4):
                        for k in cutlass.range_constexpr(width):
                            product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                            value[k] = product[k] * exp2_approx(sRelative[h[k], row] - tJ[k])
                        self.write(value, gM[None, v, row])
                elif j0 + j[0] < i0 + key.tile_i:
                    for k in cutlass.range_constexpr(width):
                        tJ[k], tJ_lo[k] = sColumn[0, h[k], j[k]], sColumn[1, h[k], j[k]]
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=2):
                        for k in cutlass.range_constexpr(width):
                            product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                            factor = decay(sRow[0, h[k], row], sRow[1, h[k], row], tJ[k], tJ_lo[k])
                            value[k] = select(i0 + row >= j0 + j[k], product[k] * factor, Float32(0.0))
                        self.write(value, gM[None, v, row])
                else:
                    value.fill(0.0)
                    for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=4):
                        self.write(value, gM[None, v, row])

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
        """``tile_i`` rows of G without the repetition over heads."""
        key = self.key
        Q, G, groups = key.chunk_size, key.n_groups, self.group_tile
        width = VECTOR if groups == G else math.gcd(VECTOR, groups)
        vectors = key.tile_j * groups // width
        offset = cute.assume(((Int64(chunk) * Q + i0) * Q + j0) * G + g0, divby=width)
        shape = (width, (groups // width, key.tile_j) if groups < G else vectors, key.tile_i)
        stride = (1, (width, G) if groups < G else width, Q * G)
        gG = cute.make_tensor(mG.iterator + offset, cute.make_layout(shape, stride=stride))
        product = cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range(cute.arch.thread_idx()[0], vectors * key.tile_i, key.threads, unroll=1):
            v, row = n % vectors, n // vectors
            for k in cutlass.range_constexpr(width):
                x = v * width + k
                product[k] = sG[row, x // groups, x % groups]
            self.write(product, gG[None, v, row])

    @cute.jit
    def write(self, values: cute.Tensor, gOut: cute.Tensor):  # each (width,)
        """Rounds once and stores, 16 bytes at a time where the width allows."""
        out = cute.make_rmem_tensor(values.shape, self.dtype)
        out.store(values.load().to(self.dtype))
        cute.autovec_copy(out, gOut)


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
        packed(Float32, b, c, H, Q, 2),
        Float32(0.0),
        Float32(0.0),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=compile_options(arch),
    )
