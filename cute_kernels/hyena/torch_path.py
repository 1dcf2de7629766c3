"""The Hyena block in plain PyTorch: the path of CPU tensors, what covers what has no kernel, and the backward pass.

Everything is differentiable (but for the rounding of "medium") and in the tensors' own dtype, fp32 in the operators.
The functions take the weights by their official names, as a mapping. They expect `precision.products` around them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.hyena.precision import linear, operand, products


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
    z: Tensor | None = None,  # [rows, emb_dim] or [1, rows, emb_dim]
) -> Tensor:
    """The implicit filter k [D, L]. In full fp32: the sine layers turn a rounded operand into percents of error."""
    first = w["filter_linear1_weight"]
    t, made = positions(length, first.shape[1], norm_len, first.device, first.dtype)
    freq = w["sin_freq"].reshape(-1)
    h = made if z is None else z.reshape(-1, first.shape[1])[:length]
    with products("highest", first.device):
        for i in (1, 2, 3):
            h = torch.sin(freq * F.linear(h, w[f"filter_linear{i}_weight"], w[f"filter_linear{i}_bias"]))
        h = F.linear(h, w["filter_linear_final_weight"])
    h = h * (torch.exp(-t[:, None] * w["exp_mod_deltas"].reshape(-1).abs()) + exp_mod_shift)
    if bias_in_filter:
        h = h + w["filter_bias"]
    return h.reshape(h.shape[1], length) if filter_layout == "reshape" else h.T


def causal_long_conv(
    u: Tensor,  # [B, D, L]
    k: Tensor,  # [D, Lk], cut or zero-padded to L
    skip: Tensor | None = None,  # [D]
    pre_gate: Tensor | None = None,  # [B, D, L]
    post_gate: Tensor | None = None,  # [B, D, L]
    precision: str = "highest",
) -> Tensor:
    """post_gate * (y + skip * g) with g = u * pre_gate and y[b, d, t] = sum_{s <= t} k[d, s] g[b, d, t - s]."""
    length = u.shape[-1]
    g = u if pre_gate is None else u * pre_gate
    n = 1 << max(1, (2 * length - 1).bit_length())
    if u.numel() == 0 or k.shape[-1] == 0:
        y = torch.zeros_like(g)
    else:
        spectrum = torch.fft.rfft(operand(g, precision), n) * torch.fft.rfft(operand(k[..., :length], precision), n)
        y = torch.fft.irfft(spectrum, n)[..., :length]
    if skip is not None:
        y = y + skip[:, None] * g
    return y if post_gate is None else y * post_gate


def short_conv(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Three causal taps over time for u [B, L, C]; weight [C, 1, 3], bias [C]."""
    padded = F.pad(u, (0, 0, 2, 0))
    length = u.shape[1]
    return bias + sum(weight[:, 0, j] * padded[:, j : j + length] for j in range(3))


def project(
    x: Tensor,  # [B, L, D]
    w: Mapping[str, Tensor],
    layer_norm_eps: float,
    precision: str = "highest",
) -> tuple[Tensor, Tensor]:
    """g = v * x1 and x0, both [B, D, L]: LayerNorm, in_proj, short convolution, gate."""
    n1 = F.layer_norm(x, x.shape[2:], w["norm1_weight"], w["norm1_bias"], layer_norm_eps)
    u = linear(n1, w["in_proj_weight"], w["in_proj_bias"], precision)
    uc = short_conv(u, w["short_conv_weight"], w["short_conv_bias"]).transpose(1, 2)
    x0, x1, v = uc.chunk(3, dim=1)
    return v * x1, x0


def finish(
    p: Tensor,  # [B, D, Lf]: the operator's output before out_proj; beyond Lf it counts as zero
    x: Tensor,  # [B, L, D]
    w: Mapping[str, Tensor],
    layer_norm_eps: float,
    precision: str = "highest",
) -> Tensor:
    """[B, L, D]: out_proj, residual, LayerNorm, fc1, GELU, fc2, residual."""
    p = F.pad(p.transpose(1, 2), (0, 0, 0, x.shape[1] - p.shape[2]))
    r = linear(p, w["out_proj_weight"], w["out_proj_bias"], precision) + x
    n2 = F.layer_norm(r, x.shape[2:], w["norm2_weight"], w["norm2_bias"], layer_norm_eps)
    hidden = F.gelu(linear(n2, w["mlp_fc1_weight"], w["mlp_fc1_bias"], precision), approximate="tanh")
    return linear(hidden, w["mlp_fc2_weight"], w["mlp_fc2_bias"], precision) + r


def hyena_block(
    x: Tensor,  # [B, L, D]
    w: Mapping[str, Tensor],
    layer_norm_eps: float = 1e-5,
    exp_mod_shift: float = 0.05,
    l_max: int = 32768,
    filter_layout: str = "reshape",
    bias_in_filter: bool = True,
    norm_len: int | None = None,
    z: Tensor | None = None,
    precision: str = "highest",
    k: Tensor | None = None,  # [D, Lf], made from the weights unless given
) -> Tensor:
    """The complete block, [B, L, D]."""
    lf = min(x.shape[1], l_max)
    g, x0 = project(x[:, :lf], w, layer_norm_eps, precision)
    if k is None:
        k = hyena_filter(w, lf, exp_mod_shift, filter_layout, bias_in_filter, norm_len, z)
    p = causal_long_conv(g, k, w["filter_bias"], None, x0, precision)
    return finish(p, x, w, layer_norm_eps, precision)


@contextlib.contextmanager
def _autograd_inside_an_op() -> Iterator[None]:
    """torch runs an op below autograd, out of its reach: this brings it back."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def gradients(
    function: Callable[[Sequence[Tensor | None]], Tensor],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],  # one for each input
    grad: Tensor,
) -> list[Tensor]:
    """Gradients of the inputs that need one, in order: the function once more, in full fp32, and back through it."""
    if grad.numel() == 0:
        wanted = [t for t, n in zip(inputs, needed, strict=True) if n]
        return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in wanted]
    leaves = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(inputs, needed, strict=True)]
    wanted = [t for t, n in zip(leaves, needed, strict=True) if n]
    with _autograd_inside_an_op(), products("highest", grad.device):
        found = torch.autograd.grad(function(leaves), wanted, grad, materialize_grads=True)
    return [g.contiguous() for g in found]
