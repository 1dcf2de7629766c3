"""A HyenaDNA layer written from its description, with nothing of the package: what `from_state_dict` is judged by.

It works on the layer's state_dict alone, in float64, token by token where that says more than a library call.
"""

import math

import torch


def layer(state: dict[str, torch.Tensor], x: torch.Tensor, eps: float = 1e-5, shift: float = 0.05) -> torch.Tensor:
    s = {name: t.double() for name, t in state.items()}
    x = x.double()
    return _second_half(s, x + _operator(s, _norm(x, s, "norm1", eps), shift), eps)


def _norm(x, s, name, eps):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * s[f"{name}.weight"] + s[f"{name}.bias"]


def _second_half(s, r, eps):
    h = _norm(r, s, "norm2", eps) @ s["mlp.fc1.weight"].T + s["mlp.fc1.bias"]
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return h @ s["mlp.fc2.weight"].T + s["mlp.fc2.bias"] + r


def _operator(s, x, shift):
    length, width = x.shape[1:]
    u = x @ s["mixer.in_proj.weight"].T + s["mixer.in_proj.bias"]  # [B, L, 3D]
    taps = s["mixer.short_filter.weight"][:, 0]  # [3D, 3], the last one meets the present
    short = torch.zeros_like(u) + s["mixer.short_filter.bias"]
    for t in range(length):
        for back in range(min(3, t + 1)):
            short[:, t] += taps[:, 2 - back] * u[:, t - back]
    x0, x1, v = short.split(width, dim=2)
    g = v * x1
    k = _kernel(s, length, shift)  # [L, D]
    y = torch.zeros_like(g)
    for t in range(length):
        y[:, t] = (k[: t + 1].flip(0) * g[:, : t + 1]).sum(1)
    y = (y + g * s["mixer.filter_fn.bias"]) * x0
    return y @ s["mixer.out_proj.weight"].T + s["mixer.out_proj.bias"]


def _kernel(s, length, shift):
    h = s["mixer.filter_fn.pos_emb.z"][0, :length]
    t = s["mixer.filter_fn.pos_emb.t"][0, :length]
    for number in (0, 2, 4):
        name = f"mixer.filter_fn.implicit_filter.{number}"
        freq = s[f"mixer.filter_fn.implicit_filter.{number + 1}.freq"]
        h = torch.sin(freq * (h @ s[f"{name}.weight"].T + s[f"{name}.bias"]))
    h = h @ s["mixer.filter_fn.implicit_filter.6.weight"].T
    return h * (torch.exp(-t * s["mixer.filter_fn.modulation.deltas"][0].abs()) + shift)
