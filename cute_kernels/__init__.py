"""GPU kernels for post-attention sequence models, written in Python with the CUTLASS CuTe DSL."""

from cute_kernels.mamba import mamba_segsum
from cute_kernels.operators import is_supported, warmup

__version__ = "0.1.0"
__all__ = ["__version__", "is_supported", "mamba_segsum", "warmup"]
