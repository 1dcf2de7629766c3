"""The first two launches on the PTX machine: g and x0 against the oracle's, the filter and the operands."""

import dataclasses

import numpy as np
import pytest
import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Precision, Project
from reference import hyena, hyena_inputs
from tests.covering import parametrize
from tests.hyena.cases import tensors
from tests.hyena.helpers import rel_l2

# Relative L2 on stress inputs: several times what is seen, and far below what a wrong kernel gives.
LIMITS = {"highest": 5e-7, "high": 6e-4, "medium": 5e-3}
EPS, SHIFT = 1e-5, 0.05
ARCHS = ("sm_90a", "sm_100a")


def kernel_for(precision, width=128, channels=32, tile=16, layout="reshape"):
    chosen = Precision.named(precision)
    return Project(chosen.dtype, chosen.parts, width, 128, channels, tile, 5, layout, True, False)


def project(inputs, kernel, sm_count=4, conv_length=None, prepared=None, arch="sm_90a"):
    """The stage on a machine of so many SMs: the more, the fewer slabs has a block."""
    pytest.importorskip("cutlass")
    machine = pytest.importorskip("reference.ptx.machine")
    w = tensors(inputs)
    length = w["hidden_states"].shape[1]
    conv_length = conv_length or length
    with machine.ptx_machine(arch, sm_count=sm_count):
        return stages.project(
            w["hidden_states"], w, kernel, conv_length, EPS, conv_length, SHIFT, prepared=prepared
        ), conv_length


def check(inputs, kernel, limit, sm_count=4, conv_length=None, arch="sm_90a"):
    made, conv_length = project(inputs, kernel, sm_count, conv_length, arch=arch)
    want = hyena.block(inputs, EPS, l_max=conv_length, filter_layout=kernel.layout)
    for name in ("g", "x0"):
        assert rel_l2(getattr(made, name)[..., :conv_length], want[name]) < limit, name
    assert rel_l2(made.k[..., :conv_length], want["k"]) < 3e-6
    for name, weight in (("out_proj", "out_proj_weight"), ("fc1", "mlp_fc1_weight"), ("fc2", "mlp_fc2_weight")):
        scale = getattr(made.operands, f"{name}_scale")[:, None]
        assert rel_l2(getattr(made.operands, name).double().sum(0) * scale, inputs[weight]) < limit, name
    norms = np.linalg.norm(inputs["mlp_fc1_weight"].astype(np.float64), axis=1)
    assert rel_l2(made.operands.fc1_norm, norms) < 1e-6


@parametrize({"precision": Precision.NAMES, "batch, length": [(1, 70), (3, 131)], "arch": ARCHS})
def test_precisions(precision, batch, length, arch):
    for made in hyena_inputs.SETS.values():
        inputs = made(batch, length, width=128, inner=128)
        check(inputs, kernel_for(precision, tile=32), LIMITS[precision], arch=arch)


@parametrize({"length": [1, 2, 3, 63, 64, 65], "tile": [16, 64], "arch": ARCHS})
def test_lengths(length, tile, arch):
    inputs = hyena_inputs.stress(2, length, width=64, inner=128)
    check(inputs, kernel_for("highest", 64, tile=tile), LIMITS["highest"], arch=arch)


def transposed(width, channels, tile, precision):
    return kernel_for(precision, width, channels, tile, "transpose")


@parametrize(
    {
        "width, channels, tile": [
            (64, 64, 48),
            (192, 32, 16),
            (256, 32, 32),
            (256, 64, 64),
            (128, 32, 64),
            (192, 64, 48),
        ],
        "precision": ["high", "highest"],
        "sm_count": [1, 24],
        "arch": ARCHS,
    },
    where=lambda *case: (case[1] == 32 or case[3] == "high") and transposed(*case[:4]).fits,
)
def test_widths(width, channels, tile, precision, sm_count, arch):
    kernel = transposed(width, channels, tile, precision)
    check(hyena_inputs.stress(1, 197, width=width, inner=128), kernel, LIMITS[precision], sm_count, arch=arch)


def test_only_the_first_tokens():
    """L > l_max: the operator sees the first l_max tokens of every batch row."""
    check(hyena_inputs.stress(2, 50, width=64, inner=128), kernel_for("highest", 64), LIMITS["highest"], 1, 30)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_rows_that_layer_norm_finds_hard(precision):
    """Constant rows are normalised to zeros, and noise on top of a large constant to the noise."""
    inputs = hyena_inputs.stress(1, 40, width=192, inner=128)
    x = inputs["hidden_states"]
    x[0, ::3] = 12345.678
    x[0, 1::3] += 1e4
    check(inputs, kernel_for(precision, 192), LIMITS[precision])


