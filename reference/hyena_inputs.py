"""Input sets for the Hyena block: `official`, the benchmark's, and `stress`, on which every stage matters.

On official inputs the whole operator moves the output by 2e-4 at most, so they cannot see most mistakes. The stress
set scales the weights so that each branch reaches the output at an rms near 1.
"""

import numpy as np

from reference.hyena import NAMES

# The benchmark's 16 shapes (batch, length).
OFFICIAL_SHAPES = (
    (1, 1024),
    (2, 4096),
    (16, 512),
    (1, 512),
    (4, 541),
    (2, 2048),
    (8, 997),
    (32, 256),
    (1, 2048),
    (2, 128),
    (2, 2053),
    (4, 256),
    (1, 4096),
    (1, 256),
    (1, 131),
    (2, 512),
)


def shapes(batch, length, width=256, inner=1024, order=64, emb_dim=5):
    d, m, o = width, inner, order
    sizes = (
        *((batch, length, d), (d,), (d,), (d,), (d,), (3 * d, d), (3 * d,), (3 * d, 1, 3), (3 * d,)),
        *((o, emb_dim), (o,), (1, o), (o, o), (o,), (o, o), (o,), (d, o), (d,), (1, 1, d)),
        *((d, d), (d,), (m, d), (m,), (d, m), (d,)),
    )
    return dict(zip(NAMES, sizes, strict=True))


def decay_rates(width):
    return np.linspace(np.log(0.01) / 1.5, np.log(0.01) / 0.3, width).reshape(1, 1, width)


def official(batch, length, seed=0, **dims):
    """The benchmark's distribution: 0.02 * normal for every weight and bias, norms the identity."""
    rng = np.random.default_rng(seed)
    fixed = {"norm1_weight": 1.0, "norm2_weight": 1.0, "norm1_bias": 0.0, "norm2_bias": 0.0, "sin_freq": 1.0}
    out = {}
    for name, shape in shapes(batch, length, **dims).items():
        if name == "exp_mod_deltas":
            value = decay_rates(shape[-1])
        elif name in fixed:
            value = np.full(shape, fixed[name])
        else:
            value = rng.standard_normal(shape) * (1.0 if name == "hidden_states" else 0.02)
        out[name] = value.astype(np.float32)
    return out


def stress(batch, length, seed=0, sin_freq=10.0, **dims):
    """Every branch at rms near 1, norms and biases random, sine frequencies up to `sin_freq`."""
    rng = np.random.default_rng(seed)
    size = shapes(batch, length, **dims)
    normal = rng.standard_normal
    # A sum over time of k * g grows with sqrt(length): both parts of the filter shrink with it.
    over_time = 1.0 / np.sqrt(max(length, 1))
    scale = {
        "hidden_states": 1.0,
        "norm1_bias": 0.5,
        "norm2_bias": 0.5,
        "in_proj_bias": 0.3,
        "short_conv_weight": 0.6,
        "short_conv_bias": 0.3,
        "filter_linear1_bias": 0.5,
        "filter_linear2_bias": 0.1,
        "filter_linear3_bias": 0.1,
        "filter_bias": min(1.0, over_time),
        "out_proj_bias": 0.3,
        "mlp_fc1_bias": 0.5,
        "mlp_fc2_bias": 0.3,
    }
    gain = {
        "filter_linear1_weight": 1.0,
        "filter_linear_final_weight": 4.0 * min(1.0, over_time),
        "mlp_fc2_weight": 1.5,
    }
    out = {}
    for name, shape in size.items():
        if name == "exp_mod_deltas":
            value = decay_rates(shape[-1])
        elif name in ("norm1_weight", "norm2_weight"):
            value = 1.0 + 0.3 * normal(shape)
        elif name == "sin_freq":
            value = rng.uniform(min(1.0, sin_freq), sin_freq, shape)
        elif name in ("filter_linear2_weight", "filter_linear3_weight"):
            value = rng.uniform(-1.0, 1.0, shape) / np.sqrt(shape[1])
        elif name in scale:
            value = scale[name] * normal(shape)
        else:
            value = gain.get(name, 1.0) * normal(shape) / np.sqrt(shape[1])
        out[name] = value.astype(np.float32)
    return out


SETS = {"official": official, "stress": stress}
