"""Weights for the tensor cores: every row scaled by a power of two, then rounded once or split in two."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.hyena import numerics
from cute_kernels.hyena.config import ConvertWeights
from cute_kernels.runtime.kernel import compile_options

F32 = cutlass.Float32
WARPS = 4  # rows of one block


@cute.jit
def convert_row(
    mW: cute.Tensor,  # (N, K) fp32
    mOut: cute.Tensor,  # (parts, N, K)
    mScale: cute.Tensor,  # (N,) fp32: multiply a product with the converted row by this
    row: cutlass.Int32,
    lane: cutlass.Int32,
):
    """One warp converts one row. Returns the row's L2 norm."""
    k = mW.shape[1]
    vec = 4 if cutlass.const_expr(k % 128 == 0) else 2
    steps = k // (32 * vec)
    gW = cute.zipped_divide(mW, (1, vec))  # ((1, vec), (N, K / vec))
    x = cute.make_rmem_tensor((vec, steps), F32)
    for i in cutlass.range_constexpr(steps):
        cute.autovec_copy(gW[(0, None), (row, lane + 32 * i)], x[None, i])
    amax, square = F32(0.0), F32(0.0)
    for i in cutlass.range_constexpr(vec * steps):
        amax = cute.arch.fmax(amax, cute.arch.fmax(x[i], -x[i]))
        square += x[i] * x[i]
    scale, inverse = numerics.scale_of(numerics.max_over(amax, 32))
    x.store(x.load() * scale)
    hi, lo = cute.make_rmem_tensor_like(x, mOut.element_type), cute.make_rmem_tensor_like(x, mOut.element_type)
    numerics.split(x, hi, lo)
    for part in cutlass.range_constexpr(mOut.shape[0]):
        gOut = cute.zipped_divide(mOut[part, None, None], (1, vec))
        out = hi if cutlass.const_expr(part == 0) else lo
        for i in cutlass.range_constexpr(steps):
            cute.autovec_copy(out[None, i], gOut[(0, None), (row, lane + 32 * i)])
    if lane == 0:
        mScale[row] = inverse
    return cute.math.sqrt(numerics.sum_over(square, 32))


class ConvertWeightsKernel:
    def __init__(self, config: ConvertWeights):
        self.config = config

    @cute.jit
    def __call__(
        self,
        mWo: cute.Tensor,  # (D, D) fp32
        mW1: cute.Tensor,  # (M, D) fp32
        mW2: cute.Tensor,  # (D, M) fp32
        mWoT: cute.Tensor,  # (parts, D, D), and so on: the operands
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mSo: cute.Tensor,  # (D,) fp32: scales
        mS1: cute.Tensor,  # (M,)
        mS2: cute.Tensor,  # (D,)
        mNorm1: cute.Tensor,  # (M,) fp32: L2 norms of the rows of fc1
        stream: cuda.CUstream,
    ):
        d, m = self.config.width, self.config.inner
        self.kernel(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1).launch(
            grid=((2 * d + m) // WARPS, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mWo: cute.Tensor,
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mWoT: cute.Tensor,
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
    ):
        d = self.config.width
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if row < d:
            convert_row(mWo, mWoT, mSo, row, lane)
        elif row < 2 * d:
            convert_row(mW2, mW2T, mS2, row - d, lane)
        else:
            norm = convert_row(mW1, mW1T, mS1, row - 2 * d, lane)
            if lane == 0:
                mNorm1[row - 2 * d] = norm


def operand_type(name: str) -> type[cutlass.Numeric]:
    return {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[name]


def compact(dtype, *shape):
    """A row-major tensor argument whose data are 16-byte aligned."""
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)


def compile_convert(config: ConvertWeights, arch: str):
    d, m, p, operand = config.width, config.inner, config.parts, operand_type(config.dtype)
    tensors = [compact(F32, d, d), compact(F32, m, d), compact(F32, d, m)]
    tensors += [compact(operand, p, d, d), compact(operand, p, m, d), compact(operand, p, d, m)]
    tensors += [compact(F32, d), compact(F32, m), compact(F32, d), compact(F32, m)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ConvertWeightsKernel(config), *tensors, stream, options=compile_options(arch))
