"""The approximate functions: what an H200 gives, as its distance from the correctly rounded result.

    python -m tests.ptx.approximations device FOLDER     on a machine with an H200: writes FOLDER/approximations.npz
    python -m tests.ptx.approximations judge FOLDER      anywhere: the GPU's distances, and the machine's from the GPU
    python -m tests.ptx.approximations keep FOLDER       stores the recording, for the tests

The distance is counted in floats (ulp). `device` counts it over every STRIDE-th of all floats, and keeps a sample.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

import numpy as np

from .recorded import FUNCTIONS, Answers, rounded
from .recorder import recorder

RECORDING = "approximations.npz"
KEPT = pathlib.Path(__file__).with_name("h200_approximations.npz")
STRIDE, SAMPLES, FARTHEST = 5, 4096, 64
VARIANTS = [f"{name}.approx{ftz}.f32" for name in FUNCTIONS for ftz in ("", ".ftz") if not (name == "tanh" and ftz)]


def ptx(variant: str) -> str:
    """Element i of the second array becomes the function of element i of the first; 256 threads a block."""
    return f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 px, .param .u64 py)
{{
.reg .b32 %r<4>;
.reg .f32 %f<4>;
.reg .b64 %rd<4>;
ld.param.u64 %rd0, [px];
ld.param.u64 %rd1, [py];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
shl.b32 %r1, %r1, 8;
add.s32 %r0, %r0, %r1;
mul.wide.u32 %rd2, %r0, 4;
add.s64 %rd0, %rd0, %rd2;
add.s64 %rd1, %rd1, %rd2;
ld.global.f32 %f0, [%rd0];
{variant} %f1, %f0;
st.global.f32 [%rd1], %f1;
ret;
}}
"""


