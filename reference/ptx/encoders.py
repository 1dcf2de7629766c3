"""Encoders of the instructions whose operands are irregular.

Each takes the encoder (program.Program), the opcode, the operands and what the table's pattern captured, and returns
the core's function and its integers, in the order that the function's comment in core/*.c gives.
"""

from __future__ import annotations

import functools
import re

from .parser import Address, Immediate, Pair, PtxError, Register, Vector

TYPES = [
    "u8",
    "u16",
    "u32",
    "u64",
    "s8",
    "s16",
    "s32",
    "s64",
    "f16",
    "bf16",
    "f32",
    "f64",
    "tf32",
    "e4m3",
    "e5m2",
]  # T_... in core/alu.c
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
SPACES = ["generic", "global", "shared", "shared::cluster", "local", "param"]
SPECIAL = [
    "tid.x",
    "tid.y",
    "tid.z",
    "ntid.x",
    "ntid.y",
    "ntid.z",
    "ctaid.x",
    "ctaid.y",
    "ctaid.z",
    "nctaid.x",
    "nctaid.y",
    "nctaid.z",
    "laneid",
    "warpid",
    "cluster_ctaid.x",
    "cluster_ctaid.y",
    "cluster_ctaid.z",
    "cluster_nctaid.x",
    "cluster_nctaid.y",
    "cluster_nctaid.z",
    "clusterid.x",
    "clusterid.y",
    "clusterid.z",
    "nclusterid.x",
    "nclusterid.y",
    "nclusterid.z",
    "cluster_ctarank",
    "cluster_nctarank",
    "lanemask_lt",
    "lanemask_le",
    "lanemask_ge",
    "lanemask_gt",
    "lanemask_eq",
    "dynamic_smem_size",
    "total_smem_size",
    "smid",
    "clock",
    "is_explicit_cluster",
]


@functools.cache
def bits_of(t: str) -> int:
    if t.endswith("x2"):
        return 2 * bits_of(t[:-2])
    return 32 if t == "tf32" else int(re.search(r"\d+$", t).group()) if t[0] != "e" else 8


def arithmetic_flags(opcode: str) -> int:
    words = opcode.split(".")
    rounding = {"rz": 1, "rm": 2, "rp": 3}
    return (
        max([rounding.get(w, 0) for w in words])
        | (4 if "ftz" in words else 0)
        | (8 if "sat" in words or "satfinite" in words else 0)
        | (16 if "NaN" in words else 0)
        | (32 if "relu" in words else 0)
    )


# ---- irregular encodings: (encoder, opcode, operands, captures) -> (core function, integers) ----


