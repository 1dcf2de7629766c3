"""Instruction families against NumPy and torch, which follow the same rules, or against PTX's own."""

import numpy as np
import pytest
import torch

from reference.ptx import MachineFault

from .snippets import evaluate, launch, module

rng = np.random.default_rng(0)
U32 = np.concatenate([[0, 1, 2**31, 2**31 - 1, 2**32 - 1, 0x80000001], rng.integers(0, 2**32, 26)]).astype(np.uint32)
V32 = np.concatenate([[0, 2**32 - 1, 2**32 - 1, 3, 7, 0], rng.integers(0, 2**32, 26)]).astype(np.uint32)
SMALL = rng.integers(0, 40, 32).astype(np.uint32)
F32 = np.concatenate(
    [[0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, -1.5], rng.normal(size=24) * 10.0 ** rng.integers(-20, 20, 24)]
).astype(np.float32)
G32 = np.roll(F32, 5)
H32 = np.roll(F32, 11)


def same(a, b):
    """Equal bits, except that any NaN is as good as another."""
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name, rule",
    [
        ("add.u32", lambda x, y: x + y),
        ("sub.s32", lambda x, y: x - y),
        ("mul.lo.u32", lambda x, y: x * y),
        ("mul.hi.u32", lambda x, y: ((x.astype(np.uint64) * y) >> 32).astype(np.uint32)),
        ("mul.hi.s32", lambda x, y: ((x.view(np.int32).astype(np.int64) * y.view(np.int32)) >> 32).astype(np.uint32)),
        ("and.b32", lambda x, y: x & y),
        ("or.b32", lambda x, y: x | y),
        ("xor.b32", lambda x, y: x ^ y),
        ("min.s32", lambda x, y: np.minimum(x.view(np.int32), y.view(np.int32)).view(np.uint32)),
        ("max.u32", np.maximum),
        ("div.u32", lambda x, y: np.where(y == 0, 2**32 - 1, x // np.maximum(y, 1)).astype(np.uint32)),
        ("rem.u32", lambda x, y: np.where(y == 0, x, x % np.maximum(y, 1)).astype(np.uint32)),
    ],
)
def test_integers(name, rule):
    same(evaluate(f"{name} $d, $0, $1;", U32, V32), rule(U32, V32))


def test_shifts_clamp():
    wide = U32.astype(np.uint64)
    same(evaluate("shl.b32 $d, $0, $1;", U32, SMALL), np.where(SMALL > 31, 0, wide << SMALL).astype(np.uint32))
    same(evaluate("shr.u32 $d, $0, $1;", U32, SMALL), np.where(SMALL > 31, 0, U32 >> (SMALL & 31)))
    signed = U32.view(np.int32)
    same(evaluate("shr.s32 $d, $0, $1;", U32, SMALL).view(np.int32), signed >> np.minimum(SMALL, 31))
    both = (V32.astype(np.uint64) << 32) | U32
    same(evaluate("shf.r.wrap.b32 $d, $0, $1, $2;", U32, V32, SMALL), (both >> (SMALL & 31)).astype(np.uint32))
    same(evaluate("shf.l.wrap.b32 $d, $0, $1, $2;", U32, V32, SMALL), ((both << (SMALL & 31)) >> 32).astype(np.uint32))


def test_bits():
    same(evaluate("popc.b32 $d, $0;", U32), np.array([bin(x).count("1") for x in U32]))
    same(evaluate("clz.b32 $d, $0;", U32), np.array([32 - int(x).bit_length() for x in U32]))
    same(evaluate("brev.b32 $d, $0;", U32), np.array([int(f"{x:032b}"[::-1], 2) for x in U32]))
    same(evaluate("bfe.u32 $d, $0, 5, 7;", U32), U32 >> 5 & 127)
    same(evaluate("bfe.s32 $d, $0, 28, 4;", U32).view(np.int32), U32.view(np.int32) >> 28)
    same(evaluate("bfi.b32 $d, $0, $1, 8, 4;", U32, V32), V32 & ~np.uint32(0xF00) | (U32 & 15) << 8)
    same(evaluate("lop3.b32 $d, $0, $1, $2, 0xE8;", U32, V32, SMALL), U32 & V32 | U32 & SMALL | V32 & SMALL)
    same(
        evaluate("prmt.b32 $d, $0, $1, 0x5140;", U32, V32),
        U32 & 255 | (V32 & 255) << 8 | (U32 >> 8 & 255) << 16 | (V32 >> 8 & 255) << 24,
    )
    same(evaluate("prmt.b32 $d, $0, $1, 0x888B;", U32, V32) >> 8, np.where(U32 & 128, 0xFFFFFF, 0))


def test_dot_products_of_bytes():
    a, b = (x.view(np.uint8).reshape(32, 4).astype(np.uint32) for x in (U32, V32))
    same(evaluate("dp4a.u32.u32 $d, $0, $1, $2;", U32, V32, SMALL), ((a * b).sum(1) + SMALL).astype(np.uint32))
    signed = (U32.view(np.int8).reshape(32, 4).astype(np.int32) * b.astype(np.int32)).sum(1) + SMALL.astype(np.int32)
    same(evaluate("dp4a.s32.u32 $d, $0, $1, $2;", U32, V32, SMALL).view(np.int32), signed)
    halves = U32.view(np.uint16).reshape(32, 2).astype(np.uint32)
    same(evaluate("dp2a.hi.u32.u32 $d, $0, $1, 0;", U32, V32), (halves * b[:, 2:]).sum(1).astype(np.uint32))
    apart = np.where(U32 > V32, U32 - V32, V32 - U32)
    same(evaluate("sad.u32 $d, $0, $1, $2;", U32, V32, SMALL), apart + SMALL)


def test_wide_integers():
    same(
        evaluate("mul.wide.s32 $d, $0, $1;", U32, V32, out=np.int64),
        U32.view(np.int32).astype(np.int64) * V32.view(np.int32),
    )
    same(
        evaluate("mad.wide.u32 $d, $0, $1, $2;", U32, V32, np.uint64(2**63), out=np.uint64),
        U32.astype(np.uint64) * V32 + np.uint64(2**63),
    )


@pytest.mark.parametrize(
    "name, rule", [("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div.rn", np.divide)]
)
def test_fp32(name, rule):
    with np.errstate(all="ignore"):
        same(evaluate(f"{name}.f32 $d, $0, $1;", F32, G32, out=np.float32), rule(F32, G32))


def test_fp32_nan_is_canonical():
    assert evaluate("add.f32 $d, $0, $1;", np.float32(np.inf), np.float32(-np.inf))[0] == 0x7FFFFFFF


def test_fma_rounds_once():
    expected = torch.addcmul(torch.tensor(H32).double(), torch.tensor(F32).double(), torch.tensor(G32).double())
    out = evaluate("fma.rn.f32 $d, $0, $1, $2;", F32, G32, H32, out=np.float32)
    finite = np.isfinite(expected.numpy()) & (np.abs(expected.numpy()) > 1e-37)
    same(out[finite], expected.float().numpy()[finite])
    x = np.float32(1 + 2**-12)
    assert evaluate("fma.rn.f32 $d, $0, $0, $1;", x, np.float32(-1 - 2**-11), out=np.float32)[0] == np.float32(2**-24)


def test_directed_rounding_ftz_and_sat():
    one, tiny = np.float32(1), np.float32(1e-30)
    assert evaluate("add.rp.f32 $d, $0, $1;", one, tiny, out=np.float32)[0] == np.nextafter(one, np.float32(2))
    assert evaluate("add.rz.f32 $d, $0, $1;", one, tiny, out=np.float32)[0] == one
    assert evaluate("sub.rm.f32 $d, $0, $1;", one, tiny, out=np.float32)[0] == np.nextafter(one, np.float32(0))
    assert evaluate("add.ftz.f32 $d, $0, $1;", np.float32(1e-40), np.float32(0), out=np.float32)[0] == 0
    same(evaluate("add.sat.f32 $d, $0, 0f00000000;", F32, out=np.float32), np.nan_to_num(np.clip(F32, 0, 1), nan=0.0))


def test_min_max_and_nan():
    same(evaluate("min.f32 $d, $0, $1;", F32, G32, out=np.float32), np.fmin(F32, G32))
    same(evaluate("max.NaN.f32 $d, $0, $1;", F32, G32, out=np.float32), np.maximum(F32, G32))
    assert np.signbit(evaluate("min.f32 $d, $0, $1;", np.float32(0), np.float32(-0.0), out=np.float32)[0])


@pytest.mark.parametrize(
    "c, rule", [("lt", np.less), ("ge", np.greater_equal), ("eq", np.equal), ("ltu", lambda x, y: ~(x >= y))]
)
def test_comparisons(c, rule):
    same(evaluate(f"setp.{c}.f32 %p1, $0, $1; selp.b32 $d, 1, 0, %p1;", F32, G32), rule(F32, G32))


def test_comparison_combined_and_negated():
    body = (
        "setp.ne.u32 %p1, $0, 0; setp.lt.and.s32 %p2|%p3, $0, $1, %p1; selp.b32 $d, 1, 0, %p2; @%p3 add.u32 $d, $d, 2;"
    )
    less, other = U32.view(np.int32) < V32.view(np.int32), U32 != 0
    same(evaluate(body, U32, V32), (less & other) + 2 * (~less & other))


def test_approximations_are_within_their_documented_error():
    x = (rng.normal(size=32) * 3).astype(np.float32)
    for approximate in (False, True):
        out = evaluate("ex2.approx.ftz.f32 $d, $0;", x, out=np.float32, approximate=approximate)
        assert np.all(np.abs(out / np.exp2(x.astype(np.float64)) - 1) < 2**-22 + 2**-24)
        out = evaluate("lg2.approx.f32 $d, $0;", np.abs(x), out=np.float32, approximate=approximate)
        assert np.all(np.abs(out - np.log2(np.abs(x).astype(np.float64))) < 2**-22 + 2**-22)
        out = evaluate("rsqrt.approx.f32 $d, $0;", np.abs(x), out=np.float32, approximate=approximate)
        assert np.all(np.abs(out * np.sqrt(np.abs(x).astype(np.float64)) - 1) < 2**-22 + 2**-23)


# ---- conversions ----
def bits16(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16)


def test_cvt_to_16_bits_rounds_to_nearest_even():
    finite = F32[~np.isnan(F32)].astype(np.float32)
    x = np.resize(finite, 32)
    same(evaluate("cvt.rn.bf16.f32 $d, $0;", x, out=np.uint16), bits16(torch.tensor(x).bfloat16()))
    same(evaluate("cvt.rn.f16.f32 $d, $0;", x, out=np.uint16), bits16(torch.tensor(x).half()))
    pair = evaluate("cvt.rn.bf16x2.f32 $d, $0, $1;", x, G32)
    same(pair >> 16, bits16(torch.tensor(x).bfloat16()))
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, -1 - 2**-8] * 8, np.float32)
    same(evaluate("cvt.rn.bf16.f32 $d, $0;", ties, out=np.uint16), bits16(torch.tensor(ties).bfloat16()))
    same(evaluate("cvt.rz.bf16.f32 $d, $0;", ties, out=np.uint16), (ties.view(np.uint32) >> 16).astype(np.uint16))


