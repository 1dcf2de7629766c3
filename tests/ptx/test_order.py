"""Orders that a GPU's schedule often provides by chance: hand-written kernels, clean, and not without any one line."""

import re

import numpy as np
import pytest

from .snippets import launch, module

ADDRESSES = """
mul.wide.u32 %rd10, %r0, 4;
add.s64 %rd11, %rd0, %rd10;
shr.u32 %r1, %r0, 5;
setp.eq.b32 %p0, %r1, 0;
setp.eq.b32 %p1, %r1, 1;
setp.eq.b32 %p2, %r0, 0;
setp.eq.b32 %p3, %r0, 1;
"""


def check(body, without, kind, at, *, out, after=ADDRESSES, target="sm_90a", before="", replace="", **shape):
    """Runs body on `out` without the line marked `// without`; expects a finding of this kind at a line, or none."""
    broken = body if without is None else re.sub(rf"[^\n]*// {without}\n", replace + "\n", body)
    assert without is None or broken != body
    text = module(after + broken, 1, target, before)
    report = launch(text, [out], **shape)
    assert {f.kind for f in report.findings} == (set() if without is None else {kind}), "\n".join(
        map(str, report.findings)
    )
    if without is not None:
        assert re.search(at, text.splitlines()[report.findings[0].line - 1])


WARPS = """
@%p0 st.global.b32 [%rd11], %r0;
bar.sync 0; // written
@%p1 ld.global.b32 %r2, [%rd11+-128];
bar.sync 0; // read
add.u32 %r3, %r0, 7;
@%p0 st.global.b32 [%rd11], %r3;
"""


@pytest.mark.parametrize("without, at", [(None, ""), ("written", r"ld\.global"), ("read", r"st\.global.*%r3")])
def test_warps_of_a_cta_in_global_memory(without, at):
    out = np.zeros(64, np.uint32)
    check(WARPS, without, "race", at, out=out, block=(64, 1, 1))
    np.testing.assert_array_equal(out[:32], np.arange(32) + 7)


LANES = """
st.global.b32 [%rd11], %r0;
bar.warp.sync -1; // written
xor.b32 %r2, %r0, 1;
mul.wide.u32 %rd10, %r2, 4;
add.s64 %rd12, %rd0, %rd10;
ld.global.b32 %r3, [%rd12];
"""


@pytest.mark.parametrize("without", [None, "written"])
def test_lanes_of_a_warp_in_global_memory(without):
    check(LANES, without, "race", r"ld\.global", out=np.zeros(32, np.uint32))


CTAS = """
mov.u32 %r2, %ctaid.x;
setp.eq.b32 %p4, %r2, 0;
@%p4 ld.global.b32 %r3, [%rd11];
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@!%p4 st.global.b32 [%rd11], %r0;
"""


@pytest.mark.parametrize("cluster", [2, 1])
def test_what_one_cta_read_another_may_not_write(cluster):
    """In a cluster its barrier orders them; nothing does between clusters."""
    text = module(ADDRESSES + CTAS, 1, "sm_90a")
    report = launch(text, [np.zeros(32, np.uint32)], grid=(2, 1, 1), cluster=(cluster, 1, 1))
    assert {f.kind for f in report.findings} == (set() if cluster == 2 else {"race"})
    assert all("CTA 0 read" in f.text for f in report.findings)


COPY_IN = """
mov.u32 %r2, tile;
mov.u32 %r3, bar;
@%p2 mbarrier.init.shared.b64 [%r3], 1;
@%p2 fence.mbarrier_init.release.cluster;
bar.sync 0;
st.global.b32 [%rd11], %r0;
fence.proxy.async.global; // fence
bar.sync 0; // barrier
@%p2 mbarrier.arrive.expect_tx.shared.b64 %rd12, [%r3], 256;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 256, [%r3];
L:
mbarrier.try_wait.parity.shared.b64 %p5, [%r3], 0;
@!%p5 bra L;
st.global.b32 [%rd11], %r1;
"""
TILE = ".shared .align 128 .b8 tile[256];\n.shared .align 8 .b8 bar[8];"


@pytest.mark.parametrize(
    "without, replace, kind",
    [
        (None, "", ""),
        ("fence", "", "missing proxy fence"),
        ("fence", "fence.proxy.async.shared::cta;", "missing proxy fence"),
        ("barrier", "", "race"),
    ],
)
def test_the_async_proxy_reads_global_memory_that_threads_wrote(without, replace, kind):
    shape = {"block": (64, 1, 1), "before": TILE, "replace": replace}
    check(COPY_IN, without, kind, r"cp\.async\.bulk", out=np.zeros(64, np.uint32), **shape)


