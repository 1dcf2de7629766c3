"""Launches that an H200 made, for the machine to repeat: PTX, launch parameters, memory, approximate functions.

A recording stands alone: it holds for the machine whatever the kernels that it was made of become. operators.py makes
them; what can be drawn again from a seed is stored as a name and a checksum.
"""

from __future__ import annotations

import ctypes
import json
import lzma
import pathlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from reference.ptx import GlobalMemory, Options, run_launch
from reference.ptx.boundary import Launch, load
from reference.ptx.parser import parse

FILE = pathlib.Path(__file__).with_name("h200_operators.npz")
POISON = 0xFF


def crc(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).tobytes())


def _squeezed(x: np.ndarray) -> np.ndarray:
    """Compressed, bytes of one weight together."""
    planes = np.ascontiguousarray(x.view(np.uint8).reshape(len(x), -1).T)
    return np.frombuffer(lzma.compress(planes.tobytes()), np.uint8)


def _expanded(x: np.ndarray, dtype) -> np.ndarray:
    planes = np.frombuffer(lzma.decompress(x.tobytes()), np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


# ---- approximate functions ----
FUNCTIONS: dict[str, Callable] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def rounded(variant: str, x: np.ndarray) -> np.ndarray:
    """The exact function of x ("ex2.approx.ftz.f32"), to nearest fp32; subnormals are zeros with .ftz."""
    flush = lambda v: np.where(abs(v) < 2.0**-126, v * 0, v) if ".ftz" in variant else v  # noqa: E731
    with np.errstate(all="ignore"):
        return flush(FUNCTIONS[variant.split(".")[0]](flush(x.astype(np.float64)))).astype(np.float32)


@dataclass
class Answers:
    """What a GPU's approximate functions gave, for the machine's option `functions`; else the exact value, rounded."""

    known: dict[str, tuple[np.ndarray, np.ndarray]]  # by variant: arguments in the order of their bits, and values
    missing: int = 0

    def __call__(self, variant: str, x: np.ndarray) -> np.ndarray:
        out = rounded(variant, x)
        arguments, values = self.known.get(variant, (x[:0], x[:0]))
        if len(arguments):
            at = np.searchsorted(arguments.view(np.uint32), x.view(np.uint32)).clip(0, len(arguments) - 1)
            hit = arguments.view(np.uint32)[at] == x.view(np.uint32)
            out[hit] = values[at][hit]
            self.missing += np.count_nonzero(~hit)
        else:
            self.missing += len(x)
        return out

    def arrays(self) -> dict[str, np.ndarray]:
        out = {}
        for variant, (x, y) in self.known.items():
            steps = np.diff(x.view(np.uint32), prepend=np.uint32(0))
            out[f"{variant} x"] = _squeezed(steps)
            out[f"{variant} y"] = _squeezed(y.view(np.uint32) - rounded(variant, x).view(np.uint32))
        return out

    @classmethod
    def of(cls, data: Mapping[str, np.ndarray]) -> Answers:
        known = {}
        for variant in [name[:-2] for name in data if name.endswith(".f32 x")]:
            x = np.cumsum(_expanded(data[f"{variant} x"], np.uint32), dtype=np.uint32).view(np.float32)
            y = _expanded(data[f"{variant} y"], np.uint32) + rounded(variant, x).view(np.uint32)
            known[variant] = x, y.view(np.float32)
        return cls(known)


# ---- launches ----
@dataclass
class RecordedLaunch:
    kernel: str
    grid: list[int]
    block: list[int]
    cluster: list[int]
    shared: int
    parameters: list[str] = field(default_factory=list)  # bytes in hexadecimal
    pointers: list[list[int]] = field(default_factory=list)  # parameter, offset in it, memory, offset in that

    @classmethod
    def of(cls, launch: Launch, ptx: str, starts: list[int], sizes: list[int]) -> RecordedLaunch:
        """A caught launch whose memories start there."""
        r = cls(launch.kernel, *map(list, (launch.grid, launch.block, launch.cluster)), launch.shared)
        for i, p in enumerate(parse(ptx).kernels[launch.kernel].parameters):
            data = launch.parameter(i, p.size)
            r.parameters.append(data.hex())
            for offset in range(0, len(data) - 7, 8):
                value = int.from_bytes(data[offset : offset + 8], "little")
                for j, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                    if start <= value < start + size:
                        r.pointers.append([i, offset, j, value - start])
        return r

    def run(self, ptx: str, blocks: list[np.ndarray], functions: Answers) -> None:
        """Repeats it on the machine, with its memories in `blocks`."""
        parameters = [bytearray.fromhex(p) for p in self.parameters]
        for i, offset, j, inside in self.pointers:
            parameters[i][offset : offset + 8] = (blocks[j].ctypes.data + inside).to_bytes(8, "little")
        held = [(ctypes.c_uint8 * len(p)).from_buffer(p) for p in parameters]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        memory = GlobalMemory()
        for x in blocks:
            memory.add(x.ctypes.data, len(x))
        sizes = map(tuple, (self.grid, self.block, self.cluster))
        launch = Launch(self.kernel, *sizes, self.shared, ctypes.addressof(pointers))
        run_launch(ptx, launch, memory, Options(strict=False, functions=functions)).check()


@dataclass
class Call:
    """One host function's launches. A memory's source is "poison", "input NAME", "after CALL MEMORY" or "stored"."""

    launches: list[RecordedLaunch]
    sizes: list[int]
    sources: list[str]
    before: list[int]  # checksums
    after: list[int]


def memories(args) -> list[tuple[torch.UntypedStorage, torch.dtype]]:
    """The distinct memories of a launch's tensors, each with the type of its first tensor."""
    found = {}
    for a in args:
        if isinstance(a, torch.Tensor) and a.numel():
            found.setdefault(a.untyped_storage().data_ptr(), (a.untyped_storage(), a.dtype))
    return list(found.values())


class Keeper:
    """Collects a case's calls, then saves them beside the other cases'."""

    def __init__(self, case: str, inputs: dict[str, torch.Tensor], answers: Answers):
        self.case = case
        self.inputs = {name: bytes_of(x) for name, x in inputs.items()}
        self.calls: list[Call] = []
        self.contents: list[list[np.ndarray]] = []
        self.arrays = answers.arrays()

    def add(self, built, ptx: str, args, before: list[np.ndarray], after: list[np.ndarray]) -> None:
        """A call of the built kernel with these arguments, and its memories before and after it on the GPU."""
        launches: list[RecordedLaunch] = []
        starts, sizes = [s.data_ptr() for s, _ in memories(args)], [len(x) for x in before]
        on_launch = lambda launch: launches.append(RecordedLaunch.of(launch, ptx, starts, sizes))  # noqa: E731
        load(built.object).call(built.symbol, list(args), on_launch)
        sources, number = [self._source(x) for x in before], len(self.calls)
        for j, x in enumerate(before):
            if sources[j] == "stored":
                self.arrays[f"{number} {j}"] = _squeezed(x)
        self.arrays[f"{number} ptx"] = np.frombuffer(lzma.compress(ptx.encode()), np.uint8)
        self.calls.append(Call(launches, sizes, sources, [crc(x) for x in before], [crc(x) for x in after]))
        self.contents.append(after)

    def _source(self, x: np.ndarray) -> str:
        if (x == POISON).all():
            return "poison"
        for name, data in self.inputs.items():
            if np.array_equal(data, x):
                return f"input {name}"
        for i, contents in enumerate(self.contents):
            for j, data in enumerate(contents):
                if np.array_equal(data, x):
                    return f"after {i} {j}"
        return "stored"

    def save(self) -> None:
        others = {}
        if FILE.exists():
            with np.load(FILE) as stored:
                others = {name: x for name, x in stored.items() if name.split("/")[0] != self.case}
        text = json.dumps([asdict(c) for c in self.calls]).encode()
        self.arrays["calls"] = np.frombuffer(lzma.compress(text), np.uint8)
        np.savez(FILE, **others, **{f"{self.case}/{name}": x for name, x in self.arrays.items()})


def bytes_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).reshape(-1).numpy().copy()


