"""`HyenaBlockParams`: the block's weights, checked once, with the options that belong to a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from cute_kernels import checks
from cute_kernels.hyena.addresses import Addresses
from cute_kernels.hyena.stages import Arguments

if TYPE_CHECKING:
    from cute_kernels.hyena.block import PreparedHyenaBlock

_PARAMS = "HyenaBlockParams"  # where a message says who complains
FILTER_LAYOUTS = ("reshape", "transpose")

# Every weight by its official name, in the order of the benchmark, with its shape in terms of the block's sizes.
SHAPES: dict[str, tuple[str | int, ...]] = {
    "norm1_weight": ("D",),
    "norm1_bias": ("D",),
    "norm2_weight": ("D",),
    "norm2_bias": ("D",),
    "in_proj_weight": ("3D", "D"),
    "in_proj_bias": ("3D",),
    "short_conv_weight": ("3D", 1, 3),
    "short_conv_bias": ("3D",),
    "filter_linear1_weight": ("order", "emb_dim"),
    "filter_linear1_bias": ("order",),
    "sin_freq": (1, "order"),
    "filter_linear2_weight": ("order", "order"),
    "filter_linear2_bias": ("order",),
    "filter_linear3_weight": ("order", "order"),
    "filter_linear3_bias": ("order",),
    "filter_linear_final_weight": ("D", "order"),
    "filter_bias": ("D",),
    "exp_mod_deltas": (1, 1, "D"),
    "out_proj_weight": ("D", "D"),
    "out_proj_bias": ("D",),
    "mlp_fc1_weight": ("d_inner", "D"),
    "mlp_fc1_bias": ("d_inner",),
    "mlp_fc2_weight": ("D", "d_inner"),
    "mlp_fc2_bias": ("D",),
}
NAMES = tuple(SHAPES)
FILTER_NAMES = NAMES[NAMES.index("filter_linear1_weight") : NAMES.index("out_proj_weight")]

# A HyenaDNA layer's names; the three sines share one frequency, under three names or the first of them.
HYENA_DNA = {
    "norm1_weight": "norm1.weight",
    "norm1_bias": "norm1.bias",
    "norm2_weight": "norm2.weight",
    "norm2_bias": "norm2.bias",
    "in_proj_weight": "mixer.in_proj.weight",
    "in_proj_bias": "mixer.in_proj.bias",
    "short_conv_weight": "mixer.short_filter.weight",
    "short_conv_bias": "mixer.short_filter.bias",
    "filter_linear1_weight": "mixer.filter_fn.implicit_filter.0.weight",
    "filter_linear1_bias": "mixer.filter_fn.implicit_filter.0.bias",
    "sin_freq": "mixer.filter_fn.implicit_filter.1.freq",
    "filter_linear2_weight": "mixer.filter_fn.implicit_filter.2.weight",
    "filter_linear2_bias": "mixer.filter_fn.implicit_filter.2.bias",
    "filter_linear3_weight": "mixer.filter_fn.implicit_filter.4.weight",
    "filter_linear3_bias": "mixer.filter_fn.implicit_filter.4.bias",
    "filter_linear_final_weight": "mixer.filter_fn.implicit_filter.6.weight",
    "filter_bias": "mixer.filter_fn.bias",
    "exp_mod_deltas": "mixer.filter_fn.modulation.deltas",
    "out_proj_weight": "mixer.out_proj.weight",
    "out_proj_bias": "mixer.out_proj.bias",
    "mlp_fc1_weight": "mlp.fc1.weight",
    "mlp_fc1_bias": "mlp.fc1.bias",
    "mlp_fc2_weight": "mlp.fc2.weight",
    "mlp_fc2_bias": "mlp.fc2.bias",
}
HYENA_DNA_Z = "mixer.filter_fn.pos_emb.z"
_Z_SHAPE = "[rows, emb_dim] or [1, rows, emb_dim]"
HYENA_DNA_FILTER = "mixer.filter_fn.implicit_filter"
SINES = (1, 3, 5)  # which of the filter's layers are the sines


class HyenaOptions(NamedTuple):
    """What of a block is neither a tensor nor a size."""

    layer_norm_eps: float = 1e-5
    exp_mod_shift: float = 0.05
    l_max: int = 32768
    filter_layout: str = "reshape"
    bias_in_filter: bool = True
    norm_len: int | None = None


@dataclass(frozen=True)
class HyenaProblem:
    """The block's sizes: what of its weights decides which kernels run."""

    width: int  # D
    inner: int  # d_inner
    order: int
    emb_dim: int
    z_rows: int | None  # rows of the stored positions


