"""The filter's products, all that differs between the architectures: wgmma on Hopper, mma.sync on Blackwell.

A product is 64 rows of weights by a few positions, over 64 of k. A warp has 16 of the rows in registers
(`filter_weights.py`); the activations of all positions lie in shared memory in core matrices, 8 of k by 8 positions in
128 bytes, which both instructions read. The results' registers are the same, too: of every eight positions a thread
has two neighbours, in two rows.

Both operands come in two fp16 parts, so there are three products, small ones before the large one, and k is divided
among accumulators: the tensor core's sums are cut, not rounded.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu import warp as warp_ops

from cute_kernels.device.math import tree_sum
from cute_kernels.hyena.filter_weights import STEPS
from cute_kernels.hyena.workspace import ORDER

F16, F32 = cutlass.Float16, cutlass.Float32
HIGH, LOW = 0, 1  # parts
PRODUCTS = ((LOW, HIGH), (HIGH, LOW), (HIGH, HIGH))  # of weights and activations, in their order


def activations(start: cute.Pointer, positions: int):
    """Two layers' activations, in core matrices: (positions, k, part, buffer) fp16."""
    shape = ((8, positions // 8), ORDER, 2, 2)
    return cute.make_tensor(
        start, cute.make_layout(shape, stride=((1, 8 * ORDER), 8, positions * ORDER, 2 * positions * ORDER))
    )


class WgmmaProduct:
    """wgmma. While other warpgroups' wgmma are under way, every mma.sync waits for a whole one of them."""

    def __init__(self, positions: int):
        self.columns = min(positions, 16)  # of a product
        self.accumulators = 32 // self.columns  # as many as registers last for

    def publish(self):
        """For who stored activations, ahead of the barrier behind which they are multiplied."""
        cute.arch.fence_proxy("async.shared", space="cta")

    def tiled_mma(self):
        k, n, source = OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
        return sm90_utils.make_trivial_tiled_mma(F16, F16, k, n, F32, (1, 1, 1), (64, self.columns), source)

    @cute.jit
    def multiply(
        self,
        sums: cute.Tensor,  # (4, columns / 8) fp32, written: the product, not scaled back
        weights: cute.Tensor,  # (8, steps, part) fp16, of this thread
        sH: cute.Tensor,  # (positions, k, part) fp16: the activations
        first: cutlass.Int32,  # of the positions
        lane: cutlass.Int32,
    ):
        mma = self.tiled_mma()
        fA = cute.make_tensor(weights.iterator, cute.make_layout(((2, 2, 2), 1, STEPS, 2)))  # (MMA, 1, steps, part)
        fB = mma.make_fragment_B(mma.get_slice(0).partition_B(sH))  # (MMA, positions / columns, steps, part)
        shape = mma.partition_shape_C((64, self.columns))
        acc = [cute.make_rmem_tensor(shape, F32) for _ in range(self.accumulators)]
        warpgroup.fence()
        for n, (left, right) in enumerate(PRODUCTS):
            for s in cutlass.range_constexpr(STEPS):
                one, fresh = acc[s % self.accumulators], n == 0 and s < self.accumulators
                mma.set(warpgroup.Field.ACCUMULATE, not fresh)
                b = cute.append_ones(fB[None, first // self.columns, s, right])
                cute.gemm(mma, one, fA[None, None, s, left], b, one)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for i in cutlass.range_constexpr(cute.size(sums)):
            sums[i] = tree_sum([one[i] for one in acc])


class MmaSyncProduct:
    """mma.sync, eight positions at a time: every 16 of k have an accumulator of their own."""

    columns = 8

    def publish(self):
        """Nothing: what was stored ahead of a barrier is there for ldmatrix."""

    @cute.jit
    def multiply(
        self,
        sums: cute.Tensor,  # (4, 1) fp32, written: the product, not scaled back
        weights: cute.Tensor,  # (8, steps, part) fp16, of this thread
        sH: cute.Tensor,  # (positions, k, part) fp16: the activations
        first: cutlass.Int32,  # of the positions
        lane: cutlass.Int32,
    ):
        mma = cute.make_tiled_mma(warp_ops.MmaF16BF16Op(F16, F32, (16, 8, 16)))
        atom = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), F16)
        a = cute.make_tensor(weights.iterator, cute.make_layout(((2, 2, 2), 1, 1, STEPS, 2)))
        b = cute.make_rmem_tensor(((2, 2), 1, 1, 2, STEPS), F16)  # (MMA, 1, 1, part, steps)
        acc = cute.make_rmem_tensor(((2, 2), 1, 1, STEPS), F32)
        acc.fill(0.0)
        for s in cutlass.range_constexpr(STEPS):
            source = sH[(None, first // 8), 16 * s + lane % 16, lane // 16]  # a lane's row of a core matrix
            source, target = (
                cute.make_tensor(m.iterator, cute.make_layout((8, 1))) for m in (source, b[None, None, None, None, s])
            )
            cute.copy(atom, source, target)
        for left, right in PRODUCTS:
            for s in cutlass.range_constexpr(STEPS):
                one = acc[None, None, None, s]
                cute.gemm(mma, one, a[None, None, None, s, left], b[None, None, None, right, s], one)
        for i in cutlass.range_constexpr(4):
            sums[i] = tree_sum([acc[4 * s + i] for s in range(STEPS)])


def filter_product(arch: str, positions: int):
    """The product on ``arch`` ("sm_90a", "sm_100a" or "sm_103a"), for tasks of so many positions."""
    return WgmmaProduct(positions) if arch == "sm_90a" else MmaSyncProduct()
