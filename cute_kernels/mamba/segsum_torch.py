"""`mamba_segsum` in plain PyTorch: the operator for CPU tensors, and the backward of every device.

It materialises several float64 tensors of L's shape, so it is slow and hungry: for tests, small inputs and gradients.
The sums are taken in float64 because a running sum of fp32 steps loses the small ones, and its differences lose more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def segsum_torch(
    dt: Tensor,  # [b, c, Q, H]
    A_log: Tensor,  # [H]
    B: Tensor,  # [b, c, Q, G, N]
    C: Tensor,  # [b, c, Q, G, N]
    dt_bias: Tensor | None,  # [H]
    dt_min: float,
    dt_max: float,
    g_layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(L, G, M, A_cumsum, decay_states), in the operator's own shapes and types, contiguous."""
    q, h = dt.shape[2:]
    dtype = B.dtype
    A = _rates(A_log)
    a = (A * _softplus(dt, dt_bias).clamp(dt_min, dt_max)).permute(0, 3, 1, 2)  # [b, H, c, Q]
    L = _decay_matrix(a).float()
    per_group = _products(B, C).float()  # [b, c, Q, Q, G]
    per_head = per_group.repeat_interleave(h // B.shape[3], -1)  # [b, c, Q, Q, H]
    lower = torch.ones(q, q, dtype=torch.bool, device=dt.device).tril_()
    M = torch.where(lower[:, :, None], per_head * L.permute(0, 2, 3, 4, 1), 0.0)
    G = per_head if g_layout == "per_head" else per_group
    return (
        L.to(dtype).contiguous(),
        G.to(dtype).contiguous(),
        M.to(dtype).contiguous(),
        a.cumsum(-1).float().contiguous(),
        _later_sums(a).exp().float().contiguous(),
    )


def segsum_torch_backward(
    grads: list[Tensor | None],  # of the five outputs
    dt: Tensor,  # [b, c, Q, H]
    A_log: Tensor,  # [H]
    B: Tensor,  # [b, c, Q, G, N]
    C: Tensor,  # [b, c, Q, G, N]
    dt_bias: Tensor | None,  # [H]
    dt_min: float,
    dt_max: float,
    g_layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of dt, A_log, B, C and dt_bias, in their shapes and types, contiguous."""
    h, g = dt.shape[3], B.shape[3]
    dL, dG, dM, dA_cumsum, d_decay = (None if t is None else t.double() for t in grads)
    A = _rates(A_log)
    x = _softplus_input(dt, dt_bias)
    unclamped = F.softplus(x, threshold=40.0)
    step = unclamped.clamp(dt_min, dt_max)
    a = (A * step).permute(0, 3, 1, 2)  # [b, H, c, Q]

    da = torch.zeros_like(a)
    dP = torch.zeros((*B.shape[:3], B.shape[2], g), dtype=torch.float64, device=dt.device)  # [b, c, Q, Q, G]
    if dG is not None:
        dP = dP + (dG.unflatten(-1, (g, h // g)).sum(-1) if g_layout == "per_head" else dG)
    if dL is not None or dM is not None:
        L = _decay_matrix(a)
        d_decay_matrix = torch.zeros_like(L) if dL is None else dL  # of L, M's share added below
        if dM is not None:
            weight = L.permute(0, 2, 3, 4, 1)  # [b, c, Q, Q, H]
            # L is 0 above the diagonal, but 0 * NaN is not: drop what the forward dropped.
            dP = dP + torch.where(weight != 0, dM * weight, 0.0).unflatten(-1, (g, h // g)).sum(-1)
            per_head = _products(B, C).repeat_interleave(h // g, -1)
            d_decay_matrix = d_decay_matrix + (dM * per_head).permute(0, 4, 1, 2, 3)
        # L[i, j] = exp(sum of a over j < s <= i), so a[s] gathers the block i >= s > j.
        d_sums = torch.where(L != 0, d_decay_matrix * L, 0.0)
        da = da + d_sums.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
    if dA_cumsum is not None:
        da = da + dA_cumsum.flip(-1).cumsum(-1).flip(-1)
    if d_decay is not None:
        d_later = d_decay * _later_sums(a).exp()
        da = da + F.pad(d_later.cumsum(-1)[..., :-1], (1, 0))

    d_a = da.permute(0, 2, 3, 1)  # [b, c, Q, H]
    kept = (unclamped >= dt_min) & (unclamped <= dt_max)
    dx = torch.where(kept, d_a * A * torch.sigmoid(x), 0.0)
    dA_log = (d_a * step).sum((0, 1, 2)) * A
    dB = torch.einsum("bcijg,bcign->bcjgn", dP, C.double())
    dC = torch.einsum("bcijg,bcjgn->bcign", dP, B.double())
    d_bias = None if dt_bias is None else dx.sum((0, 1, 2)).to(dt_bias.dtype)
    return (
        dx.to(dt.dtype).contiguous(),
        dA_log.to(A_log.dtype),
        dB.to(B.dtype).contiguous(),
        dC.to(C.dtype).contiguous(),
        d_bias,
    )


def _rates(A_log: Tensor) -> Tensor:  # [H]
    """A = -exp(A_log), rounded to fp32 so that what overflows there is infinite."""
    return -A_log.double().exp().float().double()


def _softplus_input(dt: Tensor, dt_bias: Tensor | None) -> Tensor:  # [b, c, Q, H]
    return dt.double() if dt_bias is None else dt.double() + dt_bias.double()


def _softplus(dt: Tensor, dt_bias: Tensor | None) -> Tensor:  # [b, c, Q, H]
    # Beyond 40 softplus(x) is x to the last bit of a double.
    return F.softplus(_softplus_input(dt, dt_bias), threshold=40.0)


def _decay_matrix(a: Tensor) -> Tensor:  # [..., Q] -> [..., Q, Q]
    # Column j drops the steps up to j before anything is added: a difference of two running sums would turn every sum
    # past an infinite step into NaN.
    i = torch.arange(a.shape[-1], device=a.device)
    sums = torch.where(i[:, None] > i, a[..., :, None], 0.0).cumsum(-2)
    return sums.masked_fill(i[:, None] < i, float("-inf")).exp()


def _products(B: Tensor, C: Tensor) -> Tensor:  # [b, c, Q, G, N] twice -> [b, c, Q, Q, G]
    return torch.einsum("bcign,bcjgn->bcijg", C.double(), B.double())


def _later_sums(a: Tensor) -> Tensor:  # [..., Q] -> [..., Q]
    """Sum of a over s > i."""
    return F.pad(a[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