def test_cvt_from_16_bits_and_integers():
    h = rng.integers(0, 0x7C00, 32).astype(np.uint16)
    same(
        evaluate("cvt.f32.f16 $d, $0;", h, out=np.float32),
        torch.tensor(h.view(np.int16)).view(torch.float16).float().numpy(),
    )
    same(evaluate("cvt.rn.f32.s32 $d, $0;", U32, out=np.float32), U32.view(np.int32).astype(np.float32))
    same(evaluate("cvt.rn.f32.u32 $d, $0;", U32, out=np.float32), U32.astype(np.float32))
    same(evaluate("cvt.s64.s32 $d, $0;", U32, out=np.int64), U32.view(np.int32).astype(np.int64))
    same(evaluate("cvt.u64.u32 $d, $0;", U32, out=np.uint64), U32)
    same(evaluate("cvt.s32.s8 $d, $0;", U32).view(np.int32), U32.astype(np.uint8).view(np.int8))


def test_cvt_to_integers_saturates():
    expected = np.clip(np.trunc(np.nan_to_num(F32.astype(np.float64), nan=0)), -(2**31), 2**31 - 1).astype(np.int32)
    same(evaluate("cvt.rzi.s32.f32 $d, $0;", F32).view(np.int32), expected)
    expected = np.clip(np.rint(np.nan_to_num(F32.astype(np.float64), nan=0)), 0, 2**32 - 1).astype(np.uint32)
    same(evaluate("cvt.rni.u32.f32 $d, $0;", F32), expected)


