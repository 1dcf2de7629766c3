"""The operators' licence: every launch of the public operators on an H200 and on the machine, from the same bits.

    python -m tests.ptx.operators device FOLDER [CASE ...]    on a machine with an H200: runs both, compares, writes
    python -m tests.ptx.operators judge FOLDER [CASE ...]     anywhere with the same kernels: runs the machine, compares
    python -m tests.ptx.operators keep FOLDER                 stores what recorded.py replays, for the tests

Launch by launch: the machine's next launch starts from what the GPU's last one left, so that each stage stands alone.
Once with the machine's own approximate functions, and once with the GPU's: then every bit must be the same.
FOLDER/CASE.npz holds the kernels' PTX, checksums of the GPU's memory, and how it differs from the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import lzma
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

import cute_kernels
from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Finish, Precision
from cute_kernels.runtime import backend, cache, fresh
from reference import hyena_inputs, inputs
from reference.ptx.machine import ptx_machine

from . import recorded
from .approximations import GpuFunctions
from .recorded import Answers, crc, memories

ARCH = "sm_90a"


# ---- cases ----
@dataclass
class Case:
    """`call` runs an operator on the tensors that `inputs` makes, wherever they lie."""

    inputs: Callable[[], dict[str, torch.Tensor]]
    call: Callable[[dict[str, torch.Tensor]], object]
    kept: bool = False  # small enough for the tests

    def __call__(self, device: str) -> None:
        self.call({name: x.to(device) for name, x in self.inputs().items()})


def _segsum(kept: bool = False, **shape) -> Case:
    def made():
        return {n: x for n, x in inputs.official(3, **shape)._asdict().items() if isinstance(x, torch.Tensor)}

    layout = shape.get("g_layout", "per_head")
    return Case(made, lambda t: cute_kernels.mamba_segsum(**t, g_layout=layout), kept)


def _stress(batch: int, length: int, **dims) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x) for name, x in hyena_inputs.stress(batch, length, **dims).items()}


def _split(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, cute_kernels.HyenaBlockParams]:
    weights = dict(t)
    return weights.pop("hidden_states"), cute_kernels.HyenaBlockParams(**weights)


def _filter(length: int, layout: str, kept: bool = False, **dims) -> Case:
    made = functools.partial(_stress, 1, 1, **dims)
    return Case(made, lambda t: cute_kernels.hyena_filter(_split(t)[1], length, filter_layout=layout), kept)


def _conv(channels: int, length: int, batch: int = 1, kept: bool = True) -> Case:
    def made():
        rng = np.random.RandomState(5)
        u, k = (rng.standard_normal(s).astype(np.float32) for s in ((batch, channels, length), (channels, length)))
        return {"u": torch.from_numpy(u), "k": torch.from_numpy(k)}

    return Case(made, lambda t: cute_kernels.causal_long_conv(**t, precision="highest"), kept)


def _block(batch: int, length: int, precision: str, kept: bool = False, **dims) -> Case:
    made = functools.partial(_stress, batch, length, **dims)
    return Case(made, lambda t: cute_kernels.hyena_block(*_split(t), precision=precision), kept)


def _finish(tokens: int, precision: str, kept: bool = False) -> Case:
    """`Finish`, which a block has for more tokens than the machine gets through."""
    p = Precision.named(precision)
    kernel = Finish.for_precision(precision, 256, 1024)

    def made():
        mixed = np.random.RandomState(7).standard_normal((1, 256, stages.pitch(tokens))).astype(np.float32)
        return _stress(1, tokens) | {"mixed": torch.from_numpy(mixed)}

    def call(t):
        weights = {name: w for name, w in t.items() if name not in ("hidden_states", "mixed")}
        operands = stages.convert_weights(weights, p)
        stages.finish(t["mixed"], t["hidden_states"], weights, operands, kernel, tokens, 1e-5)

    return Case(made, call, kept)


SMALL = {"width": 128, "inner": 256}
TWO_GROUPS = {"chunk_size": 64, "heads": 4, "groups": 2, "d_state": 64, "g_layout": "per_group"}
HALVES = {"dtype": torch.float16, "bias_dtype": torch.float32}
CASES: dict[str, Case] = {
    "segsum-per_head": _segsum(chunk_size=64, heads=4, d_state=64, kept=True),
    "segsum-per_group": _segsum(**TWO_GROUPS, kept=True),
    "segsum-two_chunks": _segsum(chunks=2, chunk_size=128, heads=4, d_state=128),
    "segsum-fp16": _segsum(chunk_size=64, heads=4, d_state=32, **HALVES, kept=True),
    "segsum-many_heads": _segsum(chunk_size=64, heads=96, d_state=64),
    "segsum-official": _segsum(),
    "filter-reshape": _filter(131, "reshape"),
    "filter-transpose": _filter(70, "transpose", kept=True, **SMALL),
    "conv-131": _conv(4, 131, batch=2),
    "conv-997": _conv(2, 997),
    "conv-4099": _conv(1, 4099),
    "conv-16384": _conv(1, 16384),
}
for _precision in ("highest", "high", "medium"):
    for _shape in ((1, 131), (2, 67)):
        CASES["block-{}x{}-{}".format(*_shape, _precision)] = _block(*_shape, _precision)
    CASES[f"finish-{_precision}"] = _finish(70, _precision)
    CASES[f"small-{_precision}"] = _block(2, 17, _precision, kept=True, **SMALL)


# ---- memory ----
def content(storage: torch.UntypedStorage) -> np.ndarray:
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return raw.cpu().numpy().copy()


def words(x: np.ndarray) -> np.ndarray:
    """Bytes as words of 32 bits, the last filled up with zeros."""
    return np.concatenate([x, np.zeros(-len(x) % 4, np.uint8)]).view(np.uint32)


def packed(gpu: np.ndarray, machine: np.ndarray) -> np.ndarray:
    """The GPU's words less the machine's, compressed: the sign as the last bit, bytes of one weight together."""
    d = (words(gpu) - words(machine)).view(np.int32)
    planes = np.ascontiguousarray(((d << 1) ^ (d >> 31)).view(np.uint8).reshape(-1, 4).T)
    return np.frombuffer(lzma.compress(planes.tobytes()), np.uint8)


def unpacked(stored: np.ndarray, machine: np.ndarray) -> np.ndarray:
    planes = np.frombuffer(lzma.decompress(stored.tobytes()), np.uint8).reshape(4, -1)
    z = np.ascontiguousarray(planes.T).reshape(-1).view(np.uint32)
    d = (z >> 1) ^ (0 - (z & 1))
    return (words(machine) + d).view(np.uint8)[: len(machine)].copy()


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """What torch.empty makes is full of 0xFF, as on the machine."""
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poisoned(original, *args, **kwargs):
        tensor = original(*args, **kwargs)
        if tensor.is_cuda and tensor.numel():
            tensor.new_empty(0).set_(tensor.untyped_storage()).view(torch.uint8).fill_(0xFF)
        return tensor

    for name, original in originals.items():
        setattr(torch, name, functools.partial(poisoned, original))
    empty_strided, fresh.empty_strided = fresh.empty_strided, None  # makers of this time use torch.empty_like
    try:
        yield
    finally:
        fresh.empty_strided = empty_strided
        for name, original in originals.items():
            setattr(torch, name, original)


# ---- running ----
@dataclass
class Launched:
    """One kernel's memories before and after, in the order of its arguments."""

    kernel: object
    before: list[np.ndarray]
    after: list[np.ndarray] = field(default_factory=list)


