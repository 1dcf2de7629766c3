"""Tensor memory of Blackwell: 128 lanes by 512 columns of 32 bits; a warp reaches the 32 lanes of its number modulo 4.

An accumulator of 64 rows takes half of the lanes: rows 16 w to 16 w + 15 lie in the lower or upper 16 lanes of warp w.
Read as 16x256b, its registers are those of a wgmma accumulator.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

COLUMNS = 512
UPPER_HALF = 16 << 16  # from a warp's lower lanes to its upper ones, in columns


def allocation(columns: int) -> int:
    """What holds so many columns: they come in powers of two from 32."""
    return max(32, 1 << (columns - 1).bit_length())


@cute.jit
def allocate(columns: cutlass.Constexpr, address: cute.Pointer):
    """By one warp. The address goes to shared memory, where a barrier makes it known."""
    cute.arch.alloc_tmem(columns, address)
    cute.arch.relinquish_tmem_alloc_permit()


def start(address: cute.Pointer):
    return cute.arch.retrieve_tmem_ptr(Float32, 16, address)


@cute.jit
def free(columns: cutlass.Constexpr, address: cute.Pointer):
    """By one warp, after a barrier of all that used it, each with `fence_before` in front."""
    cute.arch.dealloc_tmem(start(address), columns)


@cute.jit
def read(
    acc: cute.Tensor,  # an accumulator of 64 rows
    x: cute.Tensor,  # (columns / 2,) fp32 registers
    columns: cutlass.Constexpr,
):
    """An accumulator into a warpgroup's registers: loads take 8 columns, or a power of two times as many."""
    thread = cute.arch.thread_idx()[0] % 128
    fence_after()
    first, left = 0, columns // 8
    while cutlass.const_expr(left > 0):
        count = 1 << (left.bit_length() - 1)
        layout = cute.make_layout((acc.shape[0][0], 8 * count), stride=acc.stride[0])
        source = cute.make_tensor(acc.iterator + 8 * first, layout)
        atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(count)), Float32)
        copy = tcgen05.make_tmem_copy(atom, source)
        mine = copy.get_slice(thread)
        shape = mine.partition_D(cute.make_identity_tensor((64, 8 * count))).shape
        target = cute.make_tensor(x.iterator + 4 * first, cute.make_layout(shape))
        cute.copy(copy, mine.partition_S(source), target)
        first, left = first + count, left - count
    cute.arch.fence_view_async_tmem_load()


@dsl_user_op
def fence_before(*, loc=None, ip=None):
    """Orders this thread's work on tensor memory before what follows a barrier."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None):
    """Orders this thread's work on tensor memory after what went before a barrier."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)
