"""Tensor arguments of the Hyena kernels, as compile time sees them."""

import cutlass
from cutlass.cute.runtime import make_fake_compact_tensor


def operand_type(name: str) -> type[cutlass.Numeric]:
    return {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[name]


def compact(dtype, *shape):
    """A row-major tensor argument whose data are 16-byte aligned."""
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)