def test_cvt_tf32_rounds_half_away():
    x = np.array([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 1 + 2**-12] * 8, np.float32)
    expected = np.array([1 + 2**-10, 1 + 2**-9, -1 - 2**-10, 1] * 8, np.float32)
    same(evaluate("cvt.rna.tf32.f32 $d, $0;", x, out=np.float32), expected)


def test_packed_arithmetic():
    x = torch.randn(64).bfloat16()
    y = torch.randn(64).bfloat16()
    as_pairs = [t.view(torch.int32).numpy().view(np.uint32) for t in (x, y)]
    out = torch.tensor(evaluate("fma.rn.bf16x2 $d, $0, $1, $1;", *as_pairs).view(np.int32)).view(torch.bfloat16)
    assert torch.equal(out, (x.double() * y.double() + y.double()).bfloat16())
    out = torch.tensor(evaluate("add.rn.bf16x2 $d, $0, $1;", *as_pairs).view(np.int32)).view(torch.bfloat16)
    assert torch.equal(out, x + y)
    a, b = rng.normal(size=64).astype(np.float32), rng.normal(size=64).astype(np.float32)
    out = evaluate("mul.rn.f32x2 $d, $0, $1;", a.view(np.uint64), b.view(np.uint64), out=np.uint64).view(np.float32)
    same(out, a * b)


