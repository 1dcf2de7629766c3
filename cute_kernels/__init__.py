"""GPU kernels for post-attention sequence models, written in Python with the CUTLASS CuTe DSL."""

from cute_kernels import nn
from cute_kernels.hyena import HyenaBlockParams, causal_long_conv, hyena_block, hyena_filter
from cute_kernels.mamba import mamba_segsum
from cute_kernels.operators import is_supported, warmup
from cute_kernels.runtime.env import env_report

__version__ = "0.1.0"
__all__ = [
    "HyenaBlockParams",
    "__version__",
    "causal_long_conv",
    "env_report",
    "hyena_block",
    "hyena_filter",
    "is_supported",
    "mamba_segsum",
    "nn",
    "warmup",
]
