"""The long convolution of few rows: a block has some rows of one channel and a team of threads for each.

One more team transforms the filter beside them, not before them; its transform goes over through shared memory. With
half of the points a thread that `long_conv` has, a channel has twice as many threads, half as many instructions each,
and half of the code, which matters where it has to come from DRAM. No loop, no copies ahead.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory

from cute_kernels.hyena import long_conv_fft as fft
from cute_kernels.hyena.config import LongConv
from cute_kernels.hyena.long_conv_passes import TeamPasses

F32, I64 = cutlass.Float32, cutlass.Int64


class FewRowsConvKernel(TeamPasses):
    def __init__(self, config: LongConv):
        few = config.few
        super().__init__(few.points, few.COUNT)
        self.config = config
        self.rows = few.rows  # of a block
        self.team, self.threads = few.team, few.threads
        # A thread's values of a row, counted from its first. A length is more than half of its points.
        self.offsets = [i * self.team for i in range(self.count)]
        self.certain = self.count // 2 if few.points == config.points else 0

    @cute.jit
    def __call__(
        self,
        mU: cute.Tensor,  # (B, D, L) fp32
        mK: cute.Tensor,  # (D, Lk) fp32
        mSkip: cute.Tensor,  # (D,) fp32, if configured
        mPre: cute.Tensor,  # (B, D, L) fp32, if configured
        mPost: cute.Tensor,  # (B, D, L) fp32, if configured
        mY: cute.Tensor,  # (B, D, L) fp32
        stream: cuda.CUstream,
    ):
        self.kernel.set_name_prefix("hyena_long_conv_few_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
        grid = (mU.shape[1], cute.ceil_div(mU.shape[0], self.rows), 1)
        self.kernel(mU, mK, mSkip, mPre, mPost, mY).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream, use_pdl=True,
            # naming the carveout keeps the compiler from asking a driver for it
            min_blocks_per_mp=self.config.few.at_once, preferred_smem_carveout=100,
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
    ):
        c = self.config
        tidx = cute.arch.thread_idx()[0]
        t = tidx % self.team
        team = tidx // self.team  # 0: the filter's
        if cutlass.const_expr(self.team >= 32):
            team = cute.arch.make_warp_uniform(team)
        d, row = cute.arch.block_idx()[0], cute.arch.block_idx()[1] * self.rows + team - 1
        b, mine = I64(row), team > 0 and row < mU.shape[0]  # a team beyond the last row has nothing to do
        left = mU.shape[2] - t  # values of a row from this thread's first on
        smem = memory.SmemAllocator()
        layout = cute.make_layout((2, self.slots, 1 + self.rows), stride=(1, 2, 2 * self.slots))
        points = smem.allocate_tensor(F32, layout, byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        # project's launch has ended: the next one, which waits for this, need not wait for what that made.
        if mU.shape[0] * mU.shape[2] <= c.EARLY_TOKENS:
            cute.arch.griddepcontrol_launch_dependents()

        x = cute.make_rmem_tensor((2, self.count), F32)
        g = cute.make_rmem_tensor((self.count,), F32)
        pre = cute.make_rmem_tensor((self.count,), F32)
        post = cute.make_rmem_tensor((self.count,), F32)
        g.fill(0.0), pre.fill(1.0), post.fill(1.0)
        skip = F32(0.0)
        if team == 0:
            self.load(mK[d, None], t, cutlass.min(mU.shape[2], mK.shape[1]) - t, g, 0)
            pre.fill(1.0 / self.sizes[0])
        elif mine:
            self.load(mU[b, d, None], t, left, g, self.certain)
            if cutlass.const_expr(c.pre_gate):
                self.load(mPre[b, d, None], t, left, pre, self.certain)
            if cutlass.const_expr(c.post_gate):
                self.load(mPost[b, d, None], t, left, post, self.certain)
            if cutlass.const_expr(c.skip):
                skip = mSkip[d]
        twiddles = self.make_twiddles(t)  # while loads are on their way
        for j in cutlass.range_constexpr(self.count):
            g[j] *= pre[j]
            x[0, j] = g[j]
        own, filter_points = points[None, None, team], points[None, None, 0]
        if cutlass.const_expr(self.team < 32):  # a warp stays together
            self.forward(x, twiddles, own, t, team == 0)
            cute.arch.sync_warp()
            self.back(x, g, skip, post, twiddles, own, filter_points, mY, b, d, t, left, mine)
        else:
            if team == 0 or mine:
                self.forward(x, twiddles, own, t, team == 0)
            cute.arch.sync_threads()
            if mine:
                self.back(x, g, skip, post, twiddles, own, filter_points, mY, b, d, t, left, True)

    @cute.jit
    def forward(self, x, twiddles, points, t, of_filter):
        """Real values to their transform; the filter's goes to shared memory."""
        self.enter(x, points, t)
        self.descend(x, twiddles, points, t)
        if of_filter:
            self.move(x, points, t, self.last, True)

    @cute.jit
    def back(self, x, g, skip, post, twiddles, points, filter_points, mY, b, d, t, left, mine):
        """A row's transform x times the filter's, back, and what follows."""
        c = self.config
        k = cute.make_rmem_tensor((2, self.count), F32)
        self.move(k, filter_points, t, self.last, False)
        if cutlass.const_expr(self.team < 32):  # before the filter's own lanes go on and write there
            cute.arch.sync_warp()
        fft.product(x, k)
        self.ascend(x, twiddles, points, t)
        self.sync(0)
        self.leave(x, points, t)
        if mine:
            gY = mY[b, d, None]
            for j in cutlass.range_constexpr(self.count):
                y = x[0, j]
                if cutlass.const_expr(c.skip):
                    y = cute.math.fma(skip, g[j], y)
                if cutlass.const_expr(c.post_gate):
                    y *= post[j]
                if j < self.certain or left > self.offsets[j]:
                    gY[t + self.offsets[j]] = y

    @cute.jit
    def load(self, g, t, left, x, certain: cutlass.Constexpr):
        """This thread's values of a row (n,), zero where `left` says that it ends."""
        for j in cutlass.range_constexpr(self.count):
            if cutlass.const_expr(j < certain):
                x[j] = g[t + self.offsets[j]]
            else:
                x[j] = F32(0.0)
                if left > self.offsets[j]:
                    x[j] = g[t + self.offsets[j]]

    @cute.jit
    def sync(self, exchange: cutlass.Constexpr):
        """Between the writes and reads of an exchange, which leaves the warp where a node is more than its points."""
        if cutlass.const_expr(self.crosses_warps(exchange)):
            # barrier 0 is the block's
            cute.arch.barrier(barrier_id=1 + cute.arch.thread_idx()[0] // self.team, number_of_threads=self.team)
        else:
            cute.arch.sync_warp()
