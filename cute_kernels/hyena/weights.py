"""Weights for the tensor cores: every row scaled by a power of two, then rounded once or split in two.

The rows of in_proj take norm1's weight with them, and lie as `project` wants them in shared memory: granules of 32
channels, of each x0, x1 and v, piece after piece of 64 elements of K, in rows of 128 bytes that are swizzled already. A
piece's rows are x0's first, with two parts in turns of eight high and eight low ones, then the high ones of x1 and v in
turns of eight channels, then their low ones.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import ConvertWeights
from cute_kernels.runtime.kernel import compile_options

F32, I32 = cutlass.Float32, cutlass.Int32
WARPS = 4  # warps of a block
LANES = 8  # threads of a row of D elements: a warp has four such rows at a time, or one of d_inner
GRANULE = 32  # channels
K_TILE = 64  # elements of K of a piece: one 128-byte swizzle row
TAPS = 3
RECORD = 8  # floats that belong to a row of in_proj, see `convert_in_proj`


@cute.jit
def convert_row(
    mW: cute.Tensor,  # (N, K) fp32
    mOut: cute.Tensor,  # (parts, N, K)
    mScale: cute.Tensor,  # (N,) fp32: multiply a product with the converted row by this
    row: I32,
    lane: I32,
    lanes: cutlass.Constexpr,
):
    """`lanes` neighbouring threads convert one row. Returns the row's L2 norm."""
    k = mW.shape[1]
    vec = 4 if cutlass.const_expr(k % (4 * lanes) == 0) else 2
    steps = k // (lanes * vec)
    gW = cute.zipped_divide(mW, (1, vec))  # ((1, vec), (N, K / vec))
    x = cute.make_rmem_tensor((vec, steps), F32)
    for i in cutlass.range_constexpr(steps):
        cute.autovec_copy(gW[(0, None), (row, lane % lanes + lanes * i)], x[None, i])
    amax, square = F32(0.0), F32(0.0)
    for i in cutlass.range_constexpr(vec * steps):
        amax = cute.arch.fmax(amax, cute.arch.fmax(x[i], -x[i]))
        square += x[i] * x[i]
    scale, inverse = numerics.scale_of(numerics.max_over(amax, lanes))
    x.store(x.load() * scale)
    hi, lo = cute.make_rmem_tensor_like(x, mOut.element_type), cute.make_rmem_tensor_like(x, mOut.element_type)
    numerics.split(x, hi, lo)
    for part in cutlass.range_constexpr(mOut.shape[0]):
        gOut = cute.zipped_divide(mOut[part, None, None], (1, vec))
        out = hi if cutlass.const_expr(part == 0) else lo
        for i in cutlass.range_constexpr(steps):
            cute.autovec_copy(out[None, i], gOut[(0, None), (row, lane % lanes + lanes * i)])
    if lane % lanes == 0:
        mScale[row] = inverse
    return cute.math.sqrt(numerics.sum_over(square, lanes))


