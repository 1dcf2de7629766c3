"""Blocks that fit on one SM at once. The limits of sm_90 and sm_100 are the same (CUDA programming guide)."""

from __future__ import annotations

REGISTERS, THREADS, BLOCKS, SHARED = 65536, 2048, 32, 228 << 10  # of an SM
RESERVED_SHARED = 1024  # bytes of every block that the system takes
REGISTER_UNIT = 256  # registers are given to a warp in steps of this
SHARED_UNIT = 128


def blocks_per_sm(registers: int, shared: int, threads: int) -> int:
    """`registers` a thread; `shared` bytes a block, static and dynamic."""
    warps = -(-threads // 32)
    of_warp = -(-32 * registers // REGISTER_UNIT) * REGISTER_UNIT
    of_block = -(-(shared + RESERVED_SHARED) // SHARED_UNIT) * SHARED_UNIT
    return min(BLOCKS, THREADS // (32 * warps), REGISTERS // (of_warp * warps), SHARED // of_block)


def occupancy(registers: int, shared: int, threads: int) -> float:
    """Share of an SM's warps that are resident."""
    return blocks_per_sm(registers, shared, threads) * -(-threads // 32) * 32 / THREADS
