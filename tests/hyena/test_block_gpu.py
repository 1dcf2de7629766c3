"""The Hyena operators on a GPU, each batch row judged against float64 by the error of PyTorch's own run.

The truth is the plain formulas in float64 on the same GPU; one test compares it with the numpy oracle.
"""

import threading
import time

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels.hyena import torch_path
from cute_kernels.hyena.params import NAMES
from cute_kernels.hyena.precision import products
from reference import hyena, hyena_inputs

from .helpers import make as make_on
from .helpers import rel_l2, tensors

pytestmark = pytest.mark.gpu

OFFICIAL = {"width": 256, "inner": 1024}
PRECISIONS = ("highest", "high", "medium")
L2_FACTOR, MAX_FACTOR = 1.25, 2.0  # of PyTorch's own error, at the same precision
ORDERS = range(4)  # of PyTorch's sums
# Relative errors below these pass as they are.
FLOOR = {"highest": 6e-7, "high": 3e-5, "medium": 3e-4}
CUDA = torch.device("cuda")


def make(kind="stress", batch=1, length=131, options=None, **dims):
    return make_on(kind, batch, length, CUDA, options, **{**OFFICIAL, **dims})


def weights_of(params, dtype, order=0):
    """The weights; `order` other than 0 turns the hidden units of both MLPs round, which changes nothing but sums."""
    w = {name: t.to(dtype) for name, t in zip(NAMES, params.tensors, strict=True)}
    if order:
        generator = torch.Generator().manual_seed(order)
        for names, count in ((FILTER_UNITS, w["sin_freq"].shape[1]), (MLP_UNITS, w["mlp_fc1_bias"].shape[0])):
            turned = torch.randperm(count, generator=generator).to(params.device)
            for name, dim in names:
                w[name] = w[name].index_select(dim, turned)
    return w


# Tensors and their dimensions that run over hidden units.
FILTER_UNITS = [(f"filter_linear{n}_{part}", 0) for n in (1, 2, 3) for part in ("weight", "bias")]
FILTER_UNITS += [(f"filter_linear{n}_weight", 1) for n in (2, 3, "_final")] + [("sin_freq", 1)]
MLP_UNITS = [("mlp_fc1_weight", 0), ("mlp_fc1_bias", 0), ("mlp_fc2_weight", 1)]


def formulas(x, params, precision, dtype=torch.float32, order=0, **options):
    options = {**params.options._asdict(), **options}
    z = None if params.z is None else params.z.to(dtype)
    with torch.no_grad(), products(precision, x.device):
        w = weights_of(params, dtype, order)
        return torch_path.hyena_block(x.to(dtype), w, **options, z=z, precision=precision)


def pytorch(x, params, precision, **options):
    """PyTorch's own run, in several orders of summation."""
    return [formulas(x, params, precision, order=order, **options) for order in ORDERS]


def truth(x, params, **options):
    return formulas(x, params, "highest", torch.float64, **options)


def errors(out, want):
    """Of every batch row of out [B, ...] by itself: relative L2, and the largest relative to the row's rms; [2, B]."""
    out, want = (t.double().flatten(1) for t in (out, want))
    rms = want.square().mean(1).sqrt()
    return torch.stack(((out - want).norm(dim=1) / want.norm(dim=1), (out - want).abs().amax(1) / rms))


def judge(out, want, bases, precision):
    """Every batch row of out [B, ...] by itself, against the largest error of PyTorch's runs [B, ...].

    The error of one run is luck, above all where a row has few elements.
    """
    assert torch.isfinite(out).all()
    within(errors(out, want), torch.stack([errors(base, want) for base in bases]).amax(0), precision)


def within(measured, base, precision):
    """Both as `errors` gives them."""
    floor = FLOOR[precision]
    assert (measured[0] <= (L2_FACTOR * base[0]).clamp(min=floor)).all(), f"L2 {measured[0]}, PyTorch {base[0]}"
    assert (measured[1] <= (MAX_FACTOR * base[1]).clamp(min=8 * floor)).all(), f"max {measured[1]}, PyTorch {base[1]}"


def check(x, params, precision, **options):
    out = cute_kernels.hyena_block(x, params, precision=precision, **options)
    judge(out, truth(x, params, **options), pytorch(x, params, precision, **options), precision)
    return out


def warmup(precision="highest"):
    cute_kernels.warmup("hyena_block", d_model=256, d_inner=1024, batch=1, seq_len=131, precision=precision)


