"""What only a GPU can show: graphs, streams, devices, sizes past 32 bits, other libraries' arrays, the cost of a call.

The cases of `test_segsum_cases` run on the GPU too.
"""

import threading
import time

import pytest
import torch

import cute_kernels
from reference import compare, inputs

from .cases import PoisonedOutputs
from .test_segsum_torch import OUTPUTS, assert_close, random_grads, through_oracle

pytestmark = pytest.mark.gpu

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
GIB = 1 << 30


def warmup(x: inputs.SegsumInputs) -> None:
    cute_kernels.warmup(
        "mamba_segsum",
        dtype=x.B.dtype,
        num_heads=x.dt.shape[3],
        n_groups=x.B.shape[3],
        d_state=x.B.shape[4],
        chunk_size=x.dt.shape[2],
        dt_dtype=x.dt.dtype,
        A_dtype=x.A_log.dtype,
        bias_dtype=None if x.dt_bias is None else x.dt_bias.dtype,
        g_layout=x.g_layout,
        device=x.dt.device,
    )


def needs_memory(size: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size / GIB:.0f} GiB of free GPU memory, {free / GIB:.0f} GiB are free")


# --- graphs, streams, devices, threads -------------------------------------------------------------------------------


@pytest.mark.parametrize("destination", ["returned", "out"])
@pytest.mark.parametrize("chunks", [1, 5])
def test_graph_replays_with_new_data(chunks, destination):
    x = inputs.official(0, "cuda", chunks=chunks, heads=12, groups=4, d_state=64, bias_dtype=fp32)
    warmup(x)  # no call before the capture
    poisoned = PoisonedOutputs.like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cute_kernels.mamba_segsum(*x, out=poisoned.out if destination == "out" else None)
    for seed in (1, 2):
        y = inputs.mixture(seed, "cuda", chunks=chunks, heads=12, groups=4, d_state=64, bias_dtype=fp32)
        for target, source in zip(x[:5], y[:5], strict=True):
            target.copy_(source)
        for t in out:
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        compare.assert_ok(x, out)


def test_capture_without_warmup_says_what_to_do():
    x = inputs.official(0, "cuda", heads=11, d_state=176, chunk_size=64)  # a kernel that no other test loads
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(graph):
        cute_kernels.mamba_segsum(*x)
    torch.cuda.synchronize()
    compare.assert_ok(x, cute_kernels.mamba_segsum(*x))


def test_side_stream():
    """Inputs that are not there yet when the call returns: right only on the stream that makes them."""
    x = inputs.official(0, "cuda", batch=2)
    warmup(x)
    late = [torch.full_like(t, float("nan")) for t in x[:4]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cute_kernels.mamba_segsum(*x)  # so that the stream has memory: the driver may wait where it finds some
    stream.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # clock cycles: about a tenth of a second
        for target, source in zip(late, x, strict=False):
            target.copy_(source)
        out = cute_kernels.mamba_segsum(*late)
    assert not stream.query()  # the call did not wait for the device
    stream.synchronize()
    compare.assert_ok(x, out)


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_second_device_while_the_first_is_current():
    assert torch.cuda.current_device() == 0
    x = inputs.official(0, "cuda:1", batch=2)
    poisoned = PoisonedOutputs.like(x)
    out = cute_kernels.mamba_segsum(*x, out=poisoned.out)
    assert all(t.device == x.dt.device for t in cute_kernels.mamba_segsum(*x))
    assert torch.cuda.current_device() == 0
    compare.assert_ok(x, out)
    other = inputs.official(1, "cuda:0", batch=2)
    compare.assert_ok(other, cute_kernels.mamba_segsum(*other))
    with pytest.raises(ValueError, match="B is on cuda:0, but must be on cuda:1 like dt"):
        cute_kernels.mamba_segsum(x.dt, x.A_log, other.B, x.C)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        out = cute_kernels.mamba_segsum(*x)
    stream.synchronize()
    compare.assert_ok(x, out)


def test_threads():
    x = [inputs.official(k, "cuda", batch=1 + k, heads=4) for k in range(4)]
    results = [None] * 4

    def work(k: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(20):
                results[k] = cute_kernels.mamba_segsum(*x[k])
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(4):
        compare.assert_ok(x[k], results[k])


def test_mixed_devices():
    x = inputs.official(0, "cuda")
    with pytest.raises(ValueError, match="A_log is on cpu, but must be on cuda:0 like dt"):
        cute_kernels.mamba_segsum(x.dt, x.A_log.cpu(), x.B, x.C)
    with pytest.raises(ValueError, match=r"out\.L is on cpu"):
        cute_kernels.mamba_segsum(*x, out=[t.cpu() for t in cute_kernels.mamba_segsum(*x)])


@pytest.mark.parametrize("shape", [{"chunk_size": 96}, {"d_state": 24}, {"d_state": 272}])
def test_unsupported_sizes(shape):
    with pytest.raises(NotImplementedError, match="supported are"):
        cute_kernels.mamba_segsum(*inputs.official(0, "cuda", **shape))
    torch.cuda.synchronize()


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "chunks"), [(1, 65536), (65536, 1), (64, 1024)])
def test_65536_chunks(batch, chunks):
    needs_memory(20 * GIB)
    x = inputs.official(0, "cuda", batch=batch, chunks=chunks, chunk_size=64, heads=1, d_state=16)
    poisoned = PoisonedOutputs.like(x)
    compare.assert_ok(x, cute_kernels.mamba_segsum(*x, out=poisoned.out))
    poisoned.assert_guards_intact()


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "chunks"), [(1, 2050), (2050, 1)])
def test_outputs_past_32_bits(batch, chunks):
    """2050 chunks of 2^20 elements: L, G and M each hold more than 2^31."""
    needs_memory(40 * GIB)
    x = inputs.official(0, "cuda", batch=1, chunks=50, d_state=64)
    repeat = 2050 // 50
    x = x._replace(**{n: getattr(x, n).repeat(1, repeat, *[1] * (getattr(x, n).dim() - 2)) for n in ("dt", "B", "C")})
    # Chunks that differ at the far end, where an index that wraps would land.
    x.dt[:, -3:] = x.dt[:, -3:] * 2 - 1
    x = x._replace(**{n: getattr(x, n).view(batch, chunks, *getattr(x, n).shape[2:]) for n in ("dt", "B", "C")})
    poisoned = PoisonedOutputs.like(x)
    assert poisoned.out.M.numel() > 2**31
    compare.assert_ok(x, cute_kernels.mamba_segsum(*x, out=poisoned.out))
    poisoned.assert_guards_intact()


