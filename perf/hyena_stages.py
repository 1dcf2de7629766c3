"""The Hyena block's stages alone, on a GPU: `python -m perf.hyena_stages check` and `... time`, for each stage or one.

`check` compares with the float64 oracle, and its error with PyTorch's own in fp32 and TF32; `time` is cold L2, medians.
`mix` does both for the long convolution, beside cuFFT in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics

import numpy as np
import torch
import torch.nn.functional as F
import typer

from cute_kernels.hyena import stages, torch_path
from cute_kernels.hyena.config import ClusterFinish, Filter, Finish, Precision, Project
from perf.bench import gpu
from perf.timing import cold_time, cold_times
from reference import hyena, hyena_inputs

D, D_INNER, EPS, SHIFT = 256, 1024, 1e-5, 0.05
FINISH = ((8, 8, 4), (8, 8, 2), (4, 8, 1), *((2, tokens, 1) for tokens in (8, 16, 24, 32)))  # split, tokens, copies
FILTERS = [  # positions of a task, tasks that share the channels, warpgroups
    Filter(D, 5, "reshape", True, False, *choice) for choice in itertools.product((8, 16, 32), (1, 2, 4), (1, 2))
]

app = typer.Typer()


def finish_kernels(precision: str) -> dict[str, ClusterFinish | Finish]:
    p = Precision.named(precision)
    fields = (p.dtype, p.parts, D, D_INNER)
    clusters = {
        f"{split} x {tokens} / {copies}": ClusterFinish(*fields, split, tokens, copies)
        for split, tokens, copies in FINISH
    }
    return clusters | {"tiles": Finish(*fields)}


def errors(got: torch.Tensor, want: np.ndarray) -> tuple[float, float]:
    """Relative L2 error and largest error."""
    difference = got.double().cpu().numpy() - want
    return float(np.linalg.norm(difference) / np.linalg.norm(want)), float(np.abs(difference).max())


def on_gpu(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}


def torch_finish(p: torch.Tensor, w: dict[str, torch.Tensor], tf32: bool) -> torch.Tensor:  # p [B, D, L]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    r = F.linear(p.transpose(1, 2), w["out_proj_weight"], w["out_proj_bias"]) + w["hidden_states"]
    n2 = F.layer_norm(r, (D,), w["norm2_weight"], w["norm2_bias"], EPS)
    h = F.gelu(F.linear(n2, w["mlp_fc1_weight"], w["mlp_fc1_bias"]), approximate="tanh")
    return F.linear(h, w["mlp_fc2_weight"], w["mlp_fc2_bias"]) + r


def check_finish(kind: str, batch: int, length: int, precisions: list[str]) -> None:
    inputs = hyena_inputs.SETS[kind](batch, length)
    want, w = hyena.block(inputs), on_gpu(inputs)
    p = torch.zeros(batch, D, stages.pitch(length), device="cuda")
    p[:, :, :length] = torch.from_numpy(want["p"].astype(np.float32)).cuda()
    base = {tf32: errors(torch_finish(p[:, :, :length], w, tf32), want["out"]) for tf32 in (False, True)}
    for precision in precisions:
        operands = stages.convert_weights(w, Precision.named(precision))
        for name, kernel in finish_kernels(precision).items():
            outs = []
            for _ in range(2):
                out = torch.full((batch, length, D), float("nan"), device="cuda")
                stages.finish(p, w["hidden_states"], w, operands, kernel, length, EPS, out)
                outs.append(out)
            l2, largest = errors(outs[0], want["out"])
            base_l2, base_largest = base[precision != "highest"]
            print(
                f"finish {kind} {batch}x{length} {precision} {name}: L2 {l2:.2e} "
                f"max {largest:.2e}, of PyTorch's {l2 / base_l2:.2f} {largest / base_largest:.2f}, "
                f"same bits twice {torch.equal(*outs)}"
            )


def check_filter(kind: str, length: int) -> None:
    inputs = hyena_inputs.SETS[kind](1, length)
    w = on_gpu(inputs)
    options = {"filter_layout": "reshape", "bias_in_filter": True}
    want = hyena.hyena_filter(inputs, length, SHIFT, **options)["k"]
    base = errors(torch_path.hyena_filter(w, length, SHIFT, **options), want)
    for kernel in FILTERS:
        k = torch.full((D, stages.pitch(length)), float("nan"), device="cuda")
        got = stages.hyena_filter(w, kernel, length, length, SHIFT, None, k)[:, :length]
        l2, largest = errors(got, want)
        print(
            f"filter {kind} L {length} tile {kernel.tile} split {kernel.split} groups {kernel.groups}: "
            f"L2 {l2:.2e} max {largest:.2e}, PyTorch {base[0]:.2e} {base[1]:.2e}"
        )


def time_finish(batch: int, length: int, precisions: list[str]) -> None:
    device = torch.device("cuda")
    w = on_gpu(hyena_inputs.official(batch, length))
    p = torch.randn(batch, D, stages.pitch(length), device=device)
    out = torch.empty(batch, length, D, device=device)

    def call(operands: stages.Operands, kernel: ClusterFinish | Finish):
        return lambda: stages.finish(p, w["hidden_states"], w, operands, kernel, length, EPS, out)

    for precision in precisions:
        operands = stages.convert_weights(w, Precision.named(precision))
        calls = {name: call(operands, kernel) for name, kernel in finish_kernels(precision).items()}
        cold = cold_times(calls, device)
        times = ", ".join(f"{name} {statistics.median(cold[name]):.1f}" for name in calls)
        print(
            f"finish {batch}x{length} {precision}: {times} us by split x tokens of a block, or Finish's tiles",
            flush=True,
        )


def time_filter(length: int) -> None:
    device = torch.device("cuda")
    w = on_gpu(hyena_inputs.official(1, length))
    k = torch.empty(D, stages.pitch(length), device=device)
    for kernel in FILTERS:
        arguments = (w, kernel, length, length, SHIFT, None, k)
        us = cold_time(lambda arguments=arguments: stages.hyena_filter(*arguments), device)
        print(f"filter L {length} tile {kernel.tile} split {kernel.split} groups {kernel.groups}: {us:.1f} us")


def time_weights(precision: str) -> None:
    w = on_gpu(hyena_inputs.official(1, 8))
    convert = Precision.named(precision)
    us = cold_time(lambda: stages.convert_weights(w, convert), torch.device("cuda"))
    print(f"weights {precision}: {us:.1f} us")


def batch_and_length(size: str) -> tuple[int, int]:
    batch, length = size.split("x")
    return int(batch), int(length)


STAGE: list[str] = typer.Option(["weights", "filter", "finish"], help="Stages to run.")
CHECKED = typer.Option(["1x131", "4x541", "2x1024", "3x70"], help="Batch x length, for finish.")
TIMED = typer.Option(
    ["1x131", "1x256", "1x512", "1x1024", "1x2048", "1x4096", "2x4096"], help="Batch x length, for finish."
)
PRECISION = typer.Option(list(Precision.NAMES), help="Precisions to run.")


@app.command()
def check(
    stage: list[str] = STAGE,
    precision: list[str] = PRECISION,
    size: list[str] = CHECKED,
) -> None:
    """Errors against float64, beside PyTorch's."""
    gpu()
    for kind in ("official", "stress"):
        if "finish" in stage:
            for s in size:
                check_finish(kind, *batch_and_length(s), precision)
        if "filter" in stage:
            for length in (1, 131, 541, 1024, 4096):
                check_filter(kind, length)


