"""Hyena: the block, its filter, its long convolution."""

from cute_kernels.hyena import op as _op  # noqa: F401  registers the torch ops
from cute_kernels.hyena.block import PreparedHyenaBlock, hyena_block
from cute_kernels.hyena.causal_conv import causal_long_conv
from cute_kernels.hyena.implicit_filter import hyena_filter
from cute_kernels.hyena.params import HyenaBlockParams

__all__ = ["HyenaBlockParams", "PreparedHyenaBlock", "causal_long_conv", "hyena_block", "hyena_filter"]
