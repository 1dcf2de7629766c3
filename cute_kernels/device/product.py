"""A product of 64 rows for each warpgroup of a block, on both tensor cores: wgmma on Hopper, tcgen05 on Blackwell.

Every warpgroup multiplies its own 64 rows of A with the ``columns`` rows of B that all share, both K-major in shared
memory, in pieces of K, one 128-byte swizzle row each. ``parts`` is 1, or 2 where operands are high and low parts:
then a sum over one piece, lo * hi + hi * lo + hi * hi, is added to fp32 registers, because the tensor core truncates.
A warpgroup's A may be ``joined`` then: 32 rows, both parts of each among its 64, and hi * (lo + hi) and lo * (lo + hi)
are rows of its result.

A's pieces come through a ring of ``depth`` products. Each has its box for each warpgroup, and two mbarriers: ``full``
says that all of it is there, and on ``empty`` arrive the ``releases`` of the warpgroup when it has done with it. In
memory and among the mbarriers boxes lie product by product; `box` counts the mbarriers.

The result's registers are those of wgmma on both: with M = 64, tensor memory read as 16x256b has the same map.

Order of calls, by the warpgroups' threads alone: ``begin``, a barrier of them with a proxy fence before it,
``accumulators``; ``multiply`` for each product, which count from 0; ``end``.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05, warpgroup

from cute_kernels.device import tensor_memory
from cute_kernels.device.pin import pin

K = OperandMajorMode.K


class _Product:
    def __init__(self, columns, k_tiles, parts, dtype, warpgroups, depth, together, alone):
        self.columns, self.k_tiles, self.parts, self.dtype, self.warpgroups = columns, k_tiles, parts, dtype, warpgroups
        self.depth, self.together, self.alone = depth, together, alone

    def group(self):
        """This thread's warpgroup."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4

    def box(self, n, group):
        """The mbarrier of the n-th product's first box for a warpgroup, and its phase."""
        return (n % self.depth * self.warpgroups + group) * self.k_tiles, n // self.depth % 2

    @cute.jit
    def _add_piece(self, mma, acc, fA, fB, k, n, joined: cutlass.Constexpr):
        """All products of the parts of piece k, of the n-th A and of B."""
        kt, high = self.k_tiles, k if cutlass.const_expr(self.depth == 1) else n % self.depth * self.k_tiles + k
        if cutlass.const_expr(self.parts == 1):
            self._issue(mma, acc, fA, high, fB, k, k == 0)
        else:
            if cutlass.const_expr(not joined):
                self._issue(mma, acc, fA, high + kt * self.depth, fB, k, True)
            self._issue(mma, acc, fA, high, fB, kt + k, joined)
            self._issue(mma, acc, fA, high, fB, k, False)

    @cute.jit
    def _issue(self, mma, acc, fA, a, fB, b, fresh: cutlass.Constexpr):
        for kb in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            one = mma[0] if cutlass.const_expr(fresh and kb == 0) else mma[1]
            cute.gemm(one, acc, fA[None, None, kb, a], fB[None, None, kb, b], acc)


