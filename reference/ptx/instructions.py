"""The table of instructions: which function of the core executes a PTX opcode, and how its operands are encoded.

A row is a pattern, the name of the core's function (`op_<name>` in core/*.c) and the operands. In a pattern,
`<t:a|b>` captures one of the alternatives and `[.x|.y]` is optional. The operands are words, in the order of the PTX:

    =f32   a destination register of that type       f32   a source: register or literal
    =p     a destination predicate                   p     a source predicate
    @      an address                                #     an integer literal

and words after "/" are plain integers for the function. {t}, {bits}, {sign} and {flags} stand for what the pattern
captured. Where operands are irregular, a function of encoders.py encodes them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from . import encoders
from .encoders import arithmetic_flags, bits_of
from .parser import Immediate, PtxError

CONVERGENT, CHAINS, MOVES = 1, 2, 4  # core/machine.h


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


_INT = "u16|s16|u32|s32|u64|s64"
_BIT = "b16|b32|b64"
_RN = "[.rn|.rz|.rm|.rp]"

TABLE: list[Row] = [
    # moves
    Row("mov.<t:pred|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64|b128>", "mov", encoders.mov, MOVES),
    Row("selp.<t:b16|u16|s16|f16|bf16|b32|u32|s32|f32|b64|u64|s64|f64>", "selp_u{bits}", "={t} {t} {t} p"),
    Row(
        "cvt<mods:(\\.[a-z]+)*?>.<to:u8|u16|u32|u64|s8|s16|s32|s64|f16|bf16|f32|f64|tf32|f16x2|bf16x2>"
        ".<from:u8|u16|u32|u64|s8|s16|s32|s64|f16|bf16|f32|f64|f16x2|bf16x2>",
        "cvt",
        encoders.cvt,
    ),
    Row("cvta.<space:global|const|shared|shared::cta|shared::cluster|local|param>.<t:u32|u64>", "cvta", encoders.cvta),
    Row(
        "cvta.<to:to>.<space:global|const|shared|shared::cta|shared::cluster|local|param>.<t:u32|u64>",
        "cvta",
        encoders.cvta,
    ),
    Row(
        "isspacep.<space:global|local|shared>",
        "isspace",
        lambda e, o, x, c: (
            "isspace",
            [e.predicate_destination(x[0]), e.source(x[1], "b64"), {"global": 0, "shared": 1, "local": 2}[c["space"]]],
        ),
    ),
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
    Row(
        "shf.<o:l|r>.<w:wrap|clamp>.b32",
        "shf",
        lambda e, o, x, c: (
            "shf",
            [e.destination(x[0], 32), *[e.source(y, "b32") for y in x[1:4]], int(c["o"] == "r"), int(c["w"] == "wrap")],
        ),
    ),
    Row("<o:popc|clz>.<t:b32|b64>", "{o}_u{bits}", "=u32 {t}"),
    Row("brev.<t:b32|b64>", "brev_u{bits}", "={t} {t}"),
    Row("bfind.<t:u32|s32|u64>", "bfind_{sign}{bits}", "=u32 {t}"),
    Row("bfe.<t:u32|s32|u64|s64>", "bfe_{sign}{bits}", "={t} {t} u32 u32"),
    Row("bfi.<t:b32|b64>", "bfi_u{bits}", "={t} {t} {t} u32 u32"),
    Row(
        "bmsk.<w:clamp|wrap>.b32",
        "bmsk",
        lambda e, o, x, c: (
            "bmsk",
            [e.destination(x[0], 32), e.source(x[1], "b32"), e.source(x[2], "b32"), int(c["w"] == "wrap")],
        ),
    ),
    Row("<o:dp4a>.<x:u32|s32>.<y:u32|s32>", "dot", encoders.dot),
    Row("<o:dp2a>.<half:lo|hi>.<x:u32|s32>.<y:u32|s32>", "dot", encoders.dot),
    Row("mul24.lo.u32", "mul24_lo_u32", "=u32 u32 u32"),
    Row("sad.<t:u32|s32>", "sad_{t}", "={t} {t} {t} {t}"),
    Row("lop3.b32", "lop3", "=b32 b32 b32 b32 #"),
    Row("prmt.b32", "prmt", "=b32 b32 b32 b32"),
    Row(f"setp.<c:eq|ne|lt|le|gt|ge|lo|ls|hi|hs>.<t:{_BIT}|{_INT}>", "setp", encoders.setp),
    Row(f"setp.<c:eq|ne|lt|le|gt|ge|lo|ls|hi|hs>.<b:and|or|xor>.<t:{_BIT}|{_INT}>", "setp", encoders.setp),
    # floating point
    Row("setp.<c:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>[.ftz].<t:f32|f64|f16|bf16>", "setp", encoders.setp),
    Row(
        "setp.<c:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>.<b:and|or|xor>[.ftz].<t:f32|f64|f16|bf16>",
        "setp",
        encoders.setp,
    ),
    Row(f"<o:add|sub|mul>{_RN}[.ftz][.sat].f32", "{o}_f32", "=f32 f32 f32 / {flags}"),
    Row(
        f"<o:add|sub|mul>{_RN}[.ftz].f32x2",
        "{o}_f32x2",
        lambda e, o, x, c: (
            f"{c['o']}_f32x2",
            [
                e.destination(x[0], 64),
                e.source(x[1], "b64"),
                e.source(x[2], "b64"),
                e.source(x[2], "b64"),
                arithmetic_flags(o),
            ],
        ),
    ),
    Row(f"<o:add|sub|fma>{_RN}[.sat].f32.<t:f16|bf16>", "mixed", encoders.mixed),
    Row(f"fma{_RN}[.ftz].f32x2", "fma_f32x2", "=b64 b64 b64 b64 / {flags}"),
    Row(f"<o:add|sub|mul>{_RN}.f64", "{o}_f64", "=f64 f64 f64 / {flags}"),
    Row(f"fma{_RN}[.ftz][.sat].f32", "fma_f32", "=f32 f32 f32 f32 / {flags}"),
    Row(f"fma{_RN}.f64", "fma_f64", "=f64 f64 f64 f64 / {flags}"),
    Row(
        "<o:min|max>[.ftz][.NaN].f32",
        "{o}_f32",
        lambda e, o, x, c: (
            (
                f"{c['o']}_f32",
                [e.destination(x[0], 32), e.source(x[1], "f32"), e.source(x[2], "f32"), arithmetic_flags(o)],
            )
            if len(x) == 3
            else (
                f"{c['o']}3_f32",
                [e.destination(x[0], 32), *[e.source(y, "f32") for y in x[1:]], arithmetic_flags(o)],
            )
        ),
    ),
    Row("<o:min|max>.f64", "{o}_f64", "=f64 f64 f64 / {flags}"),
    Row("<o:neg|abs>[.ftz].f32", "{o}_f32", "=f32 f32"),
    Row("<o:neg|abs>.f64", "{o}_f64", "=f64 f64"),
    Row("copysign.f32", "copysign_f32", "=f32 f32 f32"),
    Row(
        "testp.<c:finite|infinite|number|notanumber|normal|subnormal>.f32",
        "testp_f32",
        lambda e, o, x, c: (
            "testp_f32",
            [
                e.predicate_destination(x[0]),
                e.source(x[1], "f32"),
                ["finite", "infinite", "number", "notanumber", "normal", "subnormal"].index(c["c"]),
            ],
        ),
    ),
    Row("div.<r:rn|rz|rm|rp>[.ftz].f32", "div_f32", "=f32 f32 f32 / {flags}"),
    Row("div.<r:full|approx>[.ftz].f32", "div_approx_f32", "=f32 f32 f32 / {flags}"),
    Row("div.<r:rn|rz|rm|rp>.f64", "div_f64", "=f64 f64 f64 / {flags}"),
    Row("<o:ex2|lg2|rcp|sqrt|rsqrt|sin|cos|tanh>.approx[.ftz].f32", "{o}_approx_f32", "=f32 f32 / {flags}"),
    Row("<o:sqrt|rcp>.<r:rn|rz|rm|rp>[.ftz].f32", "{o}_f32", "=f32 f32 / {flags}"),
    Row("<o:sqrt|rcp>.<r:rn|rz|rm|rp>.f64", "{o}_f64", "=f64 f64 / {flags}"),
    Row("<o:add|sub|mul>[.rn][.ftz][.sat].<t:f16|bf16|f16x2|bf16x2>", "{o}_{t}", encoders.half),
    Row(
        "fma.rn[.ftz][.sat][.relu].<t:f16|bf16|f16x2|bf16x2>",
        "fma_{t}",
        lambda e, o, x, c: encoders.half(e, o, x, {**c, "o": "fma"}),
    ),
    Row("<o:min|max>[.ftz][.NaN].<t:f16|bf16|f16x2|bf16x2>", "{o}_{t}", encoders.half),
    Row("<o:ex2|tanh>.approx[.ftz].<t:f16|bf16|f16x2|bf16x2>", "{o}_{t}", encoders.half),
    Row("<o:neg|abs>[.ftz].<t:f16|bf16>", "{o}half", "=b16 b16"),
    Row("<o:neg|abs>[.ftz].<t:f16x2|bf16x2>", "{o}_halfx2", "=b32 b32"),
    # encoders.memory
    Row(
        "st.async[.weak][.shared::cluster].mbarrier::complete_tx::bytes[.shared::cluster][.v2|.v4].<t:b32|b64|u32|s32|f32|u64|s64|f64>",
        "st_async",
        encoders.st_async,
    ),
    Row("<o:ld|ldu|st><mods:(\\.[A-Za-z0-9_:]+)*>", "memory", encoders.memory),
    Row("<o:atom|red><mods:(\\.[A-Za-z0-9_:]+)*>", "atomic", encoders.atomic),
    Row(
        "cp.async.<cache:ca|cg>.<space:shared|shared::cta>.global[.L2::cache_hint][.L2::64B|.L2::128B|.L2::256B]",
        "cpasync",
        encoders.cpasync,
    ),
    Row("cp.async.commit_group", "cpasync_commit"),
    Row("cp.async.wait_group", "cpasync_wait", "#"),
    Row("cp.async.wait_all", "cpasync_wait_all"),
    Row("mapa[.shared::cluster].<t:u32|u64>", "mapa", encoders.mapa),
    Row(
        "getctarank[.shared::cluster].<t:u32|u64>",
        "getctarank",
        lambda e, o, x, c: ("getctarank", [e.destination(x[0], 32), bits_of(c["t"]), e.source(x[1], c["t"])]),
    ),
    Row("prefetch<mods:.*>", "nothing", encoders.nothing),
    Row("prefetchu<mods:.*>", "nothing", encoders.nothing),
    Row(
        "createpolicy<mods:.*>",
        "mov_u64",
        lambda e, o, x, c: ("mov_u64", [e.destination(x[0], 64), e.source(Immediate(0), "b64")]),
    ),
    Row("applypriority<mods:.*>", "nothing", encoders.nothing),
    Row("discard<mods:.*>", "nothing", encoders.nothing),
    # warps
    Row("shfl.sync.<mode:idx|up|down|bfly>.b32", "shfl", encoders.shfl),
    Row("elect.sync", "elect", encoders.elect),
    Row("vote.sync.<mode:all|any|uni|ballot>.<t:pred|b32>", "vote", encoders.vote),
    Row("redux.sync.<o:add|min|max|and|or|xor>[.abs][.NaN].<t:u32|s32|b32|f32>", "redux", encoders.redux),
    Row("match.any.sync.b32", "match_any", "=b32 b32 b32"),
    Row("bar.warp.sync", "warpsync", "b32"),
    Row("activemask.b32", "activemask", "=b32"),
    Row("bra[.uni]", "branch", encoders.branch),
    Row("brx.idx[.uni]", "branch_indexed", encoders.branch_indexed),
    Row("<o:ret|exit>[.uni]", "exit", lambda e, o, x, c: ("exit", [])),
    Row("trap", "trap"),
    # barriers and fences
    Row("<o:bar|barrier>[.cta].<s:sync|arrive>[.aligned]", "barrier", encoders.barrier),
    Row("barrier.cluster.arrive[.release]", "cluster_arrive", "/ 0"),
    Row("barrier.cluster.arrive.relaxed", "cluster_arrive", "/ 1"),
    Row("barrier.cluster.arrive[.release].aligned", "cluster_arrive", "/ 0", CONVERGENT),
    Row("barrier.cluster.arrive.relaxed.aligned", "cluster_arrive", "/ 1", CONVERGENT),
    Row("barrier.cluster.wait[.acquire]", "cluster_wait"),
    Row("barrier.cluster.wait[.acquire].aligned", "cluster_wait", "", CONVERGENT),
    Row("fence.proxy.async", "fence_proxy_async", "/ 3"),
    Row("fence.proxy.async.<o:shared::cta|shared::cluster>", "fence_proxy_async", "/ 1"),
    Row("fence.proxy.async.global", "fence_proxy_async", "/ 2"),
    Row("fence.proxy.<p:alias|tensormap|async>::<mods:.*>", "nothing", encoders.nothing),
    Row("fence.mbarrier_init.release.cluster", "fence_mbarrier_init"),
    Row(
        "fence[.sc|.acq_rel|.acquire|.release][.sync_restrict::shared::cta.cluster|.cta|.cluster|.gpu|.sys]",
        "fence",
        lambda e, o, x, c: ("fence", []),
    ),
    Row("membar.<s:cta|gl|sys>", "nothing", encoders.nothing),
    # mbarriers
    Row("mbarrier.init[.shared|.shared::cta].b64", "mbarrier_init", "@ b32"),
    Row("mbarrier.inval[.shared|.shared::cta].b64", "mbarrier_inval", "@"),
    Row(
        "mbarrier.<o:arrive|arrive_drop>[.expect_tx][.noComplete][.release|.relaxed][.cta|.cluster]"
        "[.shared|.shared::cta|.shared::cluster].b64",
        "mbarrier_arrive",
        encoders.mbarrier_arrive,
    ),
    Row(
        "mbarrier.<o:test_wait|try_wait>[.parity][.acquire|.relaxed][.cta|.cluster][.shared|.shared::cta].b64",
        "mbarrier_wait",
        encoders.mbarrier_wait,
    ),
    Row(
        "mbarrier.<o:expect_tx|complete_tx>[.relaxed][.cta|.cluster][.shared|.shared::cta|.shared::cluster].b64",
        "mbarrier_tx",
        encoders.mbarrier_tx,
    ),
    Row("cp.async.mbarrier.arrive[.shared|.shared::cta].b64", "cpasync_arrive", "@ / 0"),
    Row("cp.async.mbarrier.arrive.noinc[.shared|.shared::cta].b64", "cpasync_arrive", "@ / 1"),
    # bulk and tensor copies
    Row(
        "cp.async.bulk.tensor.<d:1|2|3|4|5>d.<to:shared::cta|shared::cluster>.global<mods:(\\.[A-Za-z0-9_:]+)*>",
        "tma_load",
        encoders.tma_load,
    ),
    Row(
        "cp.async.bulk.tensor.<d:1|2|3|4|5>d.global.shared::cta<mods:(\\.[A-Za-z0-9_:]+)*>",
        "tma_store",
        encoders.tma_store,
    ),
    Row(
        "cp.reduce.async.bulk.tensor.<d:1|2|3|4|5>d.global.shared::cta<mods:(\\.[A-Za-z0-9_:]+)*>",
        "tma_store",
        encoders.tma_store,
    ),
    Row("cp.async.bulk.prefetch<mods:.*>", "nothing", encoders.nothing),
    Row("cp.async.bulk.commit_group", "bulk_commit"),
    Row("cp.async.bulk.wait_group", "bulk_wait", "# / 0"),
    Row("cp.async.bulk.wait_group.read", "bulk_wait", "# / 1"),
    Row(
        "cp[.reduce].async.bulk.<to:shared::cta|shared::cluster|global>.<from:global|shared::cta><mods:(\\.[A-Za-z0-9_:]+)*>",
        "bulk",
        encoders.bulk,
    ),
    # tensor cores
    Row("wgmma.fence.sync.aligned", "wgmma_fence", "", CONVERGENT),
    Row("wgmma.commit_group.sync.aligned", "wgmma_commit", "", CONVERGENT),
    Row("wgmma.wait_group.sync.aligned", "wgmma_wait", "#", CONVERGENT),
    Row(
        "wgmma.mma_async.sync.aligned.m64n<n:\\d+>k<k:\\d+>.<d:f32|f16|s32>.<a:bf16|f16|tf32|e4m3|e5m2|s8|u8>.<b:bf16|f16|tf32|e4m3|e5m2|s8|u8>",
        "wgmma",
        encoders.wgmma,
        CONVERGENT | CHAINS,
    ),
    Row(
        "mma.sync.aligned.m16n8k<k:\\d+>.row.col.<d:f32|f16>.<a:bf16|f16|tf32|e4m3|e5m2>.<b:bf16|f16|tf32|e4m3|e5m2>.<c:f32|f16>",
        "mma_sync",
        encoders.mma_sync,
        CONVERGENT,
    ),
    Row(
        "<o:ldmatrix|stmatrix>.sync.aligned.m8n8.x<n:1|2|4>[.trans][.shared|.shared::cta].b16",
        "matrix",
        encoders.matrix,
        CONVERGENT,
    ),
    Row("setmaxnreg.<o:inc|dec>.sync.aligned.u32", "nothing", encoders.nothing, CONVERGENT),
    # tensor encoders.memory
    Row(
        "tcgen05.alloc.cta_group::<group:1|2>.sync.aligned[.shared::cta].b32",
        "tmem_alloc",
        "@ b32 / {group}",
        CONVERGENT,
    ),
    Row("tcgen05.dealloc.cta_group::<group:1|2>.sync.aligned.b32", "tmem_dealloc", "b32 b32 / {group}", CONVERGENT),
    Row("tcgen05.relinquish_alloc_permit.cta_group::<group:1|2>.sync.aligned", "tmem_relinquish", "", CONVERGENT),
    Row(
        "tcgen05.<o:ld|st>.sync.aligned.<shape:32x32b|16x64b|16x128b|16x256b|16x32bx2>.x<n:\\d+>[.pack::16b|.unpack::16b].b32",
        "tmem",
        encoders.tcgen_ld,
        CONVERGENT,
    ),
    Row(
        "tcgen05.wait::<o:ld|st>.sync.aligned",
        "tmem_wait",
        lambda e, o, x, c: ("tmem_wait", [int(c["o"] == "st")]),
        CONVERGENT,
    ),
    Row("tcgen05.fence::before_thread_sync", "tcgen_fence", "/ 0"),
    Row("tcgen05.fence::after_thread_sync", "tcgen_fence", "/ 1"),
    Row(
        "tcgen05.mma<mods:(\\.ws|\\.sp)*>.cta_group::<group:1|2>.kind::<kind:\\w+><more:(\\.[A-Za-z0-9_:]+)*>",
        "tcgen_mma",
        encoders.tcgen_mma,
    ),
    Row(
        "tcgen05.commit.cta_group::<group:1|2>.mbarrier::arrive::one[.shared::cluster][.multicast::cluster].b64",
        "tcgen_commit",
        encoders.tcgen_commit,
    ),
    Row(
        "tcgen05.cp.cta_group::<group:1|2>.<shape:128x256b|128x128b|4x256b|64x128b|32x128b><more:(\\.[A-Za-z0-9_:]+)*>",
        "tcgen_cp",
        encoders.tcgen_cp,
    ),
    # launches that depend on each other: the machine runs them in order, and checks that the later one waits
    Row("griddepcontrol.wait", "grid_wait"),
    Row("griddepcontrol.launch_dependents", "nothing", encoders.nothing),
    Row("nanosleep.u32", "nothing", encoders.nothing),
    Row("pmevent", "nothing", encoders.nothing),
]

_BY_NAME: dict[str, list[Row]] = {}
for _row in TABLE:
    _head = re.match(r"<\w+:([^>]*)>", _row.pattern)
    for _name in _head[1].split("|") if _head else [re.match(r"[a-z0-9]+", _row.pattern)[0]]:
        _BY_NAME.setdefault(_name, []).append(_row)


@functools.cache
def _row_of(opcode: str) -> tuple[Row, dict[str, str]]:
    """The opcode's row, and what its pattern captures."""
    for row in _BY_NAME.get(opcode.split(".")[0], ()):
        if match := row.regex.fullmatch(opcode):
            return row, {k: v for k, v in match.groupdict().items() if v is not None}
    raise PtxError("not implemented")


@functools.cache
def _plain(opcode: str) -> tuple[str, list[str], list[int]]:
    """Of a row whose operands are written out: the core function, a word for each operand, the integers after them."""
    row, captures = _row_of(opcode)
    t = captures.get("t")
    if t and t != "pred":
        captures = captures | {"bits": bits_of(t), "sign": "s" if t[0] == "s" else "u", "wide": f"b{2 * bits_of(t)}"}
    captures = captures | {"flags": arithmetic_flags(opcode)}
    words, _, extra = row.operands.format(**captures).partition("/")
    return row.op.format(**captures), words.split(), [int(x) for x in extra.split()]


def encode(encoder, opcode: str, operands: list) -> tuple[str, list[int], int]:
    """The core function, its integers and the flags of an instruction. Raises PtxError where the table has no row."""
    row, captures = _row_of(opcode)
    encoder.convergent = bool(row.flags & CONVERGENT)
    if not isinstance(row.operands, str):
        op, args = row.operands(encoder, opcode, operands, dict(captures))
        return op, args, row.flags | (CONVERGENT if encoder.convergent else 0)
    op, words, extra = _plain(opcode)
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
    return op, args + extra, row.flags
