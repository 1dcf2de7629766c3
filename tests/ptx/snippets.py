"""Hand-written PTX for one warp: inputs from global memory, a few instructions, outputs back."""

from __future__ import annotations

import ctypes

import numpy as np

from reference.ptx import GlobalMemory, Options, Report, run_launch
from reference.ptx.boundary import Launch

_LOAD = {2: "b16", 4: "b32", 8: "b64"}


def launch(
    ptx: str,
    arrays: list[np.ndarray],
    *,
    block=(32, 1, 1),
    grid=(1, 1, 1),
    cluster=(1, 1, 1),
    shared=0,
    programmatic=False,
    memory: GlobalMemory | None = None,
    **options,
) -> Report:
    """Runs the module's kernel `k` with one pointer parameter an array."""
    memory = memory or GlobalMemory()
    for a in arrays:
        memory.add(a.ctypes.data, a.nbytes)
    values = (ctypes.c_uint64 * len(arrays))(*[a.ctypes.data for a in arrays])
    pointers = (ctypes.c_void_p * len(arrays))(*[ctypes.addressof(values) + 8 * i for i in range(len(arrays))])
    call = Launch("k", grid, block, cluster, shared, ctypes.addressof(pointers), programmatic)
    return run_launch(ptx, call, memory, Options(**options))


def module(body: str, n_pointers: int, target: str = "sm_100a", before: str = "") -> str:
    """A module with kernel `k`: %rd0 and up are the pointers, %r0 is the lane."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(n_pointers))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(n_pointers))
    return f""".version 9.0
.target {target}
.address_size 64
{before}
.visible .entry k({parameters})
{{
.reg .pred %p<16>;
.reg .b16 %h<32>;
.reg .b32 %r<64>;
.reg .f32 %f<64>;
.reg .b64 %rd<32>;
.reg .f64 %d<16>;
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}
"""


def evaluate(body: str, *inputs: np.ndarray, out: type = np.uint32, target: str = "sm_100a", **options) -> np.ndarray:
    """Runs `body` on one warp. In it, $0, $1, ... are the inputs' registers and $d the result's."""
    result = np.zeros(32, out)
    arrays = [np.ascontiguousarray(np.broadcast_to(x, 32)) for x in inputs] + [result]
    names = {1: ("%h", 1), 2: ("%h", 1), 4: ("%r", 32), 8: ("%rd", 16)}
    text, setup = body, ""
    for i, a in enumerate(arrays):
        prefix, base = names[a.itemsize]
        name = f"{prefix}{base + i}"
        text = text.replace("$d" if i == len(inputs) else f"${i}", name)
        setup += f"mul.wide.u32 %rd30, %r0, {a.itemsize};\nadd.s64 %rd{8 + i}, %rd{i}, %rd30;\n"
        if i < len(inputs):
            setup += f"ld.global.{_LOAD[a.itemsize]} {name}, [%rd{8 + i}];\n"
        else:
            text += f"\nst.global.{_LOAD[a.itemsize]} [%rd{8 + i}], {name};"
    launch(module(setup + text, len(arrays), target), arrays, **options).check()
    return result
