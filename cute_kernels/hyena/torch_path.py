"""The Hyena block in plain PyTorch: the path of CPU tensors, and what the backward pass recomputes through.

Everything is differentiable and in the tensors' own dtype (fp32 in the operator). The functions take the weights by
their official names, as a mapping.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


@contextlib.contextmanager
def full_fp32() -> Iterator[None]:
    """No TF32 inside: the filter's sine layers turn a rounded operand into errors of percents."""
    saved = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = saved


def positions(
    length: int, emb_dim: int, norm_len: int | None, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """t / (L - 1) [L], and the filter MLP's input z [L, emb_dim]."""
    n = length if norm_len is None else norm_len
    bands = (emb_dim - 1) // 2
    # linspace in fp32 is part of the formula; the rest is made in double, where it costs nothing.
    f = torch.linspace(1e-4, bands - 1, bands, dtype=torch.float32, device=device).double()
    steps = torch.arange(length, device=device, dtype=torch.float64)
    t = steps / max(n - 1, 1)
    phase = f * (2 * torch.pi * steps / n)[:, None]
    return t.to(dtype), torch.cat([t[:, None], torch.cos(-phase), torch.sin(-phase)], dim=1).to(dtype)


def hyena_filter(
    w: Mapping[str, Tensor],
    length: int,
    exp_mod_shift: float,
    filter_layout: str = "reshape",
    bias_in_filter: bool = True,
    norm_len: int | None = None,
    z: Tensor | None = None,
) -> Tensor:
    """The implicit filter k [D, L]."""
    first = w["filter_linear1_weight"]
    t, made = positions(length, first.shape[1], norm_len, first.device, first.dtype)
    freq = w["sin_freq"].reshape(-1)
    h = made if z is None else z[:length]
    with full_fp32():
        for i in (1, 2, 3):
            h = torch.sin(freq * F.linear(h, w[f"filter_linear{i}_weight"], w[f"filter_linear{i}_bias"]))
        h = F.linear(h, w["filter_linear_final_weight"])
    h = h * (torch.exp(-t[:, None] * w["exp_mod_deltas"].reshape(-1).abs()) + exp_mod_shift)
    if bias_in_filter:
        h = h + w["filter_bias"]
    return h.reshape(h.shape[1], length) if filter_layout == "reshape" else h.T


def causal_long_conv(u: Tensor, k: Tensor) -> Tensor:
    """y[b, d, t] = sum_{s <= t} k[d, s] u[b, d, t - s] for u [B, D, L]; k [D, Lk] is cut or zero-padded to L."""
    length = u.shape[-1]
    if u.numel() == 0:
        return torch.zeros_like(u)
    n = 1 << max(1, (2 * length - 1).bit_length())
    spectrum = torch.fft.rfft(u, n) * torch.fft.rfft(k[..., :length], n)
    return torch.fft.irfft(spectrum, n)[..., :length]


def short_conv(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Three causal taps over time for u [B, L, C]; weight [C, 1, 3], bias [C]."""
    padded = F.pad(u, (0, 0, 2, 0))
    length = u.shape[1]
    return bias + sum(weight[:, 0, j] * padded[:, j : j + length] for j in range(3))


def hyena_block(
    x: Tensor,
    w: Mapping[str, Tensor],
    layer_norm_eps: float = 1e-5,
    exp_mod_shift: float = 0.05,
    l_max: int = 32768,
    filter_layout: str = "reshape",
    bias_in_filter: bool = True,
    norm_len: int | None = None,
    z: Tensor | None = None,
) -> Tensor:
    """The complete block for x [B, L, D]."""
    length, width = x.shape[1:]
    lf = min(length, l_max)
    n1 = F.layer_norm(x[:, :lf], (width,), w["norm1_weight"], w["norm1_bias"], layer_norm_eps)
    u = F.linear(n1, w["in_proj_weight"], w["in_proj_bias"])
    uc = short_conv(u, w["short_conv_weight"], w["short_conv_bias"]).transpose(1, 2)
    x0, x1, v = uc.chunk(3, dim=1)  # [B, D, Lf]
    g = v * x1
    k = hyena_filter(w, lf, exp_mod_shift, filter_layout, bias_in_filter, norm_len, z)
    y = causal_long_conv(g, k) + g * w["filter_bias"][:, None]
    p = F.pad((y * x0).transpose(1, 2), (0, 0, 0, length - lf))
    r = F.linear(p, w["out_proj_weight"], w["out_proj_bias"]) + x
    n2 = F.layer_norm(r, (width,), w["norm2_weight"], w["norm2_bias"], layer_norm_eps)
    hidden = F.gelu(F.linear(n2, w["mlp_fc1_weight"], w["mlp_fc1_bias"]), approximate="tanh")
    return F.linear(hidden, w["mlp_fc2_weight"], w["mlp_fc2_bias"]) + r
