"""Input sets of `mamba_segsum`: the benchmark's own, and the ones that break such kernels.

Every generator takes a seed and a device and draws on the CPU, so that a seed names the same numbers everywhere.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

INF = float("inf")
NAN = float("nan")


class SegsumInputs(NamedTuple):
    """The operator's arguments in its own order: `mamba_segsum(*inputs)`."""

    dt: Tensor  # [b, c, Q, H]
    A_log: Tensor  # [H]
    B: Tensor  # [b, c, Q, G, N]
    C: Tensor  # [b, c, Q, G, N]
    dt_bias: Tensor | None = None  # [H]
    dt_limit: tuple[float, float] = (0.0, INF)
    g_layout: str = "per_head"


def inverse_softplus(y: float) -> float:
    """The x with log(1 + exp(x)) = y."""
    return y + math.log(-math.expm1(-y))


def official(
    seed: int,
    device: torch.device | str = "cpu",
    *,
    batch: int = 1,
    chunks: int = 1,
    chunk_size: int = 256,
    heads: int = 16,
    groups: int = 1,
    d_state: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    dt_dtype: torch.dtype = torch.bfloat16,
    A_dtype: torch.dtype = torch.bfloat16,
    bias_dtype: torch.dtype | None = None,
    dt_limit: tuple[float, float] = (0.0, INF),
    g_layout: str = "per_head",
) -> SegsumInputs:
    """The benchmark's law, any shape and type: A_log uniform in (-5, -1), the rest standard normal."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    dt = normal(batch, chunks, chunk_size, heads)
    A_log = -5 + 4 * torch.rand(heads, generator=gen)
    B = normal(batch, chunks, chunk_size, groups, d_state)
    C = normal(batch, chunks, chunk_size, groups, d_state)
    bias = None if bias_dtype is None else normal(heads).to(device, bias_dtype)
    return SegsumInputs(
        dt.to(device, dt_dtype),
        A_log.to(device, A_dtype),
        B.to(device, dtype),
        C.to(device, dtype),
        bias,
        dt_limit,
        g_layout,
    )


def long_decay(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """A = -1 .. -H over constant dt = 3: the running sum reaches tens of thousands. H = 128 unless told."""
    x = official(seed, device, **{"heads": 128, "A_dtype": torch.float32, **shape})
    A_log = torch.arange(1, len(x.A_log) + 1, device=device).log()
    return x._replace(dt=torch.full_like(x.dt, 3.0), A_log=A_log.to(x.A_log.dtype))


def fast_then_slow(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """a = -1 for 100 steps, then -0.1: clamping or factoring the running sum loses the later steps."""
    x = official(seed, device, **{"dt_dtype": torch.float32, **shape})
    dt = torch.full_like(x.dt, inverse_softplus(0.1))
    dt[:, :, : min(100, dt.shape[2] // 2)] = inverse_softplus(1.0)
    return x._replace(dt=dt, A_log=torch.zeros_like(x.A_log))


def steep(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """A = -16, dt = 3: above the diagonal exp(-x) would overflow; below it everything but a band vanishes."""
    x = official(seed, device, **{"A_dtype": torch.float32, **shape})
    return x._replace(dt=torch.full_like(x.dt, 3.0), A_log=torch.full_like(x.A_log, math.log(16)))


def mixture(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """A log-uniform in -(1/8 .. 128); dt after softplus log-uniform in 1e-4 .. 5, large and tiny steps side by side."""
    x = official(seed, device, **{"dt_dtype": torch.float32, "A_dtype": torch.float32, **shape})
    gen = torch.Generator().manual_seed(seed + 1)
    y = torch.exp(torch.empty(x.dt.shape, dtype=torch.float64).uniform_(math.log(1e-4), math.log(5.0), generator=gen))
    dt = y + torch.log(-torch.expm1(-y))
    A = torch.exp2(torch.empty(x.A_log.shape, dtype=torch.float64).uniform_(-3, 7, generator=gen))
    A[-1] = 128
    return x._replace(dt=dt.to(device, x.dt.dtype), A_log=A.log().to(device, x.A_log.dtype))


def huge_then_tiny(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """A = -128; half of the steps 5, then 1e-4 .. 1e-6: an fp32 running sum swallows the tiny ones."""
    x = official(seed, device, **{"dt_dtype": torch.float32, "A_dtype": torch.float32, **shape})
    dt = torch.full_like(x.dt, inverse_softplus(5.0))
    q = dt.shape[2]
    dt[:, :, q // 2 :] = torch.linspace(math.log(1e-4), math.log(1e-6), q - q // 2, device=device)[:, None]
    return x._replace(dt=dt, A_log=torch.full_like(x.A_log, math.log(128)))


SOFTPLUS_POINTS = (-20.0, -17.0, -16.0, 0.0, 19.9, 20.0, 20.1, 88.0, 100.0)


def softplus_points(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """dt where softplus goes wrong: log(1 + e) is 0 below -17, exp overflows above 88. One point fills one stretch."""
    x = official(seed, device, **{"dt_dtype": torch.float32, **shape})
    points = torch.tensor(SOFTPLUS_POINTS, device=device, dtype=x.dt.dtype)
    q, h = x.dt.shape[2:]
    steps = torch.arange(q, device=device)[:, None] * len(points) // q
    # Heads start at different points; the last head has the points in falling order, so that tiny steps come last.
    order = (steps + torch.arange(h, device=device)) % len(points)
    order[:, -1] = len(points) - 1 - steps[:, 0]
    return x._replace(dt=points[order].expand(x.dt.shape).contiguous())


def softplus_not_finite(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """One +inf, -inf or nan in dt, each in a head of its own; two +inf in the fourth head. Needs H >= 4."""
    x = official(seed, device, **shape)
    dt = x.dt.clone()
    q = dt.shape[2]
    dt[..., q // 3, 0] = INF
    dt[..., q // 3, 1] = -INF
    dt[..., q // 3, 2] = NAN
    dt[..., q // 4, 3] = INF
    dt[..., q // 2, 3] = INF
    return x._replace(dt=dt)


def scattered_not_finite(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """nan, +inf and -inf anywhere in dt (2%), A_log of nan, +inf and -inf in three heads; B and C finite. H >= 4."""
    x = official(seed, device, **shape)
    gen = torch.Generator().manual_seed(seed + 1)
    bad = torch.tensor([NAN, INF, -INF])[torch.randint(3, x.dt.shape, generator=gen)]
    hit = torch.rand(x.dt.shape, generator=gen) < 0.02
    dt = torch.where(hit.to(device), bad.to(device, x.dt.dtype), x.dt)
    A_log = x.A_log.clone()
    A_log[:3] = torch.tensor([NAN, INF, -INF])
    return x._replace(dt=dt, A_log=A_log)


def not_finite_operands(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """nan and inf in single elements of B and C: their rows and columns of G turn, nothing else does."""
    x = official(seed, device, **shape)
    B, C = x.B.clone(), x.C.clone()
    q = B.shape[2]
    B[:, :, q // 3, 0, 0] = NAN
    B[:, :, q // 2, -1, -1] = INF
    C[:, :, q // 4, 0, -1] = -INF
    C[:, :, q - 1, -1, 0] = NAN
    return x._replace(B=B, C=C)


def no_decay(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """A_log = -inf: A = 0, L = 1 everywhere below the diagonal."""
    x = official(seed, device, **shape)
    return x._replace(A_log=torch.full_like(x.A_log, -INF))


def group_index(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """Group g of B is filled with g + 1, C with ones: G names the group that every head used."""
    x = official(seed, device, **{"heads": 16, "groups": 4, **shape})
    values = torch.arange(1, x.B.shape[3] + 1, device=device, dtype=x.B.dtype)
    return x._replace(B=values[:, None].expand(x.B.shape).contiguous(), C=torch.ones_like(x.C))


def cancelling(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """B and C large, of alternating sign: products of 1e4 cancel down to the size of their rounding."""
    x = official(seed, device, **shape)
    n = x.B.shape[-1]
    sign = 1.0 - 2.0 * (torch.arange(n, device=device) % 2)
    B = (100 + x.B.float()).to(x.B.dtype)
    C = ((100 + x.C.float()) * sign).to(x.C.dtype)
    return x._replace(B=B, C=C)


def large_products(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """fp16 operands whose products pass 65504: G overflows to inf, and M returns to finite where L is small."""
    x = official(seed, device, **{"dtype": torch.float16, **shape})
    return x._replace(B=x.B * 64, C=x.C * 64)


def hf_init(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """The law of Hugging Face's initialisation: A_log = log(1 .. H), dt_bias = 1."""
    x = official(seed, device, **{"A_dtype": torch.float32, "bias_dtype": torch.float32, **shape})
    A_log = torch.arange(1, len(x.A_log) + 1, device=device).log().to(x.A_log.dtype)
    return x._replace(A_log=A_log, dt_bias=torch.ones_like(x.dt_bias))


