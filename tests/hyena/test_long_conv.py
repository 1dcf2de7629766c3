"""The long convolution: its kernels on the PTX machine and on a GPU, against the float64 oracle."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena import stages, torch_path
from cute_kernels.hyena.config import LongConv, MixLaunch
from reference import hyena
from tests.covering import parametrize
from tests.hyena.helpers import rel_l2

ARCHES = ["sm_90a", "sm_100a"]
WAYS = ["few rows", "many"]
LIMIT = 4e-7  # relative L2; seen are 3e-7 at most, a wrong kernel gives far more
POISON = float("nan")


def rows(rng, batch, width, length, offset=0, gap=0, device="cpu"):
    """Random [B, D, L] whose rows start `offset` floats into their storage, `gap` floats of poison apart."""
    storage = torch.full((batch, width, offset + length + gap), POISON, device=device)
    out = storage[..., offset : offset + length]
    out.copy_(torch.from_numpy(rng.standard_normal((batch, width, length)).astype(np.float32)))
    return out


def make(seed, batch, width, length, k_length=None, options=(True, True, True), device="cpu", **layout):
    """Arguments u, k, skip, pre_gate, post_gate."""
    rng = np.random.default_rng(seed)
    k = rows(rng, 1, width, length if k_length is None else k_length, device=device)[0]
    skip = rows(rng, 1, 1, width, device=device)[0, 0]
    u, pre, post = (rows(rng, batch, width, length, device=device, **layout) for _ in range(3))
    return u, k, *(value if wanted else None for value, wanted in zip((skip, pre, post), options, strict=True))


def oracle(*arguments):
    return hyena.long_conv(*(None if a is None else a.cpu().numpy() for a in arguments))


@pytest.fixture(params=ARCHES)
def machine(request):
    pytest.importorskip("cutlass")
    with pytest.importorskip("reference.ptx.machine").ptx_machine(request.param) as machine:
        yield machine


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """How rows are convolved, whatever the batch. The kernels are the same: they are kept from one test to the next."""
    few = request.param == "few rows"
    monkeypatch.setattr(LongConv, "rows", lambda kernel, batch, *_: 0 if few and kernel.few else -(-batch // 2))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 63, 64, 65, 127, 129, 131, 200, 256, 300, 541, 997])
def test_lengths(machine, way, length):
    arguments = make(length, 2, 3, length, offset=1, gap=3)
    out = rows(np.random.default_rng(0), 2, 3, length, offset=1, gap=2)
    whole = out._base
    whole.fill_(POISON)
    assert stages.long_conv(*arguments, out) is out
    assert rel_l2(out, oracle(*arguments)) < LIMIT
    assert torch.isnan(whole[..., 0]).all() and torch.isnan(whole[..., length + 1 :]).all()  # nothing beside the rows


@pytest.mark.parametrize("length", [1500, 2000, 2053, 4097, 8000, 9000, 32768])
def test_long(machine, monkeypatch, length):
    """Transforms in registers, and those in shared memory, of one block and of two; a block of two rows."""
    monkeypatch.setattr(LongConv, "rows", lambda *_: 2)
    arguments = make(length, 3, 2, length, length // 2)
    assert rel_l2(stages.long_conv(*arguments), oracle(*arguments)) < LIMIT


@parametrize(
    {"machine": ARCHES, "way": WAYS, **dict.fromkeys(["skip", "pre_gate", "post_gate"], (False, True))},
    indirect=["machine", "way"],
)
def test_options(machine, way, skip, pre_gate, post_gate):
    arguments = make(1, 2, 5, 70, options=(skip, pre_gate, post_gate))
    assert rel_l2(stages.long_conv(*arguments), oracle(*arguments)) < LIMIT


@pytest.mark.parametrize("k_length", [0, 1, 30, 100, 130])
def test_filters_of_another_length(machine, way, k_length):
    arguments = make(2, 1, 2, 100, k_length)
    assert rel_l2(stages.long_conv(*arguments), oracle(*arguments)) < LIMIT


@pytest.mark.parametrize("place", ["post_gate", "u"])
def test_in_place(machine, way, place):
    u, k, skip, pre, post = make(3, 3, 2, 75)
    want = oracle(u, k, skip, pre, post)
    out = {"post_gate": post, "u": u}[place]
    assert rel_l2(stages.long_conv(u, k, skip, pre, post, out), want) < LIMIT


def test_impulses(machine, way):
    """Each tap where it belongs, and nothing before its impulse but rounding."""
    length = 100
    at = [0, 1, 49, 98, 99]
    u = torch.zeros(len(at), 1, length)
    u[range(len(at)), 0, at] = 1.0
    k = make(4, 1, 1, length)[1]
    y = stages.long_conv(u, k)
    for row, t in zip(y[:, 0], at, strict=True):
        assert row[:t].abs().max() < 2e-6 if t else True
        torch.testing.assert_close(row[t:], k[0, : length - t], atol=2e-6, rtol=0)


def test_rows_are_their_own(machine, way):
    """A row of NaN or of huge values leaves the bits of the others alone."""
    u, k, skip, _, post = make(5, 4, 3, 40)
    want = stages.long_conv(u, k, skip, None, post)
    u[1], u[2, 0] = POISON, u[2, 0] * 1e30
    got = stages.long_conv(u, k, skip, None, post)
    assert torch.isnan(got[1]).all()
    assert torch.equal(got[[0, 3]], want[[0, 3]]) and torch.equal(got[2, 1:], want[2, 1:])


def test_magnitudes(machine, way):
    u, k, *_ = make(6, 1, 1, 50)
    for scale in (1e-18, 1e18):
        assert rel_l2(stages.long_conv(u * scale, k * scale), oracle(u * scale, k * scale)) < LIMIT


@pytest.mark.parametrize("shape", [(0, 2, 8), (2, 0, 8), (2, 2, 0)])
def test_nothing_to_do(shape):
    assert stages.long_conv(torch.zeros(shape), torch.zeros(shape[1], 8)).shape == shape


def test_beyond_the_kernels():
    """Lengths without a kernel go through torch.fft."""
    arguments = make(7, 1, 1, LongConv.MAX_POINTS + 1, 20)
    want = oracle(*arguments)
    assert rel_l2(stages.long_conv(*arguments), want) < LIMIT
    assert rel_l2(stages.long_conv(*arguments, arguments[-1]), want) < LIMIT


@pytest.mark.parametrize("length", [200, 500, 541, 9000])
def test_schedules(length):
    """The same bits under any order of the warps, where exchanges cross warps."""
    pytest.importorskip("cutlass")
    ptx_machine = pytest.importorskip("reference.ptx.machine").ptx_machine
    arguments = make(8, 3 if length < 9000 else 2, 1, length)
    outs = []
    for schedule in ("round robin", "random", "late 0", "late 1"):
        with ptx_machine("sm_90a", schedule=schedule, sm_count=1):
            outs.append(stages.long_conv(*arguments))
    assert all(torch.equal(outs[0], out) for out in outs)


@parametrize({"points": [*(1 << n for n in range(4, 16)), 768, 1536, 3072, 6144], "arch": ARCHES}, together=1)
def test_budgets(points, arch):
    pytest.importorskip("cutlass")
    from cute_kernels.runtime import cache
    from cute_kernels.runtime.inspect import machine_code

    mixes = 128 <= points <= 4096  # in a block; either kernel is compiled for other tests, too
    kernel = MixLaunch(points, True, False, True) if mixes else LongConv(points, True, True, True)
    codes = machine_code(cache.get(kernel, arch).cubin)
    assert len(codes) == (1 if kernel.few is None else 2)
    for code in codes:
        assert (code.stack, code.local, code.local_memory) == (0, 0, 0)
        assert code.registers <= 128


LENGTHS_OF = {1: 16, 16: 16, 17: 32, 131: 256, 300: 512, 513: 768, 768: 768, 769: 1024, 2053: 3072, 3073: 4096}
LENGTHS_OF |= {4096: 4096, 4097: 6144, 6145: 8192, 8193: 16384}


def test_points_of_a_length():
    sizes = {length: LongConv.of_length(length, False, False, False).points for length in LENGTHS_OF}
    assert sizes == LENGTHS_OF
    with pytest.raises(NotImplementedError, match="length must be at most"):
        LongConv.of_length(LongConv.MAX_POINTS + 1, False, False, False)


@pytest.mark.parametrize("points", [16, 256, 768, 4096])
@pytest.mark.parametrize("batch, width", [(1, 256), (7, 256), (33, 1), (5, 10**6), (10**6, 1)])
def test_rows_of_a_block(points, batch, width):
    kernel = LongConv(points, False, False, False)
    rows = kernel.rows(batch, width, 132)
    blocks = -(-batch // (rows or kernel.few.rows))
    assert 1 <= blocks <= 65535
    assert rows or blocks * width <= 132 * kernel.few.at_once


def torch_error(want, u, k, skip, pre, post):
    """Of the same convolution through torch.fft on the tensors' device."""
    g = u if pre is None else u * pre
    y = torch_path.causal_long_conv(g, k)
    y = y if skip is None else y + g * skip[:, None]
    return rel_l2(y if post is None else y * post, want)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(False, False, False), (True, True, True)], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 3, 64, 131, 256, 500, 541, 997, 1500, 2053, 4096, 4099, 8191, 16384, 32768])
def test_on_a_gpu(length, batch, options):
    arguments = make(length, batch, 37, length, options=options, device="cuda", offset=1, gap=2)
    want = oracle(*arguments)
    out = torch.full_like(want_like := arguments[0].contiguous(), POISON)
    stages.long_conv(*arguments, out)
    assert rel_l2(out, want) < max(1.25 * torch_error(want, *arguments), 1.5e-7)
    assert torch.equal(stages.long_conv(*arguments, torch.full_like(want_like, POISON)), out)
