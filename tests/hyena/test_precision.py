"""Names of precisions, and what torch's settings mean."""

import pytest
import torch

from cute_kernels.hyena import precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def settings():
    """torch's settings are those of the process: leave them as they were."""
    saved = torch.get_float32_matmul_precision()
    yield
    for backend in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"
    torch.set_float32_matmul_precision(saved)


def test_names():
    assert precision.NAMES == ("highest", "high", "medium")
    for name in precision.NAMES:
        assert precision.resolve("op", name) == name
    for wrong in ("fp32", "", 1):
        with pytest.raises(ValueError, match=r"op: precision is .*, but must be 'highest', 'high', 'medium' or None"):
            precision.resolve("op", wrong)


def test_default_is_full_precision():
    assert precision.resolve("op", None) == "highest"


@pytest.mark.parametrize(
    # torch's own "medium" runs TF32 on CUDA
    ("older", "name"),
    [("highest", "highest"), ("high", "high"), ("medium", "high")],
)
def test_older_setting(older, name):
    torch.set_float32_matmul_precision(older)
    assert precision.resolve("op", None) == name


@pytest.mark.parametrize(("newer", "name"), [("ieee", "highest"), ("tf32", "high"), ("none", "highest")])
def test_newer_setting(newer, name):
    torch.backends.cuda.matmul.fp32_precision = newer  # torch's older getters may raise from here on
    assert precision.resolve("op", None) == name


def test_allow_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    assert precision.resolve("op", None) == "high"


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("name", precision.NAMES)
def test_products_on_a_gpu(before, name):
    setting = torch.backends.cuda.matmul
    setting.fp32_precision = before
    with precision.products(name, CUDA):
        assert (setting.fp32_precision == "tf32") == (name != "highest")
    assert setting.fp32_precision == before


def test_products_on_a_cpu_are_fp32_whatever_torch_allows():
    torch.set_float32_matmul_precision("medium")
    with precision.products("high", CPU):
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


def test_products_survive_an_exception():
    with pytest.raises(ZeroDivisionError), precision.products("high", CUDA):
        raise ZeroDivisionError
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


def test_autocast_is_off_inside():
    with torch.autocast("cpu", dtype=torch.bfloat16), precision.products("highest", CPU):
        assert precision.linear(torch.ones(2, 3), torch.ones(4, 3), None, "highest").dtype == torch.float32


def test_medium_rounds_operands_and_sums_in_fp32():
    x, w = torch.randn(5, 64), torch.randn(7, 64)
    found = precision.linear(x, w, None, "medium")
    expected = x.bfloat16().double() @ w.bfloat16().double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, precision.linear(x, w, None, "highest"))
