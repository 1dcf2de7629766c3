"""Fixtures of the runtime's tests: folders of their own, and fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.runtime import artifacts, build, cache

from .kernels import Scale

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_user_folders(request, tmp_path, monkeypatch):
    """No test reads or writes the user's own cache; only those on a GPU use the environment's artifacts."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.delenv(artifacts.VARIABLE, raising=False)


@pytest.fixture
def count_builds(monkeypatch):
    """The list of (kernel, arch) compiled so far in this process."""
    calls = []
    original = build.build

    def counted(kernel, arch, folder):
        calls.append((kernel, arch))
        return original(kernel, arch, folder)

    monkeypatch.setattr(build, "build", counted)
    return calls


@pytest.fixture(scope="session")
def scale_sm90a(tmp_path_factory):
    """Scale() compiled once for sm_90a; tests copy it and leave it as it is."""
    return build.build(Scale(), "sm_90a", tmp_path_factory.mktemp("scale"))


@pytest.fixture
def start():
    """Starts Python code in a fresh process, in the repository's root; all are over when the test is."""
    processes = []

    def run(code: str, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-W", "always", "-c", code],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen) -> str:
    """Waits for a process, and returns what it printed. Fails the test where it failed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out
