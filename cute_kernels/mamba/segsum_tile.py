"""What the kernels of the segment sum have in common: operands in, G out, and how elements of G and M are divided."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.copy import store_evict_first
from cute_kernels.device.engine import mma_engine
from cute_kernels.mamba.segsum_config import PIECE, SegsumKernel, k_tile

VECTOR = 8  # elements of a 16-byte store


def aligned_size(layout):
    """Floats of shared memory for a layout, so that the next one starts at 16 bytes."""
    return -(-cute.cosize(layout) // 4) * 4


def tensors_at(ptr, layouts):
    """Tensors of fp32 one after the other from ``ptr`` on, each at 16 bytes."""
    tensors = []
    for layout in layouts:
        tensors.append(cute.make_tensor(ptr, layout))
        ptr = ptr + aligned_size(layout)
    return tensors


class Tile:
    """A block's ``tile_i`` rows and ``PIECE`` columns of a product, for ``head_tile`` heads."""

    def __init__(self, key: SegsumKernel, arch: str):
        self.key = key
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[key.dtype]
        self.heads_per_group = key.num_heads // key.n_groups
        self.group_tile = key.head_tile // self.heads_per_group  # groups of one task
        self.kt = k_tile(key.d_state)
        stages = 1 if self.group_tile == 1 else 2
        self.engine = mma_engine(arch, (PIECE, key.tile_i, self.kt), key.d_state // self.kt, self.dtype, stages)
        self.grid_i, self.grid_j = key.chunk_size // key.tile_i, key.chunk_size // key.tile_j
        self.grid_h = key.num_heads // key.head_tile
        self.tasks = self.grid_i * self.grid_j * self.grid_h  # of one chunk

    def operand_copies(self, mB, mC, b_layout, c_layout):
        """Tensor copies of pieces (rows, kt) of B and C, and what they copy as (Q, N, G, c, b)."""
        g2s = cpasync.CopyBulkTensorTileG2SOp()
        copies = []
        for m, layout, rows in ((mB, b_layout, PIECE), (mC, c_layout, self.key.tile_i)):
            gX = cute.make_tensor(m.iterator, cute.select(m.layout, mode=[2, 4, 3, 1, 0]))
            copies += cpasync.make_tiled_tma_atom(g2s, gX, cute.slice_(layout, (None, None, 0)), (rows, self.kt))
        return copies

    def sums_of_chunk(self, mA_cumsum, mstates, b, c, h0):
        """A_cumsum and decay_states of one chunk as (Q, head), from head h0 on."""
        Q, H, n_chunks = self.key.chunk_size, self.key.num_heads, mA_cumsum.shape[2]
        # the fixed inner stride lets a lane store its rows in vectors
        layout = cute.make_layout((Q, H), stride=(1, cute.assume(Int64(n_chunks) * Q, divby=Q)))
        offset = cute.assume((Int64(b) * H * n_chunks + c) * Q, divby=Q)
        return [
            cute.domain_offset((0, h0), cute.make_tensor(m.iterator + offset, layout)) for m in (mA_cumsum, mstates)
        ]

    def element_layout(self, width):
        """The layout (width, vector, row) of a piece of G or M."""
        key = self.key
        Q, H, heads = key.chunk_size, key.num_heads, key.head_tile
        if heads == H:
            return cute.make_layout((width, PIECE * H // width, key.tile_i), stride=(1, width, Q * H))
        return cute.make_layout((width, (heads // width, PIECE), key.tile_i), stride=(1, (width, H), Q * H))

    def rows_of_elements(self, mX, chunk, i0, j0, h0, width):
        """``tile_i`` rows of a piece of G or M (b, c, Q, Q, H) as (width, vector, row)."""
        Q, H = self.key.chunk_size, self.key.num_heads
        offset = cute.assume(((Int64(chunk) * Q + i0) * Q + j0) * H + h0, divby=width)
        return cute.make_tensor(mX.iterator + offset, self.element_layout(width))

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

    def walk(self, width, threads):
        """How threads walk over ``tile_i`` rows of vectors: vectors a row, rows a pass."""
        vectors = PIECE * self.key.head_tile // width
        return vectors, max(1, threads // vectors)

    @cute.jit
    def write_products(
        self,
        sG: cute.Tensor,  # (i, j, group)
        mG: cute.Tensor,  # (b, c, Q, Q, H)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        h0: Int32,
        threads: cutlass.Constexpr,
    ):
        """``tile_i`` rows of G, repeated over the heads (the first ``threads``)."""
        key = self.key
        tidx = cute.arch.thread_idx()[0]
        width, uniform = self.widths()
        vectors, rows_per_pass = self.walk(width, threads)
        gG = self.rows_of_elements(mG, chunk, i0, j0, h0, width)
        product = cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range_constexpr(-(-vectors // threads)):
            v, first = tidx % vectors + n * threads, tidx // vectors
            if (v < vectors) & (first < rows_per_pass):
                j, _, g = self.elements(v, width)
                for row in cutlass.range(first, key.tile_i, rows_per_pass, unroll=4):
                    for k in cutlass.range_constexpr(width):
                        product[k] = product[0] if k and uniform else sG[row, j[k], g[k]]
                    self.write(product, gG[None, v, row])

    @cute.jit
    def write_groups(
        self,
        sG: cute.Tensor,  # (i, j, group)
        mG: cute.Tensor,  # (b, c, Q, Q, G)
        chunk: Int32,
        i0: Int32,
        j0: Int32,
        g0: Int32,
        threads: cutlass.Constexpr,
    ):
        """``tile_i`` rows of G without the repetition over heads (the first ``threads``)."""
        key = self.key
        Q, G, groups = key.chunk_size, key.n_groups, self.group_tile
        width = VECTOR if groups == G else math.gcd(VECTOR, groups)
        vectors = PIECE * groups // width
        offset = cute.assume(((Int64(chunk) * Q + i0) * Q + j0) * G + g0, divby=width)
        shape = (width, (groups // width, PIECE) if groups < G else vectors, key.tile_i)
        stride = (1, (width, G) if groups < G else width, Q * G)
        gG = cute.make_tensor(mG.iterator + offset, cute.make_layout(shape, stride=stride))
        product = cute.make_rmem_tensor(width, Float32)
        for n in cutlass.range(cute.arch.thread_idx()[0], vectors * key.tile_i, threads, unroll=1):
            v, row = n % vectors, n // vectors
            for k in cutlass.range_constexpr(width):
                x = v * width + k
                product[k] = sG[row, x // groups, x % groups]
            self.write(product, gG[None, v, row])

    @cute.jit
    def write(self, values: cute.Tensor, gOut: cute.Tensor):  # each (width,)
        """Rounds once and stores, 16 bytes at a time where the width allows."""
        if cutlass.const_expr(cute.size(values) == VECTOR):
            store_evict_first(cute.recast_tensor(self.rounded(values), Int32), gOut)
        else:
            cute.autovec_copy(self.rounded(values), gOut)

    def rounded(self, values):
        """fp32 values in the outputs' type."""
        out = cute.make_rmem_tensor(values.shape, self.dtype)
        out.store(values.load().to(self.dtype))
        return out
