"""The three ways that `mamba_segsum` can run, as one fixture."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from cute_kernels.runtime import backend

_MACHINE = "reference.ptx.backend"  # kernels in software, on CPU tensors


@dataclass(frozen=True)
class Runner:
    """Where a case runs, and whether that is slow."""

    device: torch.device
    small: bool


@functools.cache
def _machine(arch: str) -> backend.Backend:
    """One machine an architecture, so that a kernel is compiled once."""
    return pytest.importorskip(_MACHINE, reason="the PTX machine is not here").PtxBackend(arch)


@pytest.fixture(params=["torch", "ptx-sm_90a", "ptx-sm_100a", pytest.param("gpu", marks=pytest.mark.gpu)])
def runner(request) -> Iterator[Runner]:
    if request.param == "torch":
        yield Runner(torch.device("cpu"), small=False)
    elif request.param == "gpu":
        yield Runner(torch.device("cuda", torch.cuda.current_device()), small=False)
    else:
        with backend.use(_machine(request.param.removeprefix("ptx-"))):
            yield Runner(torch.device("cpu"), small=True)