def cases() -> list[str]:
    if not FILE.exists():
        return []
    with np.load(FILE) as stored:
        return list(dict.fromkeys(name.split("/")[0] for name in stored))


def _aligned(size: int) -> np.ndarray:
    raw = np.full(size + 512, POISON, np.uint8)
    start = -raw.ctypes.data % 512
    return raw[start : start + size]


def replay(case: str, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Repeats the case's launches on the machine; returns what differs from the GPU's memory, in words."""
    with np.load(FILE) as stored:
        data = {name.partition("/")[2]: x for name, x in stored.items() if name.split("/")[0] == case}
    answers = Answers.of(data)
    done: list[list[np.ndarray]] = []
    wrong = []
    for number, fields in enumerate(json.loads(lzma.decompress(data["calls"].tobytes()))):
        call = Call(**fields)
        blocks = [_aligned(n) for n in call.sizes]
        for j, (x, source) in enumerate(zip(blocks, call.sources, strict=True)):
            kind, *names = source.split()
            if kind == "input":
                x[:] = bytes_of(inputs[names[0]])
            elif kind == "after":
                x[:] = done[int(names[0])][int(names[1])]
            elif kind == "stored":
                x[:] = _expanded(data[f"{number} {j}"], np.uint8)
            if crc(x) != call.before[j]:
                wrong.append(f"call {number}: memory {j} ({source}) is not what it was before the call on the GPU")
        ptx = lzma.decompress(data[f"{number} ptx"].tobytes()).decode()
        for launch in call.launches:
            RecordedLaunch(**launch).run(ptx, blocks, answers)
        for j, x in enumerate(blocks):
            if crc(x) != call.after[j]:
                wrong.append(f"call {number}: memory {j} of {len(x)} bytes is not what the GPU left")
        done.append(blocks)
    if answers.missing:
        wrong.append(f"{answers.missing} arguments of approximate functions that the GPU was not asked")
    return wrong
