"""The operators that `count` knows: what to call for a size, the least that it needs, the kernels it should launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Least:
    """The bytes and operations that no implementation can avoid: operands once, in fp32 where they come so."""

    read: int
    written: int
    mma: int = 0  # operations of matrix products, each product once
    transcendentals: int = 0
    fp32: int = 0  # other operations, where they count


@dataclass
class Workload:
    call: Callable[[], object]
    least: Least
    kernels: tuple[str, ...] = field(
        default=()
    )  # a word of each kernel's name; PyTorch stands in for those not launched


def _sizes(operator: str, size: str, form: str, names: dict[str, str]) -> tuple[list[int], dict[str, str]]:
    """The numbers before the first comma, as many as `form` has; then options, by their full names."""
    first, *rest = size.split(",")
    numbers = first.split("x")
    pairs = [r.partition("=") for r in rest]
    if len(numbers) != form.count("x") + 1 or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(f"{operator}: size is {size!r}, but must begin with {form}, numbers from 1")
    for name, _, _ in pairs:
        if name not in names:
            raise ValueError(f"{operator}: size has {name!r}, but options are {', '.join(names)}")
    return [int(n) for n in numbers], {names[name]: value for name, _, value in pairs}


def _segsum(size: str) -> Workload:
    """Official shapes, b x c chunks; Q=, H=, N=, G= may follow: 1x1,Q=64,H=8,N=64."""
    import torch

    import cute_kernels

    from .. import inputs

    names = {"Q": "chunk_size", "H": "heads", "N": "d_state", "G": "groups"}
    (b, c), options = _sizes("mamba_segsum", size, "BATCHxCHUNKS", names)
    given = inputs.official(0, batch=b, chunks=c, **{name: int(value) for name, value in options.items()})
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    q, h, n = given.dt.shape[2], given.dt.shape[3], given.B.shape[4]
    pairs = b * c * q * (q + 1) // 2
    least = Least(
        read=sum(t.nbytes for t in tensors),
        written=b * c * h * (3 * q * q * given.B.element_size() + 2 * q * 4),
        mma=2 * b * c * given.B.shape[3] * q * q * n,
        transcendentals=h * pairs + 3 * b * c * q * h,
    )
    return Workload(lambda: cute_kernels.mamba_segsum(*given), least)


_HYENA = {"D": "width", "M": "inner"}


def _hyena_weights(batch: int, length: int, options: dict[str, str]):
    """x, the parameters and the arrays they are made from: official inputs."""
    import torch

    import cute_kernels

    from .. import hyena_inputs

    dims = {name: int(options[name]) for name in _HYENA.values() if name in options}
    arrays = hyena_inputs.official(batch, length, **dims)
    w = {name: torch.from_numpy(value) for name, value in arrays.items()}
    x = w.pop("hidden_states")
    return x, cute_kernels.HyenaBlockParams(**w), arrays


def _filter_least(arrays: dict, length: int) -> Least:
    width, order = arrays["filter_linear_final_weight"].shape
    emb = arrays["filter_linear1_weight"].shape[1]
    names = [n for n in arrays if n.startswith(("filter", "sin_freq", "exp_mod"))]
    return Least(
        read=sum(arrays[n].nbytes for n in names),
        written=4 * width * length,
        fp32=2 * length * order * (emb + 2 * order + width),
        transcendentals=length * (emb - 1 + 3 * order + width),
    )


def _hyena_filter(size: str) -> Workload:
    """Tokens; D= may follow: 131,D=128."""
    import cute_kernels

    (length,), options = _sizes("hyena_filter", size, "TOKENS", {"D": "width"})
    _, params, arrays = _hyena_weights(1, 1, options)
    return Workload(lambda: cute_kernels.hyena_filter(params, length), _filter_least(arrays, length), ("filter",))


def _long_conv(size: str) -> Workload:
    """Rows x tokens; D= may follow: 2x1000,D=128."""
    import torch

    import cute_kernels

    (batch, length), options = _sizes("causal_long_conv", size, "BATCHxTOKENS", {"D": "width"})
    width = int(options.get("width", 256))
    g = torch.Generator().manual_seed(0)
    u, k = torch.randn(batch, width, length, generator=g), torch.randn(width, length, generator=g)
    least = Least(read=u.nbytes + k.nbytes, written=u.nbytes)
    return Workload(lambda: cute_kernels.causal_long_conv(u, k, precision="highest"), least, ("long_conv",))


def _hyena_block(size: str) -> Workload:
    """Rows x tokens; D=, M= (the MLP's width) and precision= may follow: 1x131,precision=highest."""
    import cute_kernels

    (batch, length), options = _sizes("hyena_block", size, "BATCHxTOKENS", {**_HYENA, "precision": "precision"})
    precision = options.get("precision", "high")
    x, params, arrays = _hyena_weights(batch, length, options)
    d, m = x.shape[2], arrays["mlp_fc1_weight"].shape[0]
    tokens, made = batch * length, _filter_least(arrays, length)
    least = Least(
        read=sum(a.nbytes for a in arrays.values()),
        written=x.nbytes,
        mma=2 * tokens * (3 * d * d + d * d + 2 * d * m),
        transcendentals=made.transcendentals + tokens * (m + 2),
    )
    call = lambda: cute_kernels.hyena_block(x, params, precision=precision)  # noqa: E731
    return Workload(call, least, ("project", "long_conv", "finish"))  # project makes the filter too


OPERATORS = {
    "mamba_segsum": _segsum,
    "hyena_block": _hyena_block,
    "hyena_filter": _hyena_filter,
    "causal_long_conv": _long_conv,
}
