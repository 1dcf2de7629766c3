"""Every kernel of the Hyena block as a frozen dataclass: what changes its machine code, and how to compile it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

from cute_kernels.hyena.workspace import FILTER_RECORD, ORDER, Constants, filter_operand_shape
from cute_kernels.runtime.kernel import Kernel

SHARED_BYTES = 227 * 1024  # of a block, the most that the architectures allow


@dataclasses.dataclass(frozen=True)
class Precision:
    """How the operands of the tensor cores are made from fp32."""

    dtype: str  # "float16" or "bfloat16"
    parts: int  # 1: rounded once; 2: high and low parts, three products

    NAMES: ClassVar[dict[str, tuple[str, int]]] = {
        "highest": ("float16", 2),
        "high": ("float16", 1),
        "medium": ("bfloat16", 1),
    }

    @classmethod
    def named(cls, name: str) -> Precision:
        return cls(*cls.NAMES[name])


class HyenaKernel(Kernel):
    operator: ClassVar[str] = "hyena_block"


@dataclasses.dataclass(frozen=True)
class ConvertWeights(HyenaKernel):
    """fp32 matrices to tensor-core operands: one scale for each row, `parts` matrices of `dtype`."""

    dtype: str
    parts: int
    width: int
    inner: int

    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import weights

        return weights.compile_convert(self, arch)


@dataclasses.dataclass(frozen=True)
class Finish(HyenaKernel):
    """out_proj, residual, LayerNorm, fc1, GELU, fc2, residual for tiles of 64 tokens."""

    dtype: str
    parts: int
    width: int
    inner: int

    operands_older: ClassVar[bool] = False  # than the launch in front, and read before the wait for it
    tile: ClassVar[int] = 64  # tokens
    box: ClassVar[int] = 64  # rows of weights, and elements of K, of one load
    consumers: ClassVar[int] = 256  # threads of the two warpgroups that compute
    stage_bytes: ClassVar[int] = 2 * 64 * 64 * 2

    def __post_init__(self) -> None:
        if self.width not in (128, 256):
            raise NotImplementedError(f"d_model must be 128 or 256, got {self.width}")
        if self.inner % (2 * self.box):
            raise NotImplementedError(f"d_inner must be a multiple of {2 * self.box}, got {self.inner}")

    @classmethod
    def for_precision(cls, precision: str, width: int, inner: int) -> Finish:
        chosen = Precision.named(precision)
        return cls(chosen.dtype, chosen.parts, width, inner)

    @property
    def half(self) -> int:
        """Output columns of one warpgroup."""
        return self.width // 2

    @property
    def chunk(self) -> int:
        """Hidden columns that a warpgroup takes at once: as many as its registers hold."""
        return 128 if self.parts == 1 and self.inner % 256 == 0 else 64

    @property
    def chunks(self) -> int:
        """Chunks of one warpgroup."""
        return self.inner // (2 * self.chunk)

    @property
    def rows_in_shared(self) -> bool:
        """x, then the residual, then the output are rows in shared memory. Where there is no room for them x is in
        registers, and the residual waits in the output."""
        return self.parts == 1 and self.inner <= 4096

    @property
    def row_elements(self) -> int:
        return self.tile * self.width if self.rows_in_shared else 0

    @property
    def rings(self) -> int:
        """Of weights: with one part the warpgroups take turns, so the order in which they use stages is known."""
        return self.parts

    @property
    def stages(self) -> int:
        """Stages of a ring: what is left of shared memory."""
        tokens = self.parts * self.tile * self.width * 2
        vectors = 4 * (6 * self.width + 2 * self.inner + 5 * self.tile + 32 + self.row_elements)
        return min(12 // self.rings, (SHARED_BYTES - 2048 - tokens - vectors) // (self.rings * self.stage_bytes))

    @property
    def sums_apart(self) -> int:
        """Elements from one warpgroup's sums to the other's, in the place of the weights."""
        return self.rings * self.stages * self.stage_bytes // 8

    @property
    def fits(self) -> bool:
        return self.rings * self.stages >= 4 and self.sums_apart >= self.tile * self.half

    def launch(self) -> FinishLaunch:
        return FinishLaunch(**vars(self))

    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import finish

        return finish.compile_finish(self, arch)


@dataclasses.dataclass(frozen=True)
class ClusterFinish(HyenaKernel):
    """out_proj, residual, LayerNorm, fc1, GELU, fc2, residual, with tokens as the columns of every product.

    `split` blocks, a cluster, share a tile of tokens. Each has `tokens` of them, for everything but the MLP, and a part
    of the hidden width for all of them. With `copies`, so many blocks have the same tokens: they repeat out_proj and
    LayerNorm, because that costs less than a larger tile's exchanges, and divide the output.
    """

    dtype: str
    parts: int
    width: int
    inner: int
    split: int  # blocks of a cluster
    tokens: int  # of a block
    copies: int = 1  # blocks with the same tokens

    operands_older: ClassVar[bool] = False  # than the launch in front, and read before the wait for it
    box: ClassVar[tuple[int, int]] = (128, 64)  # rows of weights, and elements of K, of one load
    consumers: ClassVar[int] = 256  # threads of the two warpgroups that compute, each with half of a box's rows

    def __post_init__(self) -> None:
        if self.width not in (128, 256):
            raise NotImplementedError(f"d_model must be 128 or 256, got {self.width}")
        if self.split not in (2, 4, 8):
            raise ValueError(f"split must be 2, 4 or 8, got {self.split}")
        if self.copies not in (1, 2, 4) or self.copies >= self.split:
            raise ValueError(f"copies must be 1, 2 or 4, and less than the split, {self.split}, got {self.copies}")
        if self.copies > 1 and self.tokens != 8:
            raise ValueError(f"tokens must be 8 with {self.copies} copies, got {self.tokens}")
        if self.tokens % 8 or not 8 <= self.tokens <= 32 or self.tile > 64:
            raise ValueError(
                "tokens must be a multiple of 8 up to 32, and a tile at most 64, "
                f"got {self.tokens} and {self.tile} with split {self.split}"
            )
        if self.inner % (self.box[0] * self.split):
            raise NotImplementedError(f"d_inner must be a multiple of {self.box[0] * self.split}, got {self.inner}")

    @classmethod
    def for_shape(cls, precision: str, width: int, inner: int, tokens: int, sm_count: int) -> ClusterFinish | None:
        """The first choice whose clusters all run at once. None where `Finish` is faster: for many tokens."""
        chosen = Precision.named(precision)
        few = ((8, 8, 4), (8, 8, 2), (4, 8, 1))
        for split, own, copies in (*few, *((2, own, 1) for own in range(8, 33, 8))):
            # Clusters of 4 and 8 don't fill a GPU: its SMs come in groups of up to 18, some with fewer.
            room = sm_count if split == 2 else sm_count * 10 // 11
            if inner % (cls.box[0] * split) == 0 and -(-tokens // (split // copies * own)) <= room // split:
                return cls(chosen.dtype, chosen.parts, width, inner, split, own, copies)
        return None

    @property
    def groups(self) -> int:
        """Of blocks with the same tokens."""
        return self.split // self.copies

    @property
    def tile(self) -> int:
        """Tokens of a cluster."""
        return self.groups * self.tokens

    @property
    def k_tiles(self) -> int:
        """Boxes along the width."""
        return self.width // self.box[1]

    @property
    def row_boxes(self) -> int:
        """Boxes along a product whose rows are the width."""
        return self.width // self.box[0]

    @property
    def chunks(self) -> int:
        """Parts of a block's hidden width that it takes at once, as wide as a box is high."""
        return self.inner // self.split // self.box[0]

    @property
    def buffers(self) -> int:
        """Of a chunk's activations."""
        return min(2, self.chunks)

    @property
    def moves_registers(self) -> bool:
        """The warps that compute take registers from others. Small blocks instead leave room for the launch before."""
        return self.tokens > 16

    @property
    def threads(self) -> int:
        return self.consumers + (128 if self.moves_registers else 32)

    @property
    def stage_bytes(self) -> int:
        return 2 * self.parts * self.box[0] * self.box[1]

    @property
    def fits(self) -> bool:
        """Two products are in flight with one part, and their stages with them."""
        return self.stages >= (5 if self.parts == 1 else 2)

    @property
    def exchange_bytes(self) -> int:
        """The tile's normalised rows; in their place later `sums_bytes`."""
        return max(2 * self.parts * self.tile * self.width, self.sums_bytes)

    @property
    def sums_bytes(self) -> int:
        """What the other blocks send: their sums of those tokens whose output a block makes."""
        return 4 * (self.split - 1) * self.tokens // self.copies * self.width

    @property
    def operand_bytes(self) -> int:
        """The operand of out_proj."""
        return 2 * self.parts * self.tokens * self.width

    @property
    def hidden_bytes(self) -> int:
        """Activations; before them the operand of out_proj and, behind it, 16 floats a token for reductions."""
        return max(2 * self.parts * self.buffers * self.box[0] * self.tile, self.operand_bytes + 64 * self.tokens)

    @property
    def stages(self) -> int:
        """Stages of the ring of weights. More than out_proj has would leave no room for the launch before."""
        rest = 2048 + self.exchange_bytes + self.hidden_bytes
        return min(8 // self.parts, (SHARED_BYTES - rest) // self.stage_bytes)

    def launch(self) -> ClusterFinishLaunch:
        return ClusterFinishLaunch(**vars(self))

    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import cluster_finish

        return cluster_finish.compile_finish(self, arch)


@dataclasses.dataclass(frozen=True)
class Filter(HyenaKernel):
    """The implicit filter k [D, L], to fp32's accuracy: a task is `tile` positions, and 1/split of the channels."""

    width: int
    emb_dim: int
    layout: str  # "reshape": k[d, t] = h.flat[d L + t]; "transpose": k[d, t] = h[t, d]
    bias: bool  # filter_bias is added to h
    stored_z: bool  # positions come from a tensor
    tile: int = 16
    split: int = 1
    groups: int = 2  # warpgroups of a task: the second and third layers have one each, or both share one

    GROUP: ClassVar[int] = 128  # threads of a warpgroup

    def __post_init__(self) -> None:
        if self.tile not in (8, 16, 32):
            raise ValueError(f"tile must be 8, 16 or 32, got {self.tile}")
        if self.width % (64 * self.split) or self.channels > 256:
            raise ValueError(f"split must divide {self.width} into multiples of 64 up to 256, got {self.split}")
        if self.groups not in (1, 2):
            raise ValueError(f"groups must be 1 or 2, got {self.groups}")

    @classmethod
    def for_shape(
        cls, width: int, emb_dim: int, layout: str, bias: bool, stored_z: bool, length: int, sm_count: int
    ) -> Filter:
        """As many tasks as blocks that run at once, and no more: their length is what counts."""
        tile = next(p for p in (8, 16, 32) if length <= p * sm_count or p == 32)
        pieces = width // 64
        splits = [n for n in range(1, pieces + 1) if pieces % n == 0 and pieces // n <= 4]
        split = max([n for n in splits if n * length <= sm_count * tile], default=splits[0])
        if tile == 8 and 2 * split in splits:  # as many tasks, with half of the last layer's turns
            tile, split = 16, 2 * split
        return cls(width, emb_dim, layout, bias, stored_z, tile, split)

    @property
    def channels(self) -> int:
        """Of a task."""
        return self.width // self.split

    @property
    def threads(self) -> int:
        return self.groups * self.GROUP

    @property
    def slots(self) -> int:
        """Units of weights that a warp has on their way: more where turns are short."""
        return 1 if self.groups == 2 else 3 if self.tile == 8 else 2

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def operand_shape(self) -> tuple[int, int]:
        """Of the weights as operands, see filter_weights.py."""
        return filter_operand_shape(self.width)

    @property
    def shared_floats(self) -> int:
        """Two layers' activations in two parts of 16 bits, times, positions, the first layer's weight, and copies."""
        kept = 2 * ORDER * self.tile + self.tile * (1 + self.emb_dim) + ORDER * self.emb_dim
        return kept + self.slots * self.warps * (16 * (ORDER + FILTER_RECORD) + 2)

    @property
    def fits(self) -> bool:
        """A wide emb_dim does not."""
        return 4 * self.shared_floats <= SHARED_BYTES

    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import filter as filter_

        return filter_.compile_filter(self, arch)


@dataclasses.dataclass(frozen=True)
class FewRows:
    """A long convolution of few rows: a block has a team of threads for each row and for the filter."""

    points: int  # of a transform
    rows: int  # of a block

    COUNT: ClassVar[int] = 8  # points of a thread

    @property
    def team(self) -> int:
        return self.points // self.COUNT

    @property
    def threads(self) -> int:
        """Of a block."""
        return (1 + self.rows) * self.team

    @property
    def at_once(self) -> int:
        """Blocks of an SM, for which the registers of a thread are made to last."""
        return min(8, 768 // self.threads)


@dataclasses.dataclass(frozen=True)
class LongConv(HyenaKernel):
    """The causal convolution of [B, D, L] with [D, Lk] for L <= points, by an FFT of `points` complex points.

    They are 2^n or, from 768 to 6144, 3 * 2^n.
    """

    points: int
    skip: bool
    pre_gate: bool
    post_gate: bool

    MIN_POINTS: ClassVar[int] = 16
    MAX_POINTS: ClassVar[int] = 32768
    THIRDS: ClassVar[range] = range(768, 6144 + 1)  # where 3 * 2^n points are a transform, too
    LARGE_POINTS: ClassVar[int] = 16384  # from here on they stay in shared memory, below in registers
    NODE_POINTS: ClassVar[int] = 16384  # the most that shared memory holds
    FEW_POINTS: ClassVar[int] = 1024  # the most for which few rows have a kernel of their own
    EARLY_TOKENS: ClassVar[int] = 1024  # of all few rows: up to here the launch behind starts while this one runs

    @classmethod
    def of_length(cls, length: int, skip: bool, pre_gate: bool, post_gate: bool) -> LongConv:
        """NotImplementedError for lengths beyond MAX_POINTS."""
        if length > cls.MAX_POINTS:
            raise NotImplementedError(f"length must be at most {cls.MAX_POINTS}, got {length}")
        points = max(cls.MIN_POINTS, 1 << max(0, length - 1).bit_length())
        thirds = points // 4 * 3
        return cls(thirds if length <= thirds and thirds in cls.THIRDS else points, skip, pre_gate, post_gate)

    @property
    def large(self) -> bool:
        return self.points >= self.LARGE_POINTS

    @property
    def thirds(self) -> bool:
        return self.points % 3 == 0

    @property
    def node_points(self) -> int:
        return min(self.points, self.NODE_POINTS)

    @property
    def nodes(self) -> int:
        """Blocks of one transform, a cluster."""
        return self.points // self.node_points

    @property
    def team(self) -> int:
        """Threads of one transform: 16 points each, large ones 32, 12 in a first pass that divides by three."""
        return self.node_points // (32 if self.large else 12 if self.thirds else 16)

    @property
    def units(self) -> int:
        """Threads of one transform behind its first pass."""
        return self.points // 16

    @property
    def threads(self) -> int:
        """Of a block: whole warps of `units`, too."""
        return max(128 if self.thirds else 32, self.team)

    @property
    def channels(self) -> int:
        """Channels of one block."""
        return self.threads // self.team

    @property
    def certain(self) -> int:
        """Values of a thread that every row has: 8 of 16, or of 12, but for the smallest."""
        return 0 if self.points == self.MIN_POINTS else 8

    @property
    def few(self) -> FewRows | None:
        """How few rows are convolved, where they have a kernel of their own."""
        if self.thirds or self.points > self.FEW_POINTS:
            return None
        points = max(self.points, 128)
        return FewRows(points, 2 if points in (256, 512) else 1)

    def rows(self, batch: int, width: int, sm_count: int) -> int:
        """Batch rows of one block: few blocks transform the filter seldom, many fill the device. 0: as `few` says."""
        few = self.few
        if few is not None and width * -(-batch // few.rows) <= sm_count * few.at_once:  # all of its blocks at once
            return 0
        return _rows(batch, -(-width // self.channels) * self.nodes, self.threads, sm_count)

    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import long_conv

        return long_conv.compile_long_conv(self, arch)


@functools.lru_cache
def _rows(batch: int, blocks: int, threads: int, sm_count: int) -> int:
    slots = sm_count * (512 // threads)  # blocks that run at once

    def cost(rows: int) -> float:
        # The filter, and all else that a block does once, counts as a row, whose time grows with the warps of a
        # scheduler, four of a full device. Within 3% of the best of 1, 2, 4, 8, ... rows for 1 to 32 x 128 to 8192.
        n = blocks * -(-batch // rows)
        return -(-n // slots) * (rows + 1) * (0.8 + 4 * min(1.0, n / slots))

    groups = range(1, min(batch, 4 * slots // blocks + 1) + 1)
    return min((-(-batch // n) for n in groups), key=cost)


@dataclasses.dataclass(frozen=True)
class Project(HyenaKernel):
    """LayerNorm, in_proj, short convolution and gate; in_proj's conversion in front, filter and other weights beside.

    A block has a tile of `tile` tokens and a run of slabs of `channels` channels of each of x0, x1 and v. A warpgroup
    beside computes the filter, for `positions` positions and 1/filter_split of the channels at a time.
    """

    dtype: str
    parts: int
    width: int
    inner: int
    channels: int  # 32 or 64
    tile: int  # a multiple of 16
    emb_dim: int
    layout: str
    bias: bool
    stored_z: bool
    positions: int = 16
    filter_split: int = 1

    TILES: ClassVar[tuple[int, ...]] = (16, 32, 48, 64)

    def __post_init__(self) -> None:
        if self.width % 64 or not 64 <= self.width <= 256:
            raise NotImplementedError(f"d_model must be 64, 128, 192 or 256, got {self.width}")
        if self.inner % 64 or not 64 <= self.inner <= 2048:
            raise NotImplementedError(f"d_inner must be a multiple of 64 up to 2048, got {self.inner}")
        self.filter  # noqa: B018  it checks its fields
        if self.channels not in (32, 64)[: 3 - self.parts]:
            raise ValueError(f"channels must be 32, or with one part 64, got {self.channels}")
        if self.tile not in self.TILES:
            raise ValueError(f"tile must be one of {self.TILES}, got {self.tile}")

    def division(self, batch: int, conv_length: int, sm_count: int) -> tuple[int, int]:
        """Slabs of one block, and the least number of blocks: what the GPU runs at once."""
        tiles = batch * -(-conv_length // self.tile)
        runs = max(1, min(self.slabs, sm_count // tiles))
        return -(-self.slabs // runs), sm_count

    def cost(self, batch: int, conv_length: int, sm_count: int) -> float:
        """Of all its blocks, in thousands of cycles."""
        run, _ = self.division(batch, conv_length, sm_count)
        blocks = batch * -(-conv_length // self.tile) * -(-self.slabs // run)
        start = 1.5 + (0.8 * self.parts) * -(-self.tile // (4 * self.warps))
        products = 5 if self.parts == 2 else self.warps // 4  # of a warpgroup with 64 rows
        multiply = products * self.width // 16 * max(self.tile + 8, 52) / 2000
        load = 128 * self.stages // self.depth * self.stage_rows / 50000
        return -(-blocks // sm_count) * (start + run * max(multiply, load) + 1 + self.tile / 80)

    @classmethod
    def for_shape(
        cls,
        precision: Precision,
        width: int,
        inner: int,
        batch: int,
        conv_length: int,
        sm_count: int,
        emb_dim: int,
        layout: str,
        bias: bool,
        stored_z: bool,
    ) -> Project | None:
        """The fastest one, or None where positions have so many features that none fits."""
        f = Filter.for_shape(width, emb_dim, layout, bias, stored_z, conv_length, sm_count)
        rest = (emb_dim, layout, bias, stored_z)
        kernels = [
            cls(precision.dtype, precision.parts, width, inner, channels, tile, *rest, f.tile, f.split)
            for channels in (32, 64)[: 3 - precision.parts]
            for tile in cls.TILES
        ]
        fitting = (k for k in kernels if k.fits)
        return min(fitting, key=lambda k: k.cost(batch, conv_length, sm_count), default=None)

    @property
    def depth(self) -> int:
        """Slabs whose rows are in shared memory at once."""
        return max(1, 4 // (self.width // 64))

    @property
    def stages(self) -> int:
        """Of in_proj's rows, 64 of K each."""
        return self.depth * self.width // 64

    @property
    def x0_rows(self) -> int:
        """Of a stage: with 32 channels and one part they are there twice, as a warpgroup multiplies 64."""
        return max(64, self.channels * self.parts)

    @property
    def stage_rows(self) -> int:
        """x0's first, then those of x1 and v: see in_proj.py."""
        return self.x0_rows + 2 * self.channels * self.parts

    @property
    def boxes(self) -> int:
        """Of in_proj's rows, 64 of K of one warpgroup each."""
        return self.stages * self.warps // 4

    @property
    def shared_bytes(self) -> int:
        """Of a block: operands in pieces that are aligned to 1024 bytes, and before them all else."""
        operands = 2 * (64 * self.stages * self.stage_rows + self.parts * self.width * (self.tile + 8))
        return operands + -(-(256 + 4 * self.filter.shared_floats) // 1024) * 1024

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_BYTES

    @property
    def filter(self) -> Filter:
        where = (self.width, self.emb_dim, self.layout, self.bias, self.stored_z)
        return Filter(*where, self.positions, self.filter_split, groups=1)

    @property
    def weights(self) -> ConvertWeights:
        return ConvertWeights(self.dtype, self.parts, self.width, self.inner)

    @property
    def slabs(self) -> int:
        return self.width // self.channels

    @property
    def warps(self) -> int:
        """Of those that multiply: a warpgroup for x0, and one for each 32 channels of x1 and v."""
        return 4 * (1 + self.channels // 32)

    @property
    def threads(self) -> int:
        """Of those that multiply."""
        return 32 * self.warps

    @property
    def block_threads(self) -> int:
        return 32 * (self.warps + self.filter_warps + self.other_warps)

    @property
    def light(self) -> bool:
        """A thread does with so few registers that a block fits beside those of the launch in front."""
        return self.tile <= (64 if self.channels == 64 else 32)

    @property
    def register_threads(self) -> int:
        """Threads of a block as which its registers are counted, so that the compiler uses fewer: 80 for each of 20
        warps, or 96 for each of 16."""
        return self.block_threads + 128 if self.light else self.block_threads

    @property
    def filter_warps(self) -> int:
        return self.filter.threads // 32

    @property
    def other_warps(self) -> int:
        """One that loads in_proj's rows, and those that convert the other weights."""
        return 4

    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import project

        return project.compile_project(self, arch)


# The same kernels behind host functions that find their tensors in the block's two buffers (see workspace.py).


class _WithConstants:
    @property
    def constants(self) -> Constants:
        """The pieces of its buffer of constants."""
        return Constants(self.width, self.inner, self.dtype, self.parts)


class _AfterMix(_WithConstants):
    operands_older: ClassVar[bool] = True  # mix starts this launch behind the end of project, which made them

    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import launches

        return launches.compile_finish(self, arch)


@dataclasses.dataclass(frozen=True)
class ProjectLaunch(_WithConstants, Project):
    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import launches

        return launches.compile_project(self, arch)


@dataclasses.dataclass(frozen=True)
class MixLaunch(LongConv):
    def compile(self, arch: str) -> Any:
        from cute_kernels.hyena import launches

        return launches.compile_mix(self, arch)


@dataclasses.dataclass(frozen=True)
class FinishLaunch(_AfterMix, Finish):
    """`Finish` as the block launches it."""


@dataclasses.dataclass(frozen=True)
class ClusterFinishLaunch(_AfterMix, ClusterFinish):
    """`ClusterFinish` as the block launches it."""
