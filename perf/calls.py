"""A case as something to call: its inputs, the public function, the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cute_kernels
from perf import formulas
from perf.cases import SEGSUM_MODELS, Case
from reference import hyena_inputs, inputs

Arguments = dict[str, Tensor | None]  # by the operator's names


def arguments(case: Case, seed: int, device: torch.device) -> Arguments:
    """Official inputs of the case's sizes."""
    s = case.sizes
    if case.op == "mamba_segsum":
        shape = {name: s[name] for name in ("batch", "chunks", "chunk_size", "heads", "groups", "d_state")}
        bias = torch.bfloat16 if case.name in SEGSUM_MODELS else None
        x = inputs.official(seed, device, **shape, bias_dtype=bias)
        return {"dt": x.dt, "A_log": x.A_log, "B": x.B, "C": x.C, "dt_bias": x.dt_bias}
    if case.op == "causal_long_conv":
        generator = torch.Generator(device).manual_seed(seed)
        shapes = {"u": (s["batch"], s["width"], s["length"]), "k": (s["width"], s["length"])}
        return {name: torch.randn(shape, device=device, generator=generator) for name, shape in shapes.items()}
    batch, length = (s["batch"], s["length"]) if case.op == "hyena_block" else (0, 0)
    arrays = hyena_inputs.official(batch, length, seed, width=s["width"], inner=4 * s["width"])
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def operator(case: Case, x: Arguments, options: dict[str, Any]):
    """The public function on these arguments, as a call. `options`: "g_layout" or "precision"."""
    if case.op == "mamba_segsum":
        return lambda: cute_kernels.mamba_segsum(**x, g_layout=options["g_layout"])
    if case.op == "causal_long_conv":
        return lambda: cute_kernels.causal_long_conv(x["u"], x["k"], precision=options["precision"])
    weights = {name: t for name, t in x.items() if name != "hidden_states"}
    params = cute_kernels.HyenaBlockParams(**weights)
    if case.op == "hyena_filter":
        return lambda: cute_kernels.hyena_filter(params, case.sizes["length"])
    return lambda: cute_kernels.hyena_block(x["hidden_states"], params, precision=options["precision"])


def formula(case: Case, x: Arguments, options: dict[str, Any]):
    """The same through plain PyTorch, as a call."""
    if case.op == "mamba_segsum":
        return lambda: formulas.mamba_segsum(**x, g_layout=options["g_layout"])
    if case.op == "causal_long_conv":
        return lambda: formulas.causal_long_conv(x["u"], x["k"])
    if case.op == "hyena_filter":
        return lambda: formulas.hyena_filter(x, case.sizes["length"])
    return lambda: formulas.hyena_block(x["hidden_states"], x)
