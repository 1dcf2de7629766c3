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
from cute_kernels.hyena.few_rows_conv import FewRowsConvKernel
from cute_kernels.hyena.large_conv import LargeConvKernel
from cute_kernels.hyena.long_conv_passes import TeamPasses
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64


class LongConvKernel(TeamPasses):
    def __init__(self, config: LongConv):
        super().__init__(config.points)
        self.config = config
        self.few_rows = None if config.few is None else FewRowsConvKernel(config)
        # A thread's values of a row, counted from its first.
        self.offsets = [i * config.team for i in range(self.counts[0])]
        self.certain = config.certain

    @cute.jit
    def __call__(
        self,
        mU: cute.Tensor,  # (B, D, L) fp32
        mK: cute.Tensor,  # (D, Lk) fp32
        mSkip: cute.Tensor,  # (D,) fp32, if configured
        mPre: cute.Tensor,  # (B, D, L) fp32, if configured
        mPost: cute.Tensor,  # (B, D, L) fp32, if configured
        mY: cute.Tensor,  # (B, D, L) fp32
        rows: I32,  # batch rows of a block; 0: few, each with a team of its own
        stream: cuda.CUstream,
    ):
        if cutlass.const_expr(self.few_rows is not None):
            if rows == 0:
                self.few_rows(mU, mK, mSkip, mPre, mPost, mY, stream)
            else:
                self.transform(mU, mK, mSkip, mPre, mPost, mY, rows, stream)
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
        all_points = smem.allocate_tensor(F32, layout, byte_alignment=16)
        points = all_points[None, None, of_block]  # (2, slots), of the first pass
        unit, inner, working = t, points, True  # of the others, which divide by three has fewer threads for
        if cutlass.const_expr(self.thirds):
            unit, working = tidx % c.units, tidx < c.units * c.channels
            inner = all_points[None, None, cutlass.min(tidx // c.units, c.channels - 1)]
        cute.arch.griddepcontrol_wait()

        values = cute.make_layout((c.threads, self.counts[0], 2))
        sU = smem.allocate_tensor(F32, values, byte_alignment=16)[tidx, None, None]  # (values, parity of the row)
        sPre, sPost = None, None
        if cutlass.const_expr(c.pre_gate):
            sPre = smem.allocate_tensor(F32, cute.select(values, mode=[0, 1]), byte_alignment=16)[tidx, None]
        if cutlass.const_expr(c.post_gate):
            sPost = smem.allocate_tensor(F32, cute.select(values, mode=[0, 1]), byte_alignment=16)[tidx, None]
        taps = cutlass.min(mU.shape[2], mK.shape[1]) - t
        for j in cutlass.range_constexpr(self.counts[0]):  # what no copy writes counts as zero
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

        twiddles = self.make_twiddles(unit)
        if cutlass.const_expr(self.in_shared(1)):
            nodes = self.sizes[0] // self.sizes[1]
            table = cute.make_layout((2, cute.size(twiddles[1], mode=[1]), nodes))
            table = smem.allocate_tensor(F32, table, byte_alignment=16)[None, None, t // (c.team // nodes)]
            if t % (c.team // nodes) == 0:
                cute.autovec_copy(twiddles[1], table)
            twiddles[1] = table
        k = cute.make_rmem_tensor((2, self.count), F32)
        k.fill(0.0)
        for row in cutlass.range(b0 - 1, end, unroll=1):
            x = cute.make_rmem_tensor((2, self.counts[0]), F32)
            u = sU[None, (row - b0) & 1]
            if row < b0:
                # On their way, oldest first: the filter, u and pre_gate of the first row, its post_gate.
                cute.arch.cp_async_wait_group(2 if c.post_gate else 1)
                for j in cutlass.range_constexpr(self.counts[0]):
                    x[0, j] = u[j]
            else:
                # The first launch has ended long ago, so the next one, which waits for this, need not wait for what
                # that made. Earlier it would only be in the way, and late it starts alone.
                cute.arch.griddepcontrol_launch_dependents()
                # On their way: u and pre_gate of this row, its post_gate.
                cute.arch.cp_async_wait_group(1 if c.post_gate else 0)
                for j in cutlass.range_constexpr(self.counts[0]):
                    x[0, j] = u[j]
                    if cutlass.const_expr(c.pre_gate):
                        x[0, j] *= sPre[j]
                        if cutlass.const_expr(c.skip):
                            u[j] = x[0, j]
                if row + 1 < end:
                    self.fetch_input(mU, mPre, sU[None, (row + 1 - b0) & 1], sPre, row + 1, d, t, left)
                else:
                    cute.arch.cp_async_commit_group()

            self.enter(x, points, t)
            z = x
            if cutlass.const_expr(self.thirds):
                z = cute.make_rmem_tensor((2, self.count), F32)
                if working:
                    self.inside(z, k, twiddles, inner, unit, row >= b0)
            else:
                self.inside(z, k, twiddles, inner, unit, row >= b0)
            # The others' points before the last pass, and the filter's reads before the next first pass's writes.
            if cutlass.const_expr(self.last > 0):
                self.sync(0)
            if row >= b0:
                self.leave(x, points, t)
                if cutlass.const_expr(c.skip):
                    for j in cutlass.range_constexpr(self.counts[0]):
                        x[0, j] = cute.math.fma(skip, u[j], x[0, j])
                if cutlass.const_expr(c.post_gate):
                    # On their way: post_gate of this row, u of the next.
                    cute.arch.cp_async_wait_group(1)
                    for j in cutlass.range_constexpr(self.counts[0]):
                        x[0, j] *= sPost[j]
                    if row + 1 < end:
                        self.fetch_gate(mPost, sPost, row + 1, d, t, left)
                if mine:
                    gY = mY[I64(row), d, None]
                    for j in cutlass.range_constexpr(self.counts[0]):
                        if j < self.certain or left > self.offsets[j]:
                            gY[t + self.offsets[j]] = x[0, j]

    @cute.jit
    def fetch(self, g, staged, t, left, certain: cutlass.Constexpr):
        """Starts to copy this thread's values of a row (n,) to its places in shared memory (values,)."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), F32, num_bits_per_copy=32)
        one = cute.make_layout(1)
        for j in cutlass.range_constexpr(self.counts[0]):
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
    def inside(self, x, k, twiddles, points, unit, of_row):
        """The passes between the first and the last: the filter's transform becomes k, a row's is multiplied by it."""
        self.descend(x, twiddles, points, unit)
        if of_row:
            fft.product(x, k)
            self.ascend(x, twiddles, points, unit)
        else:
            for j in cutlass.range_constexpr(self.count):
                k[0, j], k[1, j] = x[0, j] * (1.0 / self.config.points), x[1, j] * (1.0 / self.config.points)

    @cute.jit
    def sync(self, exchange: cutlass.Constexpr):
        """Between the writes and reads of an exchange, which leaves the warp where a node is more than its points."""
        if cutlass.const_expr(self.crosses_warps(exchange)):
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