class Recorder(backend.Backend):
    """The GPU, with the memory of each launch kept."""

    def __init__(self):
        super().__init__()
        self.launches: list[Launched] = []

    def held(self, tensor):
        return tensor  # its memory is kept, too

    def function(self, kernel, device):
        run = super().function(kernel, device)

        def call(*args):
            launched = Launched(kernel, [content(s) for s, _ in memories(args)])
            run(*args)
            torch.cuda.synchronize()
            launched.after = [content(s) for s, _ in memories(args)]
            self.launches.append(launched)

        return call


def record(case: str) -> list[Launched]:
    with poisoned_empty(), backend.use(Recorder()) as recorder:
        CASES[case]("cuda")
    return recorder.launches


class Replay(backend.Backend):
    """The machine: `on_launch(number, kernel, args, before, after, types)` says what each launch leaves behind."""

    def __init__(self, machine, on_launch: Callable):
        super().__init__()
        self.machine, self.on_launch, self.number = machine, on_launch, 0
        self.handles, self.arch, self.sm_count = machine.handles, machine.arch, machine.sm_count
        self.held = machine.held

    def function(self, kernel, device):
        run = self.machine.function(kernel, device)

        def call(*args):
            found = memories(args)
            before = [content(s) for s, _ in found]
            run(*args)
            after = [content(s) for s, _ in found]
            gpu = self.on_launch(self.number, kernel, args, before, after, [t for _, t in found])
            for (storage, _), data in zip(found, gpu, strict=True):
                torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.from_numpy(data))
            self.number += 1

        return call