@app.command(name="time")
def times(
    stage: list[str] = STAGE,
    precision: list[str] = PRECISION,
    size: list[str] = TIMED,
) -> None:
    """Microseconds of each stage by precision and configuration."""
    gpu()
    if "weights" in stage:
        for name in precision:
            time_weights(name)
    if "finish" in stage:
        for s in size:
            time_finish(*batch_and_length(s), precision)
    if "filter" in stage:
        for length in (131, 256, 512, 1024, 2048, 4096):
            time_filter(length)


MIX_SHAPES = (*hyena_inputs.OFFICIAL_SHAPES, (1, 8192), (8, 8192), (1, 16384), (1, 32768), (8, 32768))


def captured(call, repeats: int = 1) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


@app.command()
def mix() -> None:
    """The long convolution with skip and gate: errors for some lengths, microseconds for official and long shapes.

    "in a row" is a call's share of 20 in one CUDA graph, with all data in L2: what it adds to the block.
    """
    device = gpu()

    def arguments(batch: int, length: int):  # u, k, skip, pre_gate, post_gate
        u, gate, k = (
            torch.randn(*rows, stages.pitch(length), device=device)[..., :length]
            for rows in ((batch, D), (batch, D), (D,))
        )
        return u, k, torch.randn(D, device=device), None, gate

    for length in (1, 128, 131, 997, 4096, 8192, 32768):
        u, k, *_ = arguments(2, length)
        want = hyena.long_conv(u.cpu().numpy(), k.cpu().numpy())
        ours, fft = errors(stages.long_conv(u, k), want), errors(torch_path.causal_long_conv(u, k), want)
        print(f"mix L {length}: L2 {ours[0]:.2e} max {ours[1]:.2e}, cuFFT {fft[0]:.2e} {fft[1]:.2e}")
    for batch, length in sorted(MIX_SHAPES, key=lambda shape: shape[0] * shape[1]):
        u, k, skip, _, gate = arguments(batch, length)
        out = torch.empty_like(u)
        ours = lambda: stages.long_conv(u, k, skip, None, gate, out)  # noqa: B023, E731
        fft = captured(lambda: torch_path.causal_long_conv(u, k))  # noqa: B023
        row, events = captured(ours, 20), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        cold = cold_times({"ours": ours, "fft": fft.replay}, device, 11)
        us = {name: statistics.median(t) for name, t in cold.items()}
        row.replay()
        events[0].record()
        row.replay()
        events[1].record()
        torch.cuda.synchronize()
        in_a_row = 1000 * events[0].elapsed_time(events[1]) / 20
        print(f"mix {batch}x{length}: {us['ours']:.1f} us, in a row {in_a_row:.1f}, cuFFT {us['fft']:.1f}", flush=True)