def test_the_truth_is_the_oracle():
    x, params, inputs = make(batch=2, length=200)
    assert rel_l2(truth(x, params), hyena.block(inputs)["out"]) < 1e-7  # positions are fp32 in one of them


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize(("batch", "length"), hyena_inputs.OFFICIAL_SHAPES, ids=lambda n: str(n))
def test_official_sizes(batch, length, kind, precision):
    x, params, _ = make(kind, batch, length)
    out = check(x, params, precision)
    if kind == "official" and precision != "medium":
        tolerance = 2.4e-4 + 1e-5 * truth(x, params).abs()
        within = (out - truth(x, params)).abs() <= (0.5 if precision == "highest" else 1.0) * tolerance
        assert within.all() if precision == "highest" else within.double().mean() >= 0.99


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_few_tokens(length, precision):
    """Twenty rows together, and PyTorch's twenty: the error of one row of few tokens is luck."""
    measured, base = [], []
    for seed in range(10):
        x, params, _ = make(batch=2, length=length, seed=seed)
        out = cute_kernels.hyena_block(x, params, precision=precision)
        assert torch.equal(out, cute_kernels.hyena_block(x, params, precision=precision))
        measured.append(errors(out, truth(x, params)))
        base.append(errors(formulas(x, params, precision), truth(x, params)))
    measured, base = torch.cat(measured, 1), torch.cat(base, 1)
    together = (torch.stack((e[0].square().mean().sqrt(), e[1].max())) for e in (measured, base))
    within(*together, precision)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 129, 541, 997, 2053, 4099, 8192, 8760, 16384, 32768])
def test_lengths(length, precision):
    x, params, _ = make(batch=2 if length < 8000 else 1, length=length)
    out = check(x, params, precision)
    assert torch.equal(out, cute_kernels.hyena_block(x, params, precision=precision))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(("width", "inner"), [(64, 256), (128, 512), (192, 320), (512, 2048), (1024, 1024)])
def test_widths(width, inner, precision):
    x, params, _ = make(batch=2, length=97, width=width, inner=inner)
    check(x, params, precision)


@pytest.mark.parametrize(
    "options",
    [
        {"filter_layout": "transpose", "bias_in_filter": False, "norm_len": 500},
        {"l_max": 100},
        {"l_max": 64, "filter_layout": "transpose"},
        {"layer_norm_eps": 0.1, "exp_mod_shift": 0.5},
    ],
    ids=str,
)
def test_options(options):
    x, params, inputs = make(batch=2, length=131)
    out = check(x, params, "highest", **options)
    assert rel_l2(out, hyena.block(inputs, **options)["out"]) < 5e-6


def test_stored_positions_and_other_bands():
    z = torch.randn(200, 9, device=CUDA)
    x, params, _ = make(length=150, emb_dim=9, options={"z": z})
    check(x, params, "highest")
    x, params, _ = make(length=150, emb_dim=9)
    check(x, params, "highest")


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("rows", ["constant", "far from zero"])
def test_rows_that_are_hard_to_normalise(rows, precision):
    x, params, _ = make(batch=2, length=70)
    x = torch.full_like(x, 3.25) if rows == "constant" else x + 1e4
    out = cute_kernels.hyena_block(x, params, precision=precision)
    base = formulas(x, params, precision)
    want = truth(x, params)
    assert torch.isfinite(out).all()
    # At variance 0 a mean that is off by one ulp is all there is: the errors are those of fp32, but not PyTorch's own.
    limit = 4 * (base - want).abs().max() + 1e-4 * want.abs().max()
    assert (out - want).abs().max() <= limit


def test_a_large_input_at_the_full_length():
    x, params, _ = make("official", 1, 32768)
    x = torch.full_like(x, 100.0)
    out = cute_kernels.hyena_block(x, params, precision="highest")
    want = truth(x, params)
    assert (out - want).abs().max() <= 2 * (formulas(x, params, "highest") - want).abs().max() + 1e-4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [float("nan"), 1e4])
def test_rows_do_not_touch_each_other(bad, precision):
    x, params, _ = make(batch=4, length=300)
    x[1] *= bad
    out = cute_kernels.hyena_block(x, params, precision=precision)
    rows = [0, 2, 3]
    judge(out[rows], truth(x[rows], params), pytorch(x[rows], params, precision), precision)
    if bad == 1e4:
        judge(out[1:2], truth(x[1:2], params), pytorch(x[1:2], params, precision), precision)
    else:
        assert torch.isnan(out[1]).all()
    alone = cute_kernels.hyena_block(x[2:3], params, precision=precision)
    judge(alone, truth(x[2:3], params), pytorch(x[2:3], params, precision), precision)


