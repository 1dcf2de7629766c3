"""What the machine code of every prebuilt kernel may cost."""

import pytest

from cute_kernels import operators
from cute_kernels.hyena import config
from cute_kernels.runtime import artifacts, cache
from cute_kernels.runtime.inspect import machine_code

SHARED_LIMIT = 232_448  # bytes a block may have on all three
KERNELS = operators.prebuilt_kernels()
# Compiling takes seconds. sm_103a is the code of sm_100a by another name: every fourth kernel of a kind shows that.
PAIRS = artifacts.pairs(KERNELS, ("sm_90a", "sm_100a"))
for kind in dict.fromkeys(map(type, KERNELS)):
    PAIRS += artifacts.pairs([kernel for kernel in KERNELS if type(kernel) is kind][::4], ("sm_103a",))
PLAIN_FP32 = (config.ConvertWeights, config.Filter, config.LongConv)  # no matrix product
BY_THREADS = (*PLAIN_FP32, config.Project)  # read what they must convert; no tensor copies


@pytest.mark.parametrize(("kernel", "arch"), PAIRS, ids=[f"{kernel.symbol()}-{arch}" for kernel, arch in PAIRS])
def test_no_stack_no_local_memory_and_it_fits(kernel, arch):
    built = cache.get(kernel, arch)
    launches = {launch["kernel"]: launch["dynamic_shared"] for launch in built.read_metadata()["launches"]}
    codes = machine_code(built.cubin)
    assert {code.name for code in codes} == set(launches)
    for code in codes:
        assert (code.stack, code.local, code.local_memory) == (0, 0, 0), f"{code.name} of {kernel} spills"
        assert code.static_shared + launches[code.name] <= SHARED_LIMIT
    assert any(code.mma for code in codes) is not isinstance(kernel, PLAIN_FP32)
    assert any(code.tma for code in codes) is not isinstance(kernel, BY_THREADS)