def replay(case: str, on_launch: Callable, functions=None) -> None:
    """Runs the case on the machine."""
    with ptx_machine(ARCH, check=False, functions=functions) as machine, backend.use(Replay(machine, on_launch)):
        CASES[case]("cpu")
    for text in (str(f) for report in machine.reports for f in report.findings):
        print(f"{case} FINDING {text}")


def built_ptx(kernel) -> str:
    """Without comments and blank lines."""
    return re.sub(r"\n\s*\n+", "\n", re.sub(r"//[^\n]*", "", cache.get(kernel, ARCH).ptx.read_text()))


# ---- comparing ----
def ordered(bits: np.ndarray) -> np.ndarray:
    """Bits of floats as integers in the floats' order; NaN's bits count as they are."""
    sign = 1 << (8 * bits.itemsize - 1)
    bits = bits.astype(np.int64) & (2 * sign - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def difference(gpu: np.ndarray, machine: np.ndarray, dtype: torch.dtype) -> str:
    """How the machine's bytes differ from the GPU's, as numbers of this type."""
    bits = {2: np.int16, 4: np.int32}[dtype.itemsize]
    a, b = gpu.view(bits), machine.view(bits)
    off = abs(ordered(a) - ordered(b))
    touched = off != 0
    values = [torch.from_numpy(v[touched]).view(dtype).double().numpy() for v in (a, b)]
    ranges = [np.count_nonzero((off > low) & (off <= high)) for low, high in ((0, 1), (1, 4), (4, 64), (64, 2**40))]
    names = ("by 1 ulp", "to 4", "to 64", "more")
    shares = ", ".join(f"{k} {name}" for k, name in zip(ranges, names, strict=True) if k)
    worst, scale = np.nanmax(abs(values[0] - values[1])), np.nanmax(abs(values[0]))
    return f"{touched.sum()} of {len(off)} differ ({shares}), at most {worst:.2e} where the largest is {scale:.2e}"


def report(title: str, kernel, changed: list[int], gpu: list, machine: list, types: list) -> None:
    lines = []
    for i in changed:
        equal = np.array_equal(gpu[i], machine[i])
        what = f"all {len(gpu[i])} bytes equal" if equal else difference(gpu[i], machine[i], types[i])
        lines.append(f"memory {i}: {what}")
    print(f"{title} {type(kernel).__name__}: " + "; ".join(lines), flush=True)


def on_device(folder: pathlib.Path, case: str) -> None:
    times = [time.monotonic()]
    launches = record(case)
    times.append(time.monotonic())
    out: dict[str, np.ndarray] = {}

    def compare(whose, number, kernel, args, before, after, types):
        gpu, title = launches[number], f"{case} launch {number}, {whose} functions,"
        symbols = [k.symbol() for k in (kernel, gpu.kernel)]
        if symbols[0] != symbols[1]:
            raise SystemExit(f"{title} {kernel} on the machine, {gpu.kernel} on the GPU")
        for i, (x, y) in enumerate(zip(gpu.before, before, strict=True)):
            if not np.array_equal(x, y):
                print(f"{title} memory {i} ({len(x)} bytes) was not the same before the launch")
        changed = [i for i, x in enumerate(gpu.before) if not np.array_equal(x, gpu.after[i])]
        report(title, kernel, changed, gpu.after, after, types)
        if whose == "the GPU's":
            return gpu.after
        out[f"{number} ptx"] = np.frombuffer(lzma.compress(built_ptx(kernel).encode()), np.uint8)
        out[f"{number} before"] = np.array([crc(x) for x in gpu.before])
        out[f"{number} after"] = np.array([crc(x) for x in gpu.after])
        for i in changed:
            if not np.array_equal(gpu.after[i], after[i]):
                out[f"{number} {i}"] = packed(gpu.after[i], after[i])
        return gpu.after

    replay(case, functools.partial(compare, "its own"))
    times.append(time.monotonic())
    functions = GpuFunctions()
    replay(case, functools.partial(compare, "the GPU's"), functions)
    times.append(time.monotonic())
    if CASES[case].kept:
        out |= functions.answers().arrays()
    np.savez_compressed(folder / f"{case}.npz", **out)
    seconds = ", ".join(f"{b - a:.1f}" for a, b in itertools.pairwise(times))
    print(f"{case}: seconds on the GPU and twice on the machine {seconds}", flush=True)


def judge(folder: pathlib.Path, case: str, on_launch: Callable | None = None) -> None:
    with np.load(folder / f"{case}.npz") as stored:
        data = dict(stored)
    gpu: list[list[np.ndarray]] = []

    def compare(whose, number, kernel, args, before, after, types):
        title = f"{case} launch {number}, {whose} functions,"
        if lzma.decompress(data[f"{number} ptx"].tobytes()).decode() != built_ptx(kernel):
            raise SystemExit(f"{title} the recording is of other PTX than {kernel} compiles to here")
        for i, x in enumerate(before):
            if crc(x) != data[f"{number} before"][i]:
                raise SystemExit(f"{title} memory {i} is not the recording's before the launch")
        if whose == "its own":
            found = [unpacked(data[f"{number} {i}"], x) if f"{number} {i}" in data else x for i, x in enumerate(after)]
            for i, x in enumerate(found):
                if crc(x) != data[f"{number} after"][i]:
                    raise SystemExit(f"{title} memory {i} is not what the machine gave for the recording")
            gpu.append(found)
        changed = [i for i in range(len(after)) if data[f"{number} before"][i] != data[f"{number} after"][i]]
        report(title, kernel, changed, gpu[number], after, types)
        if on_launch and whose == "its own":
            on_launch(number, kernel, args, before, gpu[number])
        return gpu[number]

    replay(case, functools.partial(compare, "its own"))
    if CASES[case].kept:
        answers = Answers.of(data)
        replay(case, functools.partial(compare, "the GPU's"), answers)
        print(f"{case}: {answers.missing} arguments of approximate functions were not recorded")


def keep(folder: pathlib.Path, case: str) -> None:
    """Adds the case to the launches that recorded.py replays."""
    with np.load(folder / f"{case}.npz") as stored:
        answers = Answers.of(stored)
    kept = recorded.Keeper(case, CASES[case].inputs(), answers)
    judge(folder, case, lambda number, kernel, *memory: kept.add(cache.get(kernel, ARCH), built_ptx(kernel), *memory))
    kept.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("device", "judge", "keep"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all unless told")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    command = {"device": on_device, "judge": judge, "keep": keep}[options.command]
    for case in options.cases or CASES:
        if options.command != "keep" or CASES[case].kept:
            command(options.folder, case)


if __name__ == "__main__":
    main()