def mov(e, opcode, operands, c):
    destination, source = operands
    t = c["t"]
    if t == "pred":
        return "mov_pred", [e.predicate_destination(destination), e.predicate(source)]
    bits = bits_of(t)
    if isinstance(source, Vector):
        n = len(source.items)
        return "pack", [
            e.destination(destination, bits),
            bits,
            n,
            bits // n,
            *[e.source(s, f"b{bits // n}") for s in source.items],
        ]
    if isinstance(destination, Vector):
        n = len(destination.items)
        parts = [e.destination(d, bits // n) for d in destination.items]
        return "unpack", [e.source(source, t), bits, n, bits // n, *parts]
    if isinstance(source, Register) and source.name[1:] in SPECIAL:
        return "special", [e.destination(destination, bits), bits, SPECIAL.index(source.name[1:])]
    if isinstance(source, Register) and source.name[1:] in ("clock64", "globaltimer", "clock_hi", "globaltimer_lo"):
        return "special", [e.destination(destination, bits), bits, SPECIAL.index("clock")]
    return f"mov_u{bits}", [e.destination(destination, bits), e.source(source, t)]


def setp(e, opcode, operands, c):
    t = c["t"]
    first = operands[0]
    d, n = (first.first, first.second) if isinstance(first, Pair) else (first, Register("_"))
    combine = {None: 0, "and": 1, "or": 2, "xor": 3}[c.get("b")]
    kind = t if t[0] == "f" or t == "bf16" else f"{'s' if t[0] == 's' else 'u'}{bits_of(t)}"
    words = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    return f"setp_{kind}", [
        e.predicate_destination(d),
        e.predicate_destination(n),
        e.source(operands[1], t),
        e.source(operands[2], t),
        COMPARISONS.index(words.get(c["c"], c["c"])),
        combine,
        e.predicate(operands[3]) if combine else 0,
    ]


def cvt(e, opcode, operands, c):
    to, source, flags = c["to"], c["from"], arithmetic_flags(opcode)
    words = opcode.split(".")
    if len(operands) == 3:
        if to.endswith("x2") and bits_of(to) == 32:
            if to == "bf16x2" and not flags:
                return "cvt_bf16x2_f32", [
                    e.destination(operands[0], 32),
                    e.source(operands[1], "f32"),
                    e.source(operands[2], "f32"),
                ]
            kind = TYPES.index(to[:-2])
            return "cvt_x2_f32", [
                e.destination(operands[0], 32),
                e.source(operands[1], "f32"),
                e.source(operands[2], "f32"),
                kind,
                flags,
            ]
        raise PtxError("not implemented")
    if to.endswith("x2") or source.endswith("x2"):
        raise PtxError("not implemented")
    if (to, source) == ("bf16", "f32") and not flags:
        return "cvt_bf16_f32", [e.destination(operands[0], 16), e.source(operands[1], "f32")]
    if (to, source) == ("f32", "bf16") and not flags:
        return "cvt_f32_bf16", [e.destination(operands[0], 32), e.source(operands[1], "b16")]
    integer = next((["rni", "rzi", "rmi", "rpi"].index(w) for w in words if w in ("rni", "rzi", "rmi", "rpi")), -1)
    d_bits, s_bits = e.width(operands[0]), e.width(operands[1]) or bits_of(source)
    return "cvt", [
        e.destination(operands[0], d_bits),
        e.source(operands[1], source if isinstance(operands[1], Immediate) else f"b{s_bits}"),
        TYPES.index(to),
        TYPES.index(source),
        d_bits,
        s_bits,
        flags,
        integer,
        int("rna" in words),
    ]


def space(words: list[str]) -> int:
    for w in words:
        if w in ("shared", "shared::cta"):
            return SPACES.index("shared")
        if w in ("global", "shared::cluster", "local"):
            return SPACES.index(w)
        if w.startswith("param"):
            return SPACES.index("param")
        if w == "const":
            return SPACES.index("global")
    return SPACES.index("generic")


def memory(e, opcode, operands, c):
    words = opcode.split(".")
    load = words[0] in ("ld", "ldu")
    t = words[-1]
    size = bits_of(t) // 8
    orders = int(any(w in ("acquire", "release", "relaxed", "volatile", "mmio") for w in words))
    value, address = (operands[0], operands[1]) if load else (operands[1], operands[0])
    items = value.items if isinstance(value, Vector) else (value,)
    args = [space(words[1:]), size, len(items), int(t[0] == "s"), *e.address(address), orders]
    for item in items:
        if load:
            args += [e.destination(item, None), e.width(item) or 32]
        else:
            args += [e.source(item, t if isinstance(item, Immediate) else None), e.width(item) or max(16, 8 * size)]
    return ("load" if load else "store"), args


def atomic(e, opcode, operands, c):
    words = opcode.split(".")
    t = words[-1]
    op = next(w for w in words if w in ATOMICS)
    kinds = {"u32": 0, "b32": 0, "s32": 1, "u64": 2, "b64": 2, "s64": 3, "f32": 4, "f16x2": 5, "bf16x2": 6, "f64": 7}
    if t not in kinds:
        raise PtxError("not implemented")
    d, rest = (Register("_"), operands) if words[0] == "red" else (operands[0], operands[1:])
    values = rest[1].items if isinstance(rest[1], Vector) else (rest[1],)
    if isinstance(d, Vector):
        raise PtxError("not implemented")
    width = max(32, bits_of(t))
    args = [
        e.destination(d, width),
        space(words[1:]),
        ATOMICS.index(op),
        kinds[t],
        bits_of(t) // 8,
        len(values),
        *e.address(rest[0]),
    ]
    for v in values:
        args += [e.source(v, t), e.source(rest[2], t) if op == "cas" else e.source(Immediate(0), t)]
    return "atomic", args


ATOMICS = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]


def mixed(e, opcode, operands, c):
    """fp32 arithmetic on 16-bit operands: add and sub with one, fma with two."""
    x, y = (operands[1], operands[2]) if c["o"] == "fma" else (operands[1], operands[1])
    halves = [e.source(v, c["t"] if isinstance(v, Immediate) else "b16") for v in (x, y)]
    extra = [int(c["t"] == "bf16"), arithmetic_flags(opcode), ["add", "sub", "fma"].index(c["o"])]
    return "mixed", [e.destination(operands[0], 32), *halves, e.source(operands[-1], "f32"), *extra]


def dot(e, opcode, operands, c):
    d, *sources = operands
    signs = [int(c[k] == "s32") for k in ("x", "y")]
    halves, first = int(c["o"] == "dp2a"), 2 * int(c.get("half") == "hi")
    return "dot", [e.destination(d, 32), *[e.source(s, "b32") for s in sources], halves, first, *signs]


def shfl(e, opcode, operands, c):
    first = operands[0]
    d, p = (first.first, first.second) if isinstance(first, Pair) else (first, Register("_"))
    return "shfl", [
        e.destination(d, 32),
        e.predicate_destination(p),
        e.source(operands[1], "b32"),
        e.source(operands[2], "b32"),
        e.source(operands[3], "b32"),
        ["idx", "up", "down", "bfly"].index(c["mode"]),
        e.source(operands[4], "b32"),
    ]


def elect(e, opcode, operands, c):
    return "elect", [
        e.destination(operands[0].first, 32),
        e.predicate_destination(operands[0].second),
        e.source(operands[1], "b32"),
    ]


def vote(e, opcode, operands, c):
    mode = ["all", "any", "uni", "ballot"].index(c["mode"])
    d = e.destination(operands[0], 32) if mode == 3 else e.predicate_destination(operands[0])
    return "vote", [d, e.predicate(operands[1]), mode, e.source(operands[2], "b32")]


def redux(e, opcode, operands, c):
    kind = {
        "add.s32": 0,
        "add.u32": 0,
        "min.u32": 1,
        "max.u32": 2,
        "min.s32": 3,
        "max.s32": 4,
        "and.b32": 5,
        "or.b32": 6,
        "xor.b32": 7,
        "min.f32": 8,
        "max.f32": 9,
    }.get(f"{c['o']}.{c['t']}")
    return "redux", [e.destination(operands[0], 32), e.source(operands[1], "b32"), kind, e.source(operands[2], "b32")]


def branch(e, opcode, operands, c):
    return "branch", [e.label(operands[0])]


def branch_indexed(e, opcode, operands, c):
    targets = e.table(operands[1])
    return "branch_indexed", [e.source(operands[0], "b32"), len(targets), *targets]


def barrier(e, opcode, operands, c):
    words = opcode.split(".")
    arrive = "arrive" in words
    aligned = words[0] == "bar" or "aligned" in words
    e.convergent = e.convergent or aligned
    count = e.source(operands[1], "b32") if len(operands) > 1 else -1
    return "barrier", [e.source(operands[0], "b32"), count, int(arrive), int(aligned)]


def mbarrier_arrive(e, opcode, operands, c):
    words = opcode.split(".")
    state, rest = (operands[0], operands[1:]) if not isinstance(operands[0], Address) else (Register("_"), operands)
    expects = "expect_tx" in words
    count = rest[1] if len(rest) > 1 and not expects else Immediate(1)
    return "mbarrier_arrive", [
        e.destination(state, 64),
        *e.address(rest[0]),
        e.source(count, "b32"),
        e.source(rest[1], "b32") if expects else -1,
        int("arrive_drop" in words),
    ]


def mbarrier_wait(e, opcode, operands, c):
    words = opcode.split(".")
    parity = "parity" in words
    return "mbarrier_wait", [
        e.predicate_destination(operands[0]),
        *e.address(operands[1]),
        e.source(operands[2], "b32" if parity else "b64"),
        int(parity),
        int(words[1] == "try_wait"),
    ]


def st_async(e, opcode, operands, c):
    items = operands[1].items if isinstance(operands[1], Vector) else (operands[1],)
    values = [e.source(x, c["t"]) for x in items]
    return "st_async", [*e.address(operands[0]), *e.address(operands[2]), bits_of(c["t"]) // 8, len(values), *values]


def mbarrier_tx(e, opcode, operands, c):
    return "mbarrier_tx", [*e.address(operands[0]), e.source(operands[1], "b32"), 1 if "expect_tx" in opcode else -1]


def coordinates(e, address: Address) -> list[int]:
    return [e.source(x, "b32") for x in address.coordinates]


def tma_load(e, opcode, operands, c):
    """cp.async.bulk.tensor into shared memory: destination, tensor map and coordinates, mbarrier, CTA mask."""
    words = opcode.split(".")
    if "tile" not in words and any(w.startswith("im2col") for w in words):
        raise PtxError("not implemented")
    multicast = "multicast::cluster" in words
    mask = e.source(operands[3], "b16") if multicast else -1
    pair = int(any(w == "cta_group::2" for w in words))
    at = coordinates(e, operands[1])
    return "tma_load", [
        *e.address(operands[0]),
        *e.address(operands[1]),
        *e.address(operands[2]),
        mask,
        pair,
        len(at),
        *at,
    ]


def tma_store(e, opcode, operands, c):
    words = opcode.split(".")
    reduction = ATOMICS.index(next(w for w in words if w in ATOMICS)) if words[1] == "reduce" else -1
    at = coordinates(e, operands[0])
    return "tma_store", [*e.address(operands[0]), *e.address(operands[1]), reduction, len(at), *at]


def bulk(e, opcode, operands, c):
    """cp.async.bulk without a tensor map, in its three directions."""
    words = opcode.split(".")
    d, s = operands[0], operands[1]
    size = e.source(operands[2], "b32")
    if "bulk_group" in words:
        op, kind = -1, 0
        if words[1] == "reduce":
            op = ATOMICS.index(next(w for w in words if w in ATOMICS))
            kind = {"u32": 0, "s32": 1, "u64": 2, "f32": 4, "f16": 5, "bf16": 6, "f64": 7}[words[-1]]
        return "bulk_store", [*e.address(d), *e.address(s), size, op, kind]
    mask = e.source(operands[4], "b16") if "multicast::cluster" in words else -1
    source_shared = int(words.index("global") > 0 if "global" in words else 0) ^ 1
    return "bulk_load", [*e.address(d), *e.address(s), size, *e.address(operands[3]), mask, source_shared]


def cpasync(e, opcode, operands, c):
    extra = operands[3] if len(operands) > 3 else None
    if "L2::cache_hint" in opcode and len(operands) == 4:
        extra = None
    source_size = -1 if extra is None else e.source(extra, "b32")
    return "cpasync", [*e.address(operands[0]), *e.address(operands[1]), operands[2].value, source_size]


def wgmma(e, opcode, operands, c):
    """wgmma.mma_async: d, a (descriptor or registers), b descriptor, scale-d, negations, transpositions."""
    types = ["bf16", "f16", "tf32", "e4m3", "e5m2"]
    if c["d"] != "f32" or c["a"] not in types:
        raise PtxError("not implemented")
    n = int(c["n"])
    d = [e.update(r, 32) for r in operands[0].items]
    a = operands[1]
    a_registers = [e.source(r, "b32") for r in a.items] if isinstance(a, Vector) else []
    rest = operands[4:]
    literals = [o.value for o in rest]
    scale_a, scale_b = [*literals, 1, 1][:2]
    transposed = literals[2:]
    a_transposed = transposed[0] if not a_registers and transposed else 0
    b_transposed = transposed[-1] if transposed else 0
    numbers = [e.number(r) for r in (*(a.items if isinstance(a, Vector) else ()), *operands[0].items)]
    return "wgmma", [
        n,
        types.index(c["a"]),
        types.index(c["b"]),
        int(scale_a < 0),
        int(scale_b < 0),
        a_transposed,
        b_transposed,
        e.predicate(operands[3]) if not isinstance(operands[3], Immediate) else e.constant_predicate(operands[3].value),
        e.source(operands[2], "b64"),
        len(a_registers),
        len(d),
        *(a_registers if a_registers else [e.source(a, "b64")]),
        *d,
        *numbers,
    ]


def tcgen_mma(e, opcode, operands, c):
    """tcgen05.mma: d, a (descriptor or [tensor memory]), b, instruction descriptor, disabled lanes, enable-input-d."""
    words = opcode.split(".")
    if any(w.startswith(("ws", "sp", "block_scale", "scale_vec")) for w in words):
        raise PtxError("not implemented")
    kind = ["f16", "tf32", "f8f6f4"].index(c["kind"]) if c["kind"] in ("f16", "tf32", "f8f6f4") else None
    if kind is None:
        raise PtxError("not implemented")
    d, a, b, descriptor, *rest = operands
    lanes = [e.source(x, "b32") for x in rest[0].items] if rest and isinstance(rest[0], Vector) else []
    rest = rest[1:] if lanes else rest
    enable = e.predicate(rest[0]) if not isinstance(rest[0], Immediate) else e.constant_predicate(rest[0].value)
    if len(rest) > 1:
        raise PtxError("not implemented")
    in_tmem = isinstance(a, Address)
    return "tcgen_mma", [
        *e.address(d),
        int(in_tmem),
        *(e.address(a) if in_tmem else [e.source(a, "b64"), 1, 0]),
        e.source(b, "b64"),
        e.source(descriptor, "b32"),
        enable,
        kind,
        int(c["group"]),
        len(lanes),
        *lanes,
    ]


def tcgen_ld(e, opcode, operands, c):
    """tcgen05.ld and .st: shape, repetitions, packing, address, registers."""
    store = opcode.startswith("tcgen05.st")
    shape = ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"].index(c["shape"])
    address, vector = (operands[0], operands[-1]) if store else (operands[1], operands[0])
    registers = vector.items if isinstance(vector, Vector) else (vector,)
    split = operands[1].value if store and shape == 4 else operands[2].value if shape == 4 else 0
    packed = int("pack::16b" in opcode or "unpack::16b" in opcode)
    offsets = [e.source(r, "b32") for r in registers] if store else [e.destination(r, 32) for r in registers]
    numbers = [e.number(r) for r in registers]
    return ("tmem_st" if store else "tmem_ld"), [
        shape,
        int(c["n"]),
        packed,
        split,
        *e.address(address),
        len(offsets),
        *offsets,
        *numbers,
    ]


def tcgen_commit(e, opcode, operands, c):
    mask = e.source(operands[1], "b16") if "multicast::cluster" in opcode else -1
    return "tcgen_commit", [*e.address(operands[0]), mask, int(c["group"])]


def tcgen_cp(e, opcode, operands, c):
    shapes = ["128x256b", "128x128b", "4x256b", "64x128b", "32x128b"]
    if any(w in opcode for w in ("b8x16", "64x128b", "32x128b", "4x256b")):
        raise PtxError("not implemented")
    return "tcgen_cp", [
        *e.address(operands[0]),
        e.source(operands[1], "b64"),
        shapes.index(c["shape"]),
        int(c["group"]),
    ]


def mma_sync(e, opcode, operands, c):
    d, a, b, cc = (o.items for o in operands[:4])
    types = ["bf16", "f16", "tf32", "e4m3", "e5m2"]
    if c["d"] != "f32" or c["c"] != "f32" or c["a"] not in types:
        raise PtxError("not implemented")
    return "mma_sync", [
        int(c["k"]),
        types.index(c["a"]),
        types.index(c["b"]),
        *[e.destination(x, 32) for x in d],
        *[e.source(x, "f32") for x in cc],
        len(a),
        *[e.source(x, "b32") for x in a],
        len(b),
        *[e.source(x, "b32") for x in b],
    ]


def matrix(e, opcode, operands, c):
    """ldmatrix and stmatrix of 8 x 8 matrices of 16-bit elements."""
    load = opcode.startswith("ldmatrix")
    vector, address = (operands[0], operands[1]) if load else (operands[1], operands[0])
    items = vector.items if isinstance(vector, Vector) else (vector,)
    registers = [e.destination(r, 32) if load else e.source(r, "b32") for r in items]
    return ("ldmatrix" if load else "stmatrix"), [
        len(items),
        int("trans" in opcode.split(".")),
        *e.address(address),
        *registers,
    ]


def cvta(e, opcode, operands, c):
    window = {"global": 0, "const": 0, "shared": 1, "shared::cta": 1, "shared::cluster": 1, "local": 2, "param": 3}[
        c["space"]
    ]
    if c.get("to"):
        return "cvta_from_generic", [
            e.destination(operands[0], bits_of(c["t"])),
            bits_of(c["t"]),
            e.source(operands[1], c["t"]),
        ]
    return "cvta_to_generic", [e.destination(operands[0], 64), e.source(operands[1], c["t"]), bits_of(c["t"]), window]


def mapa(e, opcode, operands, c):
    bits = bits_of(c["t"])
    return "mapa", [e.destination(operands[0], bits), bits, e.source(operands[1], c["t"]), e.source(operands[2], "b32")]


def half(e, opcode, operands, c):
    """Arithmetic on f16, bf16 and their pairs: one shape for one, two and three operands."""
    t = c["t"]
    sources = [e.source(x, f"b{bits_of(t)}" if not isinstance(x, Immediate) else t) for x in operands[1:]]
    sources += [sources[0]] * (3 - len(sources))
    return f"{c['o']}_{t}", [e.destination(operands[0], bits_of(t)), *sources, arithmetic_flags(opcode)]


def nothing(e, opcode, operands, c):
    return "nothing", []