@pytest.mark.parametrize("early", [False, True])
def test_a_source_in_global_memory_belongs_to_its_copy(early):
    body = COPY_IN.replace("\n".join(COPY_IN.splitlines()[11:14]), "") if early else COPY_IN
    report = launch(module(ADDRESSES + body, 1, "sm_90a", TILE), [np.zeros(64, np.uint32)], block=(64, 1, 1))
    assert {f.kind for f in report.findings} == ({"race", "left behind"} if early else set())


ONE_WAITS = """
mov.u32 %r2, tile;
mov.u32 %r3, bar;
@%p2 mbarrier.init.shared.b64 [%r3], 1;
@%p2 fence.mbarrier_init.release.cluster;
bar.warp.sync -1;
@%p2 mbarrier.arrive.expect_tx.shared.b64 %rd12, [%r3], 128;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 128, [%r3];
@!%p2 bra WAITED;
L:
mbarrier.try_wait.parity.shared.b64 %p5, [%r3], 0;
@!%p5 bra L;
WAITED:
bar.warp.sync -1; // met
shl.b32 %r4, %r0, 2;
add.s32 %r4, %r4, %r2;
ld.shared.b32 %r5, [%r4];
"""


@pytest.mark.parametrize("without", [None, "met"])
def test_what_one_lane_waited_for_the_others_know_after_they_met(without):
    check(ONE_WAITS, without, "race", r"ld\.shared", out=np.zeros(32, np.uint32), before=TILE)


def test_lanes_that_wait_apart_know_the_same():
    body = ONE_WAITS.replace(
        "bar.warp.sync -1; // met",
        """
setp.ne.b32 %p6, %r0, 0;
@!%p6 bra ALL;
M:
mbarrier.try_wait.parity.shared.b64 %p5, [%r3], 0;
@!%p5 bra M;
ALL:
""",
    )
    check(body, None, "", "", out=np.zeros(32, np.uint32), before=TILE)


COPY_OUT = """
mov.u32 %r2, tile;
shl.b32 %r3, %r0, 2;
add.s32 %r3, %r3, %r2;
st.shared.b32 [%r3], %r0;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
@%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2], 128;
@%p2 cp.async.bulk.commit_group;
@WHO cp.async.bulk.wait_group 0; // wait
@%p2 ld.global.b32 %r4, [%rd0];
"""


@pytest.mark.parametrize(
    "who, without, replace, kind",
    [
        ("%p2", None, "", set()),
        ("%p2", "wait", "@%p2 cp.async.bulk.wait_group.read 0;", {"race"}),
        ("%p3", None, "", {"race", "left behind"}),
    ],
)
def test_what_a_bulk_copy_writes_needs_the_full_wait_of_its_thread(who, without, replace, kind):
    body = COPY_OUT.replace("WHO", who)
    body = body if without is None else re.sub(r"[^\n]*// wait", replace, body)
    out = np.zeros(32, np.uint32)
    report = launch(module(ADDRESSES + body, 1, "sm_90a", TILE), [out])
    assert {f.kind for f in report.findings} == kind, "\n".join(map(str, report.findings))
    np.testing.assert_array_equal(out, np.arange(32))


# Warps 0 and 4 reach the same lanes of tensor memory.
TENSOR_MEMORY = """
setp.eq.b32 %p4, %r1, 4;
mov.u32 %r2, tile;
@!%p0 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
ALLOCATED:
bar.sync 0;
ld.shared.b32 %r3, [%r2];
@!%p0 bra WRITTEN;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r0};
tcgen05.wait::st.sync.aligned;
WRITTEN:
tcgen05.fence::before_thread_sync; // before
bar.sync 0;
tcgen05.fence::after_thread_sync; // after
@!%p4 bra READ;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3];
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%rd11], %r4;
READ:
bar.sync 0;
@!%p0 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 32;
FREED:
"""


@pytest.mark.parametrize("without", [None, "before", "after"])
def test_threads_that_share_tensor_memory_fence_on_both_sides(without):
    out = np.zeros(160, np.uint32)
    shape = {"block": (160, 1, 1), "target": "sm_100a", "before": TILE}
    check(TENSOR_MEMORY, without, "missing tcgen05.fence", r"tcgen05\.ld", out=out, **shape)
    np.testing.assert_array_equal(out[128:], np.arange(32))
