"""What the machine code of every prebuilt kernel may cost, for each architecture."""

import pytest

from cute_kernels import operators
from cute_kernels.hyena import config
from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import artifacts, cache
from cute_kernels.runtime.inspect import machine_code

SHARED_LIMIT = 232_448  # bytes a block may have on all three
PAIRS = artifacts.pairs(operators.prebuilt_kernels(), arch_.NAMES)
WITHOUT_PRODUCTS = (config.ConvertWeights, config.Filter)  # plain fp32, straight from memory


@pytest.mark.parametrize(("kernel", "arch"), PAIRS, ids=[f"{kernel.symbol()}-{arch}" for kernel, arch in PAIRS])
def test_no_stack_no_local_memory_and_it_fits(kernel, arch):
    built = cache.get(kernel, arch)
    launches = {launch["kernel"]: launch["dynamic_shared"] for launch in built.read_metadata()["launches"]}
    codes = machine_code(built.cubin)
    assert {code.name for code in codes} == set(launches)
    for code in codes:
        assert (code.stack, code.local, code.local_memory) == (0, 0, 0), f"{code.name} of {kernel} spills"
        assert code.static_shared + launches[code.name] <= SHARED_LIMIT
    # The others are at heart matrix products, fed by the tensor memory accelerator.
    assert isinstance(kernel, WITHOUT_PRODUCTS) or any(code.mma and code.tma for code in codes)
