"""The long convolution of one channel: FFTs in registers and shared memory, skip and gates fused.

P / 16 threads hold a transform of P points. A pass is four levels of halving in a thread's registers; between passes
points change hands through shared memory, in place: a thread writes where it read last, so one barrier an exchange is
enough. After the first pass a node of P / 16 points belongs to at most 32 neighbouring threads, and exchanges are a
warp's own matter. The filter's values stay in registers while a block walks over its batch rows. Each thread copies its
own values of the next row to shared memory ahead of time, and finds them there when it needs them.

Shared memory has a gap of one point after every 16, which makes each access free of bank conflicts.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.hyena import long_conv_fft as fft
from cute_kernels.hyena.config import LongConv
from cute_kernels.hyena.long_conv_fft import POINTS
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64


class LongConvKernel:
    def __init__(self, config: LongConv):
        self.config = config
        # A pass handles nodes of `size` points, 16 of each `size / 16` apart; the last one several smaller nodes.
        sizes = [config.points // config.parts]
        while sizes[-1] > POINTS:
            sizes.append(sizes[-1] // POINTS)
        self.sizes = sizes
        self.slots = sizes[0] + sizes[0] // POINTS
        # The levels of a cluster: each block has `own` of the 16 points that a thread of every block transforms.
        self.cluster_levels = range(config.parts.bit_length() - 1)
        self.own = POINTS // config.parts
        # A thread's values of a row, counted from its first.
        self.offsets = [i // self.own * sizes[0] + i % self.own * config.team for i in range(POINTS)]
        # A length is more than half of its transform's points, but for the smallest: half of the loads are certain.
        self.certain = POINTS // 2 if config.points > config.MIN_POINTS else 0
        # A cluster's blocks have no shared memory left for gates.
        self.staged_pre = config.pre_gate and config.parts == 1
        self.staged_post = config.post_gate and config.parts == 1

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
        grid = (cute.ceil_div(mU.shape[1], c.channels) * c.parts, cute.ceil_div(mU.shape[0], rows), 1)
        self.kernel.set_name_prefix("hyena_long_conv", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mU, mK, mSkip, mPre, mPost, mY, rows).launch(
            grid=grid, block=(c.threads, 1, 1), cluster=(c.parts, 1, 1), stream=stream, use_pdl=True,
            # at most 128 registers a thread; naming the carveout keeps the compiler from asking a driver for it
            min_blocks_per_mp=512 // c.threads, preferred_smem_carveout=100,
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
        cute.arch.griddepcontrol_launch_dependents()
        self.cluster_arrive()
        tidx = cute.arch.thread_idx()[0]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if cutlass.const_expr(c.parts > 1) else 0
        t = tidx % c.team
        of_block = tidx // c.team
        channel = cute.arch.block_idx()[0] // c.parts * c.channels + of_block
        # Lanes beyond the last channel compute it once more, and store nothing.
        d = cutlass.min(channel, mU.shape[1] - 1)
        mine = channel < mU.shape[1]
        start = t + rank * (self.own * c.team)  # this thread's first value of a row
        left = mU.shape[2] - start
        smem = memory.SmemAllocator()
        layout = cute.make_layout((2, self.slots, c.channels), stride=(1, 2, 2 * self.slots))
        points = smem.allocate_tensor(F32, layout, byte_alignment=16)[None, None, of_block]  # (2, slots)
        back = None
        if cutlass.const_expr(c.parts > 1):
            back = smem.allocate_tensor(F32, layout, byte_alignment=16)[None, None, 0]  # from the cluster

        twiddles = []
        for n, size in enumerate(self.sizes):
            nodes, per_node = max(self.sizes[0] // max(size, POINTS), 1), max(size // POINTS, 1)
            w = None
            if cutlass.const_expr(nodes * c.parts > 1):
                w = cute.make_rmem_tensor((2, fft.TWIDDLES), F32)
                fft.node_twiddles(w, rank * nodes + t // per_node, nodes * c.parts, self.levels(n).start)
                if cutlass.const_expr(self.in_shared(n)):
                    table = cute.make_layout((2, fft.TWIDDLES, nodes))
                    table = smem.allocate_tensor(F32, table, byte_alignment=16)[None, None, t // per_node]
                    if t % per_node == 0:
                        cute.autovec_copy(w, table)
                    w = table
            twiddles.append(w)
        cute.arch.griddepcontrol_wait()

        values = cute.make_layout((c.threads, POINTS, 2))
        sU = smem.allocate_tensor(F32, values, byte_alignment=16)[tidx, None, None]  # (POINTS, parity of the row)
        sPre, sPost = None, None
        if cutlass.const_expr(self.staged_pre):
            sPre = smem.allocate_tensor(F32, cute.select(values, mode=[0, 1]), byte_alignment=16)[tidx, None]
        if cutlass.const_expr(self.staged_post):
            sPost = smem.allocate_tensor(F32, cute.select(values, mode=[0, 1]), byte_alignment=16)[tidx, None]
        for j in cutlass.range_constexpr(self.certain, POINTS):
            if left <= self.offsets[j]:  # what no copy writes counts as zero
                sU[j, 0], sU[j, 1] = F32(0.0), F32(0.0)
                for gate in (sPre, sPost):
                    if cutlass.const_expr(gate is not None):
                        gate[j] = F32(0.0)
        b0 = cute.arch.block_idx()[1] * rows
        end = cutlass.min(b0 + rows, mU.shape[0])
        self.fetch_input(mU, mPre, sU[None, 0], sPre, b0, d, start, left)
        self.fetch_gate(mPost, sPost, b0, d, start, left)

        k = cute.make_rmem_tensor((2, POINTS), F32)
        self.load(mK[d, None], start, cutlass.min(mU.shape[2], mK.shape[1]) - start, k, 0)
        for j in cutlass.range_constexpr(POINTS):
            k[0, j] *= F32(1.0 / c.points)
        self.cluster_wait()
        self.forward(k, twiddles, points, t, rank)
        # The last pass's reads before the rows' first writes.
        if cutlass.const_expr(c.parts > 1):
            self.cluster_arrive()
            self.cluster_wait()
        else:
            self.sync(0)
        skip = F32(0.0)
        if cutlass.const_expr(c.skip):
            skip = mSkip[d]

        for row in cutlass.range(b0, end, unroll=1):
            x = cute.make_rmem_tensor((2, POINTS), F32)
            u = sU[None, (row - b0) & 1]
            # On their way, oldest first: u and pre_gate of this row, its post_gate.
            cute.arch.cp_async_wait_group(1 if self.staged_post else 0)
            for j in cutlass.range_constexpr(POINTS):
                x[0, j] = u[j]
            if cutlass.const_expr(c.pre_gate):
                self.multiply(mPre, sPre, row, d, start, left, x)
                if cutlass.const_expr(c.skip):
                    for j in cutlass.range_constexpr(POINTS):
                        u[j] = x[0, j]
            if row + 1 < end:
                self.fetch_input(mU, mPre, sU[None, (row + 1 - b0) & 1], sPre, row + 1, d, start, left)
            else:
                cute.arch.cp_async_commit_group()

            self.forward(x, twiddles, points, t, rank)
            fft.product(x, k)
            self.inverse(x, twiddles, points, back, t, rank)
            if cutlass.const_expr(c.skip):
                for j in cutlass.range_constexpr(POINTS):
                    x[0, j] = cute.math.fma(skip, u[j], x[0, j])
            if cutlass.const_expr(c.post_gate):
                # On their way: post_gate of this row, u of the next.
                cute.arch.cp_async_wait_group(1)
                self.multiply(mPost, sPost, row, d, start, left, x)
                if row + 1 < end:
                    self.fetch_gate(mPost, sPost, row + 1, d, start, left)
            if mine:
                gY = mY[I64(row), d, None]
                for j in cutlass.range_constexpr(self.certain):
                    gY[start + self.offsets[j]] = x[0, j]
                for j in cutlass.range_constexpr(self.certain, POINTS):
                    if left > self.offsets[j]:
                        gY[start + self.offsets[j]] = x[0, j]

    def levels(self, n: int) -> range:
        """Of pass n."""
        return range(fft.LEVELS - min(self.sizes[n], POINTS).bit_length() + 1, fft.LEVELS)

    def in_shared(self, n: int) -> bool:
        """Whether the twiddles of pass n, shared by many threads, stay in shared memory to save registers."""
        return self.config.parts > 1 and n < 2

    @cute.jit
    def load(self, g, start, left, x, certain: cutlass.Constexpr):
        """This thread's values of a row (n,) into the real parts of x, zero from `left` on."""
        for j in cutlass.range_constexpr(POINTS):
            if cutlass.const_expr(j < certain):
                x[0, j] = g[start + self.offsets[j]]
            else:
                x[0, j] = F32(0.0)
                if left > self.offsets[j]:
                    x[0, j] = g[start + self.offsets[j]]

    @cute.jit
    def fetch(self, g, staged, start, left):
        """Starts to copy this thread's values of a row (n,) to its places in shared memory (POINTS,)."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=32)
        one = cute.make_layout(1)
        for j in cutlass.range_constexpr(POINTS):
            if j < self.certain or left > self.offsets[j]:
                source = cute.domain_offset((start + self.offsets[j],), g).iterator
                target = cute.domain_offset((j,), staged).iterator
                cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))

    @cute.jit
    def fetch_input(self, mU, mPre, sU, sPre, row, d, start, left):
        self.fetch(mU[I64(row), d, None], sU, start, left)
        if cutlass.const_expr(self.staged_pre):
            self.fetch(mPre[I64(row), d, None], sPre, start, left)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch_gate(self, mPost, sPost, row, d, start, left):
        if cutlass.const_expr(self.staged_post):
            self.fetch(mPost[I64(row), d, None], sPost, start, left)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def multiply(self, mGate, sGate, row, d, start, left, x):
        """x times the gate: from shared memory where it is staged."""
        gate = cute.make_rmem_tensor((1, POINTS), F32)
        if cutlass.const_expr(sGate is None):
            self.load(mGate[I64(row), d, None], start, left, gate, self.certain)
        else:
            for j in cutlass.range_constexpr(POINTS):
                gate[0, j] = sGate[j]
        for j in cutlass.range_constexpr(POINTS):
            x[0, j] *= gate[0, j]

    @cute.jit
    def forward(self, x, twiddles, points, t, rank):
        if cutlass.const_expr(self.config.parts > 1):
            fft.forward(x, None, self.cluster_levels)
            self.exchange(x, points, t, rank, False)
        for n in cutlass.range_constexpr(len(self.sizes)):
            if cutlass.const_expr(n > 0):
                self.move(x, points, t, n - 1, True)
                self.sync(n - 1)
                self.move(x, points, t, n, False)
            fft.forward(x, self.in_registers(twiddles[n], n), self.levels(n))

    @cute.jit
    def inverse(self, x, twiddles, points, back, t, rank):
        for m in cutlass.range_constexpr(len(self.sizes)):
            n = len(self.sizes) - 1 - m
            if cutlass.const_expr(m > 0):
                self.move(x, points, t, n + 1, True)
                self.sync(n)
                self.move(x, points, t, n, False)
            fft.inverse(x, self.in_registers(twiddles[n], n), self.levels(n))
        if cutlass.const_expr(self.config.parts > 1):
            self.exchange(x, back, t, rank, True)
            fft.inverse(x, None, self.cluster_levels)

    @cute.jit
    def in_registers(self, w, n: cutlass.Constexpr):
        """The twiddles of pass n."""
        if cutlass.const_expr(not self.in_shared(n)):
            return w
        loaded = cute.make_rmem_tensor_like(w)
        cute.autovec_copy(w, loaded)
        return loaded

    @cute.jit
    def sync(self, exchange: cutlass.Constexpr):
        """Between the writes and reads of an exchange: only the first one leaves the warp."""
        if cutlass.const_expr(exchange == 0 and self.config.team > 32):
            cute.arch.sync_threads()
        else:
            cute.arch.sync_warp()

    @cute.jit
    def cluster_arrive(self):
        if cutlass.const_expr(self.config.parts > 1):
            cute.arch.cluster_arrive()

    @cute.jit
    def cluster_wait(self):
        if cutlass.const_expr(self.config.parts > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def exchange(self, x, points, t, rank, back: cutlass.Constexpr):
        """From `own` points of every block's node to 16 points of the own node, or back: over the cluster."""
        for peer in cutlass.range_constexpr(self.config.parts):
            remote = cute.make_tensor(cute.arch.map_dsmem_ptr(points.iterator, peer), points.layout)
            theirs = cute.domain_offset((0, rank * self.slot(0, self.own)), self.first_slot(remote, t, 0))
            for i in cutlass.range_constexpr(self.own):
                cute.autovec_copy(x[None, peer * self.own + i], theirs[None, self.slot(0, i)])
        self.cluster_arrive()
        self.cluster_wait()
        self.move(x, points, t, 0, False)

    def slot(self, n: int, j: int) -> int:
        """Where point j of a thread's 16 in pass n is in shared memory, counted from the first."""
        distance = j * max(self.sizes[n] // POINTS, 1)
        return distance + distance // POINTS

    @cute.jit
    def first_slot(self, points, t, n: cutlass.Constexpr):
        """Shared memory from this thread's first point of pass n on."""
        stride = max(self.sizes[n] // POINTS, 1)
        at = (t // stride) * (stride * POINTS) + t % stride
        return cute.domain_offset((0, at + at // POINTS), points)

    @cute.jit
    def move(self, x, points, t, n: cutlass.Constexpr, to_shared: cutlass.Constexpr):
        """This thread's points of pass n, to or from shared memory."""
        mine = self.first_slot(points, t, n)
        for j in cutlass.range_constexpr(POINTS):
            if cutlass.const_expr(to_shared):
                cute.autovec_copy(x[None, j], mine[None, self.slot(n, j)])
            else:
                cute.autovec_copy(mine[None, self.slot(n, j)], x[None, j])


def compile_long_conv(config: LongConv, arch: str):
    def tensor(*shape):
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        return make_fake_tensor(F32, shape, stride=strides, assumed_align=4)

    b, d, length = cute.sym_int(), cute.sym_int(), cute.sym_int()
    # An absent option is u again, in whatever shape the argument has.
    skip = tensor(d) if config.skip else tensor(b, d, length)
    tensors = [tensor(b, d, length), tensor(d, cute.sym_int()), skip, *(tensor(b, d, length) for _ in range(3))]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(LongConvKernel(config), *tensors, I32(1), stream, options=compile_options(arch))
