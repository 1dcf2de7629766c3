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
from cute_kernels.hyena.direct_conv import DirectConvKernel
from cute_kernels.hyena.large_conv import LargeConvKernel
from cute_kernels.hyena.long_conv_fft import POINTS
from cute_kernels.hyena.long_conv_passes import Passes
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64


class LongConvKernel(Passes):
    def __init__(self, config: LongConv):
        super().__init__(config.points)
        self.config = config
        self.direct = DirectConvKernel(config) if config.points <= config.DIRECT_POINTS else None
        # A thread's values of a row, counted from its first.
        self.offsets = [i * config.team for i in range(POINTS)]
        # A length is more than half of its transform's points, but for the smallest: half of the loads are certain.
        self.certain = POINTS // 2 if config.points > config.MIN_POINTS else 0

    @cute.jit
    def __call__(
        self,
        mU: cute.Tensor,  # (B, D, L) fp32
        mK: cute.Tensor,  # (D, Lk) fp32
        mSkip: cute.Tensor,  # (D,) fp32, if configured
        mPre: cute.Tensor,  # (B, D, L) fp32, if configured
        mPost: cute.Tensor,  # (B, D, L) fp32, if configured
        mY: cute.Tensor,  # (B, D, L) fp32
        rows: I32,  # batch rows of a block; 0: sums in place of transforms
        stream: cuda.CUstream,
    ):
        if cutlass.const_expr(self.direct is None):
            self.transform(mU, mK, mSkip, mPre, mPost, mY, rows, stream)
        else:
            if rows == 0:
                self.direct(mU, mK, mSkip, mPre, mPost, mY, stream)
            else:
                self.transform(mU, mK, mSkip, mPre, mPost, mY, rows, stream)

    @cute.jit
    def transform(
        self,
        mU: cute.Tensor,
        mK: cute.Tensor,
        mSkip: cute.Tensor,
        mPre: cute.Tensor,
        mPost: cute.Tensor,
        mY: cute.Tensor,
        rows: I32,
        stream: cuda.CUstream,
    ):
        c = self.config
        grid = (cute.ceil_div(mU.shape[1], c.channels), cute.ceil_div(mU.shape[0], rows), 1)
        self.kernel.set_name_prefix("hyena_long_conv", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mU, mK, mSkip, mPre, mPost, mY, rows).launch(
            grid=grid, block=(c.threads, 1, 1), stream=stream, use_pdl=True,
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
        tidx = cute.arch.thread_idx()[0]
        t = tidx % c.team
        of_block = tidx // c.team
        channel = cute.arch.block_idx()[0] * c.channels + of_block
        # Lanes beyond the last channel compute it once more, and store nothing.
        d = cutlass.min(channel, mU.shape[1] - 1)
        mine = channel < mU.shape[1]
        left = mU.shape[2] - t  # values of a row from this thread's first on
        b0 = cute.arch.block_idx()[1] * rows
        end = cutlass.min(b0 + rows, mU.shape[0])
        smem = memory.SmemAllocator()
        layout = cute.make_layout((2, self.slots, c.channels), stride=(1, 2, 2 * self.slots))
        points = smem.allocate_tensor(F32, layout, byte_alignment=16)[None, None, of_block]  # (2, slots)

        twiddles = []
        for n, size in enumerate(self.sizes):
            nodes, per_node = max(self.sizes[0] // max(size, POINTS), 1), max(size // POINTS, 1)
            w = None
            if cutlass.const_expr(nodes > 1):
                w = cute.make_rmem_tensor((2, fft.TWIDDLES), F32)
                fft.node_twiddles(w, t // per_node, nodes, self.levels(n).start)
                if cutlass.const_expr(self.in_shared(n)):
                    table = cute.make_layout((2, fft.TWIDDLES, nodes))
                    table = smem.allocate_tensor(F32, table, byte_alignment=16)[None, None, t // per_node]
                    if t % per_node == 0:
                        cute.autovec_copy(w, table)
                    w = table
            twiddles.append(w)
        cute.arch.griddepcontrol_wait()
        # The first launch has ended: the next one, which waits for this, need not wait for what that made.
        if mU.shape[0] * mU.shape[2] <= c.EARLY_TOKENS:
            cute.arch.griddepcontrol_launch_dependents()

        values = cute.make_layout((c.threads, POINTS, 2))
        sU = smem.allocate_tensor(F32, values, byte_alignment=16)[tidx, None, None]  # (POINTS, parity of the row)
        sPre, sPost = None, None
        if cutlass.const_expr(c.pre_gate):
            sPre = smem.allocate_tensor(F32, cute.select(values, mode=[0, 1]), byte_alignment=16)[tidx, None]
        if cutlass.const_expr(c.post_gate):
            sPost = smem.allocate_tensor(F32, cute.select(values, mode=[0, 1]), byte_alignment=16)[tidx, None]
        taps = cutlass.min(mU.shape[2], mK.shape[1]) - t
        for j in cutlass.range_constexpr(POINTS):  # what no copy writes counts as zero
            if taps <= self.offsets[j]:
                sU[j, 1] = F32(0.0)
            if j >= self.certain and left <= self.offsets[j]:
                sU[j, 0] = F32(0.0)
                for gate in (sPre, sPost):
                    if cutlass.const_expr(gate is not None):
                        gate[j] = F32(0.0)
        # The filter counts as the row before the first.
        self.fetch(mK[d, None], sU[None, 1], t, taps, 0)
        cute.arch.cp_async_commit_group()
        self.fetch_input(mU, mPre, sU[None, 0], sPre, b0, d, t, left)
        self.fetch_gate(mPost, sPost, b0, d, t, left)
        skip = F32(0.0)
        if cutlass.const_expr(c.skip):
            skip = mSkip[d]

        k = cute.make_rmem_tensor((2, POINTS), F32)
        k.fill(0.0)
        for row in cutlass.range(b0 - 1, end, unroll=1):
            x = cute.make_rmem_tensor((2, POINTS), F32)
            u = sU[None, (row - b0) & 1]
            if row < b0:
                # On their way, oldest first: the filter, u and pre_gate of the first row, its post_gate.
                cute.arch.cp_async_wait_group(2 if c.post_gate else 1)
                for j in cutlass.range_constexpr(POINTS):
                    x[0, j] = F32(1.0 / c.points) * u[j]
            else:
                # On their way: u and pre_gate of this row, its post_gate.
                cute.arch.cp_async_wait_group(1 if c.post_gate else 0)
                for j in cutlass.range_constexpr(POINTS):
                    x[0, j] = u[j]
                    if cutlass.const_expr(c.pre_gate):
                        x[0, j] *= sPre[j]
                        if cutlass.const_expr(c.skip):
                            u[j] = x[0, j]
                if row + 1 < end:
                    self.fetch_input(mU, mPre, sU[None, (row + 1 - b0) & 1], sPre, row + 1, d, t, left)
                else:
                    cute.arch.cp_async_commit_group()

            self.forward(x, twiddles, points, t)
            if row < b0:
                for j in cutlass.range_constexpr(POINTS):
                    k[0, j], k[1, j] = x[0, j], x[1, j]
                self.sync(0)  # the last pass's reads before the next first pass's writes
            else:
                fft.product(x, k)
                self.inverse(x, twiddles, points, t)
                if cutlass.const_expr(c.skip):
                    for j in cutlass.range_constexpr(POINTS):
                        x[0, j] = cute.math.fma(skip, u[j], x[0, j])
                if cutlass.const_expr(c.post_gate):
                    # On their way: post_gate of this row, u of the next.
                    cute.arch.cp_async_wait_group(1)
                    for j in cutlass.range_constexpr(POINTS):
                        x[0, j] *= sPost[j]
                    if row + 1 < end:
                        self.fetch_gate(mPost, sPost, row + 1, d, t, left)
                if mine:
                    gY = mY[I64(row), d, None]
                    for j in cutlass.range_constexpr(POINTS):
                        if j < self.certain or left > self.offsets[j]:
                            gY[t + self.offsets[j]] = x[0, j]

    @cute.jit
    def fetch(self, g, staged, t, left, certain: cutlass.Constexpr):
        """Starts to copy this thread's values of a row (n,) to its places in shared memory (POINTS,)."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=32)
        one = cute.make_layout(1)
        for j in cutlass.range_constexpr(POINTS):
            if j < certain or left > self.offsets[j]:
                source = cute.domain_offset((t + self.offsets[j],), g).iterator
                target = cute.domain_offset((j,), staged).iterator
                cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))

    @cute.jit
    def fetch_input(self, mU, mPre, sU, sPre, row, d, t, left):
        self.fetch(mU[I64(row), d, None], sU, t, left, self.certain)
        if cutlass.const_expr(self.config.pre_gate):
            self.fetch(mPre[I64(row), d, None], sPre, t, left, self.certain)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch_gate(self, mPost, sPost, row, d, t, left):
        if cutlass.const_expr(self.config.post_gate):
            self.fetch(mPost[I64(row), d, None], sPost, t, left, self.certain)
            cute.arch.cp_async_commit_group()

    def in_shared(self, n: int) -> bool:
        """Whether the twiddles of pass n, the same for a warp, stay in shared memory to save registers."""
        return self.config.points == 8192 and self.config.pre_gate and n == 1

    @cute.jit
    def in_registers(self, w, n: cutlass.Constexpr):
        """The twiddles of pass n."""
        if cutlass.const_expr(not self.in_shared(n)):
            return w
        loaded = cute.make_rmem_tensor_like(w)
        cute.autovec_copy(w, loaded)
        return loaded

    @cute.jit
    def forward(self, x, twiddles, points, t):
        for n in cutlass.range_constexpr(len(self.sizes)):
            if cutlass.const_expr(n > 0):
                self.move(x, points, t, n - 1, True)
                self.sync(n - 1)
                self.move(x, points, t, n, False)
            fft.forward(x, self.in_registers(twiddles[n], n), self.levels(n))

    @cute.jit
    def inverse(self, x, twiddles, points, t):
        for m in cutlass.range_constexpr(len(self.sizes)):
            n = len(self.sizes) - 1 - m
            if cutlass.const_expr(m > 0):
                self.move(x, points, t, n + 1, True)
                self.sync(n)
                self.move(x, points, t, n, False)
            fft.inverse(x, self.in_registers(twiddles[n], n), self.levels(n))

    @cute.jit
    def sync(self, exchange: cutlass.Constexpr):
        """Between the writes and reads of an exchange: only the first one leaves the warp."""
        if cutlass.const_expr(exchange == 0 and self.config.team > 32):
            cute.arch.sync_threads()
        else:
            cute.arch.sync_warp()


def compile_long_conv(config: LongConv, arch: str):
    def tensor(*shape):
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        return make_fake_tensor(F32, shape, stride=strides, assumed_align=4)

    b, d, length = cute.sym_int(), cute.sym_int(), cute.sym_int()
    # An absent option is u again, in whatever shape the argument has.
    skip = tensor(d) if config.skip else tensor(b, d, length)
    tensors = [tensor(b, d, length), tensor(d, cute.sym_int()), skip, *(tensor(b, d, length) for _ in range(3))]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel_of(config), *tensors, I32(1), stream, options=compile_options(arch))


def kernel_of(config: LongConv):
    """The kernel's host function: (u, k, skip, pre_gate, post_gate, y, rows of a block, stream)."""
    return LargeConvKernel(config) if config.large else LongConvKernel(config)