def test_weights_of_any_magnitude():
    inputs = hyena_inputs.stress(1, 20, width=64, inner=128)
    inputs["in_proj_weight"] *= np.float32(1e30)
    inputs["in_proj_bias"] *= np.float32(1e30)
    inputs["short_conv_weight"] *= np.float32(1e-30)
    check(inputs, kernel_for("highest", 64), LIMITS["highest"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_bad_tokens_stay_where_they_are(bad):
    """A token that is not finite, or is huge, reaches the two tokens after it and nothing else."""
    inputs = hyena_inputs.stress(2, 40, width=128, inner=128)
    want = hyena.block(inputs, EPS)
    inputs["hidden_states"][0, 18] = bad
    rest = [t for t in range(40) if t not in (18, 19, 20)]
    made, _ = project(inputs, kernel_for("highest"), 1)
    for name in ("g", "x0"):
        got = getattr(made, name)[..., :40]
        assert rel_l2(got[1], want[name][1]) < LIMITS["highest"]
        assert rel_l2(got[0][:, rest], want[name][0][:, rest]) < LIMITS["highest"]


@pytest.mark.parametrize("arch", ARCHS)
def test_same_bits_for_any_division(arch):
    inputs = hyena_inputs.stress(2, 70, width=128, inner=128)
    results = [
        project(inputs, kernel_for("high", channels=channels, tile=tile), sm_count, arch=arch)[0]
        for channels, tile, sm_count in ((32, 32, 100), (32, 32, 1), (64, 32, 12), (32, 64, 5))
    ]
    for made in results[1:]:
        assert torch.equal(made.g[..., :70], results[0].g[..., :70])
        assert torch.equal(made.x0[..., :70], results[0].x0[..., :70])
        assert torch.equal(made.k[..., :70], results[0].k[..., :70])


def test_prepared():
    """With the filter and the operands at hand nothing else is computed again, and no weight is asked for."""
    inputs = hyena_inputs.stress(1, 20, width=64, inner=128)
    made, _ = project(inputs, kernel_for("high", 64))
    constants = made.k, *vars(made.operands).values()
    before = [t.clone() for t in constants]
    without_weights = {name: np.full_like(array, np.nan) for name, array in inputs.items()}
    without_weights["hidden_states"] = inputs["hidden_states"]
    again, _ = project(without_weights, kernel_for("high", 64), prepared=(made.k, made.operands))
    assert again.k is made.k and again.operands is made.operands
    for now, was in zip(constants, before, strict=True):
        assert torch.equal(now.view(torch.uint8), was.view(torch.uint8))
    for name in ("g", "x0"):
        assert torch.equal(getattr(again, name)[..., :20], getattr(made, name)[..., :20]), name


@pytest.mark.parametrize(
    "field, value, error",
    [
        ("width", 96, NotImplementedError),
        ("width", 512, NotImplementedError),
        ("inner", 4096, NotImplementedError),
        ("channels", 48, ValueError),
        ("tile", 20, ValueError),
    ],
)
def test_what_is_not_supported(field, value, error):
    with pytest.raises(error, match=str(value)):
        dataclasses.replace(kernel_for("high"), **{field: value})


SHAPES = [(1, 1), (1, 131), (1, 256), (2, 512), (1, 1024), (1, 2048), (4, 541), (1, 4096), (8, 997), (32, 256)]


@pytest.mark.parametrize("precision", Precision.NAMES)
@pytest.mark.parametrize("batch, length", SHAPES)
def test_choice(precision, batch, length):
    """Of the kernel of every shape all blocks run at once."""
    kernel = Project.for_shape(Precision.named(precision), 256, 1024, batch, length, 132, 5, "reshape", True, False)
    run, blocks = kernel.division(batch, length, 132)
    tiles = batch * -(-length // kernel.tile)
    assert tiles * -(-kernel.slabs // run) <= blocks * (1 if batch * length < 8300 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Precision.NAMES)
@pytest.mark.parametrize("channels, tile", [(32, 16), (32, 32), (64, 48), (64, 64)])
def test_on_a_gpu(precision, channels, tile):
    """At lengths that divide into nothing: right, and the same bits every time."""
    batch, length, width = 3, 2053, 256
    inputs = hyena_inputs.stress(batch, length, width=width, inner=128)
    want, w = hyena.block(inputs, EPS), {name: t.cuda() for name, t in tensors(inputs).items()}
    if channels == 64 and precision == "highest":
        pytest.skip("two parts have 32 channels")
    kernel = kernel_for(precision, width, channels, tile)
    made, again = (stages.project(w["hidden_states"], w, kernel, length, EPS, length, SHIFT) for _ in range(2))
    for name, limit in (("g", LIMITS[precision]), ("x0", LIMITS[precision]), ("k", 3e-6)):
        got = getattr(made, name)[..., :length]
        assert rel_l2(got.cpu(), want[name]) < limit, name
        assert torch.equal(got, getattr(again, name)[..., :length]), name
