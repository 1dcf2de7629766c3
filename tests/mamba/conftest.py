"""The three ways that `mamba_segsum` can run, as one fixture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from reference.ptx.machine import ptx_machine

from .cases import CASES, ON_MACHINE


@dataclass(frozen=True)
class Runner:
    """Where a case runs, and whether that is slow."""

    device: torch.device
    small: bool


BACKENDS = {
    "torch": pytest.param("torch", id="torch"),
    "sm_90a": pytest.param("sm_90a", id="ptx-sm_90a"),
    "sm_100a": pytest.param("sm_100a", id="ptx-sm_100a"),
    "gpu": pytest.param("gpu", id="gpu", marks=pytest.mark.gpu),
}


@pytest.fixture
def runner(request) -> Iterator[Runner]:
    if request.param == "torch":
        yield Runner(torch.device("cpu"), small=False)
    elif request.param == "gpu":
        yield Runner(torch.device("cuda", torch.cuda.current_device()), small=False)
    else:
        with ptx_machine(request.param):
            yield Runner(torch.device("cpu"), small=True)


def pytest_generate_tests(metafunc):
    """Every case runs in PyTorch and on the GPU; on the machine, which is slow, those that are marked for it."""
    if "case" in metafunc.fixturenames:
        pairs = [
            pytest.param(case, *backend.values, id=f"{backend.id}-{case}", marks=backend.marks)
            for backend in BACKENDS.values()
            for case in CASES
            if backend.id in ("torch", "gpu") or case.name in ON_MACHINE
        ]
        metafunc.parametrize(("case", "runner"), pairs, indirect=["runner"])
    elif "runner" in metafunc.fixturenames:
        metafunc.parametrize("runner", list(BACKENDS.values()), indirect=True)