class ConvertWeightsKernel:
    """One warp converts one row of fc2, or four others."""

    def __init__(self, config: ConvertWeights):
        self.config = c = config
        self.rows = 32 // LANES  # of D elements, at a time
        self.of_in_proj = 3 * c.width // self.rows  # warps; they come first, as they are needed first
        self.warps = self.of_in_proj + c.width + (c.width + c.inner) // self.rows

    @cute.jit
    def __call__(
        self,
        mNw: cute.Tensor,  # (D,) fp32: norm1
        mNb: cute.Tensor,  # (D,)
        mW: cute.Tensor,  # (3D, D) fp32: in_proj, rows of x0, x1, v
        mB: cute.Tensor,  # (3D,)
        mTaps: cute.Tensor,  # (3D, 3): the short convolution
        mTb: cute.Tensor,  # (3D,)
        mWo: cute.Tensor,  # (D, D) fp32
        mW1: cute.Tensor,  # (M, D) fp32
        mW2: cute.Tensor,  # (D, M) fp32
        mWT: cute.Tensor,  # (parts, 3D, D) in the order that the module's docstring says
        mWoT: cute.Tensor,  # (parts, D, D), and so on: the operands
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mRecords: cute.Tensor,  # (3D, 8) fp32: what else belongs to in_proj's rows, in the order of one part
        mSo: cute.Tensor,  # (D,) fp32: scales
        mS1: cute.Tensor,  # (M,)
        mS2: cute.Tensor,  # (D,)
        mNorm1: cute.Tensor,  # (M,) fp32: L2 norms of the rows of fc1
        stream: cuda.CUstream,
    ):
        self.kernel.set_name_prefix("hyena_weights", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            *(mNw, mNb, mW, mB, mTaps, mTb, mWo, mW1, mW2, mWT, mWoT, mW1T, mW2T, mRecords, mSo, mS1, mS2, mNorm1)
        ).launch(grid=(self.warps // WARPS, 1, 1), block=(32 * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mWo: cute.Tensor,
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mWT: cute.Tensor,
        mWoT: cute.Tensor,
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mRecords: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
    ):
        cute.arch.griddepcontrol_launch_dependents()
        d = self.config.width
        lane = cute.arch.lane_idx()
        warp = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        other = warp - self.of_in_proj
        if warp < self.of_in_proj:
            self.convert_in_proj(mNw, mNb, mW, mB, mTaps, mTb, mWT, mRecords, warp * self.rows + lane // LANES, lane)
        elif other < d:
            convert_row(mW2, mW2T, mS2, other, lane, 32)
        else:
            row = (other - d) * self.rows + lane // LANES
            if row < d:
                convert_row(mWo, mWoT, mSo, row, lane, LANES)
            else:
                norm = convert_row(mW1, mW1T, mS1, row - d, lane, LANES)
                if lane % LANES == 0:
                    mNorm1[row - d] = norm

    @cute.jit
    def convert_in_proj(
        self,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mWT: cute.Tensor,
        mRecords: cute.Tensor,
        record: I32,
        lane: I32,
    ):
        """One row: the operand, and a record of the factor of its product, the bias with norm1's bias in it, the taps
        of the short convolution and their bias."""
        c = self.config
        d, parts = c.width, c.parts
        granule, r = record // (3 * GRANULE), record % (3 * GRANULE)
        pair = r - GRANULE
        other = (pair >> 4) * 8 + (pair & 7) + (1 + ((pair >> 3) & 1)) * d
        row = granule * GRANULE + (r if r < GRANULE else other)
        steps = d // (4 * LANES)
        x, nw, nb = (cute.make_rmem_tensor((4, steps), F32) for _ in range(3))
        for i in cutlass.range_constexpr(steps):
            start = 4 * (lane % LANES) + 4 * LANES * i
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
            piece = granule * (d // K_TILE) + i // 2
            element = (4 * (lane % LANES) + 4 * LANES * (i % 2)) ^ ((first & 7) * 8)
            start = (piece * (3 * GRANULE * parts) + first) * K_TILE + element
            for part in cutlass.range_constexpr(parts):
                to = mWT.iterator + cute.assume(start + (low * K_TILE if part else 0), divby=4)
                cute.autovec_copy((lo if part else hi)[None, i], four(to))
        bias = numerics.sum_over(bias, LANES)
        if lane % LANES == 0:
            values = cute.make_rmem_tensor((4, RECORD // 4), F32)
            values.fill(0.0)
            values[0], values[1] = inverse * F32(1.0 / numerics.normalised_scale(d)), mB[row] + bias
            for i in cutlass.range_constexpr(TAPS):
                values[2 + i] = mTaps[row, i]
            values[2 + TAPS] = mTb[row]
            for i in cutlass.range_constexpr(RECORD // 4):
                cute.autovec_copy(values[None, i], four(mRecords.iterator + (record * RECORD + 4 * i)))


def four(start: cute.Pointer):
    return cute.make_tensor(start, cute.make_layout(4))


def operand_type(name: str) -> type[cutlass.Numeric]:
    return {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[name]


def compact(dtype, *shape):
    """A row-major tensor argument whose data are 16-byte aligned."""
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)


def weights_arguments(config: ConvertWeights):
    """The tensors of the kernel, as compile time sees them: what it reads, and what it writes."""
    d, m, p, operand = config.width, config.inner, config.parts, operand_type(config.dtype)
    read = [compact(F32, d), compact(F32, d), compact(F32, 3 * d, d), compact(F32, 3 * d), compact(F32, 3 * d, TAPS)]
    read += [compact(F32, 3 * d), compact(F32, d, d), compact(F32, m, d), compact(F32, d, m)]
    made = [compact(operand, p, *shape) for shape in ((3 * d, d), (d, d), (m, d), (d, m))]
    made += [compact(F32, 3 * d, RECORD), compact(F32, d), compact(F32, m), compact(F32, d), compact(F32, m)]
    return read, made


def compile_convert(config: ConvertWeights, arch: str):
    read, made = weights_arguments(config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ConvertWeightsKernel(config), *read, *made, stream, options=compile_options(arch))
