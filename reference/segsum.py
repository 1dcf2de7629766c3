"""`mamba_segsum` in float64, straight from its formulas.

Source: the segment sum of Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv:2405.21060) in the form of the
public benchmark SOL-ExecBench L2/044:

    a[b,h,c,i]      = -exp(A_log[h]) * clamp(softplus(dt[b,c,i,h] + dt_bias[h]), dt_min, dt_max)
    A_cumsum[...,i] = sum_{s<=i} a[...,s]
    L[...,i,j]      = exp(sum_{j<s<=i} a[...,s])  for j <= i, 0 for j > i
    G[b,c,i,j,h]    = sum_n C[b,c,i,g(h),n] * B[b,c,j,g(h),n],  g(h) = h // (H // G)
    M[b,c,i,j,h]    = G * L  for j <= i, 0 for j > i
    decay_states    = exp(sum_{i<s<Q} a[...,s])

Every function runs where its inputs are, CPU or GPU, and follows IEEE for inputs that are not finite. Every sum adds
exactly the steps it names: a difference of two prefix sums would cancel, and would turn a sum that holds no NaN and
no infinity into NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

INF = float("inf")


class SegsumReference(NamedTuple):
    """The five outputs in float64, not rounded to the operator's types."""

    L: Tensor  # [b, H, c, Q, Q]
    G: Tensor  # [b, c, Q, Q, H], or [b, c, Q, Q, G] with g_layout="per_group"
    M: Tensor  # [b, c, Q, Q, H]
    A_cumsum: Tensor  # [b, H, c, Q]
    decay_states: Tensor  # [b, H, c, Q]


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow or cancellation at either end, differentiable everywhere."""
    return torch.logaddexp(x, torch.zeros_like(x))


def steps(
    dt: Tensor,  # [b, c, Q, H]
    A_log: Tensor,  # [H]
    dt_bias: Tensor | None = None,  # [H]
    dt_limit: tuple[float, float] = (0.0, INF),
) -> Tensor:
    """The exponents a: [b, H, c, Q]."""
    x = dt.double()
    if dt_bias is not None:
        x = x + dt_bias.double()
    a = -_range_of_fp32(torch.exp(A_log.double())) * softplus(x).clamp(*dt_limit)
    return _range_of_fp32(a).permute(0, 3, 1, 2)


def _range_of_fp32(x: Tensor) -> Tensor:
    """The steps are fp32 by definition, so what overflows there is infinite here too."""
    return torch.where(x.float().isinf(), x.float().double(), x)


def segment_sums(a: Tensor) -> Tensor:  # [..., Q] -> [..., Q, Q]
    """x[i, j] = sum of a[s] over j < s <= i; 0 for i <= j."""
    q = a.shape[-1]
    s = torch.arange(q, device=a.device)
    # Column j keeps the steps after j and drops the others before anything is added.
    kept = torch.where(s[:, None] > s[None, :], a[..., :, None], 0.0)
    return kept.cumsum(-2)


def lower_triangle(q: int, device: torch.device) -> Tensor:  # [Q, Q], True where j <= i
    i = torch.arange(q, device=device)
    return i[:, None] >= i[None, :]


def decay_matrix(a: Tensor) -> Tensor:  # [..., Q] -> [..., Q, Q]
    """L for exponents a."""
    return torch.where(lower_triangle(a.shape[-1], a.device), torch.exp(segment_sums(a)), 0.0)


def products(B: Tensor, C: Tensor) -> Tensor:  # [b, c, Q, G, N] twice -> [b, c, Q, Q, G]
    """C_i . B_j of every group."""
    b = B.double().permute(0, 1, 3, 4, 2)  # [b, c, G, N, j]
    c = C.double().permute(0, 1, 3, 2, 4)  # [b, c, G, i, N]
    return (c @ b).permute(0, 1, 3, 4, 2)


def later_sums(a: Tensor) -> Tensor:  # [..., Q] -> [..., Q]
    """Sum of a[s] over s > i."""
    after = torch.cat([a[..., 1:], torch.zeros_like(a[..., :1])], -1)
    return after.flip(-1).cumsum(-1).flip(-1)


def segsum(
    dt: Tensor,  # [b, c, Q, H]
    A_log: Tensor,  # [H]
    B: Tensor,  # [b, c, Q, G, N]
    C: Tensor,  # [b, c, Q, G, N]
    dt_bias: Tensor | None = None,  # [H]
    dt_limit: tuple[float, float] = (0.0, INF),
    g_layout: str = "per_head",
) -> SegsumReference:
    """All five outputs, whole. For large problems `reference.compare` does the same chunk by chunk."""
    q, h = dt.shape[2:]
    a = steps(dt, A_log, dt_bias, dt_limit)
    L = decay_matrix(a)
    per_group = products(B, C)
    G = per_group.repeat_interleave(h // B.shape[3], -1)
    mask = lower_triangle(q, dt.device)[:, :, None]
    M = torch.where(mask, G * L.permute(0, 2, 3, 4, 1), 0.0)
    return SegsumReference(L, G if g_layout == "per_head" else per_group, M, a.cumsum(-1), torch.exp(later_sums(a)))