def test_new_batch_sizes_compile_nothing(monkeypatch):
    from cute_kernels.runtime import build

    warmup(inputs.official(0, "cuda"))
    monkeypatch.setattr(build, "build", lambda *args: pytest.fail("compiled"))
    for batch, chunks in ((1, 2), (3, 1), (2, 9), (16, 4)):
        x = inputs.official(0, "cuda", batch=batch, chunks=chunks)
        compare.assert_ok(x, cute_kernels.mamba_segsum(*x))


# --- other libraries -------------------------------------------------------------------------------------------------


def test_cupy():
    cupy = pytest.importorskip("cupy")
    x = inputs.official(0, "cuda", dtype=fp16, dt_dtype=fp32, A_dtype=fp32)
    out = cute_kernels.mamba_segsum(*(cupy.from_dlpack(t) for t in x[:4]))
    assert isinstance(out.L, torch.Tensor)
    compare.assert_ok(x, out)


def test_jax():
    jax = pytest.importorskip("jax")
    x = inputs.official(0, "cuda", bias_dtype=fp32)
    arrays = [jax.dlpack.from_dlpack(t) for t in x[:5]]
    compare.assert_ok(x, cute_kernels.mamba_segsum(*arrays))


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compile_and_gradients():
    x = inputs.official(0, "cuda", chunk_size=64, heads=4, groups=2, d_state=32, bias_dtype=fp32, dt_dtype=fp32)
    leaves = x._replace(
        **{n: t.clone().requires_grad_() for n, t in zip(x._fields[:5], x[:5], strict=True) if t is not None}
    )
    cpu = inputs.SegsumInputs(*(t.cpu() for t in x[:5]), *x[5:])
    grads = [g.cuda() for g in random_grads(cpu, OUTPUTS)]
    expected = through_oracle(x, grads)
    for f in (cute_kernels.mamba_segsum, torch.compile(cute_kernels.mamba_segsum, fullgraph=True)):
        out = f(*leaves)
        compare.assert_ok(x, tuple(t.detach() for t in out))
        for found, e, like in zip(torch.autograd.grad(out, leaves[:5], grads), expected, x[:5], strict=True):
            assert_close(found, e, like)


def test_opcheck():
    x = inputs.official(0, "cuda", chunk_size=64, heads=4, groups=2, d_state=32, bias_dtype=fp32)
    arguments = (*x[:5], 0.0, None, "per_head")
    torch.library.opcheck(torch.ops.cute_kernels.mamba_segsum.default, arguments)
    out = [torch.empty_like(t) for t in cute_kernels.mamba_segsum(*x)]
    torch.library.opcheck(torch.ops.cute_kernels.mamba_segsum_out.default, (*arguments, *out))


def test_same_bits_through_every_door():
    x = inputs.mixture(0, "cuda", batch=2, heads=8)
    expected = [t.clone() for t in cute_kernels.mamba_segsum(*x)]
    doors = {
        "out": cute_kernels.mamba_segsum(*x, out=PoisonedOutputs.like(x).out),
        "op": torch.ops.cute_kernels.mamba_segsum(*x[:5], 0.0, None, "per_head"),
        "views": cute_kernels.mamba_segsum(
            x.dt.transpose(2, 3).contiguous().transpose(2, 3),
            x.A_log,
            x.B.permute(4, 0, 1, 2, 3).contiguous().permute(1, 2, 3, 4, 0),
            x.C,
        ),
    }
    for door, found in doors.items():
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), door


# --- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("destination", ["returned", "out"])
def test_host_time(destination):
    """At most 15 us of host time a call, through the public function."""
    x = inputs.official(0, "cuda", d_state=64, heads=2, chunk_size=64)  # on the device for less time than on the host
    out = cute_kernels.mamba_segsum(*x) if destination == "out" else None
    calls = 100
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            cute_kernels.mamba_segsum(*x, out=out)
        times.append((time.perf_counter() - start) / calls)
    times.sort()
    assert times[len(times) // 2] <= 15e-6, f"{times[len(times) // 2] * 1e6:.1f} us"


def test_a_call_allocates_its_outputs_and_little_else():
    x = inputs.official(0, "cuda", batch=8)
    cute_kernels.mamba_segsum(*x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = cute_kernels.mamba_segsum(*x)
    size = sum(t.nbytes for t in out)
    assert torch.cuda.memory_allocated() - before <= size + 5 * 512
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * size + (1 << 20)  # the workspace