# channels of a slab, tokens of a tile
PROJECT = [(channels, tile) for channels in (32, 64) for tile in Project.TILES]
PROJECT_CHECKED = typer.Option(["1x131", "4x541", "2x1024"], help="Batch x length to check.")
PROJECT_TIMED = typer.Option(
    ["1x131", "1x256", "1x512", "1x1024", "1x2048", "4x541", "1x4096", "2x4096", "8x997", "32x256"],
    help="Batch x length to time.",
)


def project_kernels(precision: str, batch: int, length: int) -> dict[str, Project]:
    chosen = Precision.named(precision)
    device = torch.device("cuda")
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    default = Project.for_shape(chosen, D, D_INNER, batch, length, sm_count, 5, "reshape", True, False)
    kernels = {"default": default}
    for channels, tile in PROJECT:
        if channels == 64 and default.parts == 2:
            continue
        kernel = dataclasses.replace(default, channels=channels, tile=tile)
        if kernel.fits:
            kernels[f"{channels} channels, tile {tile}"] = kernel
    return kernels


def torch_project(w: dict[str, torch.Tensor], precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.backends.cuda.matmul.allow_tf32 = precision == "high"
    n1 = F.layer_norm(w["hidden_states"], (D,), w["norm1_weight"], w["norm1_bias"], EPS)
    weight = w["in_proj_weight"]
    if precision == "medium":
        n1, weight = n1.bfloat16().float(), weight.bfloat16().float()
    u = F.linear(n1, weight, w["in_proj_bias"])
    x0, x1, v = torch_path.short_conv(u, w["short_conv_weight"], w["short_conv_bias"]).transpose(1, 2).chunk(3, dim=1)
    return v * x1, x0


@app.command()
def project(
    check: bool = True,
    times: bool = True,
    checked: list[str] = PROJECT_CHECKED,
    timed: list[str] = PROJECT_TIMED,
    precision: list[str] = PRECISION,
) -> None:
    """The first two launches, or one where filter and weights are prepared: errors beside PyTorch's, microseconds."""
    device = gpu()
    for kind in ("official", "stress") if check else ():
        for batch, length in map(batch_and_length, checked):
            inputs = hyena_inputs.SETS[kind](batch, length)
            want, w = hyena.block(inputs, EPS), on_gpu(inputs)
            for chosen in precision:
                base = torch_project(w, chosen)
                for name, kernel in project_kernels(chosen, batch, length).items():
                    made = stages.project(w["hidden_states"], w, kernel, length, EPS, length, SHIFT)
                    texts = []
                    for part, reference in zip(("g", "x0"), base, strict=True):
                        ours = errors(getattr(made, part)[..., :length], want[part])
                        theirs = errors(reference, want[part])
                        texts.append(f"{part} {ours[0]:.1e} x{ours[0] / theirs[0]:.2f} max x{ours[1] / theirs[1]:.2f}")
                    texts.append(f"k {errors(made.k[:, :length], want['k'])[0]:.1e}")
                    print(f"project {kind} {batch}x{length} {chosen} {name}: {', '.join(texts)}", flush=True)
    for batch, length in map(batch_and_length, timed) if times else ():
        w = on_gpu(hyena_inputs.official(batch, length))
        for chosen in precision:
            calls = {}
            for name, kernel in project_kernels(chosen, batch, length).items():
                rest = (w["hidden_states"], w, kernel, length, EPS, length, SHIFT, None)
                made = stages.project(*rest)
                ready = (made.k, made.operands)
                calls[name] = lambda rest=rest: stages.project(*rest)
                calls[f"{name}, prepared"] = lambda rest=rest, ready=ready: stages.project(*rest, ready)
            for name, us in cold_times(calls, device, 11).items():
                print(f"project {batch}x{length} {chosen} {name}: {statistics.median(us):.1f} us", flush=True)


if __name__ == "__main__":
    app()