def test_mixed_precision():
    h, k = (rng.normal(size=32).astype(np.float16) for _ in range(2))
    x = rng.normal(size=32).astype(np.float32)
    bits = [v.view(np.uint16) for v in (h, k)]
    same(evaluate("add.rn.f32.f16 $d, $0, $1;", bits[0], x, out=np.float32), h.astype(np.float32) + x)
    same(evaluate("sub.f32.f16 $d, $0, $1;", bits[0], x, out=np.float32), h.astype(np.float32) - x)
    expected = (h.astype(np.float64) * k.astype(np.float64) + x.astype(np.float64)).astype(np.float32)
    same(evaluate("fma.rn.f32.f16 $d, $0, $1, $2;", *bits, x, out=np.float32), expected)


# ---- warps ----
LANES = np.arange(32, dtype=np.uint32)


def test_shuffles():
    same(evaluate("shfl.sync.bfly.b32 $d, $0, 3, 31, -1;", U32), U32[LANES ^ 3])
    same(evaluate("shfl.sync.up.b32 $d|%p1, $0, 4, 0, -1;", U32), U32[np.where(LANES >= 4, LANES - 4, LANES)])
    same(evaluate("shfl.sync.down.b32 $d, $0, 4, 31, -1;", U32), U32[np.where(LANES < 28, LANES + 4, LANES)])
    same(evaluate("shfl.sync.idx.b32 $d, $0, 9, 0x181f, -1;", U32), U32[(LANES & 24) + 1])
    same(evaluate("shfl.sync.up.b32 %r40|%p1, $0, 4, 0, -1; selp.b32 $d, 1, 0, %p1;", U32), LANES >= 4)


def test_votes_elect_redux():
    same(evaluate("setp.gt.u32 %p1, $0, 9; vote.sync.ballot.b32 $d, %p1, -1;", LANES), np.full(32, 0xFFFFFC00))
    same(
        evaluate("setp.gt.u32 %p1, $0, 9; vote.sync.any.pred %p2, %p1, -1; selp.b32 $d, 1, 0, %p2;", LANES), np.ones(32)
    )
    same(evaluate("mov.b32 $d, 0; elect.sync %r40|%p1, -1; @%p1 mov.b32 $d, 1;", LANES), LANES == 0)
    same(evaluate("redux.sync.add.u32 $d, $0, -1;", LANES), np.full(32, 496))
    same(evaluate("redux.sync.max.s32 $d, $0, -1;", U32).view(np.int32), np.full(32, U32.view(np.int32).max()))


def test_divergence_and_reconvergence():
    body = """
    mov.b32 $d, 0;
    setp.lt.u32 %p1, $0, 7;
    @%p1 bra A;
    mov.b32 %r40, 0;
L:  add.u32 $d, $d, 2;
    add.u32 %r40, %r40, 1;
    setp.lt.u32 %p2, %r40, $0;
    @%p2 bra L;
    bra B;
A:  add.u32 $d, $d, 1;
B:  shfl.sync.bfly.b32 $d, $d, 1, 31, -1;
    """
    expected = np.where(LANES < 7, 1, 2 * LANES)
    same(evaluate(body, LANES), expected[LANES ^ 1])


def test_shuffle_from_an_absent_lane_is_found():
    with pytest.raises(MachineFault, match="does not take part"):
        evaluate("setp.lt.u32 %p1, $0, 8; mov.b32 $d, 0; @%p1 shfl.sync.idx.b32 $d, $0, 20, 31, 0xff;", LANES)


