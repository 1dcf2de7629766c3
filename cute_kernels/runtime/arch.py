"""Which architecture a device is, asked of the driver."""

from __future__ import annotations

import functools

SUPPORTED = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}  # compute capability -> compiler's name
NAMES = tuple(SUPPORTED.values())


def for_capability(major: int, minor: int) -> str:
    """The compiler's name of a compute capability. NotImplementedError where no kernel exists for it."""
    try:
        return SUPPORTED[major, minor]
    except KeyError:
        raise NotImplementedError(
            f"compute capability {major}.{minor} is not supported: cute_kernels runs on {', '.join(NAMES)}"
        ) from None


def check(arch: str) -> str:
    """`arch` itself. ValueError where it is none of the supported names."""
    if arch not in NAMES:
        raise ValueError(f"arch must be one of {', '.join(NAMES)}, not {arch!r}")
    return arch


def _attribute(index: int, name: str) -> int:
    from cuda.bindings import driver

    def checked(result):
        error, *values = result
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver answered {error.name} for {name} of device {index}")
        return values[0] if values else None

    checked(driver.cuInit(0))
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuDeviceGet(index))))


@functools.cache
def of_device(index: int) -> str:
    """The architecture of CUDA device `index`. NotImplementedError where it is not supported."""
    return for_capability(_attribute(index, "COMPUTE_CAPABILITY_MAJOR"), _attribute(index, "COMPUTE_CAPABILITY_MINOR"))


@functools.cache
def sm_count(index: int) -> int:
    """Streaming multiprocessors of CUDA device `index`."""
    return _attribute(index, "MULTIPROCESSOR_COUNT")