class ProductSm90(_Product):
    """wgmma: accumulators in registers."""

    accumulate = warpgroup.Field.ACCUMULATE
    barriers = words = 0
    releases = 4

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
    def multiply(
        self,
        mma,  # two tiled MMAs: the first overwrites its accumulator, the second adds to it
        acc,
        total,  # (mma, 1, 1) fp32: the result
        fA,  # (mma, 1, k block, part and stage)
        fB,  # (mma, 1, k block, part and piece)
        full: cute.Pointer,
        empty: cute.Pointer,
        done: cute.Pointer,
        n: Int32,
        last: Boolean,
        joined: cutlass.Constexpr,
    ):
        """The n-th product. A piece is issued before the one in front is waited for, and its sum added.

        The warpgroups take turns, so that what one does with its result is under the products of the others.
        """
        group = self.group()
        if n > 0 or group > 0:
            cute.arch.barrier(barrier_id=self.alone + group, number_of_threads=256)
        box, phase = self.box(n, group)
        for k in cutlass.range_constexpr(self.k_tiles):
            cute.arch.mbarrier_wait(full + (box + k), phase)
            if cutlass.const_expr(k == 0 or self.parts == 2):
                warpgroup.fence()
            self._add_piece(mma, acc[k % self.parts], fA, fB, k, n, joined)
            warpgroup.commit_group()
            if cutlass.const_expr(k > 0):
                warpgroup.wait_group(1)
                self._leave(empty + (box + (k - 1)), acc, total, k - 1)
            if cutlass.const_expr(k == self.k_tiles - 1):
                following = group + 1 if group < self.warpgroups - 1 else 0
                if following > 0 or not last:
                    cute.arch.barrier_arrive(barrier_id=self.alone + following, number_of_threads=256)
        warpgroup.wait_group(0)
        self._leave(empty + (box + (self.k_tiles - 1)), acc, total, self.k_tiles - 1)

    @cute.jit
    def _leave(self, empty, acc, total, k: cutlass.Constexpr):
        """Behind a piece."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty)
        if cutlass.const_expr(self.parts == 2):
            self._add(acc, total, k)

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
    releases = 1

    def __init__(self, columns, k_tiles, parts, dtype, warpgroups, depth, together, alone):
        super().__init__(columns, k_tiles, parts, dtype, warpgroups, depth, together, alone)
        self.barriers = warpgroups
        self.pitch = -(-columns // 16) * 16  # columns from one accumulator to the next
        sums = 1 if parts == 1 else k_tiles
        self.at_once = min(sums, tensor_memory.COLUMNS // (self.pitch * warpgroups))  # accumulators of a warpgroup
        self.rounds = -(-sums // self.at_once)  # of one product
        self.allocated = tensor_memory.allocation(self.pitch * self.at_once * warpgroups)

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
        first = cute.assume(self.group() * (self.pitch * self.at_once), divby=16)
        start = tensor_memory.start(address) + first
        return cute.make_tensor(start, layout), cute.make_rmem_tensor(((2, 2, self.columns // 8), 1, 1), Float32)

    @cute.jit
    def multiply(
        self,
        mma,  # two tiled MMAs: the first overwrites its accumulator, the second adds to it
        acc,
        total,  # (mma, 1, 1) fp32: the result
        fA,  # (mma, 1, k block, part and stage)
        fB,  # (mma, 1, k block, part and piece)
        full: cute.Pointer,
        empty: cute.Pointer,
        done: cute.Pointer,
        n: Int32,
        last: Boolean,
        joined: cutlass.Constexpr,
    ):
        """The n-th product, in rounds where its sums are more than the accumulators."""
        if cutlass.const_expr(self.parts == 2):
            total.fill(0.0)
        for i in cutlass.range_constexpr(self.rounds):
            end = min(self.k_tiles, (i + 1) * self.at_once) if self.parts == 2 else self.k_tiles
            self._start(mma, acc, fA, fB, full, empty, done, n, i * self.at_once, end, joined)
            cute.arch.mbarrier_wait(done + self.group(), (n * self.rounds + i) % 2)
            if cutlass.const_expr(self.parts == 1):
                tensor_memory.read(acc, total, self.columns)
            else:
                part = cute.make_rmem_tensor_like(total)
                for j in cutlass.range(end - i * self.at_once, unroll=1):
                    tensor_memory.read(self._at(acc, j), part, self.columns)
                    total.store(total.load() + part.load())

    @cute.jit
    def _start(
        self,
        mma,
        acc,
        fA,
        fB,
        full,
        empty,
        done,
        n,
        start: cutlass.Constexpr,
        end: cutlass.Constexpr,
        joined: cutlass.Constexpr,
    ):
        """Starts the products of some pieces."""
        group = self.group()
        # The warpgroup's warps have read what these overwrite, and have seen the operands arrive.
        tensor_memory.fence_before()
        cute.arch.barrier(barrier_id=self.alone + group, number_of_threads=128)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            tensor_memory.fence_after()
            box, phase = self.box(n, group)
            for k in cutlass.range_constexpr(start, end):
                cute.arch.mbarrier_wait(full + (box + k), phase)
                at = self._at(acc, k - start) if cutlass.const_expr(self.parts == 2) else acc
                self._add_piece(mma, at, fA, fB, k, n, joined)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + (box + k))
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


def row_product(arch, columns, k_tiles, parts, dtype, warpgroups, depth, together, alone):
    """The product on ``arch`` ("sm_90a", "sm_100a" or "sm_103a").

    It may use two kinds of named barriers: ``together`` of all warpgroups, and one for each warpgroup, the first of
    which is ``alone``: on Hopper for its turn, of the two that hand it on, on Blackwell of its own threads.
    """
    product = ProductSm90 if arch == "sm_90a" else ProductSm100
    return product(columns, k_tiles, parts, dtype, warpgroups, depth, together, alone)
