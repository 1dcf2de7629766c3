"""How a tensor core adds: one MMA at a time on chosen operands, recorded on a GPU and repeated by the machine.

    python -m tests.ptx.accumulation device FOLDER     on a machine with an H200: writes FOLDER/accumulation.npz
    python -m tests.ptx.accumulation judge FOLDER      anywhere: the machine on the same operands; unequal elements
    python -m tests.ptx.accumulation keep FOLDER       stores a checksum of each case, for the tests

A case is D = C + A B^T with A [64, k], B [n, k], C and D [64, n] and one k step: 32 bytes of k.
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Iterator

import numpy as np

from .recorder import recorder

KINDS = {"bf16": 16, "f16": 16, "tf32": 8}  # k of one step
RECORDING = "accumulation.npz"
KEPT = pathlib.Path(__file__).with_name("h200_accumulation.npz")


# ---- the kernels ----
def _module(body: str, shared: int) -> str:
    return f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd)
{{
.reg .pred %p;
.reg .b32 %r<64>;
.reg .b32 %a<4>;
.reg .f32 %d<128>;
.reg .b64 %rd<16>;
.shared .align 128 .b8 sb[{shared}];
ld.param.u64 %rd0, [pa];
ld.param.u64 %rd1, [pb];
ld.param.u64 %rd2, [pc];
ld.param.u64 %rd3, [pd];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
shl.b32 %r2, %r1, 7;
add.s32 %r2, %r2, %r0;
mul.wide.u32 %rd4, %r2, 16;
add.s64 %rd4, %rd4, %rd0;
ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%rd4];
{body}
ret;
}}
"""


