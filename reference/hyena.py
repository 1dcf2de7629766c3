"""The Hyena block in float64, every intermediate kept: what the kernels are judged against.

numpy alone, one line per formula, no concern for speed. `block` takes the operator's tensors by their official
names and returns all intermediates; `stage_errors` in the tests compares any of them.
"""

from collections.abc import Mapping

import numpy as np

GELU_C0, GELU_C1 = np.sqrt(2.0 / np.pi), 0.044715

# The 25 tensors in the order of the operator's signature.
NAMES = (
    "hidden_states",
    "norm1_weight",
    "norm1_bias",
    "norm2_weight",
    "norm2_bias",
    "in_proj_weight",
    "in_proj_bias",
    "short_conv_weight",
    "short_conv_bias",
    "filter_linear1_weight",
    "filter_linear1_bias",
    "sin_freq",
    "filter_linear2_weight",
    "filter_linear2_bias",
    "filter_linear3_weight",
    "filter_linear3_bias",
    "filter_linear_final_weight",
    "filter_bias",
    "exp_mod_deltas",
    "out_proj_weight",
    "out_proj_bias",
    "mlp_fc1_weight",
    "mlp_fc1_bias",
    "mlp_fc2_weight",
    "mlp_fc2_bias",
)


def f64(x):
    return np.asarray(x, dtype=np.float64)


def layer_norm(x, weight, bias, eps):  # x [..., D]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def gelu_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(GELU_C0 * (x + GELU_C1 * x**3)))


def short_conv(u, weight, bias):  # u [B, L, C], weight [C, 1, 3], bias [C] -> [B, L, C]
    length = u.shape[1]
    padded = np.pad(u, ((0, 0), (2, 0), (0, 0)))
    return bias + sum(weight[:, 0, j] * padded[:, j : j + length] for j in range(3))


def causal_conv(k, g):
    """y[..., d, t] = sum_{s <= t} k[d, s] g[..., d, t - s], through an FFT long enough to be linear."""
    length = g.shape[-1]
    if length == 0:
        return np.zeros_like(g)
    n = 1 << max(1, (2 * length - 1).bit_length())
    k = k[..., :length]
    return np.fft.irfft(np.fft.rfft(g, n) * np.fft.rfft(k, n), n)[..., :length]


def long_conv(u, k, skip=None, pre_gate=None, post_gate=None):
    """(k * g + skip g) post_gate with g = u pre_gate, for u [B, D, L] and k [D, Lk]."""
    g = f64(u) if pre_gate is None else f64(u) * f64(pre_gate)
    y = causal_conv(f64(k), g)
    y = y if skip is None else y + g * f64(skip)[:, None]
    return y if post_gate is None else y * f64(post_gate)


def positions(length, emb_dim, norm_len=None):
    """t / (L - 1) and the filter MLP's input z [length, emb_dim]; `norm_len` takes L's place in both."""
    n = length if norm_len is None else norm_len
    bands = (emb_dim - 1) // 2
    t = np.arange(length) / max(n - 1, 1)
    f = f64(np.linspace(1e-4, bands - 1, bands, dtype=np.float32))
    phase = f * (2 * np.pi * np.arange(length) / n)[:, None]
    return t, np.concatenate([t[:, None], np.cos(-phase), np.sin(-phase)], axis=1)


def hyena_filter(
    p: Mapping, length, exp_mod_shift, filter_layout="reshape", bias_in_filter=True, norm_len=None, z=None
):
    """Step 5 and 6: dict with z, the hidden layers, h [L, D] and k [D, L]."""
    p = {name: f64(value) for name, value in p.items() if name != "hidden_states"}
    t, made = positions(length, p["filter_linear1_weight"].shape[1], norm_len)
    z = made if z is None else f64(z)[:length]
    freq = p["sin_freq"].reshape(-1)
    h1 = np.sin(freq * (z @ p["filter_linear1_weight"].T + p["filter_linear1_bias"]))
    h2 = np.sin(freq * (h1 @ p["filter_linear2_weight"].T + p["filter_linear2_bias"]))
    h3 = np.sin(freq * (h2 @ p["filter_linear3_weight"].T + p["filter_linear3_bias"]))
    h = h3 @ p["filter_linear_final_weight"].T
    h = h * (np.exp(-t[:, None] * np.abs(p["exp_mod_deltas"].reshape(-1))) + exp_mod_shift)
    if bias_in_filter:
        h = h + p["filter_bias"]
    width = h.shape[1]
    k = h.reshape(width, length) if filter_layout == "reshape" else h.T
    return {"z": z, "h1": h1, "h2": h2, "h3": h3, "h": h, "k": np.ascontiguousarray(k)}


def block(
    p: Mapping,
    layer_norm_eps=1e-5,
    exp_mod_shift=0.05,
    l_max=32768,
    filter_layout="reshape",
    bias_in_filter=True,
    norm_len=None,
    z=None,
):
    """Every intermediate of the block, by name; "out" is the result."""
    q = {name: f64(value) for name, value in p.items()}
    x = q["hidden_states"]
    batch, length, width = x.shape
    lf = min(length, l_max)
    s = {}
    s["n1"] = layer_norm(x, q["norm1_weight"], q["norm1_bias"], layer_norm_eps)
    s["u"] = s["n1"] @ q["in_proj_weight"].T + q["in_proj_bias"]
    s["uc"] = short_conv(s["u"][:, :lf], q["short_conv_weight"], q["short_conv_bias"])
    x0, x1, v = (s["uc"][:, :, i * width : (i + 1) * width].transpose(0, 2, 1) for i in range(3))
    s["x0"], s["g"] = x0, v * x1  # [B, D, Lf]
    s.update(hyena_filter(p, lf, exp_mod_shift, filter_layout, bias_in_filter, norm_len, z))
    s["conv"] = causal_conv(s["k"], s["g"])
    s["y"] = s["conv"] + s["g"] * q["filter_bias"][:, None]
    s["p"] = s["y"] * x0  # what out_proj sees, channels first
    p_rows = np.zeros((batch, length, width))
    p_rows[:, :lf] = s["p"].transpose(0, 2, 1)
    s["r"] = p_rows @ q["out_proj_weight"].T + q["out_proj_bias"] + x
    s["n2"] = layer_norm(s["r"], q["norm2_weight"], q["norm2_bias"], layer_norm_eps)
    s["hidden"] = gelu_tanh(s["n2"] @ q["mlp_fc1_weight"].T + q["mlp_fc1_bias"])
    s["out"] = s["hidden"] @ q["mlp_fc2_weight"].T + q["mlp_fc2_bias"] + s["r"]
    return s
