"""The backend: operators' kernels through the runtime, memory that nothing wrote, counts and roles."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_kernels.runtime import backend, cache
from cute_kernels.runtime.kernel import Kernel, compile_options
from reference.ptx import MachineFault, PtxError
from reference.ptx.count import roles
from reference.ptx.machine import ptx_machine

from .kernels import ARCHS
from .running import run


@dataclass(frozen=True)
class Add(Kernel):
    """y = x + x (or x + y), elementwise."""

    operator: ClassVar[str] = "test_add"
    reads_output: bool

    def compile(self, arch):
        n = cute.sym_int32()
        fakes = [make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=4) for _ in range(2)]
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(AddHost(self.reads_output), *fakes, stream, options=compile_options(arch))


class AddHost:
    def __init__(self, reads_output):
        self.reads_output = reads_output

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        n = cute.size(x)
        self.kernel(x, y, n).launch(grid=((n + 127) // 128, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
        i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if i < n:
            y[i] = x[i] + (y[i] if cutlass.const_expr(self.reads_output) else x[i])


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))


def add(x: torch.Tensor, reads_output: bool = False) -> torch.Tensor:
    current = backend.current()
    assert current.handles(x)
    y = torch.empty(x.shape)
    current.function(Add(reads_output), x.device)(x, y)
    return y


@pytest.mark.parametrize("arch", ARCHS)
def test_operator_runs_through_the_runtime(kernels, arch):
    x = torch.randn(1000)
    with ptx_machine(arch) as machine:
        assert backend.current().arch(x.device) == arch
        y = add(x)
    assert torch.equal(y, x + x)
    assert y.data_ptr() % 512 == 0
    assert machine.reports[0].counts["global_store_full_lines"] == 31
    assert machine.reports[0].counts["global_store_bytes"] == 4000
    assert not backend.current().handles(x)


@pytest.mark.parametrize("arch", ARCHS)
def test_reading_an_empty_tensor_is_found(arch, kernels):
    """The report names the kernel, the PTX line and the Python line."""
    with ptx_machine(arch), pytest.raises(MachineFault, match="nothing has written") as caught:
        add(torch.randn(1000), reads_output=True)
    source = pathlib.Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.strip().startswith("y[i] = x[i]"))
    assert f"({__file__}:{line}): ld.global" in str(caught.value)
    assert "in kernel_" in str(caught.value) and "AddHost" in str(caught.value)


def test_what_torch_wrote_since_counts_as_written(kernels):
    x = torch.randn(300)
    with ptx_machine("sm_90a"):
        y = torch.empty(300)
        y.copy_(x)
        backend.current().function(Add(True), x.device)(x, y)
    assert torch.equal(y, x + x)


def test_empty_is_restored_and_options_are_checked():
    before = torch.empty
    with pytest.raises(TypeError), ptx_machine("sm_90a", no_such_option=1) as machine:
        assert torch.empty is not before
        machine.function(Add(False), torch.device("cpu"))(torch.zeros(1), torch.zeros(1))
    assert torch.empty is before
    with pytest.raises(ValueError, match="sm_80"), ptx_machine("sm_80"):
        pass


def test_roles():
    report = run("ring", "sm_100a", 64, 64, 5)[2][0]
    names = roles(report)
    assert "warp 4" in names and names["warp 4"]["copy"] == 2 * 2 * 5


def test_ptx_for_another_architecture_is_refused():
    from .kernels import compiled

    ptx = compiled("elementwise", "sm_90a").ptx
    with pytest.raises(PtxError, match="sm_90a"):
        run("elementwise", "sm_100a", ptx=ptx)
