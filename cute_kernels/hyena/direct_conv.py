"""The long convolution of a short channel: its sums as they are written, skip and gates fused.

A thread has `OUTPUTS` neighbouring outputs and a slice of the taps. Outputs come in tiles, the last of which meets all
taps, the first one only its own: half of the square that causality leaves empty is skipped. The slices' sums meet in
shared memory. Little code, which matters where it has to come from DRAM, and one short chain from the loads to the
stores: for few and short rows that is faster than a transform.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as memory

from cute_kernels.hyena.config import LongConv

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
OUTPUTS = 8


def pairwise(values: list):
    """The sum of 2^n values."""
    n = len(values) // 2
    return values[0] if n == 0 else pairwise(values[:n]) + pairwise(values[n:])


class DirectConvKernel:
    def __init__(self, config: LongConv):
        self.config = config
        self.points = max(config.points, 64)
        self.tile = min(self.points, 128)
        self.groups = self.tile // OUTPUTS  # threads of a tile and slice
        self.slices = min(self.groups, self.points // self.groups)
        self.threads = self.groups * self.slices
        self.own = self.points // self.threads  # values of a row that one thread loads and stores

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
        self.kernel.set_name_prefix("hyena_long_conv_direct", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mU, mK, mSkip, mPre, mPost, mY).launch(
            grid=(mU.shape[1], mU.shape[0], 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

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
        tid = cute.arch.thread_idx()[0]
        d, b = cute.arch.block_idx()[0], cute.arch.block_idx()[1]
        length = mU.shape[2]
        smem = memory.SmemAllocator()
        # A tile of zeros before the row. A gap of one value after every 8 keeps accesses free of bank conflicts.
        sG = smem.allocate_tensor(F32, cute.make_layout(self.place(self.points + self.tile)), byte_alignment=16)
        sK = smem.allocate_tensor(F32, cute.make_layout(self.points), byte_alignment=16)
        sums = cute.make_layout((self.points, self.slices))
        sums = smem.allocate_tensor(F32, sums, byte_alignment=16)
        if tid < self.tile:
            sG[self.place(tid)] = F32(0.0)
        cute.arch.griddepcontrol_wait()
        # The first launch has ended: the next one, which waits for this, need not wait for what that made.
        if mU.shape[0] * mU.shape[2] <= c.EARLY_TOKENS:
            cute.arch.griddepcontrol_launch_dependents()

        row = I64(b)
        taps = cutlass.min(length, mK.shape[1])
        g = cute.make_rmem_tensor((self.own,), F32)
        post = cute.make_rmem_tensor((self.own,), F32)
        k = cute.make_rmem_tensor((self.own,), F32)
        g.fill(0.0), k.fill(0.0), post.fill(1.0)
        for i in cutlass.range_constexpr(self.own):
            t = tid + i * self.threads
            if t < taps:
                k[i] = mK[d, t]
            if t < length:
                g[i] = mU[row, d, t]
                if cutlass.const_expr(c.pre_gate):
                    g[i] *= mPre[row, d, t]
                if cutlass.const_expr(c.post_gate):
                    post[i] = mPost[row, d, t]
        skip = F32(0.0)
        if cutlass.const_expr(c.skip):
            skip = mSkip[d]
        for i in cutlass.range_constexpr(self.own):
            t = tid + i * self.threads
            sK[t] = k[i]
            sG[self.place(t + self.tile)] = g[i]
        cute.arch.sync_threads()

        group, part = tid % self.groups, tid // self.groups
        for tile in cutlass.range(self.points // self.tile, unroll=1):
            # of 8 taps: this slice's share of what a tile meets
            steps = (tile + 1) * (self.groups // self.slices)
            self.sum(sG, sK, sums[None, part], tile * self.tile + group * OUTPUTS, part * steps * OUTPUTS, steps)
        cute.arch.sync_threads()

        for i in cutlass.range_constexpr(self.own):
            t = tid + i * self.threads
            y = pairwise([sums[t, s] for s in range(self.slices)])
            if cutlass.const_expr(c.skip):
                y = cute.math.fma(skip, g[i], y)
            if t < length:
                mY[row, d, t] = y * post[i] if cutlass.const_expr(c.post_gate) else y

    def place(self, t):
        return t + t // OUTPUTS

    @cute.jit
    def sum(self, sG, sK, sums, first, tap, steps):
        """sums[first + r] = sum over 8 `steps` taps s from `tap` on of k[s] g[first + r - s], for r < 8."""
        y = cute.make_rmem_tensor((OUTPUTS,), F32)
        y.fill(0.0)
        near = cute.make_rmem_tensor((OUTPUTS,), F32)
        far = cute.make_rmem_tensor((OUTPUTS,), F32)
        k = cute.make_rmem_tensor((OUTPUTS,), F32)
        at = (first - tap + self.tile) // OUTPUTS * (OUTPUTS + 1)
        for j in cutlass.range_constexpr(OUTPUTS):
            near[j] = sG[at + j]
        for step in cutlass.range(steps, unroll=1):
            here = cute.domain_offset(at - (step + 1) * (OUTPUTS + 1), sG)
            cute.autovec_copy(cute.local_tile(sK, (OUTPUTS,), (tap // OUTPUTS + step,)), k)
            for j in cutlass.range_constexpr(OUTPUTS):
                far[j] = here[j]
            for q in cutlass.range_constexpr(OUTPUTS):
                for r in cutlass.range_constexpr(OUTPUTS):
                    value = near[r - q] if r >= q else far[OUTPUTS + r - q]
                    y[r] = cute.math.fma(k[q], value, y[r])
            for j in cutlass.range_constexpr(OUTPUTS):
                near[j] = far[j]
        cute.autovec_copy(y, cute.local_tile(sums, (OUTPUTS,), (first // OUTPUTS,)))