@dataclass(frozen=True, eq=False)
class Kind:
    """What of a block's params decides how it runs. One object for all that are equal, so that it hashes fast."""

    problem: HyenaProblem
    options: HyenaOptions
    device: torch.device

    @staticmethod
    @functools.lru_cache(4096)
    def of(problem: HyenaProblem, options: HyenaOptions, device: torch.device) -> Kind:
        return Kind(problem, options, device)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HyenaBlockParams:
    """The 24 weights of a Hyena block, and the options that belong to its model.

    The tensors are kept, not copied: a change in place of their values (an optimizer's step) is seen by the next call.
    Their sizes, types, devices and strides are checked here, once; a tensor whose storage is exchanged afterwards
    (`weight.data = ...`) needs new params.

    All are fp32 (DLPack arrays are taken, too), on one device, of the shapes beside them; D is the model's width,
    emb_dim = 2 bands + 1 is odd and at least 3. Kernels cover D and d_inner that are multiples of 64, D from 64 to
    1024, and order = 64; CPU tensors have no such limits.

    Options:
        z: Stored positions, the input of the filter's MLP, in place of computed ones; as many rows as tokens at least.
        layer_norm_eps: Added to the variance in both norms.
        exp_mod_shift: Added to the filter's decay.
        l_max: Tokens that the operator reaches; beyond it the block passes x through its second half alone.
        filter_layout: "reshape" reads the filter h [L, D] row-major as [D, L], as the public benchmark does;
            "transpose" is h^T, as HyenaDNA's code does.
        bias_in_filter: Whether filter_bias is added to the filter, as the benchmark does; the skip connection has it
            anyway.
        norm_len: The length by which positions are normalised; None: the length of the call, so that another length
            has another filter. HyenaDNA takes the model's maximum length.

    The defaults are the benchmark's; `from_state_dict` sets them as HyenaDNA needs them.

    Raises:
        ValueError: a tensor or an option is wrong.
        TypeError: a weight is neither a tensor nor a DLPack array, as None.
    """

    norm1_weight: Tensor  # [D]
    norm1_bias: Tensor  # [D]
    norm2_weight: Tensor  # [D]
    norm2_bias: Tensor  # [D]
    in_proj_weight: Tensor  # [3D, D]: x0, x1, v
    in_proj_bias: Tensor  # [3D]
    short_conv_weight: Tensor  # [3D, 1, 3]
    short_conv_bias: Tensor  # [3D]
    filter_linear1_weight: Tensor  # [order, emb_dim]
    filter_linear1_bias: Tensor  # [order]
    sin_freq: Tensor  # [1, order]
    filter_linear2_weight: Tensor  # [order, order]
    filter_linear2_bias: Tensor  # [order]
    filter_linear3_weight: Tensor  # [order, order]
    filter_linear3_bias: Tensor  # [order]
    filter_linear_final_weight: Tensor  # [D, order]
    filter_bias: Tensor  # [D]
    exp_mod_deltas: Tensor  # [1, 1, D]
    out_proj_weight: Tensor  # [D, D]
    out_proj_bias: Tensor  # [D]
    mlp_fc1_weight: Tensor  # [d_inner, D]
    mlp_fc1_bias: Tensor  # [d_inner]
    mlp_fc2_weight: Tensor  # [D, d_inner]
    mlp_fc2_bias: Tensor  # [D]
    z: Tensor | None = None  # [rows, emb_dim] or [1, rows, emb_dim]
    layer_norm_eps: float = 1e-5
    exp_mod_shift: float = 0.05
    l_max: int = 32768
    filter_layout: str = "reshape"
    bias_in_filter: bool = True
    norm_len: int | None = None

    # Derived from the above.
    tensors: tuple[Tensor, ...] = field(init=False)  # the 24 weights in the order of NAMES
    options: HyenaOptions = field(init=False)
    problem: HyenaProblem = field(init=False)
    device: torch.device = field(init=False)
    plain: bool = field(init=False)  # nothing is a subclass of Tensor
    copied: tuple[int, ...] = field(init=False)  # of `tensors` and z: what a kernel can't read in place

    def __post_init__(self) -> None:
        for name in (*NAMES, "z"):
            value = getattr(self, name)
            if not (isinstance(value, Tensor) or (value is None and name == "z")):
                object.__setattr__(self, name, checks.as_tensor(_PARAMS, name, value))
        tensors = tuple([getattr(self, name) for name in NAMES])
        options = HyenaOptions(*[getattr(self, name) for name in HyenaOptions._fields])
        options = check_options(_PARAMS, options)
        everything = (*tensors, self.z)
        plain = all([type(t) in checks.PLAIN_OR_NONE for t in everything])
        derived = {
            "tensors": tensors,
            **options._asdict(),
            "options": options,
            "problem": check_weights(tensors, self.z),
            "device": tensors[0].device,
            "plain": plain,
            "copied": tuple([i for i, t in enumerate(everything) if t is not None and not _in_place(t)])
            if plain and not torch.compiler.is_compiling()
            else (),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()  # a file's tensors may come to another device

    def __repr__(self) -> str:
        p = self.problem
        z = "" if self.z is None else f", z of {p.z_rows} rows"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options._asdict().items())
        return f"HyenaBlockParams(D={p.width}, d_inner={p.inner}, emb_dim={p.emb_dim} on {self.device}{z}, {options})"

    @property
    def requires_grad(self) -> bool:
        """Whether a weight, or z, requires grad now."""
        return any([t.requires_grad for t in self.everything])

    @functools.cached_property
    def everything(self) -> tuple[Tensor, ...]:
        """The 24 weights, and z where there is one."""
        return self.tensors if self.z is None else (*self.tensors, self.z)

    def apart(self, start: int, end: int) -> bool:
        """Whether no weight, nor z, shares memory with the addresses from start to end."""
        known = self.__dict__.get("_addresses")
        if known is None or not known.hold():
            known = self.__dict__["_addresses"] = Addresses(self.everything)
        return known.apart(start, end)

    @functools.cached_property
    def kind(self) -> Kind:
        return Kind.of(self.problem, self.options, self.device)

    def weights(self) -> Arguments:
        """The 24 weights and "z" (where there is one) by name, as kernels can read them: copied where they must be."""
        return self._copied() if self.copied else self.in_place

    @functools.cached_property
    def in_place(self) -> Arguments:
        """`weights` where nothing has to be copied."""
        return self._copied()

    def _copied(self) -> Arguments:
        named = dict(zip(NAMES, self.tensors, strict=True))
        if self.z is not None:
            named["z"] = self.z[0] if self.z.dim() == 3 else self.z
        for index in self.copied:
            name = (*NAMES, "z")[index]
            named[name] = readable(named[name])
        return Arguments({name: t.detach() for name, t in named.items()})

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], prefix: str = "", **options: Any) -> HyenaBlockParams:
        """The params of one layer of a HyenaDNA model.

        HyenaDNA differs from the benchmark, and this sets the options so: the filter's layout is "transpose",
        filter_bias is not added to the filter, positions are stored (z) and normalised by the model's maximum length,
        which is also l_max.

        Args:
            state_dict: A layer's tensors by HyenaDNA's names ("mixer.in_proj.weight", "norm1.bias", ...).
            prefix: What stands before these names, as "hyena.backbone.layers.3.".
            **options: In place of the options above.

        Raises:
            ValueError: a tensor is missing or wrong, or the filter is one that this block can't express: its three
                sines have different frequencies, it has more layers, or the last one has a bias.
            TypeError: state_dict is no mapping, prefix no string, or an option has another name than those above.
        """
        if not isinstance(state_dict, Mapping):
            was = f"of type {type(state_dict).__qualname__}"
            raise TypeError(f"{_PARAMS}: state_dict is {was}, but must be a mapping of names to tensors")
        if not isinstance(prefix, str):
            raise TypeError(f"{_PARAMS}: prefix is of type {type(prefix).__qualname__}, but must be a str")
        for name in options:
            if name not in HyenaOptions._fields:
                known = ", ".join(HyenaOptions._fields)
                raise TypeError(f"{_PARAMS}: {name} is no option of from_state_dict, which takes {known}")
        tensors = {}
        for name, key in {**HYENA_DNA, "z": HYENA_DNA_Z}.items():
            if prefix + key not in state_dict:
                raise ValueError(f"{_PARAMS}: state_dict has no {prefix + key!r}; check prefix, which is {prefix!r}")
            tensors[name] = checks.as_tensor(_PARAMS, prefix + key, state_dict[prefix + key])
        layers = f"{prefix}{HYENA_DNA_FILTER}."
        sines = [f"{layers}{number}.freq" for number in SINES]
        places = {*sines, *(prefix + key for key in HYENA_DNA.values())}
        for key in state_dict:
            if isinstance(key, str) and key.startswith(layers) and key not in places:
                raise ValueError(f"{_PARAMS}: state_dict has {key!r}, for which the block's filter has no place")
        found = {key: checks.as_tensor(_PARAMS, key, state_dict[key]) for key in sines if key in state_dict}
        check_one_frequency(_PARAMS, found, sines)
        z = tensors["z"]
        if z.dim() not in (2, 3) or z.shape[-2] < 1:
            must = f"{_Z_SHAPE} with rows >= 1"
            raise checks.wrong(_PARAMS, prefix + HYENA_DNA_Z, f"of shape {list(z.shape)}", must)
        return cls(**tensors, **{**hyena_dna_options(z.shape[-2]), **options})

    def prepare(self, *, seq_len: int, precision: str | None = None) -> PreparedHyenaBlock:
        """The filter and the converted weights for calls with sequences of `seq_len`, to be given in place of params.

        They are made from the weights as they are now. Without it every call makes them anew.
        """
        from cute_kernels.hyena.block import prepare

        return prepare(self, seq_len, precision)


