"""A product of 64 rows for each warpgroup of a block, on both tensor cores: wgmma on Hopper, tcgen05 on Blackwell.

Every warpgroup multiplies its own 64 rows of A with the ``columns`` rows of B that all share, both K-major in shared
memory, in pieces of K, one 128-byte swizzle row each. ``parts`` is 1, or 2 where operands are high and low parts:
then a sum over one piece, lo * hi + hi * lo + hi * hi, is added to fp32 registers, because the tensor core truncates.
A warpgroup's A may be ``joined`` then: 32 rows, both parts of each among its 64, and hi * (lo + hi) and lo * (lo + hi)
are rows of its result.

The result's registers are those of wgmma on both: with M = 64, tensor memory read as 16x256b has the same map.

Order of calls, by the warpgroups' threads alone: ``begin``, a barrier of them with a proxy fence before it,
``accumulators``; then for each product ``start`` for each piece of K, and ``finish``; ``end``. The n-th product counts
from 0. Between the pieces there should be other work: a warp that issues wgmma waits while the tensor core is busy.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warpgroup

from cute_kernels.device import tensor_memory
from cute_kernels.device.pin import pin

K = OperandMajorMode.K


class _Product:
    def __init__(self, columns, k_tiles, parts, dtype, warpgroups):
        self.columns, self.k_tiles, self.parts, self.dtype, self.warpgroups = columns, k_tiles, parts, dtype, warpgroups

    def group(self):
        """This thread's warpgroup."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4

    @cute.jit
    def _add_piece(self, mma, acc, fA, fB, k, buffer, joined: cutlass.Constexpr):
        """All products of the parts of piece k, of A and of the B in a buffer."""
        kt = self.k_tiles
        if cutlass.const_expr(self.parts == 1):
            self._issue(mma, acc, fA, k, fB, buffer * kt + k, k == 0)
        else:
            if cutlass.const_expr(not joined):
                self._issue(mma, acc, fA, kt + k, fB, buffer * 2 * kt + k, True)
            self._issue(mma, acc, fA, k, fB, buffer * 2 * kt + kt + k, joined)
            self._issue(mma, acc, fA, k, fB, buffer * 2 * kt + k, False)

    @cute.jit
    def _issue(self, mma, acc, fA, a, fB, b, fresh: cutlass.Constexpr):
        for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            one = mma[0] if cutlass.const_expr(fresh and kb == 0) else mma[1]
            cute.gemm(one, acc, fA[None, None, kb, a], fB[None, None, kb, b], acc)


class ProductSm90(_Product):
    """wgmma: accumulators in registers."""

    accumulate = warpgroup.Field.ACCUMULATE
    barriers = words = 0

    def tiled_mma(self):
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, K, K, Float32, (1, 1, 1), tiler_mn=(64, self.columns)
        )

    def slice(self, tiled_mma, thread):
        return tiled_mma.get_slice(thread)

    def begin(self, done, address):
        pass

    def accumulators(self, tiled_mma, address):
        """Of the tensor core, with two parts two of them in turn, and the result's."""
        make = lambda: cute.make_rmem_tensor(tiled_mma.partition_shape_C((64, self.columns)), Float32)  # noqa: E731
        acc = [make() for _ in range(self.parts)]
        return acc, acc[0] if cutlass.const_expr(self.parts == 1) else make()

    @cute.jit
    def start(
        self,
        mma,  # two tiled MMAs: the first overwrites its accumulator, the second adds to it
        acc,
        total,  # (mma, 1, 1) fp32
        fA,  # (mma, 1, k block, part and piece)
        fB,  # (mma, 1, k block, buffer, part and piece)
        buffer: Int32,
        done: cute.Pointer,
        piece: cutlass.Constexpr,
        joined: cutlass.Constexpr,
    ):
        """Starts a piece of a product. With two parts the sum of the piece before is awaited, and added."""
        if cutlass.const_expr(piece == 0 or self.parts == 2):
            warpgroup.fence()
        self._add_piece(mma, acc[piece % self.parts], fA, fB, piece, buffer, joined)
        warpgroup.commit_group()
        if cutlass.const_expr(self.parts == 2 and piece > 0):
            warpgroup.wait_group(1)
            self._add(acc, total, piece - 1)

    @cute.jit
    def finish(self, mma, acc, total, fA, fB, buffer, done, n, joined: cutlass.Constexpr):
        """Waits for the n-th product."""
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.parts == 2):
            self._add(acc, total, self.k_tiles - 1)

    @cute.jit
    def _add(self, acc, total, piece: cutlass.Constexpr):
        part = acc[piece % 2]
        for i in cutlass.range_constexpr(cute.size(total)):
            # Pinned, or the compiler would keep all sums until the last.
            value = part[i] if cutlass.const_expr(piece == 0) else total[i] + part[i]
            total[i] = pin(value.bitcast(Int32)).bitcast(Float32)

    def end(self, address):
        pass