def samples() -> np.ndarray:
    """[SAMPLES] fp32: any bits, numbers around 1, and the ends of every range."""
    rng = np.random.RandomState(9)
    bits = rng.randint(0, 2**32, SAMPLES, dtype=np.uint64).astype(np.uint32)
    bits[::2] = (rng.standard_normal(SAMPLES // 2) * 4).astype(np.float32).view(np.uint32)
    ends = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    bits[: 2 * len(ends)] = [e | sign for e in ends for sign in (0, 0x80000000)]
    return bits.view(np.float32)


def ordered(x: np.ndarray) -> np.ndarray:
    """Floats as integers in their order, so that a difference counts the floats between two; every NaN is one."""
    bits = np.where(np.isnan(x), np.float32(np.nan), x).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def unordered(order: np.ndarray) -> np.ndarray:
    bits = np.where(order < 0, 0x80000000 - order, order)
    return bits.astype(np.uint32).view(np.float32)


def on_machine(variant: str, x: np.ndarray, **options) -> np.ndarray:
    from .snippets import launch

    out = np.zeros_like(x)
    launch(ptx(variant), [x, out], grid=(len(x) // 256, 1, 1), block=(256, 1, 1), **options).check()
    return out


class GpuFunctions:
    """The GPU's own approximate functions, for the machine's option `functions`; remembers what it answered."""

    def __init__(self):
        self.kernels: dict[str, Callable] = {}
        self.asked: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __call__(self, variant: str, x: np.ndarray) -> np.ndarray:
        import torch

        from . import device

        if variant not in self.kernels:
            self.kernels[variant] = device.Kernel(ptx(variant))
            self.memory = [torch.zeros(256, pin_memory=True) for _ in range(2)]
        given, result = (t.numpy() for t in self.memory)
        given[: len(x)] = x
        self.kernels[variant](*self.memory, grid=1, block=256)
        self.asked.setdefault(variant, []).append((x.copy(), result[: len(x)].copy()))
        return result[: len(x)].copy()

    def answers(self) -> Answers:
        known = {}
        for variant, pairs in self.asked.items():
            x, y = (np.concatenate(a).view(np.uint32) for a in zip(*pairs, strict=True))
            x, first = np.unique(x, return_index=True)
            known[variant] = x.view(np.float32), y[first].view(np.float32)
        return Answers(known)


def on_device(folder: pathlib.Path) -> None:
    import torch

    from . import device

    folder.mkdir(parents=True, exist_ok=True)
    out = {"device": np.array(torch.cuda.get_device_name())}
    exact = {"rcp": "reciprocal", "ex2": "exp2", "lg2": "log2"}
    for variant in VARIANTS:
        name = variant.split(".")[0]
        kernel = device.Kernel(ptx(variant))
        x = torch.from_numpy(samples()).cuda()
        y = torch.empty_like(x)
        kernel(x, y, grid=SAMPLES // 256, block=256)
        distance = ordered(y.cpu().numpy()) - ordered(rounded(variant, samples()))
        out[variant] = distance.astype(np.int32)
        # Every STRIDE-th float, normal numbers with normal results: how many are how far off.
        counts = torch.zeros(2 * FARTHEST + 1, dtype=torch.int64, device="cuda")
        chunk, worst = 1 << 26, torch.zeros(3, dtype=torch.float64, device="cuda")
        y = torch.empty(chunk, dtype=torch.float32, device="cuda")
        tiny = 2.0**-126
        for first in range(0, 2**32 // STRIDE // chunk):
            bits = (torch.arange(chunk, device="cuda") + first * chunk) * STRIDE
            x = bits.int().view(torch.float32)
            kernel(x, y, grid=chunk // 256, block=256)
            truth = getattr(torch, exact.get(name, name))(x.double())
            want = truth.float()
            regular = want.isfinite() & (want.abs() >= tiny) & (x.abs() >= tiny) & x.isfinite()
            if name in ("sin", "cos"):
                for i, limit in enumerate((np.pi, 2 * np.pi, 100 * np.pi)):
                    off = torch.where(regular & (x.abs() <= limit), (y.double() - truth).abs(), 0).max()
                    worst[i] = torch.maximum(worst[i], off)
                regular &= x.abs() <= np.pi
            else:
                relative = torch.where(regular, (y.double() / truth - 1).abs(), 0).max()
                absolute = torch.where(regular, (y.double() - truth).abs(), 0).max()
                worst[0], worst[1] = torch.maximum(worst[0], relative), torch.maximum(worst[1], absolute)
            ints = [torch.where(b < 0, -(b & 0x7FFFFFFF), b) for b in (v.view(torch.int32).long() for v in (y, want))]
            off = (ints[0] - ints[1]).clamp(-FARTHEST, FARTHEST)[regular]
            counts += torch.bincount(off + FARTHEST, minlength=2 * FARTHEST + 1)
        out[f"{variant} counts"], out[f"{variant} worst"] = counts.cpu().numpy(), worst.cpu().numpy()
        print("ran", variant, flush=True)
        print(described(out, variant), flush=True)
        np.savez_compressed(folder / RECORDING, **out)


def described(data, variant: str) -> str:
    counts, worst = data[f"{variant} counts"], data[f"{variant} worst"]
    seen = np.flatnonzero(counts) - FARTHEST
    share = {int(i): counts[i + FARTHEST] / counts.sum() for i in seen if abs(i) <= 2}
    what = "absolute within pi, 2 pi, 100 pi" if variant[:3] in ("sin", "cos") else "relative, absolute"
    errors = ", ".join(f"2^{np.log2(w):.2f}" if w else "-" for w in worst)
    shares = ", ".join(f"{i:+d}: {s:.3%}" for i, s in share.items())
    return f"  {counts.sum()} floats, {seen.min():+d} to {seen.max():+d} ulp ({shares}); {what}: {errors}"


def judge(folder: pathlib.Path) -> None:
    with np.load(folder / RECORDING) as data:
        for variant in VARIANTS:
            print(variant)
            print(described(data, variant))
            gpu = ordered(rounded(variant, samples())) + data[variant]
            off = ordered(on_machine(variant, samples())) - gpu
            print(
                f"  machine: {np.count_nonzero(off)} of {len(off)} samples differ, {off.min():+d} to {off.max():+d} ulp"
            )


def keep(folder: pathlib.Path) -> None:
    shutil.copyfile(folder / RECORDING, KEPT)


if __name__ == "__main__":
    recorder(__doc__, {"device": on_device, "judge": judge, "keep": keep})
