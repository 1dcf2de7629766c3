"""Copies with a say in what the L2 cache keeps."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

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
def prefetch_evict_last(gX: cute.Tensor, num_bytes: cutlass.Constexpr):  # contiguous, 16-byte aligned
    """Brings ``num_bytes``, a multiple of 16, to the L2 cache, which keeps them longer than what is written."""
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global.L2::cache_hint [{$r0}], {$r1}, {$r2};",
        read_only_args=[gX.iterator, Int32(num_bytes), Int64(EVICT_LAST)],
    )


@cute.jit
def prefetch(start: cute.Pointer, num_bytes: Int32):
    """Brings global memory to the L2 cache: 16 bytes or a multiple, aligned as much."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[start, Int32(num_bytes)])
