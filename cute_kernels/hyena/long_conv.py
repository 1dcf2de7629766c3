"""The long convolution of one channel: FFTs in registers and shared memory, skip and gates fused.

P / 16 threads hold a transform of P points. A pass is four levels of halving in a thread's registers; between passes
points change hands through shared memory, in place: a thread writes where it read last, so one barrier an exchange is
enough. After the first pass a node of P / 16 points belongs to at most 32 neighbouring threads, and exchanges are a
warp's own matter. The filter's values stay in registers while a block walks over its batch rows.

Shared memory has a gap of one point after every 16, which makes each access free of bank conflicts.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
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
        sizes = [config.points]
        while sizes[-1] > POINTS:
            sizes.append(sizes[-1] // POINTS)
        self.sizes = sizes
        self.slots = config.points + config.points // POINTS
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
        rows: I32,  # batch rows of a block
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
        cute.arch.griddepcontrol_launch_dependents()
        tidx = cute.arch.thread_idx()[0]
        t = tidx % c.team
        of_block = tidx // c.team
        channel = cute.arch.block_idx()[0] * c.channels + of_block
        length = mU.shape[2]
        # Lanes beyond the last channel compute it once more, and store nothing.
        d = cutlass.min(channel, mU.shape[1] - 1)
        mine = channel < mU.shape[1]
        left = length - t  # of a row, counted from this thread's first value
        smem = memory.SmemAllocator().allocate_tensor(
            F32, cute.make_layout((2, self.slots, c.channels), stride=(1, 2, 2 * self.slots)), byte_alignment=16
        )
        points = smem[None, None, of_block]  # (2, slots)

        twiddles = [None]
        for n, size in enumerate(self.sizes[1:]):
            w = cute.make_rmem_tensor((2, fft.TWIDDLES), F32)
            nodes = POINTS ** (n + 1) if cutlass.const_expr(size >= POINTS) else c.team
            node = t // (size // POINTS) if cutlass.const_expr(size >= POINTS) else t
            fft.node_twiddles(w, node, nodes, self.first(size))
            twiddles.append(w)
        cute.arch.griddepcontrol_wait()

        k = cute.make_rmem_tensor((2, POINTS), F32)
        self.load(mK[d, None], t, cutlass.min(length, mK.shape[1]) - t, k, 0)
        for j in cutlass.range_constexpr(POINTS):
            k[0, j] *= F32(1.0 / c.points)
        self.forward(k, twiddles, points, t)
        self.sync(0)  # the last pass's reads before the rows' first writes
        skip = F32(0.0)
        if cutlass.const_expr(c.skip):
            skip = mSkip[d]

        b0 = cute.arch.block_idx()[1] * rows
        for row in cutlass.range(b0, cutlass.min(b0 + rows, mU.shape[0]), unroll=1):
            b = I64(row)
            x = cute.make_rmem_tensor((2, POINTS), F32)
            self.load_gated(mU, mPre, b, d, t, left, x)
            self.forward(x, twiddles, points, t)
            fft.product(x, k)
            self.inverse(x, twiddles, points, t)
            if cutlass.const_expr(c.skip):
                u = cute.make_rmem_tensor((2, POINTS), F32)
                self.load_gated(mU, mPre, b, d, t, left, u)
                for j in cutlass.range_constexpr(POINTS):
                    x[0, j] = cute.math.fma(skip, u[0, j], x[0, j])
            if cutlass.const_expr(c.post_gate):
                self.multiply(mPost[b, d, None], t, left, x)
            if mine:
                gY = mY[b, d, None]
                for j in cutlass.range_constexpr(self.certain):
                    gY[t + j * c.team] = x[0, j]
                for j in cutlass.range_constexpr(self.certain, POINTS):
                    if left > j * c.team:
                        gY[t + j * c.team] = x[0, j]

    def first(self, size: int) -> int:
        """The first level of a pass over nodes of `size` points."""
        return fft.LEVELS - min(size, POINTS).bit_length() + 1

    @cute.jit
    def load(self, g, t, left, x, certain: cutlass.Constexpr):
        """Every team-th of a row's values (n,) from t on into the real parts of x, zero where less than `left`."""
        for j in cutlass.range_constexpr(POINTS):
            if cutlass.const_expr(j < certain):
                x[0, j] = g[t + j * self.config.team]
            else:
                x[0, j] = F32(0.0)
                if left > j * self.config.team:
                    x[0, j] = g[t + j * self.config.team]

    @cute.jit
    def multiply(self, g, t, left, x):
        gate = cute.make_rmem_tensor((1, POINTS), F32)
        self.load(g, t, left, gate, self.certain)
        for j in cutlass.range_constexpr(POINTS):
            x[0, j] *= gate[0, j]

    @cute.jit
    def load_gated(self, mU, mPre, b, d, t, left, x):
        self.load(mU[b, d, None], t, left, x, self.certain)
        if cutlass.const_expr(self.config.pre_gate):
            self.multiply(mPre[b, d, None], t, left, x)

    @cute.jit
    def forward(self, x, twiddles, points, t):
        for n in cutlass.range_constexpr(len(self.sizes)):
            if cutlass.const_expr(n > 0):
                self.move(x, points, t, n - 1, to_shared=True)
                self.sync(n - 1)
                self.move(x, points, t, n, to_shared=False)
            fft.forward(x, twiddles[n], self.first(self.sizes[n]))

    @cute.jit
    def inverse(self, x, twiddles, points, t):
        for m in cutlass.range_constexpr(len(self.sizes)):
            n = len(self.sizes) - 1 - m
            if cutlass.const_expr(m > 0):
                self.move(x, points, t, n + 1, to_shared=True)
                self.sync(n)
                self.move(x, points, t, n, to_shared=False)
            fft.inverse(x, twiddles[n], self.first(self.sizes[n]))

    @cute.jit
    def sync(self, exchange: cutlass.Constexpr):
        """Between the writes and reads of an exchange: only the first one leaves the warp."""
        if cutlass.const_expr(exchange == 0 and self.config.team > 32):
            cute.arch.sync_threads()
        else:
            cute.arch.sync_warp()

    @cute.jit
    def move(self, x, points, t, n: cutlass.Constexpr, to_shared: cutlass.Constexpr):
        """This thread's points of pass n, to or from shared memory."""
        stride = max(self.sizes[n] // POINTS, 1)
        start = (t // stride) * (stride * POINTS) + t % stride
        mine = cute.domain_offset((0, start + start // POINTS), points)
        for j in cutlass.range_constexpr(POINTS):
            slot = mine[None, j * stride + j * stride // POINTS]
            if cutlass.const_expr(to_shared):
                cute.autovec_copy(x[None, j], slot)
            else:
                cute.autovec_copy(slot, x[None, j])


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
