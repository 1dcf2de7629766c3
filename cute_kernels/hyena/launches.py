"""The block's launches on its buffers: three host functions that find the kernels' tensors there.

A view made in Python takes a microsecond, and a call would need a dozen.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.hyena.arguments import compact, operand_type
from cute_kernels.hyena.cluster_finish import ClusterFinishKernel
from cute_kernels.hyena.config import ClusterFinishLaunch, FinishLaunch, MixLaunch, ProjectLaunch
from cute_kernels.hyena.filter import filter_arguments
from cute_kernels.hyena.finish import FinishKernel
from cute_kernels.hyena.long_conv import kernel_of
from cute_kernels.hyena.project import ProjectKernel
from cute_kernels.hyena.weights import weights_arguments
from cute_kernels.hyena.workspace import ROW_ALIGN, Constants
from cute_kernels.runtime.kernel import compile_options

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64


def aligned(pointer, dtype=F32, alignment: int = 16):
    """The same address, known to be aligned."""
    return cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=alignment)


def operand(buffer: cute.Tensor, constants: Constants, name: str):
    """A matrix of 16-bit operands (parts, N, K)."""
    shape = constants.shapes(0)[name]
    start = aligned(buffer.iterator + constants.offsets()[name], operand_type(constants.dtype))
    return cute.make_tensor(start, cute.make_ordered_layout(shape, order=(2, 1, 0)))


def vector(buffer: cute.Tensor, constants: Constants, name: str):
    start = aligned(buffer.iterator + constants.offsets()[name])
    shape = constants.shapes(0)[name]
    return cute.make_tensor(start, cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape))))))


def operands(buffer: cute.Tensor, constants: Constants):
    """out_proj, fc1, fc2, their scales, and fc1's norms."""
    matrices = [operand(buffer, constants, name) for name in ("out_proj", "fc1", "fc2")]
    vectors = [vector(buffer, constants, n) for n in ("out_proj_scale", "fc1_scale", "fc2_scale", "fc1_norm")]
    return matrices, vectors


def pitch(length: I32):
    return cute.assume((length + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN, divby=ROW_ALIGN)


def rows(buffer: cute.Tensor, offset: I64, index: int, batch: I32, width, length: I32, row: I32):
    """(B, D, length) of the scratch, whose rows are `row` apart: 0 is g, 1 is x0. It begins `offset` floats in."""
    per_batch = cute.assume(I64(row) * width, divby=ROW_ALIGN)
    start = aligned(buffer.iterator + offset + index * batch * per_batch)
    layout = cute.make_layout((batch, width, length), stride=(per_batch, cute.assume(I64(row), divby=ROW_ALIGN), 1))
    return cute.make_tensor(start, layout)


def by_token(x: cute.Tensor):  # (B, L, D) -> (B L, D)
    batch, length, width = x.shape
    return cute.make_tensor(x.iterator, cute.make_ordered_layout((batch * length, width), order=(1, 0)))


class Projecting:
    def __init__(self, config: ProjectLaunch, arch: str):
        self.config, self.kernel = config, ProjectKernel(config, arch)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (B, L, D) fp32
        mZ: cute.Tensor,  # as ProjectKernel takes them
        mF1: cute.Tensor,
        mFb1: cute.Tensor,
        mFreq: cute.Tensor,
        mF2: cute.Tensor,
        mFb2: cute.Tensor,
        mF3: cute.Tensor,
        mFb3: cute.Tensor,
        mFf: cute.Tensor,
        mFbias: cute.Tensor,
        mDeltas: cute.Tensor,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        mW: cute.Tensor,
        mB: cute.Tensor,
        mTaps: cute.Tensor,
        mTb: cute.Tensor,
        mWo: cute.Tensor,
        mW1: cute.Tensor,
        mW2: cute.Tensor,
        scratch: cute.Tensor,
        constants: cute.Tensor,
        offset: I64,  # of the scratch in its buffer, in floats
        conv_length: I32,
        run: I32,
        blocks: I32,
        beside: I32,
        eps: F32,
        norm_len: I32,
        shift: F32,
        stream: cuda.CUstream,
    ):
        c = self.config
        row = pitch(conv_length)
        g, x0 = (rows(scratch, offset, i, x.shape[0], c.width, row, row) for i in (0, 1))
        taps = cute.make_layout((c.width, row), stride=(cute.assume(I64(row), divby=ROW_ALIGN), 1))
        k = cute.make_tensor(aligned(constants.iterator + c.constants.offsets()["k"]), taps)
        matrices, vectors = operands(constants, c.constants)
        in_proj, records = operand(constants, c.constants, "in_proj"), vector(constants, c.constants, "in_proj_records")
        of_filter = vector(constants, c.constants, "filter")
        self.kernel(
            *(by_token(x), g, x0, mZ, mF1, mFb1, mFreq, mF2, mFb2, mF3, mFb3, mFf, mFbias, mDeltas, of_filter, k),
            *(mNw, mNb, mW, mB, mTaps, mTb, mWo, mW1, mW2, in_proj, records, *matrices, *vectors),
            *(x.shape[1], conv_length, run, blocks, beside, eps, norm_len, shift, stream),
        )


