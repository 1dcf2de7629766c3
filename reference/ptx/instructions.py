"""The table of instructions: which PTX opcode the core executes with which function, and how its operands are encoded.

A row is a pattern, the name of the core's function (`op_<name>` in core/*.c) and the operands. In a pattern, `<t:a|b>` captures
one of the alternatives and `[.x|.y]` is optional. The operands are words, in the order of the PTX:

    =f32   a destination register of that type       f32   a source: register or literal
    =p     a destination predicate                   p     a source predicate
    @      an address                                #     an integer literal

and words after "/" are plain integers for the function. {t}, {bits}, {sign} and {flags} stand for what the pattern captured.
Where operands are irregular, a function encodes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .parser import Address, Immediate, Pair, PtxError, Register, Symbol, Vector

CONVERGENT, CHAINS, MOVES = 1, 2, 4  # core/machine.h

TYPES = ["u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64", "tf32", "e4m3", "e5m2"]  # T_... in core/alu.c
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
SPACES = ["generic", "global", "shared", "shared::cluster", "local", "param"]
SPECIAL = (
    "tid.x tid.y tid.z ntid.x ntid.y ntid.z ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z laneid warpid "
    "cluster_ctaid.x cluster_ctaid.y cluster_ctaid.z cluster_nctaid.x cluster_nctaid.y cluster_nctaid.z "
    "clusterid.x clusterid.y clusterid.z nclusterid.x nclusterid.y nclusterid.z cluster_ctarank cluster_nctarank "
    "lanemask_lt lanemask_le lanemask_ge lanemask_gt lanemask_eq dynamic_smem_size total_smem_size smid clock is_explicit_cluster"
).split()


def bits_of(t: str) -> int:
    if t.endswith("x2"):
        return 2 * bits_of(t[:-2])
    return 32 if t == "tf32" else int(re.search(r"\d+$", t).group()) if t[0] != "e" else 8


@dataclass
class Row:
    pattern: str
    op: str
    operands: object = ""
    flags: int = 0

    def __post_init__(self):
        text = ""
        for part in re.findall(r"<\w+:[^>]*>|\[[^\]]*\]|[^<\[]+", self.pattern):
            if part[0] == "<":  # a capture: its alternatives are a regular expression
                name, alternatives = part[1:-1].split(":", 1)
                text += f"(?P<{name}>{alternatives})"
            elif part[0] == "[":
                text += "(?:" + "|".join(re.escape(p) for p in part[1:-1].split("|")) + ")?"
            else:
                text += re.escape(part)
        self.regex = re.compile(text)


def _flags(opcode: str) -> int:
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


def _mov(e, opcode, operands, c):
    destination, source = operands
    t = c["t"]
    if t == "pred":
        return "mov_pred", [e.predicate_destination(destination), e.predicate(source)]
    bits = bits_of(t)
    if isinstance(source, Vector):
        n = len(source.items)
        return "pack", [e.destination(destination, bits), bits, n, bits // n, *[e.source(s, f"b{bits // n}") for s in source.items]]
    if isinstance(destination, Vector):
        n = len(destination.items)
        parts = [e.destination(d, bits // n) for d in destination.items]
        return "unpack", [e.source(source, t), bits, n, bits // n, *parts]
    if isinstance(source, Register) and source.name[1:] in SPECIAL:
        return "special", [e.destination(destination, bits), bits, SPECIAL.index(source.name[1:])]
    if isinstance(source, Register) and source.name[1:] in ("clock64", "globaltimer", "clock_hi", "globaltimer_lo"):
        return "special", [e.destination(destination, bits), bits, SPECIAL.index("clock")]
    return f"mov_u{bits}", [e.destination(destination, bits), e.source(source, t)]


def _setp(e, opcode, operands, c):
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


def _cvt(e, opcode, operands, c):
    to, source, flags = c["to"], c["from"], _flags(opcode)
    words = opcode.split(".")
    if len(operands) == 3:
        if to.endswith("x2") and bits_of(to) == 32:
            if to == "bf16x2" and not flags:
                return "cvt_bf16x2_f32", [e.destination(operands[0], 32), e.source(operands[1], "f32"), e.source(operands[2], "f32")]
            kind = TYPES.index(to[:-2])
            return "cvt_x2_f32", [e.destination(operands[0], 32), e.source(operands[1], "f32"), e.source(operands[2], "f32"), kind, flags]
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
        e.destination(operands[0], d_bits), e.source(operands[1], source if isinstance(operands[1], Immediate) else f"b{s_bits}"),
        TYPES.index(to), TYPES.index(source), d_bits, s_bits, flags, integer, int("rna" in words),
    ]  # fmt: skip


def _space(words: list[str]) -> int:
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


def _memory(e, opcode, operands, c):
    words = opcode.split(".")
    load = words[0] in ("ld", "ldu")
    t = words[-1]
    size = bits_of(t) // 8
    orders = int(any(w in ("acquire", "release", "relaxed", "volatile", "mmio") for w in words))
    value, address = (operands[0], operands[1]) if load else (operands[1], operands[0])
    items = value.items if isinstance(value, Vector) else (value,)
    args = [_space(words[1:]), size, len(items), int(t[0] == "s"), *e.address(address), orders]
    for item in items:
        if load:
            args += [e.destination(item, None), e.width(item) or 32]
        else:
            args += [e.source(item, t if isinstance(item, Immediate) else None), e.width(item) or max(16, 8 * size)]
    return ("load" if load else "store"), args


def _atomic(e, opcode, operands, c):
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
    args = [e.destination(d, width), _space(words[1:]), ATOMICS.index(op), kinds[t], bits_of(t) // 8, len(values), *e.address(rest[0])]
    for v in values:
        args += [e.source(v, t), e.source(rest[2], t) if op == "cas" else e.source(Immediate(0), t)]
    return "atomic", args


ATOMICS = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]


def _shfl(e, opcode, operands, c):
    first = operands[0]
    d, p = (first.first, first.second) if isinstance(first, Pair) else (first, Register("_"))
    return "shfl", [
        e.destination(d, 32), e.predicate_destination(p), e.source(operands[1], "b32"), e.source(operands[2], "b32"),
        e.source(operands[3], "b32"), ["idx", "up", "down", "bfly"].index(c["mode"]), e.source(operands[4], "b32"),
    ]  # fmt: skip


def _elect(e, opcode, operands, c):
    return "elect", [e.destination(operands[0].first, 32), e.predicate_destination(operands[0].second), e.source(operands[1], "b32")]


def _vote(e, opcode, operands, c):
    mode = ["all", "any", "uni", "ballot"].index(c["mode"])
    d = e.destination(operands[0], 32) if mode == 3 else e.predicate_destination(operands[0])
    return "vote", [d, e.predicate(operands[1]), mode, e.source(operands[2], "b32")]


def _redux(e, opcode, operands, c):
    kind = {"add.s32": 0, "add.u32": 0, "min.u32": 1, "max.u32": 2, "min.s32": 3, "max.s32": 4, "and.b32": 5, "or.b32": 6, "xor.b32": 7,
            "min.f32": 8, "max.f32": 9}.get(f"{c['o']}.{c['t']}")  # fmt: skip
    return "redux", [e.destination(operands[0], 32), e.source(operands[1], "b32"), kind, e.source(operands[2], "b32")]


def _branch(e, opcode, operands, c):
    return "branch", [e.label(operands[0])]


def _branch_indexed(e, opcode, operands, c):
    targets = e.table(operands[1])
    return "branch_indexed", [e.source(operands[0], "b32"), len(targets), *targets]


def _barrier(e, opcode, operands, c):
    words = opcode.split(".")
    arrive = "arrive" in words
    aligned = words[0] == "bar" or "aligned" in words
    e.convergent = e.convergent or aligned
    count = e.source(operands[1], "b32") if len(operands) > 1 else -1
    return "barrier", [e.source(operands[0], "b32"), count, int(arrive), int(aligned)]


def _mbarrier_arrive(e, opcode, operands, c):
    words = opcode.split(".")
    state, rest = (operands[0], operands[1:]) if not isinstance(operands[0], Address) else (Register("_"), operands)
    expects = "expect_tx" in words
    count = rest[1] if len(rest) > 1 and not expects else Immediate(1)
    return "mbarrier_arrive", [
        e.destination(state, 64), *e.address(rest[0]), e.source(count, "b32"), e.source(rest[1], "b32") if expects else -1,
        int("arrive_drop" in words),
    ]  # fmt: skip


def _mbarrier_wait(e, opcode, operands, c):
    words = opcode.split(".")
    parity = "parity" in words
    return "mbarrier_wait", [
        e.predicate_destination(operands[0]), *e.address(operands[1]), e.source(operands[2], "b32" if parity else "b64"),
        int(parity), int(words[1] == "try_wait"),
    ]  # fmt: skip


def _st_async(e, opcode, operands, c):
    items = operands[1].items if isinstance(operands[1], Vector) else (operands[1],)
    values = [e.source(x, c["t"]) for x in items]
    return "st_async", [*e.address(operands[0]), *e.address(operands[2]), bits_of(c["t"]) // 8, len(values), *values]


def _mbarrier_tx(e, opcode, operands, c):
    return "mbarrier_tx", [*e.address(operands[0]), e.source(operands[1], "b32"), 1 if "expect_tx" in opcode else -1]


def _coordinates(e, address: Address) -> list[int]:
    return [e.source(x, "b32") for x in address.coordinates]


def _tma_load(e, opcode, operands, c):
    """cp.async.bulk.tensor into shared memory: destination, tensor map and coordinates, mbarrier, CTA mask."""
    words = opcode.split(".")
    if "tile" not in words and any(w.startswith("im2col") for w in words):
        raise PtxError("not implemented")
    multicast = "multicast::cluster" in words
    mask = e.source(operands[3], "b16") if multicast else -1
    pair = int(any(w == "cta_group::2" for w in words))
    coordinates = _coordinates(e, operands[1])
    return "tma_load", [
        *e.address(operands[0]), *e.address(operands[1]), *e.address(operands[2]), mask, pair, len(coordinates), *coordinates,
    ]  # fmt: skip


def _tma_store(e, opcode, operands, c):
    words = opcode.split(".")
    reduction = ATOMICS.index(next(w for w in words if w in ATOMICS)) if words[1] == "reduce" else -1
    coordinates = _coordinates(e, operands[0])
    return "tma_store", [*e.address(operands[0]), *e.address(operands[1]), reduction, len(coordinates), *coordinates]


def _bulk(e, opcode, operands, c):
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


def _cpasync(e, opcode, operands, c):
    extra = operands[3] if len(operands) > 3 else None
    if "L2::cache_hint" in opcode and len(operands) == 4:
        extra = None
    source_size = -1 if extra is None else e.source(extra, "b32")
    return "cpasync", [*e.address(operands[0]), *e.address(operands[1]), operands[2].value, source_size]


def _wgmma(e, opcode, operands, c):
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
    scale_a, scale_b = (literals + [1, 1])[:2]
    transposed = literals[2:]
    a_transposed = transposed[0] if not a_registers and transposed else 0
    b_transposed = transposed[-1] if transposed else 0
    numbers = [e.number(r) for r in (*(a.items if isinstance(a, Vector) else ()), *operands[0].items)]
    return "wgmma", [
        n, types.index(c["a"]), types.index(c["b"]), int(scale_a < 0), int(scale_b < 0), a_transposed, b_transposed,
        e.predicate(operands[3]) if not isinstance(operands[3], Immediate) else e.constant_predicate(operands[3].value),
        e.source(operands[2], "b64"), len(a_registers), len(d),
        *(a_registers if a_registers else [e.source(a, "b64")]), *d, *numbers,
    ]  # fmt: skip


def _tcgen_mma(e, opcode, operands, c):
    """tcgen05.mma: d, a (descriptor, or [tensor memory]), b descriptor, instruction descriptor, disabled lanes, enable-input-d."""
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
        *e.address(d), int(in_tmem), *(e.address(a) if in_tmem else [e.source(a, "b64"), 1, 0]), e.source(b, "b64"),
        e.source(descriptor, "b32"), enable, kind, int(c["group"]), len(lanes), *lanes,
    ]  # fmt: skip


def _tcgen_ld(e, opcode, operands, c):
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
        shape, int(c["n"]), packed, split, *e.address(address), len(offsets), *offsets, *numbers,
    ]  # fmt: skip


def _tcgen_commit(e, opcode, operands, c):
    mask = e.source(operands[1], "b16") if "multicast::cluster" in opcode else -1
    return "tcgen_commit", [*e.address(operands[0]), mask, int(c["group"])]


def _tcgen_cp(e, opcode, operands, c):
    shapes = ["128x256b", "128x128b", "4x256b", "64x128b", "32x128b"]
    if any(w in opcode for w in ("b8x16", "64x128b", "32x128b", "4x256b")):
        raise PtxError("not implemented")
    return "tcgen_cp", [*e.address(operands[0]), e.source(operands[1], "b64"), shapes.index(c["shape"]), int(c["group"])]


def _mma_sync(e, opcode, operands, c):
    d, a, b, cc = (o.items for o in operands[:4])
    types = ["bf16", "f16", "tf32", "e4m3", "e5m2"]
    if c["d"] != "f32" or c["c"] != "f32" or c["a"] not in types:
        raise PtxError("not implemented")
    return "mma_sync", [
        int(c["k"]), types.index(c["a"]), types.index(c["b"]),
        *[e.destination(x, 32) for x in d], *[e.source(x, "f32") for x in cc],
        len(a), *[e.source(x, "b32") for x in a], len(b), *[e.source(x, "b32") for x in b],
    ]  # fmt: skip


def _matrix(e, opcode, operands, c):
    """ldmatrix and stmatrix of 8 x 8 matrices of 16-bit elements."""
    load = opcode.startswith("ldmatrix")
    vector, address = (operands[0], operands[1]) if load else (operands[1], operands[0])
    items = vector.items if isinstance(vector, Vector) else (vector,)
    registers = [e.destination(r, 32) if load else e.source(r, "b32") for r in items]
    return ("ldmatrix" if load else "stmatrix"), [len(items), int("trans" in opcode.split(".")), *e.address(address), *registers]


def _cvta(e, opcode, operands, c):
    window = {"global": 0, "const": 0, "shared": 1, "shared::cta": 1, "shared::cluster": 1, "local": 2, "param": 3}[c["space"]]
    if c.get("to"):
        return "cvta_from_generic", [e.destination(operands[0], bits_of(c["t"])), bits_of(c["t"]), e.source(operands[1], c["t"])]
    return "cvta_to_generic", [e.destination(operands[0], 64), e.source(operands[1], c["t"]), bits_of(c["t"]), window]


def _mapa(e, opcode, operands, c):
    bits = bits_of(c["t"])
    return "mapa", [e.destination(operands[0], bits), bits, e.source(operands[1], c["t"]), e.source(operands[2], "b32")]


def _half(e, opcode, operands, c):
    """Arithmetic on f16, bf16 and their pairs: one shape for one, two and three operands."""
    t = c["t"]
    sources = [e.source(x, f"b{bits_of(t)}" if not isinstance(x, Immediate) else t) for x in operands[1:]]
    sources += [sources[0]] * (3 - len(sources))
    return f"{c['o']}_{t}", [e.destination(operands[0], bits_of(t)), *sources, _flags(opcode)]


def _nothing(e, opcode, operands, c):
    return "nothing", []


_INT = "u16|s16|u32|s32|u64|s64"
_BIT = "b16|b32|b64"
_RN = "[.rn|.rz|.rm|.rp]"

TABLE: list[Row] = [
    # moves
    Row("mov.<t:pred|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64|b128>", "mov", _mov, MOVES),
    Row("selp.<t:b16|u16|s16|f16|bf16|b32|u32|s32|f32|b64|u64|s64|f64>", "selp_u{bits}", "={t} {t} {t} p"),
    Row("cvt<mods:(\\.[a-z]+)*?>.<to:u8|u16|u32|u64|s8|s16|s32|s64|f16|bf16|f32|f64|tf32|f16x2|bf16x2>"
        ".<from:u8|u16|u32|u64|s8|s16|s32|s64|f16|bf16|f32|f64|f16x2|bf16x2>", "cvt", _cvt),
    Row("cvta.<space:global|const|shared|shared::cta|shared::cluster|local|param>.<t:u32|u64>", "cvta", _cvta),
    Row("cvta.<to:to>.<space:global|const|shared|shared::cta|shared::cluster|local|param>.<t:u32|u64>", "cvta", _cvta),
    Row("isspacep.<space:global|local|shared>", "isspace", lambda e, o, x, c: (
        "isspace", [e.predicate_destination(x[0]), e.source(x[1], "b64"), {"global": 0, "shared": 1, "local": 2}[c["space"]]])),
    # integers
    Row(f"add.<t:{_INT}>", "add_u{bits}", "={t} {t} {t}"),
    Row("add.sat.s32", "add_sat_s32", "=s32 s32 s32"),
    Row("sub.sat.s32", "sub_sat_s32", "=s32 s32 s32"),
    Row(f"sub.<t:{_INT}>", "sub_u{bits}", "={t} {t} {t}"),
    Row(f"mul.lo.<t:{_INT}>", "mul_lo_u{bits}", "={t} {t} {t}"),
    Row(f"mul.hi.<t:{_INT}>", "mul_hi_{sign}{bits}", "={t} {t} {t}"),
    Row("mul.wide.<t:u16|s16|u32|s32>", "mul_wide_{sign}{bits}", "={wide} {t} {t}"),
    Row(f"mad.lo.<t:{_INT}>", "mad_lo_u{bits}", "={t} {t} {t} {t}"),
    Row("mad.hi.<t:u32|s32>", "mad_hi_{sign}{bits}", "={t} {t} {t} {t}"),
    Row("mad.wide.<t:u16|s16|u32|s32>", "mad_wide_{sign}{bits}", "={wide} {t} {t} {wide}"),
    Row(f"div.<t:{_INT}>", "div_{sign}{bits}", "={t} {t} {t}"),
    Row(f"rem.<t:{_INT}>", "rem_{sign}{bits}", "={t} {t} {t}"),
    Row(f"min.<t:{_INT}>", "min_{sign}{bits}", "={t} {t} {t}"),
    Row(f"max.<t:{_INT}>", "max_{sign}{bits}", "={t} {t} {t}"),
    Row("abs.<t:s16|s32|s64>", "abs_s{bits}", "={t} {t}"),
    Row("neg.<t:s16|s32|s64>", "neg_s{bits}", "={t} {t}"),
    Row("<o:and|or|xor>.pred", "{o}_pred", "=p p p"),
    Row("not.pred", "not_pred", "=p p"),
    Row(f"<o:and|or|xor>.<t:{_BIT}>", "{o}_u{bits}", "={t} {t} {t}"),
    Row(f"<o:not|cnot>.<t:{_BIT}>", "{o}_u{bits}", "={t} {t}"),
    Row(f"shl.<t:{_BIT}>", "shl_u{bits}", "={t} {t} u32"),
    Row(f"shr.<t:{_BIT}|{_INT}>", "shr_{sign}{bits}", "={t} {t} u32"),
    Row("shf.<o:l|r>.<w:wrap|clamp>.b32", "shf", lambda e, o, x, c: ("shf", [
        e.destination(x[0], 32), *[e.source(y, "b32") for y in x[1:4]], int(c["o"] == "r"), int(c["w"] == "wrap")])),
    Row("<o:popc|clz>.<t:b32|b64>", "{o}_u{bits}", "=u32 {t}"),
    Row("brev.<t:b32|b64>", "brev_u{bits}", "={t} {t}"),
    Row("bfind.<t:u32|s32|u64>", "bfind_{sign}{bits}", "=u32 {t}"),
    Row("bfe.<t:u32|s32|u64|s64>", "bfe_{sign}{bits}", "={t} {t} u32 u32"),
    Row("bfi.<t:b32|b64>", "bfi_u{bits}", "={t} {t} {t} u32 u32"),
    Row("bmsk.<w:clamp|wrap>.b32", "bmsk", lambda e, o, x, c: (
        "bmsk", [e.destination(x[0], 32), e.source(x[1], "b32"), e.source(x[2], "b32"), int(c["w"] == "wrap")])),
    Row("lop3.b32", "lop3", "=b32 b32 b32 b32 #"),
    Row("prmt.b32", "prmt", "=b32 b32 b32 b32"),
    Row(f"setp.<c:eq|ne|lt|le|gt|ge|lo|ls|hi|hs>.<t:{_BIT}|{_INT}>", "setp", _setp),
    Row(f"setp.<c:eq|ne|lt|le|gt|ge|lo|ls|hi|hs>.<b:and|or|xor>.<t:{_BIT}|{_INT}>", "setp", _setp),
    # floating point
    Row("setp.<c:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>[.ftz].<t:f32|f64|f16|bf16>", "setp", _setp),
    Row("setp.<c:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>.<b:and|or|xor>[.ftz].<t:f32|f64|f16|bf16>", "setp", _setp),
    Row(f"<o:add|sub|mul>{_RN}[.ftz][.sat].f32", "{o}_f32", "=f32 f32 f32 / {flags}"),
    Row(f"<o:add|sub|mul>{_RN}[.ftz].f32x2", "{o}_f32x2", lambda e, o, x, c: (f"{c['o']}_f32x2", [
        e.destination(x[0], 64), e.source(x[1], "b64"), e.source(x[2], "b64"), e.source(x[2], "b64"), _flags(o)])),
    Row(f"fma{_RN}[.ftz].f32x2", "fma_f32x2", "=b64 b64 b64 b64 / {flags}"),
    Row(f"<o:add|sub|mul>{_RN}.f64", "{o}_f64", "=f64 f64 f64 / {flags}"),
    Row(f"fma{_RN}[.ftz][.sat].f32", "fma_f32", "=f32 f32 f32 f32 / {flags}"),
    Row(f"fma{_RN}.f64", "fma_f64", "=f64 f64 f64 f64 / {flags}"),
    Row("<o:min|max>[.ftz][.NaN].f32", "{o}_f32", lambda e, o, x, c: (
        (f"{c['o']}_f32", [e.destination(x[0], 32), e.source(x[1], "f32"), e.source(x[2], "f32"), _flags(o)]) if len(x) == 3 else
        (f"{c['o']}3_f32", [e.destination(x[0], 32), *[e.source(y, "f32") for y in x[1:]], _flags(o)]))),
    Row("<o:min|max>.f64", "{o}_f64", "=f64 f64 f64 / {flags}"),
    Row("<o:neg|abs>[.ftz].f32", "{o}_f32", "=f32 f32"),
    Row("<o:neg|abs>.f64", "{o}_f64", "=f64 f64"),
    Row("copysign.f32", "copysign_f32", "=f32 f32 f32"),
    Row("testp.<c:finite|infinite|number|notanumber|normal|subnormal>.f32", "testp_f32", lambda e, o, x, c: ("testp_f32", [
        e.predicate_destination(x[0]), e.source(x[1], "f32"),
        ["finite", "infinite", "number", "notanumber", "normal", "subnormal"].index(c["c"])])),
    Row("div.<r:rn|rz|rm|rp>[.ftz].f32", "div_f32", "=f32 f32 f32 / {flags}"),
    Row("div.<r:full|approx>[.ftz].f32", "div_approx_f32", "=f32 f32 f32 / {flags}"),
    Row("div.<r:rn|rz|rm|rp>.f64", "div_f64", "=f64 f64 f64 / {flags}"),
    Row("<o:ex2|lg2|rcp|sqrt|rsqrt|sin|cos|tanh>.approx[.ftz].f32", "{o}_approx_f32", "=f32 f32 / {flags}"),
    Row("<o:sqrt|rcp>.<r:rn|rz|rm|rp>[.ftz].f32", "{o}_f32", "=f32 f32 / {flags}"),
    Row("<o:sqrt|rcp>.<r:rn|rz|rm|rp>.f64", "{o}_f64", "=f64 f64 / {flags}"),
    Row("<o:add|sub|mul>[.rn][.ftz][.sat].<t:f16|bf16|f16x2|bf16x2>", "{o}_{t}", _half),
    Row("fma.rn[.ftz][.sat][.relu].<t:f16|bf16|f16x2|bf16x2>", "fma_{t}", lambda e, o, x, c: _half(e, o, x, {**c, "o": "fma"})),
    Row("<o:min|max>[.ftz][.NaN].<t:f16|bf16|f16x2|bf16x2>", "{o}_{t}", _half),
    Row("<o:ex2|tanh>.approx[.ftz].<t:f16|bf16|f16x2|bf16x2>", "{o}_{t}", _half),
    Row("<o:neg|abs>[.ftz].<t:f16|bf16>", "{o}_half", "=b16 b16"),
    Row("<o:neg|abs>[.ftz].<t:f16x2|bf16x2>", "{o}_halfx2", "=b32 b32"),
    # memory
    Row("st.async[.weak][.shared::cluster].mbarrier::complete_tx::bytes[.shared::cluster][.v2|.v4].<t:b32|b64|u32|s32|f32|u64|s64|f64>",
        "st_async", _st_async),
    Row("<o:ld|ldu|st><mods:(\\.[A-Za-z0-9_:]+)*>", "memory", _memory),
    Row("<o:atom|red><mods:(\\.[A-Za-z0-9_:]+)*>", "atomic", _atomic),
    Row("cp.async.<cache:ca|cg>.<space:shared|shared::cta>.global[.L2::cache_hint][.L2::64B|.L2::128B|.L2::256B]", "cpasync", _cpasync),
    Row("cp.async.commit_group", "cpasync_commit"),
    Row("cp.async.wait_group", "cpasync_wait", "#"),
    Row("cp.async.wait_all", "cpasync_wait_all"),
    Row("mapa[.shared::cluster].<t:u32|u64>", "mapa", _mapa),
    Row("getctarank[.shared::cluster].<t:u32|u64>", "getctarank", lambda e, o, x, c: (
        "getctarank", [e.destination(x[0], 32), bits_of(c["t"]), e.source(x[1], c["t"])])),
    Row("prefetch<mods:.*>", "nothing", _nothing),
    Row("prefetchu<mods:.*>", "nothing", _nothing),
    Row("createpolicy<mods:.*>", "mov_u64", lambda e, o, x, c: ("mov_u64", [e.destination(x[0], 64), e.source(Immediate(0), "b64")])),
    Row("applypriority<mods:.*>", "nothing", _nothing),
    Row("discard<mods:.*>", "nothing", _nothing),
    # warps
    Row("shfl.sync.<mode:idx|up|down|bfly>.b32", "shfl", _shfl),
    Row("elect.sync", "elect", _elect),
    Row("vote.sync.<mode:all|any|uni|ballot>.<t:pred|b32>", "vote", _vote),
    Row("redux.sync.<o:add|min|max|and|or|xor>[.abs][.NaN].<t:u32|s32|b32|f32>", "redux", _redux),
    Row("match.any.sync.b32", "match_any", "=b32 b32 b32"),
    Row("bar.warp.sync", "warpsync", "b32"),
    Row("activemask.b32", "activemask", "=b32"),
    Row("bra[.uni]", "branch", _branch),
    Row("brx.idx[.uni]", "branch_indexed", _branch_indexed),
    Row("<o:ret|exit>[.uni]", "exit", lambda e, o, x, c: ("exit", [])),
    Row("trap", "trap"),
    # barriers and fences
    Row("<o:bar|barrier>[.cta].<s:sync|arrive>[.aligned]", "barrier", _barrier),
    Row("barrier.cluster.arrive[.release|.relaxed]", "cluster_arrive"),
    Row("barrier.cluster.arrive[.release|.relaxed].aligned", "cluster_arrive", "", CONVERGENT),
    Row("barrier.cluster.wait[.acquire]", "cluster_wait"),
    Row("barrier.cluster.wait[.acquire].aligned", "cluster_wait", "", CONVERGENT),
    Row("fence.proxy.async[.global|.shared::cta|.shared::cluster]", "fence_proxy_async"),
    Row("fence.proxy.<p:alias|tensormap|async>::<mods:.*>", "nothing", _nothing),
    Row("fence.mbarrier_init.release.cluster", "nothing"),
    Row("fence[.sc|.acq_rel|.acquire|.release][.sync_restrict::shared::cta.cluster|.cta|.cluster|.gpu|.sys]", "nothing", _nothing),
    Row("membar.<s:cta|gl|sys>", "nothing", _nothing),
    # mbarriers
    Row("mbarrier.init[.shared|.shared::cta].b64", "mbarrier_init", "@ b32"),
    Row("mbarrier.inval[.shared|.shared::cta].b64", "mbarrier_inval", "@"),
    Row("mbarrier.<o:arrive|arrive_drop>[.expect_tx][.noComplete][.release|.relaxed][.cta|.cluster]"
        "[.shared|.shared::cta|.shared::cluster].b64", "mbarrier_arrive", _mbarrier_arrive),
    Row("mbarrier.<o:test_wait|try_wait>[.parity][.acquire|.relaxed][.cta|.cluster][.shared|.shared::cta].b64", "mbarrier_wait", _mbarrier_wait),
    Row("mbarrier.<o:expect_tx|complete_tx>[.relaxed][.cta|.cluster][.shared|.shared::cta|.shared::cluster].b64", "mbarrier_tx", _mbarrier_tx),
    Row("cp.async.mbarrier.arrive[.shared|.shared::cta].b64", "cpasync_arrive", "@ / 0"),
    Row("cp.async.mbarrier.arrive.noinc[.shared|.shared::cta].b64", "cpasync_arrive", "@ / 1"),
    # bulk and tensor copies
    Row("cp.async.bulk.tensor.<d:1|2|3|4|5>d.<to:shared::cta|shared::cluster>.global<mods:(\\.[A-Za-z0-9_:]+)*>", "tma_load", _tma_load),
    Row("cp.async.bulk.tensor.<d:1|2|3|4|5>d.global.shared::cta<mods:(\\.[A-Za-z0-9_:]+)*>", "tma_store", _tma_store),
    Row("cp.reduce.async.bulk.tensor.<d:1|2|3|4|5>d.global.shared::cta<mods:(\\.[A-Za-z0-9_:]+)*>", "tma_store", _tma_store),
    Row("cp.async.bulk.prefetch<mods:.*>", "nothing", _nothing),
    Row("cp.async.bulk.commit_group", "bulk_commit"),
    Row("cp.async.bulk.wait_group", "bulk_wait", "# / 0"),
    Row("cp.async.bulk.wait_group.read", "bulk_wait", "# / 1"),
    Row("cp[.reduce].async.bulk.<to:shared::cta|shared::cluster|global>.<from:global|shared::cta><mods:(\\.[A-Za-z0-9_:]+)*>", "bulk", _bulk),
    # tensor cores
    Row("wgmma.fence.sync.aligned", "wgmma_fence", "", CONVERGENT),
    Row("wgmma.commit_group.sync.aligned", "wgmma_commit", "", CONVERGENT),
    Row("wgmma.wait_group.sync.aligned", "wgmma_wait", "#", CONVERGENT),
    Row("wgmma.mma_async.sync.aligned.m64n<n:\\d+>k<k:\\d+>.<d:f32|f16|s32>.<a:bf16|f16|tf32|e4m3|e5m2|s8|u8>.<b:bf16|f16|tf32|e4m3|e5m2|s8|u8>",
        "wgmma", _wgmma, CONVERGENT | CHAINS),
    Row("mma.sync.aligned.m16n8k<k:\\d+>.row.col.<d:f32|f16>.<a:bf16|f16|tf32|e4m3|e5m2>.<b:bf16|f16|tf32|e4m3|e5m2>.<c:f32|f16>",
        "mma_sync", _mma_sync, CONVERGENT),
    Row("<o:ldmatrix|stmatrix>.sync.aligned.m8n8.x<n:1|2|4>[.trans][.shared|.shared::cta].b16", "matrix", _matrix, CONVERGENT),
    Row("setmaxnreg.<o:inc|dec>.sync.aligned.u32", "nothing", _nothing, CONVERGENT),
    # tensor memory
    Row("tcgen05.alloc.cta_group::<group:1|2>.sync.aligned[.shared::cta].b32", "tmem_alloc", "@ b32 / {group}", CONVERGENT),
    Row("tcgen05.dealloc.cta_group::<group:1|2>.sync.aligned.b32", "tmem_dealloc", "b32 b32 / {group}", CONVERGENT),
    Row("tcgen05.relinquish_alloc_permit.cta_group::<group:1|2>.sync.aligned", "tmem_relinquish", "", CONVERGENT),
    Row("tcgen05.<o:ld|st>.sync.aligned.<shape:32x32b|16x64b|16x128b|16x256b|16x32bx2>.x<n:\\d+>[.pack::16b|.unpack::16b].b32",
        "tmem", _tcgen_ld, CONVERGENT),
    Row("tcgen05.wait::<o:ld|st>.sync.aligned", "tmem_wait", lambda e, o, x, c: ("tmem_wait", [int(c["o"] == "st")]), CONVERGENT),
    Row("tcgen05.fence::<o:before_thread_sync|after_thread_sync>", "nothing", _nothing),
    Row("tcgen05.mma<mods:(\\.ws|\\.sp)*>.cta_group::<group:1|2>.kind::<kind:\\w+><more:(\\.[A-Za-z0-9_:]+)*>", "tcgen_mma", _tcgen_mma),
    Row("tcgen05.commit.cta_group::<group:1|2>.mbarrier::arrive::one[.shared::cluster][.multicast::cluster].b64", "tcgen_commit", _tcgen_commit),
    Row("tcgen05.cp.cta_group::<group:1|2>.<shape:128x256b|128x128b|4x256b|64x128b|32x128b><more:(\\.[A-Za-z0-9_:]+)*>", "tcgen_cp", _tcgen_cp),
    # launches that depend on each other: the machine runs them in order
    Row("griddepcontrol.<o:wait|launch_dependents>", "nothing", _nothing),
    Row("nanosleep.u32", "nothing", _nothing),
    Row("pmevent", "nothing", _nothing),
]  # fmt: skip

_BY_NAME: dict[str, list[Row]] = {}
for _row in TABLE:
    _head = re.match(r"<\w+:([^>]*)>", _row.pattern)
    for _name in _head[1].split("|") if _head else [re.match(r"[a-z0-9]+", _row.pattern)[0]]:
        _BY_NAME.setdefault(_name, []).append(_row)


def encode(encoder, opcode: str, operands: list) -> tuple[str, list[int], int]:
    """The core function, its integers and the flags of an instruction. Raises PtxError where the table has no row."""
    for row in _BY_NAME.get(opcode.split(".")[0], ()):
        match = row.regex.fullmatch(opcode)
        if match:
            break
    else:
        raise PtxError("not implemented")
    captures = {k: v for k, v in match.groupdict().items() if v is not None}
    encoder.convergent = bool(row.flags & CONVERGENT)
    if not isinstance(row.operands, str):
        op, args = row.operands(encoder, opcode, operands, captures)
        return op, args, row.flags | (CONVERGENT if encoder.convergent else 0)
    t = captures.get("t")
    if t and t != "pred":
        captures |= {"bits": bits_of(t), "sign": "s" if t[0] == "s" else "u", "wide": f"b{2 * bits_of(t)}"}
    captures["flags"] = _flags(opcode)
    words, _, extra = row.operands.format(**captures).partition("/")
    words = words.split()
    if len(words) != len(operands):
        raise PtxError("not implemented (number of operands)")
    args: list[int] = []
    for word, operand in zip(words, operands, strict=True):
        if word == "@":
            args += encoder.address(operand)
        elif word == "#":
            args.append(operand.value)
        elif word == "p":
            args.append(encoder.predicate(operand))
        elif word == "=p":
            args.append(encoder.predicate_destination(operand))
        elif word.startswith("="):
            args.append(encoder.destination(operand, bits_of(word[1:])))
        else:
            args.append(encoder.source(operand, word))
    args += [int(x) for x in extra.split()]
    return row.op.format(**captures), args, row.flags


__all__ = ["TABLE", "Symbol", "encode"]
