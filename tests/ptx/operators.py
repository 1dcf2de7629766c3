"""The operators' licence: every launch of the public operators on an H200 and on the machine, from the same bits.

    python -m tests.ptx.operators device FOLDER [CASE ...]    on a machine with an H200: runs both, compares, writes
    python -m tests.ptx.operators judge FOLDER [CASE ...]     anywhere with the same kernels: runs the machine, compares

Launch by launch: the machine's next launch starts from what the GPU's last one left, so that each stage stands alone.
FOLDER/CASE.npz holds the kernels' PTX, checksums of the GPU's memory, and how it differs from the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import lzma
import pathlib
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

import cute_kernels
from cute_kernels.runtime import backend, cache
from reference import hyena_inputs, inputs
from reference.ptx.machine import ptx_machine

ARCH = "sm_90a"


# ---- cases: name to (device) -> call ----
def _segsum(device: str, **shape) -> Callable[[], object]:
    given = inputs.official(3, device, **shape)
    return lambda: cute_kernels.mamba_segsum(*given)


def _stress(batch: int, length: int, device: str, **dims) -> tuple[torch.Tensor, cute_kernels.HyenaBlockParams]:
    arrays = hyena_inputs.stress(batch, length, **dims)
    w = {name: torch.from_numpy(value).to(device) for name, value in arrays.items()}
    return w.pop("hidden_states"), cute_kernels.HyenaBlockParams(**w)


def _filter(device: str, length: int, layout: str, **dims) -> Callable[[], object]:
    params = _stress(1, 1, device, **dims)[1]
    return lambda: cute_kernels.hyena_filter(params, length, filter_layout=layout)


def _conv(device: str, channels: int, length: int, batch: int = 1) -> Callable[[], object]:
    rng = np.random.RandomState(5)
    u, k = (rng.standard_normal(n).astype(np.float32) for n in ((batch, channels, length), (channels, length)))
    u, k = torch.from_numpy(u).to(device), torch.from_numpy(k).to(device)
    return lambda: cute_kernels.causal_long_conv(u, k, precision="highest")


def _block(device: str, batch: int, length: int, precision: str, **dims) -> Callable[[], object]:
    x, params = _stress(batch, length, device, **dims)
    return lambda: cute_kernels.hyena_block(x, params, precision=precision)


SMALL = {"width": 128, "inner": 256}
CASES: dict[str, Callable[[str], Callable[[], object]]] = {
    "segsum-per_head": functools.partial(_segsum, chunk_size=64, heads=8, d_state=64),
    "segsum-per_group": functools.partial(_segsum, chunk_size=64, heads=8, groups=2, d_state=64, g_layout="per_group"),
    "segsum-two_chunks": functools.partial(_segsum, chunks=2, chunk_size=128, heads=4, d_state=128),
    "segsum-fp16": functools.partial(
        *(_segsum,), chunk_size=64, heads=4, d_state=32, dtype=torch.float16, bias_dtype=torch.float32
    ),
    "segsum-many_heads": functools.partial(_segsum, chunk_size=64, heads=96, d_state=64),
    "segsum-official": _segsum,
    "filter-reshape": functools.partial(_filter, length=131, layout="reshape"),
    "filter-transpose": functools.partial(_filter, length=70, layout="transpose", **SMALL),
    "conv-131": functools.partial(_conv, channels=4, length=131, batch=2),
    "conv-997": functools.partial(_conv, channels=2, length=997),
    "conv-4099": functools.partial(_conv, channels=1, length=4099),
    "conv-16384": functools.partial(_conv, channels=1, length=16384),
}
for _precision in ("highest", "high", "medium"):
    for _batch, _length in ((1, 131), (2, 67)):
        CASES[f"block-{_batch}x{_length}-{_precision}"] = functools.partial(
            *(_block,), batch=_batch, length=_length, precision=_precision
        )
    CASES[f"small-{_precision}"] = functools.partial(_block, batch=2, length=35, precision=_precision, **SMALL)


# ---- memory ----
def memories(args: tuple) -> list[tuple[torch.UntypedStorage, torch.dtype]]:
    """The distinct memories of a launch's tensors, each with the type of its first tensor."""
    found = {}
    for a in args:
        if isinstance(a, torch.Tensor) and a.numel():
            found.setdefault(a.untyped_storage().data_ptr(), (a.untyped_storage(), a.dtype))
    return list(found.values())


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
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


# ---- recording ----
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


def built_ptx(kernel) -> str:
    return plain(cache.get(kernel, ARCH).ptx.read_text())


def plain(ptx: str) -> str:
    """Without comments and blank lines."""
    return re.sub(r"\n\s*\n+", "\n", re.sub(r"//[^\n]*", "", ptx))


def record(case: str) -> list[Launched]:
    with poisoned_empty(), backend.use(Recorder()) as recorder:
        CASES[case]("cuda")()
    return recorder.launches


