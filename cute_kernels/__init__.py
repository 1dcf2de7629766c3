"""GPU kernels for post-attention sequence models, written in Python with the CUTLASS CuTe DSL."""

from cute_kernels.mamba import mamba_segsum
from cute_kernels.operators import is_supported, warmup
from cute_kernels.runtime.env import env_report

__version__ = "0.1.0"
__all__ = ["__version__", "env_report", "is_supported", "mamba_segsum", "warmup"]
