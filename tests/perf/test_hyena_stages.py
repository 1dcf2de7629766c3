import pytest
import torch
from typer.testing import CliRunner

from perf.hyena_stages import app


@pytest.mark.parametrize("command", ["check", "time", "mix", "project"])
def test_without_a_gpu_it_says_so(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 2
    assert "needs an NVIDIA GPU" in " ".join(result.output.replace("│", " ").split())
