"""What the machine code of every prebuilt kernel may cost.

Compiling all of them takes minutes. By default a few are compiled in which every pair of fields has all values that it
has anywhere, and for sm_90a and sm_100a every field. For sm_103a, whose code is sm_100a's by another name, and of
kernels that have nothing of their architecture in them, one of each kind. The others are `exhaustive`.
"""

import dataclasses

import pytest

from cute_kernels import operators
from cute_kernels.hyena import config
from cute_kernels.runtime import cache
from cute_kernels.runtime.inspect import machine_code

from .covering import covering

# Bytes a block may have on all three, with the 1024 of the system, which count as static.
SHARED_LIMIT = 233_472
PLAIN_FP32 = (config.ConvertWeights, config.LongConv)  # no matrix product


def by_default(cases):
    """Of all kernels of one kind, each with every architecture."""
    kind = type(cases[0][0])
    archs = ("sm_90a",) if issubclass(kind, PLAIN_FP32) else ("sm_90a", "sm_100a")

    def values(case):
        kernel, arch = case
        return arch, *(getattr(kernel, field.name) for field in dataclasses.fields(kernel))

    several = covering([case for case in cases if case[1] in archs], values, together=2)
    return several + [next(case for case in cases if case[1] == arch) for arch in {"sm_100a", "sm_103a"} - {*archs}]


def parameters():
    kernels = operators.prebuilt_kernels()
    for kind in dict.fromkeys(map(type, kernels)):
        cases = [(kernel, arch) for kernel in kernels if type(kernel) is kind for arch in kernel.archs]
        chosen = by_default(cases)
        for kernel, arch in cases:
            marks = () if (kernel, arch) in chosen else pytest.mark.exhaustive
            yield pytest.param(kernel, arch, id=f"{kernel.symbol()}-{arch}", marks=marks)


@pytest.mark.parametrize(("kernel", "arch"), parameters())
def test_no_stack_no_local_memory_and_it_fits(kernel, arch):
    built = cache.get(kernel, arch)
    launches = {launch["kernel"]: launch["dynamic_shared"] for launch in built.read_metadata()["launches"]}
    codes = machine_code(built.cubin)
    assert {code.name for code in codes} == set(launches)
    for code in codes:
        assert (code.stack, code.local, code.local_memory) == (0, 0, 0), f"{code.name} of {kernel} spills"
        assert code.static_shared + launches[code.name] <= SHARED_LIMIT
    assert any(code.mma for code in codes) is not isinstance(kernel, PLAIN_FP32)
    if arch == "sm_90a":  # where wgmma is under way, an mma.sync waits for a whole one
        assert not any("HMMA" in code.opcodes for code in codes)
    assert any(code.tma for code in codes) is not isinstance(kernel, PLAIN_FP32)
