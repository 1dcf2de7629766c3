"""Planted faults: kernels broken in one place, each found, at the right line."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from reference.ptx import MachineFault, PtxError

from .kernels import compiled
from .running import run
from .snippets import launch, module


@dataclass
class Fault:
    """`pattern` (its `nth` match, from 0) becomes `replacement`; the machine must report `kind` at a line like `at`.

    Or against such a line: a race has two ends.
    """

    name: str
    kernel: tuple
    arch: str
    pattern: str
    replacement: str
    kind: str
    at: str
    nth: int = 0
    text: str = ""


RING, HANKEL, TRANSPOSE = ("ring", 64, 64, 5), ("hankel",), ("transpose",)
GEMM90, GEMM100 = ("gemm", 64, 64, 1), ("gemm", 128, 64, 1)

FAULTS = [
    # fences
    Fault(
        "proxy fence dropped before wgmma",
        HANKEL,
        "sm_90a",
        r"fence\.proxy\.async[^;]*;",
        "",
        "missing proxy fence",
        r"wgmma\.mma_async",
    ),
    Fault(
        "proxy fence dropped before tcgen05",
        HANKEL,
        "sm_100a",
        r"fence\.proxy\.async[^;]*;",
        "",
        "missing proxy fence",
        r"tcgen05\.mma",
    ),
    Fault(
        "proxy fence dropped before a TMA store",
        TRANSPOSE,
        "sm_90a",
        r"fence\.proxy\.async[^;]*;",
        "",
        "missing proxy fence",
        r"cp\.async\.bulk\.tensor\.2d\.global",
    ),
    Fault(
        "wgmma.fence dropped",
        GEMM90,
        "sm_90a",
        r"wgmma\.fence\.sync\.aligned;",
        "",
        "missing wgmma.fence",
        r"wgmma\.mma_async",
    ),
    Fault(
        "mbarrier fence dropped before a tensor copy",
        TRANSPOSE,
        "sm_90a",
        r"fence\.mbarrier_init[^;]*;",
        "",
        "missing mbarrier fence",
        r"cp\.async\.bulk\.tensor\.2d\.shared",
    ),
    Fault(
        "mbarrier fence dropped before a commit",
        GEMM100,
        "sm_100a",
        r"fence\.mbarrier_init[^;]*;",
        "",
        "missing mbarrier fence",
        r"tcgen05\.commit",
        nth=1,
    ),
    Fault(
        "tcgen05.fence dropped before the accumulator is read",
        GEMM100,
        "sm_100a",
        r"tcgen05\.fence::after_thread_sync;",
        "",
        "missing tcgen05.fence",
        r"tcgen05\.ld",
        text="after_thread_sync",
    ),
    # barriers
    Fault(
        "barrier before a TMA store dropped",
        TRANSPOSE,
        "sm_90a",
        r"bar\.sync[^;]*;",
        "",
        "race",
        r"cp\.async\.bulk\.tensor\.2d\.global",
        nth=1,
    ),
    Fault(
        "barrier after mbarrier.init dropped",
        TRANSPOSE,
        "sm_100a",
        r"bar\.sync[^;]*;",
        "",
        "race",
        r"mbarrier\.try_wait",
        text="initialisation",
    ),
    Fault(
        "barrier with too many threads",
        GEMM100,
        "sm_100a",
        r"bar\.sync\s+1, 128;",
        "bar.sync 1, 160;",
        "deadlock",
        r"bar\.sync",
    ),
    Fault(
        "cluster barrier before the multicast dropped",
        ("multicast",),
        "sm_90a",
        r"barrier\.cluster\.(arrive|wait);",
        "",
        "barrier",
        r"barrier\.cluster\.wait",
    ),
    # mbarriers
    Fault(
        "wait for the wrong phase",
        GEMM90,
        "sm_90a",
        r"(mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\]), 0,",
        r"\1, 1,",
        "race",
        r"wgmma\.mma_async",
    ),
    Fault(
        "expect_tx too large",
        GEMM90,
        "sm_90a",
        r"mov\.b32 \t(%r\d+), 16384;",
        r"mov.b32 \t\1, 16400;",
        "deadlock",
        r"mbarrier\.try_wait",
        text="pending bytes 16",
    ),
    Fault(
        "expect_tx too small",
        GEMM100,
        "sm_100a",
        r"mov\.b32 \t(%r\d+), 24576;",
        r"mov.b32 \t\1, 24560;",
        "deadlock",
        r"mbarrier\.try_wait",
        text="pending bytes -16",
    ),
    Fault(
        "producer does not wait for an empty stage",
        RING,
        "sm_90a",
        r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r23\], 0, \d+;",
        "setp.eq.b32 P1, 0, 0;",
        "race",
        r"cp\.async\.bulk\.tensor",
        text="wgmma operand read",
    ),
    Fault(
        "consumer never releases a stage",
        RING,
        "sm_90a",
        r"mbarrier\.arrive\.shared\.b64[^;]*;",
        "",
        "deadlock",
        r"mbarrier\.try_wait",
    ),
    # asynchronous results
    Fault("wgmma.wait_group dropped", GEMM90, "sm_90a", r"wgmma\.wait_group[^;]*;", "", "register in use", r"cvt\.rn"),
    Fault(
        "tcgen05.wait::ld dropped", GEMM100, "sm_100a", r"tcgen05\.wait::ld[^;]*;", "", "register in use", r"cvt\.rn"
    ),
    Fault(
        "tcgen05.commit of the accumulator dropped",
        GEMM100,
        "sm_100a",
        r"tcgen05\.commit[^;]*;",
        "",
        "deadlock",
        r"mbarrier\.try_wait",
        nth=1,
    ),
    Fault(
        "accumulator read before its commit",
        GEMM100,
        "sm_100a",
        r"(try_wait\.parity\.shared\.b64 P1, \[%r\d+\]), 0,(?=(?:(?!try_wait)[\s\S])*tcgen05\.ld)",
        r"\1, 1,",
        "race",
        r"tcgen05\.ld",
    ),
    Fault(
        "bulk store not waited for",
        TRANSPOSE,
        "sm_90a",
        r"cp\.async\.bulk\.wait_group\.read[^;]*;",
        "",
        "left behind",
        r"ret;",
    ),
    Fault(
        "bulk store never committed", TRANSPOSE, "sm_90a", r"cp\.async\.bulk\.commit_group;", "", "left behind", r"ret;"
    ),
    Fault(
        "copy never waited for",
        TRANSPOSE,
        "sm_90a",
        r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], 0, \d+;",
        "setp.eq.b32 P1, 0, 0;",
        "left behind",
        r"cp\.async\.bulk\.tensor\.2d\.shared",
    ),
    Fault(
        "CTA leaves while its peer may still write",
        ("cluster",),
        "sm_90a",
        r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], 0, \d+;",
        "ret;",
        "exited CTA",
        r"st\.async",
    ),
    # tensor memory
    Fault(
        "tensor memory freed twice",
        GEMM100,
        "sm_100a",
        r"(tcgen05\.dealloc[^;]*;)",
        r"\1 \1",
        "tensor memory",
        r"tcgen05\.dealloc",
        text="twice",
    ),
    Fault(
        "tensor memory not freed",
        GEMM100,
        "sm_100a",
        r"tcgen05\.dealloc[^;]*;",
        "",
        "tensor memory",
        r"tcgen05\.alloc",
        text="ends with",
    ),
    Fault(
        "tensor memory freed while others read", GEMM100, "sm_100a", r"bar\.sync \t1;", "", "race", r"tcgen05\.dealloc"
    ),
    Fault(
        "tensor memory too small",
        GEMM100,
        "sm_100a",
        r"mov\.b32 \t(%r\d+), 64;(?=\s+tcgen05\.alloc)",
        r"mov.b32 \t\1, 32;",
        "tensor memory",
        r"tcgen05\.mma",
        text="not allocated",
    ),
    # addresses and descriptors
    Fault(
        "swizzle of the descriptor mismatched",
        GEMM90,
        "sm_90a",
        "4611686293305360384",
        str(2 << 62 | 4611686293305360384 & (1 << 62) - 1),
        "swizzle mismatch",
        r"wgmma\.mma_async",
    ),
    Fault(
        "stride of the descriptor doubled",
        GEMM90,
        "sm_90a",
        r"or\.b64(\s+%rd10, %rd\d+), 4611686293305360384",
        rf"or.b64\1, {4611686293305360384 + (64 << 32)}",
        "out of bounds",
        r"wgmma\.mma_async",
    ),
    Fault(
        "misaligned store",
        GEMM90,
        "sm_90a",
        r"st\.global\.b32(\s+\[%rd\d+\+)(\d+)\]",
        r"st.global.b32\g<1>2]",
        "misaligned",
        r"st\.global",
    ),
    Fault(
        "store beyond the tensor",
        ("elementwise",),
        "sm_90a",
        r"setp\.(ge|gt|lt|le)\.s32",
        r"setp.ne.s32",
        "out of bounds",
        r"(ld|st)\.global",
    ),
    Fault(
        "shared memory never written",
        HANKEL,
        "sm_90a",
        r"st\.shared\.b16 \t\[%r\d+\+1280\][^;]*;",
        "",
        "uninitialised",
        r"wgmma\.mma_async",
    ),
    Fault(
        "two CTAs write the same rows",
        GEMM90,
        "sm_90a",
        r"mov\.u32 \t(%r\d+), %ctaid\.x;",
        r"mov.u32 \t\1, 0;",
        "race",
        r"st\.global",
        nth=1,
        text="CTA 0 wrote",
    ),
    Fault(
        "unknown instruction",
        GEMM90,
        "sm_90a",
        r"fence\.mbarrier_init[^;]*;",
        "frobnicate.b32 \t%r1, %r2;",
        "not implemented",
        r"frobnicate",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
def test_planted_fault_is_found(fault):
    name, *shape = fault.kernel
    ptx = compiled(name, fault.arch, *shape).ptx
    matches = list(re.finditer(fault.pattern, ptx))
    assert len(matches) > fault.nth, "the kernel has changed: nothing to break"
    broken = matches[fault.nth]
    mutant = ptx[: broken.start()] + broken.expand(fault.replacement) + ptx[broken.end() :]
    with pytest.raises(MachineFault) as caught:
        run(name, fault.arch, *shape, ptx=mutant)
    lines = mutant.splitlines()
    found = [f for f in caught.value.findings if f.kind == fault.kind and fault.text in f.text]
    assert found, f"expected {fault.kind}, got {caught.value}"
    assert any(re.search(fault.at, lines[n - 1]) for f in found for n in (f.line, f.other_line) if n), (
        f"not at the line: {caught.value}"
    )


EXCHANGE = """
shl.b32 %r1, %r0, 2;
mov.u32 %r2, tile;
add.s32 %r3, %r2, %r1;
xor.b32 %r4, %r1, 4;
add.s32 %r4, %r2, %r4;
mul.wide.u32 %rd1, %r0, 4;
add.s64 %rd1, %rd1, %rd0;
st.shared.b32 [%r3], %r0;
bar.warp.sync -1; // written
ld.shared.b32 %r5, [%r4];
bar.warp.sync -1; // read
st.shared.b32 [%r3], %r5;
fence.proxy.async;
bar.warp.sync -1; // written again
setp.eq.b32 %p0, %r0, 0;
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize(
    "dropped, at",
    [
        (None, ""),
        ("written", r"ld\.shared\.b32 %r5"),
        ("read", r"st\.shared\.b32 \[%r3\], %r5"),
        ("written again", r"cp\.async\.bulk\.global"),
    ],
)
def test_lanes_of_a_warp_must_meet(dropped, at):
    """Lanes exchange values through shared memory, and one of them copies it out; each bar.warp.sync is needed."""
    body = re.sub(rf"bar\.warp\.sync -1; // {dropped}\n", "", EXCHANGE)
    text = module(body, 1, before=".shared .align 128 .b8 tile[128];")
    out = np.zeros(32, np.uint32)
    report = launch(text, [out])
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)
    assert bool(report.findings) == bool(dropped)
    if dropped:
        assert {f.kind for f in report.findings} == {"race"}
        assert re.search(at, text.splitlines()[report.findings[0].line - 1])


