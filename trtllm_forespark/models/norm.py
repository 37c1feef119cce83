"""RMS normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_FEW = 64 * 1024  # elements up to which the number of operators matters more than what they do


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] / rms(x) * weight [H], or [heads, H] for heads of different norms.

    On a CPU torch's own operator is a chain of a dozen small ones. Layer normalisation is a single one, and of
    (x, -x), whose mean is 0, it is the RMS norm.
    """
    if x.device.type == "cpu" and x.numel() <= _FEW and not x.requires_grad:
        size = x.shape[-1]
        both = torch.native_layer_norm(torch.cat((x, -x), -1), (2 * size,), None, None, eps)[0]
        return both[..., :size] * weight
    if x.dtype != torch.float32 or x.device.type != "cpu":
        if weight.dim() > 1:
            return F.rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    scale = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.to(self.weight.dtype), self.weight, self.eps)  # autocast hands in half precision
