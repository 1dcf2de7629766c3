"""The filter's kernel, compiled and run on the PTX machine, against the oracle, and which one a shape gets."""

import numpy as np
import pytest
import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.compose import filter_kernel
from cute_kernels.hyena.config import Filter
from cute_kernels.hyena.params import HyenaOptions, HyenaProblem
from reference import hyena, hyena_inputs

from ..covering import parametrize
from .cases import poisoned, tensors
from .helpers import rel_l2

pytest.importorskip("cutlass")
machine = pytest.importorskip("reference.ptx.machine")


ARCHS = ("sm_90a", "sm_100a")  # whose products differ


@parametrize(
    {
        "width, length, tile, split": [
            (128, 1, 16, 1),
            (128, 70, 16, 2),
            (128, 131, 32, 1),
            (64, 131, 8, 1),
            (192, 97, 16, 1),
            (256, 70, 8, 1),
            (256, 41, 16, 1),
            (256, 131, 32, 1),
        ],
        "kind": hyena_inputs.SETS,
        "layout": ["reshape", "transpose"],
        "groups": [1, 2],
        "arch": ARCHS,
    },
    together=3,
)
def test_filter(width, length, tile, split, kind, layout, groups, arch):
    inputs = hyena_inputs.SETS[kind](1, length, width=width, inner=128)
    kernel = Filter(width, 5, layout, True, False, tile, split, groups)
    out = poisoned(width, stages.pitch(length))
    with machine.ptx_machine(arch):
        k = stages.hyena_filter(tensors(inputs), kernel, length, length, 0.05, out=out)
    assert rel_l2(k[:, :length], hyena.hyena_filter(inputs, length, 0.05, layout)["k"]) < 3e-6
    assert torch.isnan(k[:, length:]).all()


@pytest.mark.parametrize("width", range(64, 1025, 64))
@pytest.mark.parametrize("length", [1, 131, 1024, 4096, 32768])
def test_choice_of_a_filter(width, length):
    """A task has at most 256 channels, and the tasks one turn on the device where they can."""
    kernel = Filter.for_shape(width, 5, "reshape", True, False, length, 132)
    assert width % kernel.split == 0
    assert kernel.channels <= 256
    assert (kernel.tile == 32) is (length > 16 * 132)
    assert kernel.split * -(-length // kernel.tile) <= 132 or kernel.tile == 32 or width > 256


@pytest.mark.parametrize("arch", ARCHS)
def test_filter_weights_of_any_magnitude(arch):
    """A row of weights is an operand scaled by its own largest: rows of any size, and bad ones stay where they are."""
    inputs = hyena_inputs.stress(1, 20, width=64, inner=128)
    inputs["filter_linear_final_weight"] *= np.logspace(-30, 30, 64, dtype=np.float32)[:, None]
    inputs["filter_linear2_weight"][::2] *= np.float32(1e-20)
    inputs["filter_linear3_weight"][5] = 0
    inputs["filter_bias"][:] = 0
    want = hyena.hyena_filter(inputs, 20, 0.05, "transpose")["k"]
    inputs["filter_linear_final_weight"][[3, 40]] = [[np.inf], [np.nan]]
    with machine.ptx_machine(arch):
        k = stages.hyena_filter(tensors(inputs), Filter(64, 5, "transpose", True, False, 8), 20, 20, 0.05)[:, :20]
    for d in range(64):
        if d in (3, 40):
            assert not torch.isfinite(k[d]).any()
        else:
            assert rel_l2(k[d], want[d]) < 1e-5, d


@pytest.mark.parametrize("arch", ARCHS)
def test_filter_of_a_trained_model(arch):
    """Stored positions, another length to normalise by, no bias, five bands."""
    inputs = hyena_inputs.stress(1, 40, width=64, inner=128, emb_dim=11)
    options = {"filter_layout": "transpose", "bias_in_filter": False, "norm_len": 90}
    w = tensors(inputs)
    z = np.random.default_rng(3).standard_normal((45, 11)).astype(np.float32)
    with machine.ptx_machine(arch):
        made = stages.hyena_filter(w, Filter(64, 11, "transpose", False, False), 40, 90, 0.05)
        stored = stages.hyena_filter(w, Filter(64, 11, "transpose", False, True), 40, 90, 0.05, torch.from_numpy(z))
    assert rel_l2(made[:, :40], hyena.hyena_filter(inputs, 40, 0.05, **options)["k"]) < 3e-6
    assert rel_l2(stored[:, :40], hyena.hyena_filter(inputs, 40, 0.05, **options, z=z)["k"]) < 3e-6


def test_no_kernel_where_offsets_pass_32_bits():
    problem, options = HyenaProblem(1024, 64, 64, 5, None), HyenaOptions()
    assert filter_kernel(problem, options, (1 << 22) - 8, 132) is not None
    assert filter_kernel(problem, options, 1 << 22, 132) is None
