"""What users import, and the questions that can be asked of an operator without calling it."""

import re
import subprocess
import sys

import numpy as np
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
        ({"num_heads": True}, "num_heads is True, but must be a positive int, below 2^31"),
        ({"d_state": 2**70}, "d_state is 1180591620717411303424, but must be a positive int, below 2^31"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', but must be torch.bfloat16 or torch.float16"),
        ({"dtype": np.array([1, 2])}, "dtype is array([1, 2]), but must be torch.bfloat16 or torch.float16"),
        ({"g_layout": np.array([1, 2])}, "g_layout is array([1, 2]), but must be 'per_head' or 'per_group'"),
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
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(reason)):
        cute_kernels.warmup("mamba_segsum", **{**SHAPE, **change})
    assert not stand_in.asked


@pytest.mark.parametrize(
    ("operator", "shape", "reason"),
    [
        ("hyena_block", {"d_model": 256, "d_inner": 64, "stored_z": "x"}, "stored_z is 'x', but must be True or False"),
        ("hyena_block", {"d_model": 256, "d_inner": 64, "stored_z": np.array([1, 2])}, "stored_z is array([1, 2])"),
        ("hyena_block", {"d_model": 256, "d_inner": True}, "d_inner is True, but must be a positive int, below 2^31"),
        ("hyena_block", {"d_model": 256, "d_inner": 64, "batch": 2**70}, "a positive int or None, below 2^31"),
        ("hyena_filter", {"d_model": 256, "emb_dim": 4}, "emb_dim is 4, but must be odd and at least 3"),
        ("causal_long_conv", {"skip": "yes"}, "skip is 'yes', but must be True or False"),
        ("causal_long_conv", {"pre_gate": []}, "pre_gate is [], but must be True or False"),
        ("causal_long_conv", {"seq_len": True}, "seq_len is True, but must be an int from 0 or None, below 2^63"),
    ],
)
def test_unsupported_hyena(stand_in, operator, shape, reason):
    supported, why = cute_kernels.is_supported(operator, **shape)
    assert not supported
    assert why.startswith(f"{operator}: ")
    assert reason in why


def test_numbers_of_numpy(stand_in):
    shape = {name: np.int64(value) if isinstance(value, int) else value for name, value in SHAPE.items()}
    assert segsum.check_shape(**shape) == segsum.check_shape(**SHAPE)
    assert type(segsum.check_shape(**shape)[0].chunk_size) is int
    assert cute_kernels.is_supported("hyena_block", d_model=np.int64(256), d_inner=1024, seq_len=np.int32(5))[0]


@pytest.mark.parametrize("ask", [cute_kernels.is_supported, cute_kernels.warmup])
@pytest.mark.parametrize(
    ("operator", "shape", "message"),
    [
        ("mamba_segsum", {**SHAPE, "foo": 1}, "foo is no argument of it; it takes dtype, num_heads, .*, device$"),
        ("mamba_segsum", {"dtype": torch.float16}, "num_heads is missing; it takes dtype, num_heads, .*, device$"),
        ("hyena_block", {"d_model": 256}, "d_inner is missing; it takes d_model, d_inner, .*, precision, device$"),
        ("hyena_block", {"d_modle": 256}, "d_modle is no argument of it"),
        ("hyena_filter", {"d_model": 256, "d_inner": 64}, "d_inner is no argument of it; it takes d_model, emb_dim"),
        ("hyena_filter", {"d_model": 256, "precision": "high"}, "precision is no argument of it"),
        ("causal_long_conv", {"gate": True}, "gate is no argument of it; it takes seq_len, skip"),
    ],
)
def test_names_of_arguments(stand_in, ask, operator, shape, message):
    with pytest.raises(TypeError, match=f"^{operator}: {message}"):
        ask(operator, **shape)
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
