"""The command line: what an operator moves and computes, against the least it needs."""

import pytest

from reference.ptx import count
from reference.ptx.__main__ import main
from reference.ptx.operators import OPERATORS

from .kernels import ARCHS

SIZES = {
    "mamba_segsum": "1x1,Q=64,H=8,N=64",
    "hyena_block": "1x20,D=128,M=128",
    "hyena_filter": "20,D=64",
    "causal_long_conv": "1x20,D=8",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator(operator, arch, capsys):
    main(["count", operator, SIZES[operator], "--arch", arch])
    out = capsys.readouterr().out
    assert out.startswith(f"{operator} {SIZES[operator]} on {arch}")
    assert "launch 0" in out
    read, written = (
        next(x.split() for x in out.splitlines() if x.startswith(f"bytes {y}, all")) for y in ("read", "written")
    )
    if "no kernel on" not in out:
        assert float(read[-2]) >= 1 and float(written[-2]) >= 1


def test_least_of_the_official_block():
    """The bytes of 25 weights, x and the output; the products of the five matrices."""
    least = OPERATORS["hyena_block"]("1x131").least
    d, m, tokens = 256, 1024, 131
    weights = (
        4 * d
        + 3 * d * (d + 1)
        + 3 * d * 4
        + 64 * 5
        + 64 * 2
        + 2 * 64 * 65
        + 64 * d
        + 2 * d
        + d * (d + 1)
        + m * (d + 1)
        + d * (m + 1)
    )
    assert (least.read, least.written) == (4 * (weights + tokens * d), 4 * tokens * d)
    assert least.mma == 2 * tokens * (4 * d * d + 2 * d * m)


@pytest.mark.parametrize(
    "operator, size, message",
    [
        ("nothing", "1x1", "no operator nothing"),
        ("causal_long_conv", "300", "BATCHxTOKENS"),
        ("hyena_block", "1x0", "numbers from 1"),
        ("hyena_filter", "20,Q=3", "options are D"),
        ("hyena_block", "1x20,D=100", "no kernel for D = 100"),
    ],
)
def test_errors_are_one_sentence(operator, size, message, capsys):
    with pytest.raises(SystemExit):
        main(["count", operator, size])
    assert message in capsys.readouterr().err


def test_classes():
    assert count.classify("ex2.approx.ftz.f32") == "special function"
    assert count.classify("fma.rn.f32") == "fp32"
    assert count.classify("mbarrier.try_wait.parity.shared.b64") == "barrier"
