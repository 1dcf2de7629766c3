"""The whole block through the public function, its kernels on the PTX machine."""

import pytest

import cute_kernels
from reference import hyena

from .helpers import make, rel_l2

pytest.importorskip("cutlass")
machine = pytest.importorskip("reference.ptx.machine")

ARCHS = ("sm_90a", "sm_100a")
LIMITS = {"highest": 3e-6, "high": 1e-3, "medium": 1e-2}  # relative L2 on stress inputs


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("precision", LIMITS)
def test_block(precision, arch):
    x, params, inputs = make(batch=2, length=43, width=128, inner=128)
    with machine.ptx_machine(arch) as m:
        out = cute_kernels.hyena_block(x, params, precision=precision)
        launches = len(m.reports)
        prepared = params.prepare(seq_len=43, precision=precision)
        again = cute_kernels.hyena_block(x, prepared)
    assert launches > 1
    assert rel_l2(out, hyena.block(inputs)["out"]) < LIMITS[precision]
    assert (again == out).all()


OPTIONS = {"l_max": 20, "filter_layout": "transpose", "bias_in_filter": False, "norm_len": 50}


@pytest.mark.parametrize("arch", ARCHS)
def test_options(arch):
    x, params, inputs = make(batch=1, length=33, width=128, inner=128)
    with machine.ptx_machine(arch):
        out = cute_kernels.hyena_block(x, params, **OPTIONS, precision="highest")
    assert rel_l2(out, hyena.block(inputs, **OPTIONS)["out"]) < LIMITS["highest"]


def test_width_without_kernels_for_every_stage():
    x, params, inputs = make(batch=1, length=17)
    with machine.ptx_machine("sm_90a"):
        out = cute_kernels.hyena_block(x, params)
    assert rel_l2(out, hyena.block(inputs)["out"]) < LIMITS["highest"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("width", "inner", "batch", "length"), [(256, 256, 1, 150), (128, 384, 3, 70), (128, 128, 1, 1)]
)
def test_four_launches(width, inner, batch, length, arch):
    """Nothing but the four kernels runs, whole tiles and parts of them."""
    x, params, inputs = make(batch=batch, length=length, width=width, inner=inner)
    with machine.ptx_machine(arch) as m:
        out = cute_kernels.hyena_block(x, params, precision="high")
    assert len(m.reports) == 4
    assert rel_l2(out, hyena.block(inputs)["out"]) < LIMITS["high"]


@pytest.mark.parametrize("emb_dim", [401, 901])
def test_more_features_of_a_position_than_shared_memory_holds(emb_dim):
    """Beside project, or for the filter alone, too: PyTorch computes what no kernel has room for."""
    x, params, inputs = make("official", batch=1, length=17, width=128, inner=128, emb_dim=emb_dim)
    with machine.ptx_machine("sm_90a"):
        out = cute_kernels.hyena_block(x, params, precision="highest")
        k = cute_kernels.hyena_filter(params, 17)
    want = hyena.block(inputs)
    assert rel_l2(out, want["out"]) < LIMITS["highest"]
    assert rel_l2(k, want["k"]) < LIMITS["highest"]
