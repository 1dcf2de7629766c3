"""What tests of the Hyena stages share: inputs as tensors, poisoned outputs."""

import math

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


def converted(matrix, precision: Precision):
    """Rows brought into [2^14, 2^15), then rounded once or split in two: [parts, N, K], and the rows' scales."""
    dtype = getattr(torch, precision.dtype)
    scale = torch.exp2(torch.frexp(matrix.abs().amax(1)).exponent - 15.0)
    parts, rest = [], matrix / scale[:, None]
    for _ in range(precision.parts):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts), scale


def in_proj_rows(width):
    """The rows of in_proj in the order of their records: 32 of x0, then x1 and v in turns of 8, and so on."""
    x0, x1, v = torch.arange(3 * width).view(3, width // 32, 32)
    others = torch.stack([x1.view(-1, 4, 8), v.view(-1, 4, 8)], dim=2).view(-1, 64)
    return torch.cat([x0, others], dim=1).reshape(-1)


def in_proj_image(parts):
    """[parts, 3D, D], rows in the order of their records, as they lie in shared memory, piece by piece of K."""
    count, rows, width = parts.shape
    pieces = parts.view(count, rows // 96, 96, width // 64, 8, 8).permute(1, 3, 0, 2, 4, 5)  # (.., part, row, 8, 8)
    first, others = pieces[:, :, :, :32], pieces[:, :, :, 32:]
    first = first.reshape(*first.shape[:3], 4, 8, 8, 8).transpose(2, 3)  # high and low parts in turns of 8 rows
    image = torch.cat([first.reshape(*first.shape[:2], -1, 8, 8), others.reshape(*others.shape[:2], -1, 8, 8)], dim=2)
    row, vector = torch.arange(image.shape[2])[:, None], torch.arange(8)
    return image[:, :, row, vector ^ row % 8].reshape(parts.shape)


def operands(w, precision: Precision) -> stages.Operands:
    """What ConvertWeights makes of the weights."""
    names = ("out_proj_weight", "mlp_fc1_weight", "mlp_fc2_weight")
    matrices, scales = zip(*(converted(w[name], precision) for name in names), strict=True)
    width = w["norm1_weight"].numel()
    rows = in_proj_rows(width)
    in_proj, scale = converted((w["in_proj_weight"] * w["norm1_weight"])[rows], precision)
    bias = w["in_proj_bias"] + w["in_proj_weight"] @ w["norm1_bias"]
    normalised = 2.0 ** (14 - math.ceil(math.log2(width) / 2))
    others = bias[rows, None], w["short_conv_weight"].view(-1, 3)[rows], w["short_conv_bias"][rows, None]
    records = torch.cat([scale[:, None] / normalised, *others, torch.zeros(3 * width, 2)], dim=1)
    norm = w["mlp_fc1_weight"].norm(dim=1)
    return stages.Operands(in_proj_image(in_proj), records, *matrices, *scales, norm)