def hyena_dna_options(max_length: int) -> dict[str, Any]:
    """The options of a HyenaDNA model."""
    return {"l_max": max_length, "filter_layout": "transpose", "bias_in_filter": False, "norm_len": max_length}


def _in_place(t: Tensor) -> bool:
    """Whether a kernel can read the tensor where it is: contiguous, 16-byte aligned, with its own sign."""
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        return True  # it has no memory of its own: no kernel will read it
    return t.is_contiguous() and not t.is_neg() and (t.is_meta or not t.data_ptr() & 15)


def readable(t: Tensor) -> Tensor:
    """t, or a copy that a kernel can read."""
    return t if _in_place(t) else t.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def check_weights(
    tensors: tuple[Tensor, ...],
    z: Tensor | None,
    names: tuple[str, ...] = NAMES,  # of the tensors
    operator: str = _PARAMS,
) -> HyenaProblem:
    """ValueError where a weight is wrong. Reads metadata alone, fake tensors' too."""
    named = dict(zip(names, tensors, strict=True))
    if z is not None:
        named["z"] = z
    device = tensors[0].device
    for name, t in named.items():
        symbols = SHAPES.get(name)
        if symbols is None:
            if t.dim() not in (2, 3):
                raise checks.wrong(operator, name, f"of shape {list(t.shape)}", f"{_Z_SHAPE}, of rank 2 or 3")
        elif t.dim() != len(symbols):
            must = f"{_shape(symbols)}, of rank {len(symbols)}"
            raise checks.wrong(operator, name, f"of shape {list(t.shape)}", must)
        if t.layout != torch.strided:
            raise checks.wrong(operator, name, f"a {t.layout} tensor", "a strided tensor")
        if t.dtype != torch.float32:
            raise checks.wrong(operator, name, f"of type {checks.dtype_name(t.dtype)}", "float32")
        if t.device != device:
            raise checks.wrong(operator, name, f"on {t.device}", f"on {device} like {names[0]}")
    order, emb_dim = named["filter_linear1_weight"].shape
    if order < 1 or emb_dim < 3 or emb_dim % 2 == 0:
        was = f"of shape {[order, emb_dim]}"
        must = "[order, emb_dim] with order >= 1 and an odd emb_dim from 3"
        raise checks.wrong(operator, "filter_linear1_weight", was, must)
    width = named["filter_bias"].shape[0]
    inner = named["mlp_fc1_weight"].shape[0] if "mlp_fc1_weight" in named else 1
    sizes = {"D": width, "3D": 3 * width, "d_inner": inner, "order": order, "emb_dim": emb_dim}
    for name, t in zip(names, tensors, strict=True):
        shape = [sizes.get(s, s) for s in SHAPES[name]]
        if list(t.shape) != shape:
            must = f"{_shape(SHAPES[name])} = {shape}, by filter_linear1_weight, filter_bias and mlp_fc1_weight"
            raise checks.wrong(operator, name, f"of shape {list(t.shape)}", must)
        if t.numel() == 0:
            raise checks.wrong(operator, name, f"of shape {list(t.shape)}", "without a size of 0")
    if z is not None and (z.shape[-1] != emb_dim or z.shape[-2] < 1 or (z.dim() == 3 and z.shape[0] != 1)):
        must = f"{_Z_SHAPE} with rows >= 1 and emb_dim = {emb_dim}"
        raise checks.wrong(operator, "z", f"of shape {list(z.shape)}", must)
    return HyenaProblem(width, inner, order, emb_dim, None if z is None else z.shape[-2])


