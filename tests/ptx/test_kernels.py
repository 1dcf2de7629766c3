"""Real kernels, host code included, on the machine against float64, under several schedules."""

import pytest
import torch

from .kernels import ARCHS
from .running import run

BF16_ULP, FP32_ULP = 2.0**-8, 2.0**-23


@pytest.mark.parametrize("arch", ARCHS)
def test_elementwise(arch):
    out, expected, _ = run("elementwise", arch)
    assert (out.double() - expected).abs().max() < 4e-6


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shape", [(64, 64, 1), (64, 256, 4)])
def test_gemm(arch, shape):
    out, expected, reports = run("gemm", arch, *shape)
    assert torch.all((out.double() - expected).abs() <= BF16_ULP * expected.abs() + 1e-4)
    m, n, tiles = shape
    assert reports[0].counts["mma_bf16"] == 2 * (2 * m) * n * 64 * tiles
    assert reports[0].counts["tma_load_bytes"] == 2 * (m + n) * 64 * tiles * 2
    assert reports[0].counts["global_store_bytes"] == 2 * m * n * 2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "n, majors, kind",
    [
        (32, "KM", "Float16"),
        (64, "KM", "BFloat16"),
        (128, "KM", "BFloat16"),
        (64, "MK", "Float16"),
        (32, "MM", "BFloat16"),
        (64, "MM", "BFloat16"),
        (128, "MM", "Float16"),
    ],
)
def test_gemm_with_operands_major_along_rows(arch, n, majors, kind):
    out, expected, _ = run("gemm", arch, 64, n, 2, kind, majors)
    assert torch.all((out.double() - expected).abs() <= BF16_ULP * expected.abs() + 1e-4)


def test_gemm_tf32():
    out, expected, _ = run("gemm", "sm_100a", 64, 64, 2, "TFloat32", "KK")
    assert (out.double() - expected).norm() < 4e-7 * expected.norm()


def test_gemm_with_128_rows_of_tensor_memory():
    out, expected, _ = run("gemm", "sm_100a", 128, 64, 1)
    assert torch.all((out.double() - expected).abs() <= BF16_ULP * expected.abs() + 1e-4)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("schedule", ["round robin", "random", "late 0", "late 2", "late 4"])
def test_ring_of_stages_under_every_schedule(arch, schedule):
    out, expected, _ = run("ring", arch, 64, 64, 5, schedule=schedule, seed=3)
    assert torch.all((out.double() - expected).abs() <= BF16_ULP * expected.abs() + 1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_operand_written_by_threads_and_read_through_an_aliased_descriptor(arch):
    out, expected, _ = run("hankel", arch)
    assert (out.double() - expected).norm() < 2e-7 * expected.norm()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["transpose", "transpose_tf32", "multicast", "cluster"])
def test_copies_are_exact(arch, name):
    out, expected, _ = run(name, arch)
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_schedules_do_not_change_a_bit(arch):
    first = run("ring", arch, 64, 64, 5)[0]
    for seed in range(3):
        assert torch.equal(first, run("ring", arch, 64, 64, 5, schedule="random", seed=seed)[0])


@pytest.mark.parametrize("arch", ARCHS)
def test_wrong_device_and_shape_are_the_host_codes_own_errors(arch):
    from reference.ptx import run_object

    from .kernels import compiled

    made = compiled("gemm", arch, 64, 64, 1)
    bad = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises((ValueError, TypeError), match="argument"):
        run_object(made.object, made.symbol, made.ptx, [*bad, torch.zeros(64, 63, dtype=torch.bfloat16)])
