import sys

import pytest
import torch

from tests import sanitizer


@pytest.mark.parametrize(
    ("gpu", "arguments", "message"),
    [
        (False, [], "this needs an NVIDIA GPU"),
        (False, ["--run", "conv-3"], "this needs an NVIDIA GPU"),
        (True, ["conv-3"], "compute-sanitizer was not found on the search path"),
        (True, ["conv-4"], "no such case: conv-4"),
    ],
)
def test_what_is_missing_is_named(gpu, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["sanitizer", *arguments])
    with pytest.raises(SystemExit, match="2"):
        sanitizer.main()
    assert message in capsys.readouterr().err
