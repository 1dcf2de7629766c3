"""The operators as plain PyTorch formulas: the rivals `torch` and `compile`, and in float64 the truth of error tables.

They compute in the type of their inputs' widest part (segsum: fp32, or `dtype`) and use torch's own settings for
matrix products. Weights of the Hyena block go by their official names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def mamba_segsum(
    dt: Tensor,  # [b, c, Q, H]
    A_log: Tensor,  # [H]
    B: Tensor,  # [b, c, Q, G, N]
    C: Tensor,  # [b, c, Q, G, N]
    dt_bias: Tensor | None,  # [H]
    g_layout: str,
) -> tuple[Tensor, ...]:
    """(L, G, M, A_cumsum, decay_states) as the benchmark has them: all in fp32, differences of one cumsum."""
    x = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    a = (-torch.exp(A_log.float()) * F.softplus(x)).permute(0, 3, 1, 2)  # [b, H, c, Q]
    sums = torch.cumsum(a, -1)
    above = torch.ones(*2 * a.shape[-1:], dtype=torch.bool, device=a.device).triu(1)
    L = torch.exp((sums[..., :, None] - sums[..., None, :]).masked_fill(above, float("-inf")))
    G = torch.einsum("bcign,bcjgn->bcijg", C.float(), B.float())
    per_head = G.repeat_interleave(dt.shape[3] // B.shape[3], -1)
    M = per_head * L.permute(0, 2, 3, 4, 1)
    decay_states = torch.exp(sums[..., -1:] - sums)
    G = G if g_layout == "per_group" else per_head
    return L.to(B.dtype), G.to(B.dtype), M.to(B.dtype), sums, decay_states


def hyena_filter(w: Mapping[str, Tensor], length: int, exp_mod_shift: float = 0.05) -> Tensor:
    """k [D, L], layout "reshape"."""
    first = w["filter_linear1_weight"]
    like = {"device": first.device, "dtype": first.dtype}
    bands = (first.shape[1] - 1) // 2
    steps = torch.arange(length, **like)
    t = steps / max(length - 1, 1)
    f = torch.linspace(1e-4, bands - 1, bands, device=first.device).to(first.dtype)
    phase = f * (2 * torch.pi * steps / length)[:, None]
    h = torch.cat([t[:, None], torch.cos(-phase), torch.sin(-phase)], 1)
    for i in (1, 2, 3):
        h = torch.sin(w["sin_freq"] * F.linear(h, w[f"filter_linear{i}_weight"], w[f"filter_linear{i}_bias"]))
    h = F.linear(h, w["filter_linear_final_weight"])
    h = h * (torch.exp(-t[:, None] * w["exp_mod_deltas"].reshape(-1).abs()) + exp_mod_shift) + w["filter_bias"]
    return h.reshape(h.shape[1], length)


def causal_long_conv(u: Tensor, k: Tensor) -> Tensor:  # [B, D, L], [D, L] -> [B, D, L]
    """Through an FFT padded to a power of two: cuFFT on a GPU."""
    n = 2 << (u.shape[-1] - 1).bit_length()
    return torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(k, n), n)[..., : u.shape[-1]]


def hyena_block(x: Tensor, w: Mapping[str, Tensor], k: Tensor | None = None, layer_norm_eps: float = 1e-5) -> Tensor:
    """The complete block for x [B, L, D], L at most l_max. `k` [D, L]: its filter, computed where it is not given."""
    length, width = x.shape[1:]
    n1 = F.layer_norm(x, (width,), w["norm1_weight"], w["norm1_bias"], layer_norm_eps)
    u = F.linear(n1, w["in_proj_weight"], w["in_proj_bias"]).transpose(1, 2)
    u = F.conv1d(u, w["short_conv_weight"], w["short_conv_bias"], padding=2, groups=3 * width)[..., :length]
    x0, x1, v = u.chunk(3, 1)  # [B, D, L]
    g = v * x1
    y = causal_long_conv(g, hyena_filter(w, length) if k is None else k) + g * w["filter_bias"][:, None]
    r = F.linear((y * x0).transpose(1, 2), w["out_proj_weight"], w["out_proj_bias"]) + x
    n2 = F.layer_norm(r, (width,), w["norm2_weight"], w["norm2_bias"], layer_norm_eps)
    h = F.gelu(F.linear(n2, w["mlp_fc1_weight"], w["mlp_fc1_bias"]), approximate="tanh")
    return F.linear(h, w["mlp_fc2_weight"], w["mlp_fc2_bias"]) + r
