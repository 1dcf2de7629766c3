"""Mamba-2 operators."""

from cute_kernels.mamba import segsum_op  # noqa: F401  registers the torch ops
from cute_kernels.mamba.segsum import SegsumOutputs, mamba_segsum

__all__ = ["SegsumOutputs", "mamba_segsum"]
