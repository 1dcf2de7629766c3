"""Recognises a call whose tensors look like an earlier call's, for less than reading their metadata takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards  # what torch.compile asks before it runs compiled code
except ImportError:
    TensorGuards = None


def looks(*tensors: Tensor) -> Callable[..., bool] | None:
    """A function of as many tensors: whether they look as these do now; None where this torch has none.

    They do where their Python types, shapes, strides, types, devices, dispatch keys and requires_grad are the same. The
    keys tell a negative view and a tensor of inference mode, but not whether gradients are enabled, nor who watches.
    """
    if TensorGuards is None:
        return None
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
