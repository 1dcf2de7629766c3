"""What users import, and the questions that can be asked of an operator without calling it."""

import subprocess
import sys

import pytest
import torch

import cute_kernels
from cute_kernels import operators
from cute_kernels.mamba import segsum
from cute_kernels.runtime import backend
from tests.stand_in import StandIn

SHAPE = {"dtype": torch.bfloat16, "num_heads": 16, "n_groups": 1, "d_state": 256, "chunk_size": 256}


class Asked(StandIn):
    """Kernels that are asked for, and never run."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def function(self, kernel, device):
        self.asked.append((kernel, device))
        return lambda *arguments: pytest.fail("warmup must not launch")


@pytest.fixture
def stand_in():
    with backend.use(Asked()) as b:
        yield b


def test_public_names():
    operators = {"mamba_segsum", "hyena_block", "hyena_filter", "causal_long_conv"}
    others = {"HyenaBlockParams", "__version__", "env_report", "is_supported", "nn", "warmup"}
    assert set(cute_kernels.__all__) == operators | others
    assert all(hasattr(cute_kernels, name) for name in cute_kernels.__all__)


def test_import_brings_no_compiler():
    code = (
        "import sys, cute_kernels; print([m for m in sys.modules if m.split('.')[0] in ('cutlass', 'rich', 'typer')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_supported(stand_in):
    assert cute_kernels.is_supported("mamba_segsum", **SHAPE) == (True, "")
    options = {"dt_dtype": torch.float32, "A_dtype": torch.float32, "bias_dtype": torch.float16}
    assert cute_kernels.is_supported("mamba_segsum", **SHAPE, **options, g_layout="per_group", device="cpu")[0]
    assert not stand_in.asked


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunk_size": 96}, "Q = 96"),
        ({"d_state": 24}, "N = 24"),
        ({"d_state": 272}, "N = 272"),
        ({"n_groups": 3}, "n_groups is 3, but must be a divisor of num_heads, 16"),
        ({"num_heads": 0}, "num_heads is 0, but must be a positive int"),
        ({"num_heads": 1.5}, "num_heads is 1.5"),
        ({"dtype": torch.float32}, "dtype is torch.float32, but must be torch.bfloat16 or torch.float16"),
        ({"dt_dtype": torch.float64}, "dt_dtype is torch.float64"),
        ({"bias_dtype": torch.int32}, "bias_dtype is torch.int32"),
        ({"g_layout": "flat"}, "g_layout is 'flat'"),
    ],
)
def test_unsupported(stand_in, change, reason):
    supported, why = cute_kernels.is_supported("mamba_segsum", **{**SHAPE, **change})
    assert not supported
    assert reason in why
    with pytest.raises((ValueError, NotImplementedError), match=reason.replace("(", r"\(")):
        cute_kernels.warmup("mamba_segsum", **{**SHAPE, **change})
    assert not stand_in.asked


def test_no_kernel_for_cpu_tensors():
    supported, why = cute_kernels.is_supported("mamba_segsum", **SHAPE, device="cpu")
    assert not supported
    assert "no kernel for device cpu" in why


def test_unknown_operator():
    for ask in (cute_kernels.is_supported, cute_kernels.warmup):
        with pytest.raises(ValueError, match="operator is 'segsum', but must be one of 'mamba_segsum', 'hyena_block'"):
            ask("segsum")


def test_warmup_asks_for_every_kernel_once(stand_in, monkeypatch):
    monkeypatch.setattr(segsum, "kernel", lambda problem, chunks, sms: (problem, min(chunks // sms, 2)))
    cute_kernels.warmup("mamba_segsum", **SHAPE)
    kernels = [kernel for kernel, _ in stand_in.asked]
    assert sorted(k[1] for k in kernels) == [0, 1, 2]
    assert kernels[0][0].dt_dtype == kernels[0][0].A_dtype == torch.bfloat16
    assert kernels[0][0].bias_dtype is None


def test_prebuilt_kernels():
    kernels = operators.prebuilt_kernels()
    assert len(set(kernels)) == len(kernels) >= 1 + len(segsum._MODELS)
    assert len({k.symbol() for k in kernels}) == len(kernels)
