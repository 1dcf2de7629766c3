"""The Hyena operators at their official width, through their public functions, on both architectures.

Other sizes, options and stages: tests/hyena. The segment sum: tests/mamba.
"""

import numpy as np
import pytest
import torch

import cute_kernels
from reference import hyena, hyena_inputs
from reference.ptx.machine import ptx_machine

from .kernels import ARCHS

LENGTH = 131
LIMITS = {"high": 6e-4, "medium": 5e-3}  # relative L2: what TF32 and bf16 operands cost, with a margin


def block_inputs(kind, batch=1):
    arrays = hyena_inputs.SETS[kind](batch, LENGTH)
    w = {name: torch.from_numpy(value) for name, value in arrays.items()}
    x = w.pop("hidden_states")
    return arrays, x, cute_kernels.HyenaBlockParams(**w)


def errors(got, want):
    """Relative L2 error and largest error."""
    difference = got.double().numpy() - want
    return np.linalg.norm(difference) / np.linalg.norm(want), abs(difference).max()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "kind, precision", [("stress", "highest"), ("stress", "high"), ("stress", "medium"), ("official", "high")]
)
def test_block(kind, precision, arch):
    """ "highest" is as near to the truth as PyTorch in fp32: within 1.25 times its L2 error, twice its largest."""
    arrays, x, params = block_inputs(kind)
    want = hyena.block(arrays)["out"]
    with ptx_machine(arch) as machine:
        out = cute_kernels.hyena_block(x, params, precision=precision)
    assert machine.reports
    l2, largest = errors(out, want)
    if precision == "highest":
        plain = errors(cute_kernels.hyena_block(x, params, precision=precision), want)  # on a CPU: PyTorch
        assert l2 <= 1.25 * plain[0] and largest <= 2 * plain[1]
    else:
        assert l2 < LIMITS[precision]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["reshape", "transpose"])
def test_filter(layout, arch):
    arrays, _, params = block_inputs("stress")
    with ptx_machine(arch) as machine:
        k = cute_kernels.hyena_filter(params, LENGTH, filter_layout=layout)
    assert len(machine.reports) == 2  # its weights, and the filter
    want = hyena.hyena_filter(arrays, LENGTH, 0.05, layout)["k"]
    plain = errors(cute_kernels.hyena_filter(params, LENGTH, filter_layout=layout), want)
    l2, largest = errors(k, want)
    assert l2 <= 1.25 * plain[0] and largest <= 2 * plain[1]


@pytest.mark.parametrize("arch", ARCHS)
def test_long_conv(arch):
    g = torch.Generator().manual_seed(5)
    u, k = torch.randn(1, 256, LENGTH, generator=g), torch.randn(256, LENGTH, generator=g)
    want = hyena.long_conv(u.numpy(), k.numpy(), None, None, None)
    with ptx_machine(arch) as machine:
        out = cute_kernels.causal_long_conv(u, k, precision="highest")
    assert len(machine.reports) == 1
    l2, largest = errors(out, want)
    plain = errors(cute_kernels.causal_long_conv(u, k, precision="highest"), want)
    assert l2 <= 1.25 * plain[0] and largest <= 2 * plain[1]
