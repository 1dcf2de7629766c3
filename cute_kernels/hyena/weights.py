"""Weights for the tensor cores: every row scaled by a power of two, then rounded once or split in two."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.hyena import numerics
from cute_kernels.hyena.arguments import compact, operand_type
from cute_kernels.hyena.config import ConvertWeights
from cute_kernels.hyena.in_proj import InProjKernel, in_proj_arguments
from cute_kernels.runtime.kernel import compile_options

F32, I32 = cutlass.Float32, cutlass.Int32
WARPS = 4  # warps of a block
LANES = 8  # threads of a row of D elements: a warp has four such rows at a time, or one of d_inner


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


class WeightsRole:
    """The work of one warp, in a kernel of its own or beside another role of one: out_proj, fc1 and fc2."""

    def __init__(self, config: ConvertWeights):
        self.config = c = config
        self.rows = 32 // LANES  # of D elements, at a time
        self.units = c.width + (c.width + c.inner) // self.rows

    @cute.jit
    def work(
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
        unit: I32,
        lane: I32,
    ):
        d = self.config.width
        if unit < d:
            convert_row(mW2, mW2T, mS2, unit, lane, 32)
        else:
            row = (unit - d) * self.rows + lane // LANES
            if row < d:
                convert_row(mWo, mWoT, mSo, row, lane, LANES)
            else:
                norm = convert_row(mW1, mW1T, mS1, row - d, lane, LANES)
                if lane % LANES == 0:
                    mNorm1[row - d] = norm


class ConvertWeightsKernel:
    """The conversion alone, with in_proj's."""

    def __init__(self, config: ConvertWeights):
        self.role, self.in_proj = WeightsRole(config), InProjKernel(config)

    @cute.jit
    def __call__(
        self,
        mNw: cute.Tensor,  # as InProjKernel takes them
        mNb: cute.Tensor,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mWo: cute.Tensor,  # as in WeightsRole.work
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        mWT: cute.Tensor,  # as InProjKernel takes them
        mRecords: cute.Tensor,
        mWoT: cute.Tensor,  # as in WeightsRole.work
        mW1T: cute.Tensor,
        mW2T: cute.Tensor,
        mSo: cute.Tensor,
        mS1: cute.Tensor,
        mS2: cute.Tensor,
        mNorm1: cute.Tensor,
        stream: cuda.CUstream,
    ):
        self.in_proj(mNw, mNb, mW, mB, mTaps, mTb, mWT, mRecords, stream)
        self.kernel.set_name_prefix("hyena_weights", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1).launch(
            grid=(self.role.units // WARPS, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
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
        unit = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.role.work(mWo, mW1, mW2, mWoT, mW1T, mW2T, mSo, mS1, mS2, mNorm1, unit, cute.arch.lane_idx())


def weights_arguments(config: ConvertWeights):
    """The tensors of ConvertWeightsKernel, as compile time sees them: what it reads, and what it writes."""
    d, m, p, operand = config.width, config.inner, config.parts, operand_type(config.dtype)
    read_first, made_first = in_proj_arguments(config)
    read = [compact(F32, d, d), compact(F32, m, d), compact(F32, d, m)]
    made = [compact(operand, p, d, d), compact(operand, p, m, d), compact(operand, p, d, m)]
    made += [compact(F32, d), compact(F32, m), compact(F32, d), compact(F32, m)]
    return read_first + read, made_first + made


def compile_convert(config: ConvertWeights, arch: str):
    read, made = weights_arguments(config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ConvertWeightsKernel(config), *read, *made, stream, options=compile_options(arch))