# ---- comparing ----
def ordered(x: np.ndarray) -> np.ndarray:
    """Bits of floats as integers in the floats' order; NaN's bits count as they are."""
    bits = x.astype(np.int64)
    sign = 1 << (8 * x.itemsize - 1)
    bits &= 2 * sign - 1
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def difference(gpu: np.ndarray, machine: np.ndarray, dtype: torch.dtype) -> str:
    """How the machine's bytes differ from the GPU's, as numbers of this type."""
    size = dtype.itemsize
    bits = {2: np.int16, 4: np.int32}[size]
    a, b = gpu.view(bits), machine.view(bits)
    off = abs(ordered(a) - ordered(b))
    values = [torch.from_numpy(v.copy()).view(dtype).double().nan_to_num(0, 0, 0).numpy() for v in (a, b)]
    n = np.count_nonzero(off)
    ranges = [np.count_nonzero((off > low) & (off <= high)) for low, high in ((0, 1), (1, 4), (4, 64), (64, 2**40))]
    touched = off != 0
    scale = abs(values[0][touched]).max()
    worst = abs(values[0] - values[1]).max()
    shares = ", ".join(
        f"{k} {name}" for k, name in zip(ranges, ("by 1 ulp", "to 4", "to 64", "more"), strict=True) if k
    )
    return f"{n} of {len(off)} differ ({shares}), at most {worst:.2e} where the largest is {scale:.2e}"


class Replay(backend.Backend):
    """The machine: after each launch its memory is compared with the GPU's, and becomes the GPU's."""

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
            gpu = self.on_launch(self.number, kernel, before, after, [t for _, t in found])
            for (storage, _), data in zip(found, gpu, strict=True):
                torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.from_numpy(data))
            self.number += 1

        return call


def replay(case: str, on_launch: Callable) -> list[str]:
    """Runs the case on the machine; returns the findings."""
    with ptx_machine(ARCH, check=False) as machine, backend.use(Replay(machine, on_launch)):
        CASES[case]("cpu")()
    return [str(f) for report in machine.reports for f in report.findings]


def crc(x: np.ndarray) -> int:
    return zlib.crc32(x.tobytes())


def report(case: str, number: int, kernel, changed, gpu, machine, types) -> None:
    lines = []
    for i in changed:
        equal = np.array_equal(gpu[i], machine[i])
        what = f"all {len(gpu[i])} bytes equal" if equal else difference(gpu[i], machine[i], types[i])
        lines.append(f"memory {i}: {what}")
    print(f"{case} launch {number} {type(kernel).__name__}: " + "; ".join(lines), flush=True)


def on_device(folder: pathlib.Path, case: str) -> None:
    start = time.monotonic()
    launches = record(case)
    seconds = [time.monotonic() - start]
    out: dict[str, np.ndarray] = {}

    def compare(number, kernel, before, after, types):
        gpu = launches[number]
        names = [(type(k).__name__, k.symbol()) for k in (kernel, gpu.kernel)]
        if names[0] != names[1]:
            raise SystemExit(f"{case} launch {number}: {names[0]} on the machine, {names[1]} on the GPU")
        for i, (x, y) in enumerate(zip(gpu.before, before, strict=True)):
            if not np.array_equal(x, y):
                print(f"{case} launch {number}: memory {i} ({len(x)} bytes) was not the same before the launch")
        changed = [i for i, x in enumerate(gpu.before) if not np.array_equal(x, gpu.after[i])]
        report(case, number, kernel, changed, gpu.after, after, types)
        out[f"{number} ptx"] = np.frombuffer(lzma.compress(built_ptx(kernel).encode()), np.uint8)
        out[f"{number} before"] = np.array([crc(x) for x in gpu.before])
        out[f"{number} after"] = np.array([crc(x) for x in gpu.after])
        for i in changed:
            if not np.array_equal(gpu.after[i], after[i]):
                out[f"{number} {i}"] = packed(gpu.after[i], after[i])
        return gpu.after

    findings = replay(case, compare)
    seconds.append(time.monotonic() - start - seconds[0])
    for text in findings:
        print(f"{case} FINDING {text}")
    np.savez_compressed(folder / f"{case}.npz", **out)
    print(f"{case}: GPU {seconds[0]:.1f} s, machine {seconds[1]:.1f} s", flush=True)


def judge(folder: pathlib.Path, case: str) -> None:
    with np.load(folder / f"{case}.npz") as stored:
        data = dict(stored)

    def compare(number, kernel, before, after, types):
        if lzma.decompress(data[f"{number} ptx"].tobytes()).decode() != built_ptx(kernel):
            raise SystemExit(f"{case} launch {number}: the recording is of other PTX than {kernel} compiles to here")
        for i, x in enumerate(before):
            if crc(x) != data[f"{number} before"][i]:
                raise SystemExit(f"{case} launch {number}: memory {i} is not the recording's before the launch")
        gpu = []
        for i, x in enumerate(after):
            gpu.append(unpacked(data[f"{number} {i}"], x) if f"{number} {i}" in data else x)
            if crc(gpu[i]) != data[f"{number} after"][i]:
                raise SystemExit(f"{case} launch {number}: memory {i} is not what the machine gave for the recording")
        changed = [i for i in range(len(after)) if data[f"{number} before"][i] != data[f"{number} after"][i]]
        report(case, number, kernel, changed, gpu, after, types)
        return gpu

    for text in replay(case, compare):
        print(f"{case} FINDING {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("device", "judge"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all unless told")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for case in options.cases or CASES:
        (on_device if options.command == "device" else judge)(options.folder, case)


if __name__ == "__main__":
    main()