def _accumulators(n: int, write: bool) -> str:
    """Each thread's n / 2 accumulators, contiguous in memory."""
    lines = [f"mul.wide.u32 %rd5, %r2, {2 * n};", f"add.s64 %rd5, %rd5, %rd{3 if write else 2};"]
    for i in range(0, n // 2, 4):
        registers = "{" + ", ".join(f"%d{i + e}" for e in range(4)) + "}"
        at = f"[%rd5+{4 * i}]"
        lines.append(f"st.global.v4.f32 {at}, {registers};" if write else f"ld.global.v4.f32 {registers}, {at};")
    return "\n".join(lines)


def wgmma(kind: str, n: int) -> str:
    """One wgmma: A from registers, B from shared memory without a swizzle, core matrices next to each other along k."""
    words, copy = 8 * n, []
    for first in range(0, words, 128):
        copy += [
            f"add.s32 %r3, %r0, {first};",
            f"mad.lo.s32 %r4, %r1, {words}, %r3;",
            "mul.wide.u32 %rd6, %r4, 4;",
            "add.s64 %rd6, %rd6, %rd1;",
            f"setp.lt.u32 %p, %r3, {words};",
            "@%p ld.global.b32 %r5, [%rd6];",
            "shl.b32 %r6, %r3, 2;",
            "mov.u32 %r7, sb;",
            "add.s32 %r6, %r6, %r7;",
            "@%p st.shared.b32 [%r6], %r5;",
        ]
    d = ", ".join(f"%d{i}" for i in range(n // 2))
    scales = "p, 1, 1" + (", 0" if kind != "tf32" else "")
    body = f"""{chr(10).join(copy)}
fence.proxy.async;
bar.sync 0;
{_accumulators(n, False)}
mov.u32 %r7, sb;
shr.u32 %r7, %r7, 4;
cvt.u64.u32 %rd7, %r7;
or.b64 %rd7, %rd7, {(128 >> 4) << 16 | (256 >> 4) << 32};
setp.ne.b32 %p, 1, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n{n}k{KINDS[kind]}.f32.{kind}.{kind} {{{d}}}, {{%a0, %a1, %a2, %a3}}, %rd7, %{scales};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{_accumulators(n, True)}"""
    return _module(body, 4 * words)


def mma_sync(kind: str) -> str:
    """One mma.sync a warp, each with its own 16 rows and all 8 columns."""
    body = f"""and.b32 %r3, %r0, 31;
shl.b32 %r4, %r1, 6;
add.s32 %r4, %r4, %r3;
mul.wide.u32 %rd6, %r4, 4;
add.s64 %rd6, %rd6, %rd1;
ld.global.b32 %r5, [%rd6];
ld.global.b32 %r6, [%rd6+128];
{_accumulators(8, False)}
mma.sync.aligned.m16n8k{KINDS[kind]}.row.col.f32.{kind}.{kind}.f32 {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, {{%r5, %r6}}, {{%d0, %d1, %d2, %d3}};
{_accumulators(8, True)}"""  # noqa: E501
    return _module(body, 16)


# ---- operands ----
def _exact(kind: str, x: np.ndarray) -> np.ndarray:
    """x cut to what the kind can hold."""
    x = np.asarray(x, np.float32)
    if kind == "f16":
        return x.astype(np.float16).astype(np.float32)
    mask = np.uint32(0xFFFF0000 if kind == "bf16" else 0xFFFFE000)
    return (x.view(np.uint32) & mask).view(np.float32)


def _spread(rng, shape, low: int, high: int) -> np.ndarray:
    """Random signs and mantissas, exponents from low to high."""
    sign = rng.randint(0, 2, shape) * 2 - 1
    return np.ldexp(sign * (1 + rng.random_sample(shape)), rng.randint(low, high + 1, shape)).astype(np.float32)


def families(kind: str, n: int = 8, seed: int = 1) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """(name, A [64, k], B [n, k], C [64, n]); RandomState's streams never change."""
    k = KINDS[kind]
    rng = np.random.RandomState(seed)
    small, tiny = (-10, -14) if kind == "f16" else (-60, -66)

    # One large addend and `count` small ones, 2^-distance below it. Columns: who is large, whose signs differ.
    counts, distances = (1, 2, 3, 4, 5, 6, k - 1), np.arange(21, 30)
    for large, weight in ((1.0, 1.0), (1.5, 1.0), (1.5, 1.5), (1.0, 1.75)):
        for scale in (1.0, 1.5):
            A = np.zeros((64, k))
            for row in range(63):
                count, distance = counts[row // 9], distances[row % 9]
                first = rng.randint(1, k - count + 1)
                A[row, first : first + count] = scale * 2.0 ** -(distance // 2)
                A[row, 0] = large
            B = np.full((8, k), scale)
            C = np.zeros((64, 8))
            B[:, 0] = weight
            for row in range(63):  # the small factors share the distance, as fp16 needs
                A[row, 1:] *= 2.0 ** -((distances[row % 9] + 1) // 2 - 10)
            B[:, 1:] *= 2.0**-10
            B[1, 1:] *= -1
            B[2, 0], C[:, 2] = 0, large * weight
            B[3], B[3, 0], C[:, 3] = -B[3], 0, large * weight
            B[4, 1::2] *= -1
            B[5, 0], C[:, 5] = 0, 2 * large * weight
            C[:, 6] = large * 2.0**-22
            C[:, 7] = -large * 2.0 ** -(rng.randint(20, 30, 64))
            yield "steps", A, B, C
    # Where the large addend stands, and where another cancels it.
    for cancel in (False, True):
        A, B = _spread(rng, (64, k), -13, -11), _spread(rng, (8, k), -13, -11)
        for row in range(64):
            A[row, row % k] = 1.5
            if cancel:
                A[row, (row % k + 1 + row // k) % k] = 1.5
        if cancel:
            B[:] = np.where(np.arange(k) % 2, 1, -1) * 2.0 ** rng.randint(-1, 1, (8, 1))
        yield "places", A, B, _spread(rng, (64, 8), -24, 2)
    shape_a, shape_b, shape_c = (64, k), (n, k), (64, n)
    for _ in range(6):
        yield "normal", rng.standard_normal(shape_a), rng.standard_normal(shape_b), 4 * rng.standard_normal(shape_c)
        yield "no accumulator", _spread(rng, shape_a, -3, 3), _spread(rng, shape_b, -3, 3), np.zeros(shape_c)
        yield "wide", _spread(rng, shape_a, -6, 6), _spread(rng, shape_b, -6, 6), _spread(rng, shape_c, -16, 12)
        sparse = _spread(rng, shape_a, -10, 10) * (rng.random_sample(shape_a) < 0.3)
        yield "sparse", sparse, _spread(rng, shape_b, -6, 2), _spread(rng, shape_c, -20, 10)
        yield (
            "large accumulator",
            _spread(rng, shape_a, -8, 0),
            _spread(rng, shape_b, -8, 0),
            _spread(rng, shape_c, 4, 16),
        )
        ends = np.where(rng.random_sample(shape_b) < 0.5, 1.0, 1 + (127 / 128 if kind == "bf16" else 1023 / 1024))
        yield "ends of the mantissa", ends[rng.randint(0, n, 64)], ends, _spread(rng, shape_c, -3, 3)
        A, B = _spread(rng, shape_a, -4, 4), _spread(rng, shape_b, -4, 4)
        half = k // 2
        order = rng.permutation(k)
        A[:, order[half:]] = A[:, order[:half]]
        B[:, order[half:]] = -B[:, order[:half]]
        A[:, order[-1]] *= 1 + 2.0**-5
        yield "cancellation", A, B, _spread(rng, shape_c, -30, -4)
        A, B = _spread(rng, shape_a, small, small + 4), _spread(rng, shape_b, tiny, small)
        A[::2] = np.where(rng.random_sample((32, k)) < 0.5, A[::2], 2.0**-20 * A[::2])
        yield "small operands", A, B, _spread(rng, shape_c, 2 * small - 8, 2 * small)
    low = -24 if kind == "f16" else -133
    yield "subnormal operands", _spread(rng, shape_a, low, low + 14), _spread(rng, shape_b, 0, 8), np.zeros(shape_c)
    yield (
        "subnormal operands",
        _spread(rng, shape_a, low, low + 14),
        _spread(rng, shape_b, -3, 3),
        _spread(rng, shape_c, low - 4, low + 14),
    )
    if kind != "f16":
        yield "subnormal sums", _spread(rng, shape_a, -75, -64), _spread(rng, shape_b, -75, -64), np.zeros(shape_c)
        yield (
            "subnormal sums",
            _spread(rng, shape_a, -75, -64),
            _spread(rng, shape_b, -70, -60),
            _spread(rng, shape_c, -149, -124),
        )
        yield "overflow", _spread(rng, shape_a, 58, 63), _spread(rng, shape_b, 58, 63), _spread(rng, shape_c, 120, 127)
    A, B, C = (_spread(rng, s, -2, 2) for s in (shape_a, shape_b, shape_c))
    for x, p in ((A, 0.02), (C, 0.1)):
        x[rng.random_sample(x.shape) < p] = np.inf
        x[rng.random_sample(x.shape) < p] = -np.inf
        x[rng.random_sample(x.shape) < p / 2] = np.nan
    B[rng.random_sample(B.shape) < 0.05] = 0
    yield "infinities and NaN", A, B, C


def operands(kind: str, n: int = 8) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Names, A [cases, 64, k], B [cases, n, k], C [cases, 64, n], all fp32 that the kind can hold."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cases = [(name, _exact(kind, A), _exact(kind, B), C) for name, A, B, C in families(kind, n) if len(B) == n]
        names, A, B, C = zip(*cases, strict=True)
        return list(names), np.stack(A), np.stack(B), np.stack(C).astype(np.float32)


def _words(kind: str, x: np.ndarray) -> np.ndarray:
    """[..., k] to [..., 8] words of 32 bits."""
    if kind == "tf32":
        return np.ascontiguousarray(x).view(np.uint32)
    halves = x.astype(np.float16).view(np.uint16) if kind == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(halves).view(np.uint32)


def _by_thread(x: np.ndarray) -> np.ndarray:
    """[cases, 64, columns] words to [cases, 128 threads, registers], as accumulators lie (and A, seen as words)."""
    cases, _, columns = x.shape
    x = x.reshape(cases, 4, 2, 8, columns // 8, 4, 2)  # warp, half, row, tile, column pair, within
    return np.ascontiguousarray(x.transpose(0, 1, 3, 5, 4, 2, 6)).reshape(cases, 128, columns // 2)


def _from_threads(x: np.ndarray, columns: int) -> np.ndarray:
    cases = len(x)
    x = x.reshape(cases, 4, 8, 4, columns // 8, 2, 2)
    return np.ascontiguousarray(x.transpose(0, 1, 5, 2, 4, 3, 6)).reshape(cases, 64, columns)


def _a_by_thread(words: np.ndarray) -> np.ndarray:
    """[cases, 64, 8] words to [cases, 128, 4]: registers go rows + 8 first, then words + 4."""
    x = words.reshape(len(words), 4, 2, 8, 2, 4)  # warp, half, row, right, word
    return np.ascontiguousarray(x.transpose(0, 1, 3, 5, 4, 2)).reshape(len(words), 128, 4)


def _b_cores(words: np.ndarray) -> np.ndarray:
    """[cases, n, 8] words to core matrices of 8 rows x 16 bytes."""
    cases, n, _ = words.shape
    x = words.reshape(cases, n // 8, 8, 2, 4)
    return np.ascontiguousarray(x.transpose(0, 1, 3, 2, 4))


VARIANTS = {f"wgmma {kind} n{n}": (kind, n, wgmma(kind, n)) for kind in KINDS for n in (8, 64)} | {
    f"mma.sync {kind}": (kind, 8, mma_sync(kind)) for kind in KINDS
}


def arguments(kind: str, n: int, keep: slice = slice(None)) -> tuple[list[str], list[np.ndarray]]:
    """The names of the cases; A, B, C as the kernels take them, and D, poisoned."""
    names, A, B, C = operands(kind, n)
    A, B, C = A[keep], B[keep], C[keep]
    arrays = [_a_by_thread(_words(kind, A)), _b_cores(_words(kind, B)), _by_thread(C), np.full(C.shape, np.nan, "f4")]
    return names[keep], arrays


# ---- running ----
def on_machine(variant: str, keep: slice = slice(None), **options) -> np.ndarray:
    """D [cases, 64, n] as bits."""
    from .snippets import launch

    kind, n, ptx = VARIANTS[variant]
    _, arrays = arguments(kind, n, keep)
    launch(ptx, arrays, grid=(len(arrays[0]), 1, 1), block=(128, 1, 1), **options).check()
    return _from_threads(arrays[3].view(np.uint32), n)


def on_device(folder: pathlib.Path) -> None:
    import torch

    from . import device

    folder.mkdir(parents=True, exist_ok=True)
    torch.zeros(1, device="cuda")
    out = {"device": np.array(torch.cuda.get_device_name())}
    for variant, (kind, n, ptx) in VARIANTS.items():
        _, arrays = arguments(kind, n)
        tensors = [torch.from_numpy(x.view(np.int32)).cuda() for x in arrays]
        device.Kernel(ptx)(*tensors, grid=len(arrays[0]), block=128)
        out[variant] = _from_threads(tensors[3].cpu().numpy().view(np.uint32), n)
        out[f"{variant} inputs"] = np.array(checksum(arrays))
        print("ran", variant, out[variant].shape)
    np.savez_compressed(folder / RECORDING, **out)


def checksum(arrays: list[np.ndarray]) -> int:
    return zlib.crc32(b"".join(x.tobytes() for x in arrays[:3]))


def judge(folder: pathlib.Path) -> None:
    data = np.load(folder / RECORDING)
    for variant, (kind, n, _) in VARIANTS.items():
        if variant not in data:
            continue
        names, arrays = arguments(kind, n)
        if checksum(arrays) != int(data[f"{variant} inputs"]):
            raise SystemExit(f"{variant}: recorded with other operands")
        differ = (on_machine(variant) != data[variant]).reshape(len(names), -1)
        print(f"{variant}: {differ.sum()} of {differ.size} differ")
        for name in dict.fromkeys(names):
            rows = differ[[x == name for x in names]]
            if rows.any():
                print(f"    {name}: {rows.sum()} of {rows.size}")


def checksums(out: np.ndarray) -> np.ndarray:
    """One for each case, of D's bits."""
    return np.array([zlib.crc32(case.tobytes()) for case in np.ascontiguousarray(out)], np.uint32)


def keep(folder: pathlib.Path) -> None:
    with np.load(folder / RECORDING) as data:
        kept = {name: data[name] for name in ("device", *(f"{v} inputs" for v in VARIANTS))}
        np.savez_compressed(KEPT, **kept, **{v: checksums(data[v]) for v in VARIANTS})


if __name__ == "__main__":
    recorder(__doc__, {"device": on_device, "judge": judge, "keep": keep})
