import io

import pytest
from rich.console import Console

from cute_kernels import operators
from cute_kernels.runtime import cache
from perf import demo

from ..runtime.kernels import Scale


@pytest.fixture
def output(monkeypatch):
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(demo, "console", console)
    return console.file


def test_without_a_gpu_every_kernel_is_compiled_and_read(output, monkeypatch):
    monkeypatch.setattr(operators, "prebuilt_kernels", lambda: [Scale(), Scale(threads=128)])
    assert demo.without_gpu()
    text = output.getvalue()
    assert "4/4" in text
    assert [line.split()[:3] for line in text.splitlines() if line.lstrip().startswith("Scale")] == [
        ["Scale", "sm_90a", "2"],
        ["Scale", "sm_100a", "2"],
    ]
    assert "…" not in text


def test_a_cache_that_cannot_be_used_is_named(output, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(operators, "prebuilt_kernels", lambda: [Scale()])
    assert not demo.without_gpu()
    assert "for sm_90a failed: [Errno 17] File exists" in output.getvalue()


@pytest.mark.parametrize(("good", "last"), [(True, "Shown: through PyTorch"), (False, "Something is wrong")])
def test_it_ends_with_what_it_has_shown(good, last, output, monkeypatch):
    monkeypatch.setattr(demo, "_supported_device", lambda: None)
    for part in ("segsum_on_cpu", "hyena_on_cpu"):
        monkeypatch.setattr(demo, part, lambda: True)
    monkeypatch.setattr(demo, "without_gpu", lambda: good)
    assert demo.main() == (0 if good else 1)
    assert output.getvalue().split("\n\n")[-1].startswith(last)


def test_a_share_of_the_tolerance_has_two_digits():
    assert demo._share(0.00123) == "0.0012"
    assert demo._share(float("nan")) == "[red]nan WRONG[/]"


def test_on_the_cpu_the_operators_meet_the_bar(output):
    assert demo.segsum_on_cpu()
    assert demo.hyena_on_cpu()
    assert "decay_states" in output.getvalue()
