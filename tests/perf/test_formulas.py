import numpy as np
import pytest
import torch

from perf import formulas
from reference import hyena, hyena_inputs, inputs, segsum


@pytest.mark.parametrize("layout", ["per_head", "per_group"])
@pytest.mark.parametrize("bias", [None, torch.bfloat16])
def test_segsum(layout, bias):
    x = inputs.official(0, batch=2, chunks=2, chunk_size=64, heads=4, groups=2, d_state=32, bias_dtype=bias)
    want = segsum.segsum(*x._replace(g_layout=layout))
    got = formulas.mamba_segsum(*x[:5], layout)
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert a.shape == b.shape, name
        torch.testing.assert_close(a.double(), b, rtol=8e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["official", "stress"])
def test_the_hyena_block_in_float64(kind):
    arrays = hyena_inputs.SETS[kind](2, 131, width=64, inner=128)
    want = hyena.block(arrays)
    w = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
    np.testing.assert_allclose(formulas.hyena_filter(w, 131), want["k"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(formulas.hyena_block(w["hidden_states"], w), want["out"], rtol=1e-9, atol=1e-9)


def test_the_long_convolution():
    rng = np.random.default_rng(0)
    u, k = rng.standard_normal((2, 3, 37)), rng.standard_normal((3, 37))
    got = formulas.causal_long_conv(torch.from_numpy(u), torch.from_numpy(k))
    np.testing.assert_allclose(got, hyena.causal_conv(k, u), atol=1e-12)
