"""How wrong an operator's output is: beside the bar (mamba_segsum), or beside PyTorch's own error (Hyena)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perf import calls, formulas
from perf.cases import Case
from reference import compare, inputs


def errors(case: Case, x: calls.Arguments, options: dict[str, Any], out: Any) -> dict[str, float]:
    """mamba_segsum: `bar`, the largest error in units of what is allowed. The others, against float64: `l2` and `max`,
    the relative L2 error of the worst batch row and the largest error; the same of PyTorch at its present precision
    settings (`torch_l2`, `torch_max`); and `tolerance`, the largest error in units of the official tolerance."""
    if case.op == "mamba_segsum":
        report = compare.compare(inputs.SegsumInputs(**x, g_layout=options["g_layout"]), out)
        return {"bar": max(r.max_ratio if r.ok else float("inf") for r in report.outputs.values())}
    truth = calls.formula(case, {name: t.double() for name, t in x.items()}, options)()
    found = _errors(out, truth)
    rival = _errors(_torch(case, x, options), truth)
    found |= {f"torch_{name}": value for name, value in rival.items()}
    if case.tolerance:
        found["tolerance"] = float(((out.double() - truth).abs() / case.tolerance.of(truth)).max())
    return found


def _torch(case: Case, x: calls.Arguments, options: dict[str, Any]) -> Tensor:
    """PyTorch's own result at its present precision settings, but for the filter, which is always plain fp32."""
    if case.op != "hyena_block":
        return calls.formula(case, x, options)()
    matmul = torch.backends.cuda.matmul
    saved, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        k = formulas.hyena_filter(x, case.sizes["length"])
    finally:
        matmul.allow_tf32 = saved
    return formulas.hyena_block(x["hidden_states"], x, k)


def _errors(out: Tensor, truth: Tensor) -> dict[str, float]:
    difference = (out.double() - truth).flatten(1) if truth.dim() > 2 else (out.double() - truth).flatten()[None]
    size = truth.reshape(difference.shape)
    l2 = torch.linalg.vector_norm(difference, dim=1) / torch.linalg.vector_norm(size, dim=1)
    return {"l2": float(l2.max()), "max": float(difference.abs().max())}