# ---- memory ----
def aligned(x: np.ndarray) -> np.ndarray:
    """A copy that starts at a 128-byte line."""
    raw = np.zeros(x.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[:] = x
    return out


def test_atomics():
    total, old = np.zeros(4, np.uint32), np.zeros(32, np.uint32)
    body = """
    atom.global.add.u32 %r1, [%rd0], 1;
    red.global.max.u32 [%rd0+4], %r0;
    red.global.add.f32 [%rd0+8], 0f3F000000;
    mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd1, %rd5; st.global.b32 [%rd6], %r1;
    """
    launch(module(body, 2), [total, old]).check()
    assert total[0] == 32 and total[1] == 31 and total.view(np.float32)[2] == 16 and sorted(old) == list(range(32))


def test_vectors_local_and_shared():
    data, out = aligned(rng.integers(0, 2**32, 128).astype(np.uint32)), aligned(np.zeros(128, np.uint32))
    body = """
    mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd6];
    mov.b32 %r10, tile; shl.b32 %r11, %r0, 4; add.u32 %r12, %r10, %r11;
    st.shared.v4.b32 [%r12], {%r1, %r2, %r3, %r4};
    mov.b64 %rd8, depot; cvta.local.u64 %rd9, %rd8;
    st.b32 [%rd9+4], %r0;
    bar.warp.sync -1;
    xor.b32 %r11, %r11, 16; add.u32 %r12, %r10, %r11;
    ld.shared.v2.b64 {%rd10, %rd11}, [%r12];
    ld.local.b32 %r20, [depot+4]; setp.ne.u32 %p1, %r20, %r0; @%p1 trap;
    st.global.v2.b64 [%rd7], {%rd10, %rd11};
    """
    before = ".shared .align 16 .b8 tile[512];"
    text = module(body, 2, before=before).replace(".reg .pred", ".local .align 8 .b8 depot[8];\n.reg .pred", 1)
    report = launch(text, [data, out]).check()
    same(out.reshape(32, 4), data.reshape(32, 4)[LANES ^ 1])
    assert report.counts["global_load_sectors"] == 16 and report.counts["global_store_full_lines"] == 4
    assert report.counts["shared_store_wavefronts"] == 4


def test_bank_conflicts_are_counted():
    body = "mov.b32 %r10, tile; shl.b32 %r11, %r0, 7; add.u32 %r12, %r10, %r11; st.shared.b32 [%r12], %r0;"
    report = launch(module(body, 0, before=".shared .align 16 .b8 tile[4096];"), []).check()
    assert report.counts["shared_store_wavefronts"] == 32


def test_cp_async_needs_its_wait():
    data, out = rng.integers(0, 2**32, 128).astype(np.uint32), np.zeros(128, np.uint32)
    body = """
    mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5;
    mov.b32 %r10, tile; shl.b32 %r11, %r0, 4; add.u32 %r12, %r10, %r11;
    cp.async.cg.shared.global [%r12], [%rd6], 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r12];
    st.global.v4.b32 [%rd7], {%r1, %r2, %r3, %r4};
    """
    text = module(body, 2, before=".shared .align 16 .b8 tile[512];")
    launch(text, [data, out]).check()
    same(out, data)
    with pytest.raises(MachineFault, match="not ordered after a cp"):
        launch(text.replace("cp.async.wait_group 0;", ""), [data, out]).check()


# ---- tensor core, warp level ----
@pytest.mark.parametrize("kind, k", [("bf16", 16), ("f16", 16), ("bf16", 8), ("tf32", 8), ("tf32", 4)])
def test_mma_sync(kind, k):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[kind]
    a, b, c = torch.randn(16, k).to(dtype), torch.randn(8, k).to(dtype), torch.randn(16, 8)
    if kind == "tf32":
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
    per = 1 if kind == "tf32" else 2

    def words(t):
        return t.contiguous().view(torch.int32).numpy().view(np.uint32).reshape(t.shape[0], k // per)

    n_b = k // per // 4
    rows, columns = LANES // 4, LANES % 4
    a_registers = [words(a)[rows + 8 * (r & 1), columns + 4 * (r >> 1)] for r in range(2 * n_b)]
    b_registers = [words(b)[rows, columns + 4 * r] for r in range(n_b)]
    c_words = c.numpy().view(np.uint32)
    c_registers = [c_words[rows + 8 * (r >> 1), 2 * columns + (r & 1)] for r in range(4)]
    inputs = [np.ascontiguousarray(x) for x in (*a_registers, *b_registers, *c_registers)]
    out = np.zeros((4, 32), np.float32)
    names = [f"%r{i + 1}" for i in range(len(inputs))]
    load = "".join(f"ld.global.b32 {n}, [%rd29+{128 * i}];\n" for i, n in enumerate(names))
    ra, rb = names[: len(a_registers)], names[len(a_registers) : len(a_registers) + n_b]
    rc = names[-4:]
    operands = ", ".join("{" + ", ".join(x) + "}" for x in (["%f1", "%f2", "%f3", "%f4"], ra, rb, rc))
    store = "".join(f"st.global.f32 [%rd31+{128 * i}], %f{i + 1};\n" for i in range(4))
    body = (
        "mul.wide.u32 %rd28, %r0, 4; add.s64 %rd29, %rd0, %rd28; add.s64 %rd31, %rd1, %rd28;\n"
        f"{load}mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {operands};\n{store}"
    )
    launch(module(body, 2), [np.stack(inputs), out]).check()
    got = np.zeros((16, 8), np.float32)
    for r in range(4):
        got[rows + 8 * (r >> 1), 2 * columns + (r & 1)] = out[r]
    expected = a.double() @ b.double().T + c.double()
    np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=float(expected.abs().max()) * 2e-7)


def test_ldmatrix_and_stmatrix():
    data, out = rng.integers(0, 2**16, (32, 8)).astype(np.uint16), np.zeros((32, 8), np.uint16)
    body = """
    mul.wide.u32 %rd5, %r0, 16; add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd6];
    mov.b32 %r10, tile; shl.b32 %r11, %r0, 4; add.u32 %r12, %r10, %r11;
    st.shared.v4.b32 [%r12], {%r1, %r2, %r3, %r4};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r1, %r2, %r3, %r4}, [%r12];
    bar.sync 0;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r12], {%r1, %r2, %r3, %r4};
    bar.sync 0;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r12];
    st.global.v4.b32 [%rd7], {%r1, %r2, %r3, %r4};
    """
    launch(module(body, 2, before=".shared .align 16 .b8 tile[512];"), [data, out]).check()
    same(out.reshape(4, 8, 8), data.reshape(4, 8, 8).transpose(0, 2, 1))


@pytest.mark.parametrize("factors, kept", [((13, 12), 2.0**-21), ((13, 13), 0.0)])
def test_accumulation_cuts_below_two_guard_bits(factors, kept):
    """1 + 16 products of 2^-25 or 2^-26: the guard bits hold the first, and nothing holds the second."""
    words = [torch.full((16,), 2.0**-e).bfloat16().view(torch.int32).numpy().view(np.uint32) for e in factors]
    body = (
        "ld.global.b32 %r1, [%rd0];\nld.global.b32 %r2, [%rd1];\nmov.b32 %f1, 0f3F800000;\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5}, {%r1, %r1, %r1, %r1}, "
        "{%r2, %r2}, {%f1, %f1, %f1, %f1};\n"
        "st.global.f32 [%rd2], %f2;"
    )
    out = np.zeros(32, np.float32)
    launch(module(body, 3), [*map(np.ascontiguousarray, words), out], strict=False)
    assert out[0] == np.float32(1.0 + kept)


def test_findings_name_the_python_line():
    text = module(".loc 1 42 3\nst.global.b32 [%rd0+4096], %r0;", 1).replace("{\n", "{\n", 1)
    text = text.replace(".address_size 64", '.address_size 64\n.file 1 "kernel.py"')
    with pytest.raises(MachineFault, match=r"kernel\.py:42"):
        launch(text, [np.zeros(4, np.uint32)]).check()


def test_an_early_launch_must_wait_for_the_one_before():
    from reference.ptx import GlobalMemory

    data, out, memory = np.zeros(32, np.uint32), np.zeros(32, np.uint32), GlobalMemory()
    address = "mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd0, %rd5; add.s64 %rd7, %rd1, %rd5;\n"
    launch(module(address + "st.global.b32 [%rd6], %r0;", 2), [data, out], memory=memory).check()
    copy = address + "griddepcontrol.wait;\nld.global.b32 %r1, [%rd6]; st.global.b32 [%rd7], %r1;"
    launch(module(copy, 2), [data, out], memory=memory, programmatic=True).check()
    same(out, LANES)
    launch(module(address + "st.global.b32 [%rd6], %r0;", 2), [data, out], memory=memory).check()
    with pytest.raises(MachineFault, match="launch before wrote"):
        text = module(copy.replace("griddepcontrol.wait;", ""), 2)
        launch(text, [data, out], memory=memory, programmatic=True).check()
