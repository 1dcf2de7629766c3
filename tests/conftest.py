"""Every test can run everywhere: those marked `gpu` are skipped where there is no GPU. Kernels are compiled once."""

import gc
import os

import pytest
import torch

from cute_kernels.runtime import cache


def pytest_configure(config):
    if cache.VARIABLE not in os.environ and hasattr(config, "cache"):
        # One for all tests and worker processes, beside pytest's own; the user's stays as it is.
        folder = config.cache.mkdir("kernels")
        folder.chmod(0o700)  # whatever the umask: a cache that others can write to is refused
        os.environ[cache.VARIABLE] = str(folder)
    if workers := getattr(config.option, "numprocesses", None):
        # Worker processes, which start after this, share the cores: threads that wait for each other spin.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
        if config.option.maxschedchunk is None:
            config.option.maxschedchunk = 1  # a worker that has a slow test takes no others meanwhile


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish():
    """Compilers and parsers make so many objects that collecting garbage among all that there are took a sixth."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
