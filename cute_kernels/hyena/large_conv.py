"""The long convolution of one long channel: FFTs in shared memory, skip and gates fused.

As in `long_conv`, a pass is four levels of halving of 16 points in registers. Here a transform has twice as many of
these groups as the block has threads, and each thread takes two in turn. So up to 16384 points fit in one block, its
warps meet at two barriers a row, and between these a warp owns 1024 neighbouring points. The filter's transform stays
in registers. Each thread copies its own values of the next row to shared memory ahead of time.

More points are divided among the two blocks of a cluster, each with one of the root's two nodes. Both read the whole
real row (its second half late, for want of room), so only real numbers change hands: at the end each block has a part
of the other one's outputs.
"""

from __future__ import annotations

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.math import select
from cute_kernels.hyena import long_conv_fft as fft
from cute_kernels.hyena.config import LongConv
from cute_kernels.hyena.long_conv_fft import POINTS
from cute_kernels.hyena.long_conv_passes import Passes

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
GROUPS = 2  # of 16 points, that a thread takes in turn
TWIDDLES = 8  # of a node of 16 points
LINE = 32  # floats that are prefetched at once
PITCH = 20  # floats from one node's twiddles to the next: free of bank conflicts


class LargeConvKernel(Passes):
    def __init__(self, config: LongConv):
        super().__init__(config.node_points)
        self.config = config
        self.threads = config.team
        self.last = len(self.sizes) - 1
        self.node_units = self.sizes[0] // POINTS  # groups of a node
        # A group's values of a row, counted from its first.
        self.offsets = [j * self.node_units for j in range(POINTS)]
        # A length is more than half of its points: the values of a row, or of its halves, that it surely has.
        self.certain = (POINTS // 2,) if config.nodes == 1 else (POINTS, 0)

    @cute.jit
    def __call__(
        self,
        mU: cute.Tensor,  # (B, D, L) fp32
        mK: cute.Tensor,  # (D, Lk) fp32
        mSkip: cute.Tensor,  # (D,) fp32, if configured
        mPre: cute.Tensor,  # (B, D, L) fp32, if configured
        mPost: cute.Tensor,  # (B, D, L) fp32, if configured
        mY: cute.Tensor,  # (B, D, L) fp32
        rows: I32,  # batch rows of a block
        stream: cuda.CUstream,
    ):
        c = self.config
        grid = (mU.shape[1] * c.nodes, cute.ceil_div(mU.shape[0], rows), 1)
        self.kernel.set_name_prefix("hyena_long_conv_large", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mU, mK, mSkip, mPre, mPost, mY, rows).launch(
            grid=grid, block=(self.threads, 1, 1), cluster=(c.nodes, 1, 1), stream=stream, use_pdl=True,
            # at most 128 registers a thread; naming the carveout keeps the compiler from asking a driver for it
            min_blocks_per_mp=512 // self.threads, preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mU: cute.Tensor,
        mK: cute.Tensor,
        mSkip: cute.Tensor,
        mPre: cute.Tensor,
        mPost: cute.Tensor,
        mY: cute.Tensor,
        rows: I32,
    ):
        c = self.config
        self.cluster_arrive()
        tid = cute.arch.thread_idx()[0]
        # Two groups of 32 neighbours for each warp: what they exchange after the first pass stays in the warp.
        first = tid // 32 * (32 * GROUPS) + tid % 32
        units = [first + 32 * g for g in range(GROUPS)]
        bidx, part = cute.arch.block_idx()[0], cute.arch.block_idx()[1]
        node = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if cutlass.const_expr(c.nodes > 1) else 0
        d = bidx // c.nodes
        b0 = part * rows
        end = cutlass.min(b0 + rows, mU.shape[0])
        taps = cutlass.min(mU.shape[2], mK.shape[1])
        line = (node * self.threads + tid) * LINE  # of a row, that this thread prefetches
        smem = memory.SmemAllocator()
        layout = cute.make_layout((2, self.slots), stride=(1, 2))
        points = smem.allocate_tensor(F32, layout, byte_alignment=16)
        tables = []  # twiddles of each pass but the last, by node
        for n in cutlass.range_constexpr(self.last):
            count = self.sizes[0] // self.sizes[n]
            table = None
            if cutlass.const_expr(c.nodes * count > 1):
                table = cute.make_layout((2, TWIDDLES, count), stride=(1, 2, PITCH))
                table = smem.allocate_tensor(F32, table, byte_alignment=16)
                self.fill(table, tid, node, count)
            tables.append(table)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        staged = cute.make_layout((self.threads, GROUPS * POINTS))
        staged = smem.allocate_tensor(F32, staged, byte_alignment=16)[tid, None]
        for g in cutlass.range_constexpr(GROUPS):
            for j in cutlass.range_constexpr(POINTS):
                if taps <= units[g] + self.offsets[j]:  # what no copy writes counts as zero
                    staged[g * POINTS + j] = F32(0.0)
        for g in cutlass.range_constexpr(GROUPS):
            self.fetch(mK[d, None], staged, g, units[g], taps, 0)
        k = [cute.make_rmem_tensor((2, POINTS), F32) for _ in units]
        for g in cutlass.range_constexpr(GROUPS):
            k[g].fill(0.0)
        skip = F32(0.0)
        if cutlass.const_expr(c.skip):
            skip = mSkip[d]
        for row in cutlass.range(b0 - 1, end, unroll=1):  # the filter, then rows
            if row + 1 < end:
                self.prefetch(mU, mPre, mPost, row + 1, d, line)
            self.enter(mU, mK, mPre, staged, points, tables[0], row, b0, d, node, units)
            cute.arch.sync_threads()
            for n in cutlass.range_constexpr(1, self.last):
                for g in cutlass.range(GROUPS, unroll=1):
                    self.level(points, tables[n], n, first + 32 * g, True)
                cute.arch.sync_warp()
            for g in cutlass.range_constexpr(GROUPS):
                self.middle(points, k[g], row >= b0, node, units[g])
                if row + 1 < end:
                    self.fetch(mU[I64(row + 1), d, None], staged, g, units[g], mU.shape[2], self.certain[0])
            if row < b0:
                if cutlass.const_expr(c.nodes == 1):
                    cute.arch.sync_threads()  # the last pass's reads before the next first pass's writes
                self.cluster_arrive()
            else:
                cute.arch.sync_warp()
                for m in cutlass.range_constexpr(1, self.last):
                    n = self.last - m
                    for g in cutlass.range(GROUPS, unroll=1):
                        self.level(points, tables[n], n, first + 32 * g, False)
                    if cutlass.const_expr(n > 1):
                        cute.arch.sync_warp()
                cute.arch.sync_threads()
                if cutlass.const_expr(c.nodes == 1):
                    for g in cutlass.range(GROUPS, unroll=1):
                        self.leave(mU, mPre, mPost, mY, skip, points, row, d, first + 32 * g)
                else:
                    self.leave_cluster(mU, mPre, mPost, mY, skip, points, tables[0], row, d, node, units)
        self.cluster_wait()

    @cute.jit
    def fill(self, table, tid, node, count: cutlass.Constexpr):
        w = cute.make_rmem_tensor((2, TWIDDLES), F32)
        for i in cutlass.range_constexpr(-(-count // self.threads)):
            n = tid + i * self.threads
            if n < count:
                fft.node_twiddles(w, node * count + n, self.config.nodes * count, self.levels(0))
                cute.autovec_copy(w, table[None, None, n])

    @cute.jit
    def twiddles(self, table, n: cutlass.Constexpr, unit):
        """Of pass n, for a group."""
        if cutlass.const_expr(table is None):
            return None
        w = cute.make_rmem_tensor((2, TWIDDLES), F32)
        cute.autovec_copy(table[None, None, unit // (self.sizes[n] // POINTS)], w)
        return w

    @cute.jit
    def cluster_arrive(self):
        if cutlass.const_expr(self.config.nodes > 1):
            cute.arch.cluster_arrive()

    @cute.jit
    def cluster_wait(self):
        if cutlass.const_expr(self.config.nodes > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def prefetch(self, mU, mPre, mPost, row, d, line):
        """A line of a row to the L2."""
        if line < mU.shape[2]:
            for tensor, wanted in ((mU, True), (mPre, self.config.pre_gate), (mPost, self.config.post_gate)):
                if cutlass.const_expr(wanted):
                    of_row = cute.domain_offset((line,), tensor[I64(row), d, None])
                    cute.arch.prefetch(of_row.iterator.llvm_ptr, cache_level="L2")

    @cute.jit
    def load(self, g, first, length, x, certain: cutlass.Constexpr):
        """A group's values of a row (n,), zero from `length` on."""
        for j in cutlass.range_constexpr(POINTS):
            if cutlass.const_expr(j < certain):
                x[j] = g[first + self.offsets[j]]
            else:
                x[j] = F32(0.0)
                if length - first > self.offsets[j]:
                    x[j] = g[first + self.offsets[j]]

    @cute.jit
    def fetch(self, row, staged, g: cutlass.Constexpr, unit, length, certain: cutlass.Constexpr):
        """Starts to copy a group's values of a row (n,), or of its first half, to shared memory."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=32)
        one = cute.make_layout(1)
        for j in cutlass.range_constexpr(POINTS):
            if j < certain or length - unit > self.offsets[j]:
                source = cute.domain_offset((unit + self.offsets[j],), row).iterator
                target = cute.domain_offset((g * POINTS + j,), staged).iterator
                cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply(self, mGate, row, b0, d, first, x, certain: cutlass.Constexpr):
        """A row's values times the gate, from row b0 on. (With a branch the compiler would double the whole loop.)"""
        gate = cute.make_rmem_tensor((POINTS,), F32)
        self.load(mGate[I64(cutlass.max(row, b0)), d, None], first, mGate.shape[2], gate, certain)
        for j in cutlass.range_constexpr(POINTS):
            x[j] *= select(row >= b0, gate[j], F32(1.0))

    def root(self, node):
        """The twiddle of the root, of which a node's polynomial is the remainder; with the node's sign."""
        sign = F32(1.0) - node.to(F32) * F32(2.0)
        return sign * F32(math.cos(math.pi / 4)), sign * F32(math.sin(math.pi / 4))

    @cute.jit
    def enter(self, mU, mK, mPre, staged, points, table, row, b0, d, node, units):
        """The first pass of the filter or a row."""
        c = self.config
        cute.arch.cp_async_wait_group(0)
        for g in cutlass.range_constexpr(GROUPS):
            x = cute.make_rmem_tensor((2, POINTS), F32)
            for j in cutlass.range_constexpr(POINTS):
                x[0, j] = staged[g * POINTS + j]
            if cutlass.const_expr(c.pre_gate):
                self.multiply(mPre, row, b0, d, units[g], x[0, None], self.certain[0])
            if cutlass.const_expr(c.nodes == 2):
                half = cute.make_rmem_tensor((POINTS,), F32)
                first = units[g] + self.sizes[0]
                if row < b0:
                    self.load(mK[d, None], first, cutlass.min(mU.shape[2], mK.shape[1]), half, 0)
                else:
                    self.load(mU[I64(row), d, None], first, mU.shape[2], half, 0)
                if cutlass.const_expr(c.pre_gate):
                    self.multiply(mPre, row, b0, d, first, half, 0)
                cosine, sine = self.root(node)
                for j in cutlass.range_constexpr(POINTS):
                    x[0, j] = cute.math.fma(cosine, half[j], x[0, j])
                    x[1, j] = sine * half[j]
            fft.forward(x, self.twiddles(table, 0, units[g]), self.levels(0))
            if cutlass.const_expr(g == 0):
                self.cluster_wait()  # the other block has read what this one overwrites
            self.move(x, points, units[g], 0, True)

    @cute.jit
    def level(self, points, table, n: cutlass.Constexpr, unit, forward: cutlass.Constexpr):
        """Pass n, in place."""
        x = cute.make_rmem_tensor((2, POINTS), F32)
        w = self.twiddles(table, n, unit)
        self.move(x, points, unit, n, False)
        if cutlass.const_expr(forward):
            fft.forward(x, w, self.levels(n))
        else:
            fft.inverse(x, w, self.levels(n))
        self.move(x, points, unit, n, True)

    @cute.jit
    def middle(self, points, k, product, node, unit):
        """The last pass; a row times the filter k, and its first pass back. Or the filter becomes k."""
        x = cute.make_rmem_tensor((2, POINTS), F32)
        w = cute.make_rmem_tensor((2, TWIDDLES), F32)
        self.move(x, points, unit, self.last, False)
        levels = self.levels(self.last)
        fft.node_twiddles(w, node * self.node_units + unit, self.config.nodes * self.node_units, levels)
        fft.forward(x, w, levels)
        if product:
            fft.product(x, k)
            fft.inverse(x, w, self.levels(self.last))
            self.move(x, points, unit, self.last, True)
        else:
            for i in cutlass.range_constexpr(2 * POINTS):
                k[i] = x[i] * F32(1.0 / self.config.points)

    @cute.jit
    def leave(self, mU, mPre, mPost, mY, skip, points, row, d, unit):
        """The last pass back, and what follows it."""
        x = cute.make_rmem_tensor((2, POINTS), F32)
        self.move(x, points, unit, 0, False)
        fft.inverse_root(x)
        self.store(mU, mPre, mPost, mY, skip, row, d, unit, x[0, None], self.certain[0])

    @cute.jit
    def leave_cluster(self, mU, mPre, mPost, mY, skip, points, table, row, d, node, units):
        """The same for two nodes: one block has the outputs Re(p + q), the other one Re((p - q) / w)."""
        peer = cute.make_tensor(cute.arch.map_dsmem_ptr(points.iterator, node ^ 1), points.layout)
        cosine, sine = self.root(node)
        for g in cutlass.range_constexpr(GROUPS):
            x = cute.make_rmem_tensor((2, POINTS), F32)
            self.move(x, points, units[g], 0, False)
            fft.inverse(x, self.twiddles(table, 0, units[g]), self.levels(0))
            y = cute.make_rmem_tensor((2, POINTS), F32)  # neighbours: half of them the other block's, then the own
            for j in cutlass.range_constexpr(POINTS):
                low, high = x[0, j], cute.math.fma(sine, x[1, j], cosine * x[0, j])
                y[j] = select(node == 0, high, low)
                y[POINTS + j] = select(node == 0, low, high)
            self.move(y, points, units[g], 0, True)
        self.cluster_arrive()
        self.cluster_wait()
        outputs = [cute.make_rmem_tensor((POINTS,), F32) for _ in units]
        for g in cutlass.range_constexpr(GROUPS):
            pairs = cute.make_tensor(outputs[g].iterator, cute.make_layout((2, POINTS // 2)))
            own, other = (self.first_slot(p, units[g], 0) for p in (points, peer))
            pair = cute.make_rmem_tensor((2,), F32)
            for j in cutlass.range_constexpr(POINTS // 2):
                cute.autovec_copy(other[None, self.slot(0, j)], pairs[None, j])
            for j in cutlass.range_constexpr(POINTS // 2):
                cute.autovec_copy(own[None, self.slot(0, POINTS // 2 + j)], pair)
                for i in cutlass.range_constexpr(2):
                    pairs[i, j] += pair[i]
        self.cluster_arrive()  # before global stores, which it would wait for
        for g in cutlass.range_constexpr(GROUPS):
            first = units[g] + node * self.sizes[0]
            self.store(mU, mPre, mPost, mY, skip, row, d, first, outputs[g], 0)

    @cute.jit
    def store(self, mU, mPre, mPost, mY, skip, row, d, first, y, certain: cutlass.Constexpr):
        """A group's outputs."""
        if cutlass.const_expr(self.config.skip):
            g = cute.make_rmem_tensor((POINTS,), F32)
            self.load(mU[I64(row), d, None], first, mU.shape[2], g, certain)
            if cutlass.const_expr(self.config.pre_gate):
                self.multiply(mPre, row, row, d, first, g, certain)
            for j in cutlass.range_constexpr(POINTS):
                y[j] = cute.math.fma(skip, g[j], y[j])
        if cutlass.const_expr(self.config.post_gate):
            self.multiply(mPost, row, row, d, first, y, certain)
        gY, left = mY[I64(row), d, None], mY.shape[2] - first
        for j in cutlass.range_constexpr(POINTS):
            if j < certain or left > self.offsets[j]:
                gY[first + self.offsets[j]] = y[j]