class ProductSm100(_Product):
    """tcgen05: accumulators in tensor memory, issued by a warpgroup's first warp and read by all four.

    Sums over pieces that must stay apart have accumulators of their own, as many as fit, so that one wait serves them.
    """

    accumulate = tcgen05.Field.ACCUMULATE
    words = 1  # of shared memory, for the address of the tensor memory

    def __init__(self, columns, k_tiles, parts, dtype, warpgroups, together, alone):
        super().__init__(columns, k_tiles, parts, dtype, warpgroups)
        self.together, self.alone = together, alone
        self.barriers = warpgroups
        self.pitch = -(-columns // 16) * 16  # columns from one accumulator to the next
        sums = 1 if parts == 1 else k_tiles
        self.depth = min(sums, tensor_memory.COLUMNS // (self.pitch * warpgroups))  # accumulators of a warpgroup
        self.rounds = -(-sums // self.depth)  # of one product
        self.allocated = tensor_memory.allocation(self.pitch * self.depth * warpgroups)

    def tiled_mma(self):
        return sm100_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, K, K, Float32, tcgen05.CtaGroup.ONE, (64, self.columns)
        )

    def slice(self, tiled_mma, thread):
        return tiled_mma.get_slice(0)

    @cute.jit
    def begin(self, done, address):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            tensor_memory.allocate(self.allocated, address)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.barriers):
                    cute.arch.mbarrier_init(done + i, 1)
                cute.arch.mbarrier_init_fence()

    def accumulators(self, tiled_mma, address):
        """The first of a warpgroup, in tensor memory, and the result's registers."""
        layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C((64, self.columns))).layout
        first = cute.assume(self.group() * (self.pitch * self.depth), divby=16)
        start = tensor_memory.start(address) + first
        return cute.make_tensor(start, layout), cute.make_rmem_tensor(((2, 2, self.columns // 8), 1, 1), Float32)

    @cute.jit
    def start(
        self,
        mma,  # two tiled MMAs: the first overwrites its accumulator, the second adds to it
        acc,
        total,  # (mma, 1, 1) fp32
        fA,  # (mma, 1, k block, part and piece)
        fB,  # (mma, 1, k block, buffer, part and piece)
        buffer: Int32,
        done: cute.Pointer,
        piece: cutlass.Constexpr,
        joined: cutlass.Constexpr,
    ):
        """Starts a product, with its first piece: all of it or, with two parts, the first round."""
        if cutlass.const_expr(piece == 0):
            self._start_round(mma, acc, fA, fB, 0, buffer, done, joined)

    @cute.jit
    def finish(self, mma, acc, total, fA, fB, buffer, done, n, joined: cutlass.Constexpr):
        """Waits for the n-th product, and makes its other rounds."""
        if cutlass.const_expr(self.parts == 1):
            cute.arch.mbarrier_wait(done + self.group(), n % 2)
            tensor_memory.read(acc, total, self.columns)
        else:
            total.fill(0.0)
            part = cute.make_rmem_tensor_like(total)
            for i in cutlass.range_constexpr(self.rounds):
                if cutlass.const_expr(i > 0):
                    self._start_round(mma, acc, fA, fB, i, buffer, done, joined)
                cute.arch.mbarrier_wait(done + self.group(), (n * self.rounds + i) % 2)
                for j in cutlass.range(min(self.depth, self.k_tiles - i * self.depth), unroll=1):
                    tensor_memory.read(self._at(acc, j), part, self.columns)
                    total.store(total.load() + part.load())

    @cute.jit
    def _start_round(self, mma, acc, fA, fB, i: cutlass.Constexpr, buffer, done, joined: cutlass.Constexpr):
        group = self.group()
        # The warpgroup's warps have read what these overwrite, and have seen the operands arrive.
        tensor_memory.fence_before()
        cute.arch.barrier(barrier_id=self.alone + group, number_of_threads=128)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            tensor_memory.fence_after()
            first = 0 if cutlass.const_expr(self.parts == 1) else i * self.depth
            last = self.k_tiles if cutlass.const_expr(self.parts == 1) else min(self.k_tiles, first + self.depth)
            for k in cutlass.range_constexpr(first, last):
                self._add_piece(mma, self._at(acc, (k - first) % self.depth), fA, fB, k, buffer, joined)
            with cute.arch.elect_one():
                tcgen05.commit(done + group)

    def _at(self, acc, i):
        """The i-th accumulator after one."""
        return cute.make_tensor(acc.iterator + cute.assume(Int32(i) * self.pitch, divby=16), acc.layout)

    @cute.jit
    def end(self, address):
        tensor_memory.fence_before()
        cute.arch.barrier(barrier_id=self.together, number_of_threads=128 * self.warpgroups)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            tensor_memory.free(self.allocated, address)


def row_product(arch, columns, k_tiles, parts, dtype, warpgroups, together, alone):
    """The product on ``arch`` ("sm_90a", "sm_100a" or "sm_103a").

    It may use two kinds of named barriers: ``together`` of all warpgroups, and of each alone, the first of which is
    ``alone``.
    """
    if arch == "sm_90a":
        return ProductSm90(columns, k_tiles, parts, dtype, warpgroups)
    return ProductSm100(columns, k_tiles, parts, dtype, warpgroups, together, alone)