def mamba_init(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """The law of mamba_ssm's initialisation: A uniform in -(1 .. 16), softplus(dt_bias) log-uniform in 1e-3 .. 0.1."""
    x = official(seed, device, **{"A_dtype": torch.float32, "bias_dtype": torch.float32, **shape})
    gen = torch.Generator().manual_seed(seed + 1)
    A = torch.empty(x.A_log.shape).uniform_(1, 16, generator=gen)
    y = torch.exp(torch.empty(x.A_log.shape).uniform_(math.log(1e-3), math.log(0.1), generator=gen))
    bias = y + torch.log(-torch.expm1(-y))
    return x._replace(A_log=A.log().to(device, x.A_log.dtype), dt_bias=bias.to(device, x.dt_bias.dtype))


def limited(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """dt_limit cuts both ends of softplus(dt + dt_bias)."""
    x = official(seed, device, **{"bias_dtype": torch.bfloat16, **shape})
    return x._replace(dt=x.dt * 4, dt_limit=(0.1, 2.5))


# --- views -----------------------------------------------------------------------------------------------------------


def projection_slice(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """dt, B and C as slices of one projection's rows, as models make them. An odd H makes the row stride odd too."""
    x = official(seed, device, **{"heads": 3, **shape})
    b, c, q, h = x.dt.shape
    g, n = x.B.shape[3:]
    # Rows of 1 + h + 2 g n + pad elements: nothing that follows dt is aligned to more than an element.
    rows = torch.cat([x.dt.new_zeros(b, c, q, 1), x.dt.to(x.B.dtype), x.B.flatten(3), x.C.flatten(3)], -1)
    dt, B, C = rows[..., 1 : h + 1], rows[..., h + 1 : h + 1 + g * n], rows[..., h + 1 + g * n :]
    return x._replace(dt=dt, B=B.unflatten(-1, (g, n)), C=C.unflatten(-1, (g, n)))


def aligned_slice(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """B and C as slices of one padded row whose pieces stay 16-byte aligned: strides that need no copy."""
    x = official(seed, device, **shape)
    rows = torch.cat([x.B.flatten(3), x.C.flatten(3), torch.zeros_like(x.B.flatten(3)[..., :8])], -1)
    g, n = x.B.shape[3:]
    return x._replace(B=rows[..., : g * n].unflatten(-1, (g, n)), C=rows[..., g * n : 2 * g * n].unflatten(-1, (g, n)))


def transposed(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """B stored [b, c, G, Q, N] (last dimension contiguous), C stored [b, c, G, N, Q] (not), dt stored [b, c, H, Q]."""
    x = official(seed, device, **{"heads": 8, "groups": 4, **shape})
    B = x.B.transpose(2, 3).contiguous().transpose(2, 3)
    C = x.C.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return x._replace(B=B, C=C, dt=x.dt.transpose(2, 3).contiguous().transpose(2, 3))


def expanded(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """Stride 0: B shared by the batch and the groups, C by the chunks, dt by the heads, A_log by all heads."""
    x = official(seed, device, **{"batch": 2, "chunks": 2, "heads": 8, "groups": 2, **shape})
    return x._replace(
        dt=x.dt[..., :1].expand(x.dt.shape),
        A_log=x.A_log[:1].expand(x.A_log.shape),
        B=x.B[:1, :, :, :1].expand(x.B.shape),
        C=x.C[:, :1].expand(x.C.shape),
    )


def misaligned(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """Contiguous tensors that begin one element after an aligned address."""
    x = official(seed, device, **shape)

    def shift(t: Tensor) -> Tensor:
        room = t.new_zeros(t.numel() + 1)
        room[1:] = t.flatten()
        return room[1:].view(t.shape)

    return x._replace(dt=shift(x.dt), A_log=shift(x.A_log), B=shift(x.B), C=shift(x.C))


def strided_parameters(seed: int, device: torch.device | str = "cpu", **shape) -> SegsumInputs:
    """A_log and dt_bias as columns of a matrix, dt with every second step of a longer sequence."""
    x = official(seed, device, **{"bias_dtype": torch.float32, **shape})
    columns = torch.stack([x.A_log, x.A_log, x.A_log], -1)
    bias = torch.stack([x.dt_bias, x.dt_bias], -1)
    longer = x.dt.repeat_interleave(2, 2)
    return x._replace(dt=longer[:, :, ::2], A_log=columns[:, 1], dt_bias=bias[:, 1])


# Every set at its own default shape, by name. Each also takes the keyword arguments of `official`.
ADVERSARIAL = {
    f.__name__: f
    for f in (
        long_decay,
        fast_then_slow,
        steep,
        mixture,
        huge_then_tiny,
        softplus_points,
        softplus_not_finite,
        scattered_not_finite,
        not_finite_operands,
        no_decay,
        group_index,
        cancelling,
        large_products,
        hf_init,
        mamba_init,
        limited,
        projection_slice,
        aligned_slice,
        transposed,
        expanded,
        misaligned,
        strided_parameters,
    )
}
