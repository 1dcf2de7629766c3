"""Hand-written PTX on a GPU, through the driver: what the recordings for the tests are made with."""

from __future__ import annotations

import ctypes

import torch


def launch(ptx: str, tensors: list[torch.Tensor], *, grid: int, block: int) -> None:
    """Runs the module's kernel `k` with one pointer parameter a tensor, and waits. RuntimeError on failure."""
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    parameters = (ctypes.c_void_p * len(pointers))(*[ctypes.addressof(p) for p in pointers])
    torch.cuda.synchronize()
    codes = [cuda.cuModuleLoadData(ctypes.byref(module), ptx.encode())]
    codes.append(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"k"))
    codes.append(cuda.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, None, parameters, None))
    codes.append(cuda.cuCtxSynchronize())
    codes.append(cuda.cuModuleUnload(module))
    if any(codes):
        raise RuntimeError(f"the driver's codes were {codes}")