def compile_project(config: ProjectLaunch, arch: str):
    weights, _ = weights_arguments(config.weights)
    scalars = [I64(0), *(I32(1) for _ in range(4)), F32(1e-5), I32(1), F32(0.05)]
    return _compile(
        Projecting(config, arch),
        *(_activations(config.width), *filter_arguments(config.filter)[:-2], *weights),
        *(_buffer(), _buffer(), *scalars),
        arch=arch,
    )


class Mixing:
    def __init__(self, config: MixLaunch):
        self.kernel = kernel_of(config)

    @cute.jit
    def __call__(
        self,
        skip: cute.Tensor,  # (D,) fp32
        scratch: cute.Tensor,
        constants: cute.Tensor,
        offset: I64,  # of the scratch in its buffer, in floats
        k_offset: I64,  # of the filter
        batch: I32,
        conv_length: I32,
        rows_of_block: I32,
        stream: cuda.CUstream,
    ):
        width, row = skip.shape[0], pitch(conv_length)
        g, x0 = (rows(scratch, offset, i, batch, width, conv_length, row) for i in (0, 1))
        taps = cute.make_layout((width, conv_length), stride=(I64(row), 1))
        k = cute.make_tensor(constants.iterator + k_offset, taps)
        self.kernel(g, k, skip, g, x0, x0, rows_of_block, stream)


def compile_mix(config: MixLaunch, arch: str):
    scalars = [I64(0), I64(0), I32(1), I32(1), I32(1)]
    return _compile(Mixing(config), compact(F32, cute.sym_int()), _buffer(), _buffer(), *scalars, arch=arch)


class Finishing:
    def __init__(self, config: FinishLaunch | ClusterFinishLaunch, arch: str):
        clusters = isinstance(config, ClusterFinishLaunch)
        self.config, self.kernel = config, (ClusterFinishKernel if clusters else FinishKernel)(config, arch)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (B, L, D) fp32
        scratch: cute.Tensor,
        constants: cute.Tensor,
        mBo: cute.Tensor,  # as FinishKernel takes them
        mB1: cute.Tensor,
        mB2: cute.Tensor,
        mNw: cute.Tensor,
        mNb: cute.Tensor,
        out: cute.Tensor,  # (B, L, D) fp32
        offset: I64,  # of the scratch in its buffer, in floats
        conv_length: I32,
        eps: F32,
        stream: cuda.CUstream,
    ):
        c = self.config
        row = pitch(conv_length)
        p = rows(scratch, offset, 1, x.shape[0], c.width, row, row)
        matrices, vectors = operands(constants, c.constants)
        weights = (mBo, mB1, mB2, mNw, mNb, by_token(out))
        self.kernel(p, by_token(x), *matrices, *vectors, *weights, x.shape[1], conv_length, eps, stream)


def compile_finish(config: FinishLaunch | ClusterFinishLaunch, arch: str):
    d, m = config.width, config.inner
    weights = [compact(F32, n) for n in (d, m, d, d, d)]
    scalars = [I64(0), I32(1), F32(1e-5)]
    return _compile(
        Finishing(config, arch),
        *(_activations(d), _buffer(), _buffer(), *weights, _activations(d), *scalars),
        arch=arch,
    )


def _activations(width: int):
    return compact(F32, cute.sym_int(), cute.sym_int(), width)


def _buffer():
    return compact(F32, cute.sym_int64())


def _compile(host, *arguments, arch: str):
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(host, *arguments, stream, options=compile_options(arch))
