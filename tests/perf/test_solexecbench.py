import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from perf import solexecbench
from perf.__main__ import app
from perf.solutions import hyena_block, mamba_segsum
from reference import compare, inputs
from reference.ptx.machine import ptx_machine

from ..covering import parametrize
from . import solution_driver

ROOT = Path(__file__).parents[2]
PARTS = 4  # processes, which compile what they need
DRIVER = Path(__file__).with_name("solution_driver.py")


@pytest.fixture
def bundle(tmp_path):
    """A folder with the sources of the operator's solution.json alone."""

    def make(op):
        result = CliRunner().invoke(app, ["solexecbench", "--op", op, "--out", str(tmp_path / "made")])
        assert result.exit_code == 0, result.output
        clean = tmp_path / "clean"
        for source in json.loads((tmp_path / "made/solution.json").read_text())["sources"]:
            path = clean / source["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source["content"])
        return clean

    return make


def drive(clean, *arguments):
    """Runs the driver in a process that can't see this checkout."""
    folders = [f for f in os.environ.get("PYTHONPATH", "").split(os.pathsep) if f and Path(f).resolve() != ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    code = DRIVER.read_text()
    command = [sys.executable, "-c", code, str(clean), *map(str, arguments)]
    done = subprocess.run(command, cwd=clean, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@parametrize({"op": solexecbench.OPERATORS, "arch": ["sm_90a", "sm_100a"]}, together=1)
def test_the_sources_compile_on_their_own(bundle, op, arch):
    """Two sizes, with every kind of kernel between them. A bundle keeps no kernels: all sizes would take minutes."""
    done = drive(bundle(op), op, "compile", arch, *{"mamba_segsum": (0, 15), "hyena_block": (1, 15)}[op])
    assert done["kernels"] == {"mamba_segsum": 2, "hyena_block": 6}[op]
    assert done["launches"] == done["kernels"]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("op", solexecbench.OPERATORS)
def test_the_sources_meet_the_oracle_on_all_official_sizes(bundle, op, part):
    assert drive(bundle(op), op, "run", ROOT, part, PARTS)["cases"] >= 16 // PARTS


def test_the_solution_is_as_the_harness_wants_it():
    made = solexecbench.solution("mamba_segsum", "someone")
    assert made["definition"] == "044_mamba_discretization_and_segsum"
    assert made["spec"]["languages"] == ["cute_dsl"]
    assert made["spec"]["entry_point"] == "kernel.py::run"
    paths = [source["path"] for source in made["sources"]]
    assert "kernel.py" in paths
    assert len(set(paths)) == len(paths)
    for source in made["sources"]:
        assert source["content"]
        assert "from cute_kernels" not in source["content"]
        assert "import cute_kernels" not in source["content"]


def test_another_operator_is_an_error():
    with pytest.raises(ValueError, match="op is 'gelu'"):
        solexecbench.solution("gelu", "someone")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_segsum_entry_is_right_on_the_ptx_machine(arch):
    x = inputs.official(0)
    q, h = x.dt.shape[2:]
    with ptx_machine(arch):
        square = [
            torch.empty(shape, dtype=torch.bfloat16) for shape in ((1, h, 1, q, q), (1, 1, q, q, h), (1, 1, q, q, h))
        ]
        outputs = (*square, *(torch.empty(1, h, 1, q) for _ in range(2)))
        mamba_segsum.run(torch.empty(1, 1, q, h, 160), *x[:4], *outputs)
    compare.assert_ok(x, outputs)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_hyena_entry_is_right_on_the_ptx_machine(arch):
    given, outputs = solution_driver.hyena_arguments(1, 70, True, "cpu")
    with ptx_machine(arch):
        hyena_block.run(*given, *outputs)
    solution_driver.judge_hyena(given, outputs)
