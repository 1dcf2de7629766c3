"""Hand-written PTX on a GPU, through the driver: what the recordings for the tests are made with."""

from __future__ import annotations

import ctypes

import torch


class Kernel:
    """The module's kernel `k`, which takes one pointer a tensor. RuntimeError where the driver refuses."""

    def __init__(self, ptx: str):
        torch.cuda.synchronize()
        self.cuda = ctypes.CDLL("libcuda.so.1")
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self.cuda.cuModuleLoadData(ctypes.byref(module), ptx.encode()))
        self._check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, b"k"))

    def __call__(self, *tensors: torch.Tensor, grid: int, block: int) -> None:
        """Runs it and waits."""
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        parameters = (ctypes.c_void_p * len(pointers))(*[ctypes.addressof(p) for p in pointers])
        torch.cuda.synchronize()
        self._check(self.cuda.cuLaunchKernel(self.function, grid, 1, 1, block, 1, 1, 0, None, parameters, None))
        self._check(self.cuda.cuCtxSynchronize())

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver's code was {code}")
