"""What tests of the Hyena stages share: inputs as tensors, poisoned outputs."""

import torch

from cute_kernels.hyena import stages
from cute_kernels.hyena.config import Precision


def tensors(inputs):
    return {name: torch.from_numpy(value) for name, value in inputs.items()}


def poisoned(*shape):
    return torch.full(shape, float("nan"))


def padded(p):
    """[B, D, L] float64 to the padded fp32 rows that kernels exchange; the padding is poison."""
    out = poisoned(*p.shape[:2], stages.pitch(p.shape[2]))
    out[..., : p.shape[2]] = torch.from_numpy(p)
    return out


def operands(w, precision: Precision) -> stages.Operands:
    """What ConvertWeights makes of the weights: rows brought into [2^14, 2^15), then rounded once or split in two."""
    dtype = getattr(torch, precision.dtype)
    matrices = [w[name] for name in ("out_proj_weight", "mlp_fc1_weight", "mlp_fc2_weight")]
    converted, scales = [], []
    for matrix in matrices:
        scale = torch.exp2(torch.frexp(matrix.abs().amax(1)).exponent - 15.0)
        parts, rest = [], matrix / scale[:, None]
        for _ in range(precision.parts):
            parts.append(rest.to(dtype))
            rest = rest - parts[-1].float()
        converted.append(torch.stack(parts))
        scales.append(scale)
    return stages.Operands(*converted, *scales, matrices[1].norm(dim=1))
