"""Mamba-2's discretization and segment sum: SOL-ExecBench 044."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mamba.segsum_config import SegsumConfig, SegsumKernel
from cute_kernels.runtime import backend


@torch.no_grad()
def run(
    hidden_states: Tensor,  # [b, c, Q, H, P]: only its shape counts
    dt: Tensor,  # [b, c, Q, H] bf16
    A_log: Tensor,  # [H] bf16
    B: Tensor,  # [b, c, Q, G, N] bf16
    C: Tensor,  # [b, c, Q, G, N] bf16
    L: Tensor,  # [b, H, c, Q, Q] bf16, written, as the following
    G: Tensor,  # [b, c, Q, Q, H] bf16
    M: Tensor,  # [b, c, Q, Q, H] bf16
    A_cumsum: Tensor,  # [b, H, c, Q] fp32
    decay_states: Tensor,  # [b, H, c, Q] fp32
) -> None:
    b, c, chunk_size, heads = dt.shape
    groups, d_state = B.shape[3:]
    gpu = backend.current()
    tiles = SegsumConfig.for_shape(chunk_size, heads, groups, d_state, b * c, gpu.sm_count(dt.device))
    dtypes = (str(x.dtype).removeprefix("torch.") for x in (B, dt, A_log))
    kernel = SegsumKernel(chunk_size, heads, groups, d_state, *dtypes, "none", False, **vars(tiles))
    workspace = ()
    if tiles.cluster == 1:
        workspace = (torch.empty(b, c, heads, chunk_size, 2, dtype=torch.float32, device=dt.device),)
    launch = gpu.function(kernel, dt.device)
    launch(dt, A_log, None, B, C, L, G, M, A_cumsum, decay_states, *workspace, 0.0, float("inf"))
