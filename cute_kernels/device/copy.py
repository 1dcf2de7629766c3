"""Bulk copies and their mbarriers, stores by predicate, and copies with a say in what the L2 cache keeps."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.typing import Pointer
from cutlass.cutlass_dsl import dsl_user_op

# the policies that createpolicy.fractional.L2::evict_first.b64 and evict_last make for every access
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000


@cute.jit
def store_evict_first(words: cute.Tensor, gOut: cute.Tensor):  # (4,) 32-bit words in registers, 16 bytes
    """Stores a vector that this kernel won't read: the L2 cache gives its lines up before those of inputs."""
    cute.arch.inline_ptx(
        "st.global.L2::cache_hint.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, {$r5};",
        read_only_args=[gOut.iterator, words[0], words[1], words[2], words[3], Int64(EVICT_FIRST)],
    )


@cute.jit
def store_if(condition: Boolean, x: cute.Tensor, start: cute.Pointer):  # (4,) fp32 in registers; 16-byte aligned
    """Stores a vector where the condition holds, without a branch: what makes it can move across other stores."""
    cute.arch.inline_ptx(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[start, x[0], x[1], x[2], x[3]],
        predicate=condition,
    )


@cute.jit
def store_one_if(condition: Boolean, x: cutlass.Float32, start: cute.Pointer):
    """The same of one number."""
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[start, x], predicate=condition)


@cute.jit
def store_bulk_evict_first(sX: cute.Tensor, gOut: cute.Tensor, num_bytes: cutlass.Constexpr):  # 16-byte aligned
    """Starts a copy of shared to global memory, of a multiple of 16 bytes; commit and wait for its bulk group."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [{$r0}], [{$r1}], {$r2}, {$r3};",
        read_only_args=[gOut.iterator, Int32(sX.iterator.toint()), Int32(num_bytes), Int64(EVICT_FIRST)],
    )


@cute.jit
def prefetch_evict_last(gX: cute.Tensor, num_bytes: cutlass.Constexpr):  # contiguous, 16-byte aligned
    """Brings ``num_bytes``, a multiple of 16, to the L2 cache, which keeps them longer than what is written."""
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global.L2::cache_hint [{$r0}], {$r1}, {$r2};",
        read_only_args=[gX.iterator, Int32(num_bytes), Int64(EVICT_LAST)],
    )


@dsl_user_op
def load(target: Pointer, source: Pointer, num_bytes: Int32, mbar: Pointer, *, loc=None, ip=None) -> None:
    """Starts a copy of global memory to shared memory, which completes ``num_bytes`` on ``mbar``: 16 bytes or a
    multiple, aligned as much."""
    target, source, mbar = (p.to_llvm_ptr(loc=loc, ip=ip) for p in (target, source, mbar))
    nvvm.cp_async_bulk_shared_cluster_global(
        target, source, mbar, Int32(num_bytes).ir_value(loc=loc, ip=ip), loc=loc, ip=ip
    )


@dsl_user_op
def invalidate(mbar: Pointer, *, loc=None, ip=None) -> None:
    """Ends an mbarrier, so that its memory may get another one."""
    nvvm.mbarrier_inval(mbar.to_llvm_ptr(loc=loc, ip=ip), loc=loc, ip=ip)
