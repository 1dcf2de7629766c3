"""The rows of in_proj for the tensor cores: times norm1's weight, scaled by a power of two, rounded or split in two.

They lie as `project` wants them in shared memory: granules of 32 channels, of each x0, x1 and v, piece after piece of
64 elements of K, in rows of 128 bytes that are swizzled already. A piece's rows are x0's first, with two parts in turns
of eight high and eight low ones, then the high ones of x1 and v in turns of eight channels, then their low ones.

What else belongs to a row is its record: the factor of its product, its bias with norm1's bias in it, the taps of the
short convolution and their bias. Records are in the order of one part's rows.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from cute_kernels.hyena import numerics
from cute_kernels.hyena.arguments import compact, operand_type
from cute_kernels.hyena.config import ConvertWeights, Filter
from cute_kernels.hyena.filter_weights import FilterWeightsRole
from cute_kernels.hyena.workspace import IN_PROJ_RECORD

F32, I32 = cutlass.Float32, cutlass.Int32
WARPS = 4  # warps of a block
LANES = 16  # threads of a row
GRANULE = 32  # channels
K_TILE = 64  # elements of K of a piece: one 128-byte swizzle row
TAPS = 3
# Bytes of a block, unused: as many blocks as an SM holds would need all of its shared memory, so it is set up for that,
# and a block of the launch behind fits beside.
SHARED = 16 * 1024


class InProjKernel:
    """The launch in front of `project`, which starts under it. It converts the filter's weights too, if asked to."""

    def __init__(self, config: ConvertWeights, filter_config: Filter | None = None):
        self.config = config
        self.blocks = 3 * config.width * LANES // (32 * WARPS)
        self.filter = FilterWeightsRole(filter_config) if filter_config else None

    @cute.jit
    def __call__(
        self,
        mNw: cute.Tensor,  # (D,) fp32: norm1
        mNb: cute.Tensor,  # (D,)
        mW: cute.Tensor,  # (3D, D) fp32: in_proj, rows of x0, x1, v
        mB: cute.Tensor,  # (3D,)
        mTaps: cute.Tensor,  # (3D, 3): the short convolution
        mTb: cute.Tensor,  # (3D,)
        mWT: cute.Tensor,  # (parts, 3D, D): the rows in the order above
        mRecords: cute.Tensor,  # (3D, 8) fp32
        stream: cuda.CUstream,
    ):
        self.launch((mNw, mNb, mW, mB, mTaps, mTb, mWT, mRecords), None, stream)

    @cute.jit
    def launch(self, tensors: tuple, of_filter: tuple | None, stream: cuda.CUstream):
        """`tensors` are those of __call__, `of_filter` those that FilterWeightsRole.work takes."""
        blocks = self.blocks + (self.filter.units // WARPS if self.filter else 0)
        self.kernel.set_name_prefix("hyena_in_proj", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(tensors, of_filter).launch(
            grid=(blocks, 1, 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            smem=SHARED,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, of_filter: tuple | None):
        cute.arch.griddepcontrol_launch_dependents()
        block, lane = cute.arch.block_idx()[0], cute.arch.lane_idx()
        if block < self.blocks:
            thread = block * (32 * WARPS) + cute.arch.thread_idx()[0]
            self.convert_row(*tensors, thread // LANES, lane)
        elif cutlass.const_expr(self.filter is not None):
            unit = (block - self.blocks) * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
            self.filter.work(*of_filter, unit, lane)

    @cute.jit
    def convert_row(self, mNw, mNb, mW, mB, mTaps, mTb, mWT, mRecords, record, lane):
        """One row, by 16 neighbouring threads."""
        c = self.config
        d, parts = c.width, c.parts
        granule, r = record // (3 * GRANULE), record % (3 * GRANULE)
        pair = r - GRANULE
        other = (pair >> 4) * 8 + (pair & 7) + (1 + ((pair >> 3) & 1)) * d
        row = granule * GRANULE + (r if r < GRANULE else other)
        steps = d // K_TILE  # of 4 elements
        x, nw, nb = (cute.make_rmem_tensor((4, steps), F32) for _ in range(3))
        for i in cutlass.range_constexpr(steps):
            start = 4 * (lane % LANES) + K_TILE * i
            for pointer, values in ((mW.iterator + row * d, x), (mNw.iterator, nw), (mNb.iterator, nb)):
                cute.autovec_copy(four(pointer + cute.assume(start, divby=4)), values[None, i])
        bias = F32(0.0)
        for i in cutlass.range_constexpr(4 * steps):
            bias = cute.math.fma(x[i], nb[i], bias)
            x[i] = x[i] * nw[i]
        scale, inverse = numerics.scale_of(numerics.max_over(numerics.largest(x), LANES))
        x.store(x.load() * scale)
        hi, lo = cute.make_rmem_tensor_like(x, mWT.element_type), cute.make_rmem_tensor_like(x, mWT.element_type)
        numerics.split(x, hi, lo)
        first, low = r, I32(0)  # the row of its piece, and the rows from there to its low part
        if cutlass.const_expr(parts == 2):
            first, low = r + GRANULE, I32(2 * GRANULE)
            if r < GRANULE:
                first, low = 2 * r - (r & 7), I32(8)
        for i in cutlass.range_constexpr(steps):
            piece = granule * steps + i
            element = (4 * (lane % LANES)) ^ ((first & 7) * 8)
            start = (piece * (3 * GRANULE * parts) + first) * K_TILE + element
            for part in cutlass.range_constexpr(parts):
                to = mWT.iterator + cute.assume(start + (low * K_TILE if part else 0), divby=4)
                cute.autovec_copy((lo if part else hi)[None, i], four(to))
        bias = numerics.sum_over(bias, LANES)
        if lane % LANES == 0:
            values = cute.make_rmem_tensor((4, IN_PROJ_RECORD // 4), F32)
            values.fill(0.0)
            values[0], values[1] = inverse * F32(1.0 / numerics.normalised_scale(d)), mB[row] + bias
            for i in cutlass.range_constexpr(TAPS):
                values[2 + i] = mTaps[row, i]
            values[2 + TAPS] = mTb[row]
            for i in cutlass.range_constexpr(IN_PROJ_RECORD // 4):
                cute.autovec_copy(values[None, i], four(mRecords.iterator + (record * IN_PROJ_RECORD + 4 * i)))


def four(start: cute.Pointer):
    return cute.make_tensor(start, cute.make_layout(4))


def in_proj_arguments(config: ConvertWeights):
    """The tensors of InProjKernel, as compile time sees them: what it reads, and what it writes."""
    d, p = config.width, config.parts
    read = [compact(F32, d), compact(F32, d), compact(F32, 3 * d, d), compact(F32, 3 * d)]
    read += [compact(F32, 3 * d, TAPS), compact(F32, 3 * d)]
    return read, [compact(operand_type(config.dtype), p, 3 * d, d), compact(F32, 3 * d, IN_PROJ_RECORD)]