def check_options(operator: str, options: HyenaOptions) -> HyenaOptions:
    """The options, as Python's own numbers. ValueError where one is wrong."""
    o = options
    norm_len = o.norm_len
    return HyenaOptions(
        layer_norm_eps=checks.number(operator, "layer_norm_eps", o.layer_norm_eps, least=0),
        exp_mod_shift=checks.number(operator, "exp_mod_shift", o.exp_mod_shift),
        l_max=checks.integer(operator, "l_max", o.l_max, bits=63),  # no more of it than the call's length counts
        filter_layout=checks.one_of(operator, "filter_layout", o.filter_layout, FILTER_LAYOUTS),
        bias_in_filter=checks.flag(operator, "bias_in_filter", o.bias_in_filter),
        norm_len=None if norm_len is None else checks.integer(operator, "norm_len", norm_len, also=" or None"),
    )


def check_emb_dim(operator: str, emb_dim: int) -> int:
    """The width of the filter MLP's input. ValueError where it is wrong."""
    emb_dim = checks.integer(operator, "emb_dim", emb_dim)
    if emb_dim < 3 or emb_dim % 2 == 0:
        raise checks.wrong(operator, "emb_dim", emb_dim, "odd and at least 3")
    return emb_dim


def check_one_frequency(operator: str, state_dict: Mapping[str, Any], names: Sequence[str]) -> None:
    """ValueError where those of the sines' frequencies that are there differ."""
    first, *others = [name for name in names if isinstance(state_dict.get(name), Tensor)] or [None]
    for name in others:
        if not _same_values(state_dict[first], state_dict[name]):
            raise ValueError(f"{operator}: {name} must equal {first}: the block's three sines have one frequency")


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Whether shapes and values are the same, NaN included. Values of tensors without memory aren't known."""
    if a is b or a.shape != b.shape:
        return a is b
    if a.is_meta or b.is_meta or is_fake(a) or is_fake(b):
        return True
    a, b = (t.detach() if t.layout == torch.strided else t.detach().to_dense() for t in (a, b))
    b = b.to(a.device)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _shape(symbols: tuple[str | int, ...]) -> str:
    return f"[{', '.join(map(str, symbols))}]"