@pytest.mark.parametrize("name", hyena.NAMES)
def test_every_tensor_moves_the_output_as_the_formulas_say(name):
    inputs = hyena_inputs.stress(1, 131, **OFFICIAL)
    noise = np.random.default_rng(7).standard_normal(inputs[name].shape).astype(np.float32)
    moved = {**inputs, name: inputs[name] + 0.1 * np.abs(inputs[name]).max() * noise}
    found, want = [], []
    for arrays in (inputs, moved):
        x, w = tensors(arrays, CUDA)
        params = cute_kernels.HyenaBlockParams(**w)
        found.append(cute_kernels.hyena_block(x, params, precision="highest").double())
        want.append(truth(x, params))
    change, expected = found[1] - found[0], want[1] - want[0]
    assert expected.square().mean().sqrt() > 1e-3
    assert (change - expected).norm() <= 1e-3 * expected.norm()


def test_prefix_of_a_longer_sequence():
    x, params, _ = make(length=300, options={"norm_len": 300, "filter_layout": "transpose"})
    long, short = (cute_kernels.hyena_block(t, params, precision="highest") for t in (x, x[:, :100]))
    torch.testing.assert_close(long[:, :100], short, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("shape", [(0, 131, 256), (3, 0, 256)])
def test_empty(shape):
    _, params, _ = make()
    assert cute_kernels.hyena_block(torch.zeros(shape, device=CUDA), params).shape == shape


# --- the filter ------------------------------------------------------------------------------------------------------


def filter_formulas(params, length, dtype=torch.float32, order=0, **options):
    o = {**params.options._asdict(), **options}
    names = ("exp_mod_shift", "filter_layout", "bias_in_filter", "norm_len")
    with torch.no_grad():
        return torch_path.hyena_filter(weights_of(params, dtype, order), length, **{name: o[name] for name in names})


@pytest.mark.parametrize("kind", hyena_inputs.SETS)
@pytest.mark.parametrize("length", [1, 2, 131, 541, 997, 2053, 4096, 8760, 32768])
def test_filter(kind, length):
    _, params, _ = make(kind, length=max(length, 1))
    for options in ({}, {"filter_layout": "transpose", "bias_in_filter": False, "norm_len": 2 * length}):
        k = cute_kernels.hyena_filter(params, length, **options)
        want = filter_formulas(params, length, torch.float64, **options)
        bases = [filter_formulas(params, length, order=order, **options)[None] for order in ORDERS]
        judge(k[None], want[None], bases, "highest")


@pytest.mark.parametrize("frequency", [0.0, 100.0, 1e3])
def test_filter_frequencies(frequency):
    inputs = hyena_inputs.stress(1, 541, **OFFICIAL)
    inputs["sin_freq"][:] = frequency
    _, w = tensors(inputs, CUDA)
    params = cute_kernels.HyenaBlockParams(**w)
    k = cute_kernels.hyena_filter(params, 541)
    want, base = filter_formulas(params, 541, torch.float64), filter_formulas(params, 541)
    assert torch.isfinite(k).all()
    assert (k - want).norm() <= 2 * (base - want).norm() + 1e-6 * want.norm()


def test_filter_does_not_follow_tf32():
    _, params, _ = make()
    ks = []
    for precision in ("high", "highest"):
        with products(precision, CUDA):
            ks.append(cute_kernels.hyena_filter(params, 541))
    torch.testing.assert_close(*ks, rtol=0, atol=1e-6)


# --- the long convolution --------------------------------------------------------------------------------------------


def conv_inputs(batch, width, length, taps=None, seed=0):
    g = torch.Generator(CUDA).manual_seed(seed)
    shapes = [
        (batch, width, length),
        (width, length if taps is None else taps),
        (width,),
        *[(batch, width, length)] * 2,
    ]
    u, k, *rest = (torch.randn(s, device=CUDA, generator=g) for s in shapes)
    return u, k / max(length, 1) ** 0.5, *rest


def conv_truth(*x):
    return torch_path.causal_long_conv(*(None if t is None else t.double() for t in x))


@pytest.mark.parametrize(
    ("batch", "width", "length", "taps"),
    [
        *((2, 256, n, n) for n in (1, 2, 3, 5, 63, 64, 65, 127, 129, 541, 997, 2053, 4099, 8192, 8760, 16384, 32768)),
        *((1, 3, 70000, 70000), (3, 1, 1000, 1000), (32, 64, 256, 256), (2, 5, 300, 100), (2, 5, 300, 500)),
        (1, 1, 1 << 20, 1 << 20),
    ],
)
def test_conv(batch, width, length, taps):
    x = conv_inputs(batch, width, length, taps)
    for given in (x, x[:2]):
        y = cute_kernels.causal_long_conv(*given, precision="highest")
        judge(y, conv_truth(*given), [torch_path.causal_long_conv(*given)], "highest")
        assert torch.equal(y, cute_kernels.causal_long_conv(*given, precision="highest"))


@pytest.mark.parametrize("length", [131, 4099, 32768])
def test_conv_impulses(length):
    u = torch.zeros(1, 2, length, device=CUDA)
    u[..., length // 3] = 1.0
    k = torch.randn(2, length, device=CUDA)
    y = cute_kernels.causal_long_conv(u, k)
    assert y[..., : length // 3].abs().max() < 1e-5
    torch.testing.assert_close(y[0, :, length // 3 :], k[:, : length - length // 3], rtol=1e-5, atol=1e-5)
    last = torch.zeros_like(k)
    last[:, -1] = 1.0
    y = cute_kernels.causal_long_conv(torch.ones_like(u), last)
    assert y[..., :-1].abs().max() < 1e-5
    assert (y[..., -1] - 1).abs().max() < 1e-5


def test_conv_of_a_skip_alone():
    u, k, skip, *_ = conv_inputs(2, 8, 500)
    y = cute_kernels.causal_long_conv(u, torch.zeros_like(k), 1e3 * skip)
    torch.testing.assert_close(y, 1e3 * skip[:, None] * u, rtol=1e-6, atol=0)


def test_conv_rows_do_not_touch_each_other():
    x = conv_inputs(4, 16, 300)
    x[0][1] = float("nan")
    x[0][2] *= 1e4
    y = cute_kernels.causal_long_conv(*x)
    for row in (0, 2, 3):
        one = [t[row : row + 1] if t.dim() == 3 else t for t in x]
        judge(y[row : row + 1], conv_truth(*one), [torch_path.causal_long_conv(*one)], "highest")


def test_conv_views():
    x = conv_inputs(2, 6, 300)
    expected = cute_kernels.causal_long_conv(*x)
    padded = [torch.cat([t, t], -1)[..., 1 : 1 + t.shape[-1]].copy_(t) for t in x]
    turned = [t.mT.contiguous().mT if t.dim() > 1 else t for t in x]
    for views in (padded, turned):
        assert torch.equal(cute_kernels.causal_long_conv(*views), expected)


# --- graphs, streams, devices, torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_replays_with_new_data(precision):
    x, params, _ = make(length=131)
    warmup(precision)  # no call before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cute_kernels.hyena_block(x, params, precision=precision)
    for seed in (1, 2):
        y, w = tensors(hyena_inputs.stress(1, 131, seed, **OFFICIAL), CUDA)
        x.copy_(y)
        for name, t in w.items():
            getattr(params, name).copy_(t)
        out.fill_(float("nan"))
        graph.replay()
        judge(out, truth(x, params), pytorch(x, params, precision), precision)


def test_side_stream():
    """Inputs that are not there yet when the call returns: right only on the stream that makes them."""
    x, params, _ = make(batch=2, length=131)
    expected = cute_kernels.hyena_block(x, params)
    late = torch.full_like(x, float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # clock cycles: a twentieth of a second
        late.copy_(x)
        out = cute_kernels.hyena_block(late, params)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_second_device_while_the_first_is_current():
    x, params, _ = make_on("stress", 2, 131, "cuda:1", **OFFICIAL)
    out = cute_kernels.hyena_block(x, params, precision="highest")
    assert out.device == x.device
    assert torch.cuda.current_device() == 0
    judge(out, truth(x, params), pytorch(x, params, "highest"), "highest")


def test_mixed_devices():
    x, params, _ = make()
    with pytest.raises(ValueError, match="x is on cpu, but must be on cuda:0 like the weights"):
        cute_kernels.hyena_block(x.cpu(), params)
    with pytest.raises(ValueError, match="out is on cpu, but must be on cuda:0 like x"):
        cute_kernels.hyena_block(x, params, out=torch.empty_like(x, device="cpu"))


def test_threads():
    _, params, _ = make()
    xs = [make(batch=1 + k, length=100 + k)[0] for k in range(4)]
    expected = [cute_kernels.hyena_block(x, params) for x in xs]
    results = [None] * 4
    torch.cuda.synchronize()

    def work(k):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                results[k] = cute_kernels.hyena_block(xs[k], params)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_same_bits_through_every_door():
    x, params, _ = make(batch=2, length=131)
    expected = cute_kernels.hyena_block(x, params)
    out = torch.full_like(x, float("nan"))
    cute_kernels.hyena_block(x, params, out=out)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        autocast = cute_kernels.hyena_block(x, params)
    doors = {
        "out": out,
        "autocast": autocast,
        "op": torch.ops.cute_kernels.hyena_block(x, *params.tensors, None, None, *params.options, "highest"),
        "transposed": cute_kernels.hyena_block(x.mT.contiguous().mT, params),
        "misaligned": cute_kernels.hyena_block(torch.cat([x[0, 0, :1], x.flatten()])[1:].view(x.shape), params),
        "prepared": cute_kernels.hyena_block(x, params.prepare(seq_len=131)),
        "compiled": torch.compile(cute_kernels.hyena_block, fullgraph=True, backend="aot_eager")(x, params),
    }
    for door, found in doors.items():
        assert torch.equal(found, expected), door


@pytest.mark.parametrize("newer", [False, True])
def test_precision_follows_torch(newer):
    x, params, _ = make(length=131)
    expected = cute_kernels.hyena_block(x, params, precision="high")
    assert not torch.equal(cute_kernels.hyena_block(x, params), expected)
    if newer:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    try:
        assert torch.equal(cute_kernels.hyena_block(x, params), expected)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


@pytest.mark.slow
def test_outputs_past_32_bits():
    """B L D of 2^31 + some: the last row is the first one's."""
    rows = 2**31 // (2048 * 256) + 1
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of free GPU memory")
    one, params, _ = make(batch=2, length=2048)
    x = torch.zeros(rows, 2048, 256, device=CUDA)
    x[0], x[-1] = one[0], one[1]
    out = cute_kernels.hyena_block(x, params, precision="high")
    ends = out[[0, -1]]
    judge(ends, truth(one, params), pytorch(one, params, "high"), "high")


def test_gradients_and_opcheck():
    x, params, _ = make(batch=2, length=40, width=64, inner=128)
    wanted = [t.clone().requires_grad_() for t in (x, *params.tensors)]
    leaves = cute_kernels.HyenaBlockParams(**dict(zip(NAMES, wanted[1:], strict=True)))
    grad = torch.randn_like(x)
    found = torch.autograd.grad(cute_kernels.hyena_block(wanted[0], leaves), wanted, grad)
    doubles = [t.detach().double().requires_grad_() for t in wanted]
    y = torch_path.hyena_block(doubles[0], dict(zip(NAMES, doubles[1:], strict=True)))
    for name, a, b in zip(("x", *NAMES), found, torch.autograd.grad(y, doubles, grad.double()), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm(), name
    arguments = (x, *params.tensors, None, None, *params.options, "highest")
    torch.library.opcheck(torch.ops.cute_kernels.hyena_block.default, arguments)


def test_a_call_keeps_to_its_memory():
    """Beside its output a call allocates at most 4 x B x L x D x 4 bytes and the weights' share."""
    x, params, _ = make(batch=2, length=4096)
    cute_kernels.hyena_block(x, params, precision="high")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = cute_kernels.hyena_block(x, params, precision="high")
    weights = 4 * sum(t.nbytes for t in params.tensors)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 4 * x.nbytes + weights + 4 * 256 * 4096 + (
        2 << 20
    )


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_host_time(precision):
    """At most 30 us of host time a call, through the public function."""
    x, params, _ = make(batch=1, length=64)
    cute_kernels.hyena_block(x, params, precision=precision)
    calls, times = 20, []  # few enough that no call waits for the device
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            cute_kernels.hyena_block(x, params, precision=precision)
        times.append((time.perf_counter() - start) / calls)
    times.sort()
    assert times[len(times) // 2] <= 30e-6, f"{times[len(times) // 2] * 1e6:.1f} us"