TO_THE_PEER = """
mov.u32 %r1, word;
mov.u32 %r2, %cluster_ctarank;
xor.b32 %r3, %r2, 1;
mapa.shared::cluster.u32 %r4, %r1, %r3;
mul.wide.u32 %rd1, %r2, 4;
add.s64 %rd1, %rd1, %rd0;
setp.eq.b32 %p0, %r0, 0;
@%p0 st.shared.b32 [%r1], %r2;
ARRIVE
barrier.cluster.wait.aligned;
@%p0 ld.shared::cluster.b32 %r5, [%r4];
@%p0 st.global.b32 [%rd1], %r5;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize(
    "arrive, clean",
    [
        ("barrier.cluster.arrive.aligned;", True),
        ("barrier.cluster.arrive.relaxed.aligned;", False),
        ("fence.acq_rel.cluster;\nbarrier.cluster.arrive.relaxed.aligned;", True),
    ],
)
def test_a_relaxed_arrival_publishes_what_a_fence_covers(arrive, clean):
    text = module(TO_THE_PEER.replace("ARRIVE", arrive), 1, before=".shared .align 4 .b8 word[4];")
    out = np.full(2, 9, np.uint32)
    report = launch(text, [out], grid=(2, 1, 1), cluster=(2, 1, 1))
    np.testing.assert_array_equal(out, [1, 0])
    assert [f.kind for f in report.findings] == ([] if clean else ["race"])
    if not clean:
        assert "ld.shared::cluster" in text.splitlines()[report.findings[0].line - 1]


def test_more_shared_memory_than_there_is_is_refused():
    with pytest.raises(PtxError, match="232449 bytes of shared memory"):
        launch(module("", 0), [], shared=232449)
