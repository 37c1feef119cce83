"""A linear layer for inference whose weight lies in the layout the processor reads fastest."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

# Rows the packed layout is laid out for. Measured (576 -> 1536, float32, AVX2): F.linear takes 299, 460, 498, 402 us at
# 1, 2, 4, 8 rows, the packed product 206, 204, 213, 266; past 64 rows they are equal.
_ROWS_HINT = 16


@cache
def packing_available(dtype: torch.dtype) -> bool:
    """Whether oneDNN prepacked weights work for `dtype` in this build on this processor (tried once)."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(32, 32, dtype=dtype), _ROWS_HINT)
        row = torch.ones(1, 32, dtype=dtype)
        out = torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], "")
        return bool((out == 32).all()) and torch.equal(weight.to_dense(), torch.ones(32, 32, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


class PackedLinear:
    """x [T, in] -> x W^T + b [T, out]; no gradient. Keeps exactly one copy of the weight.

    weight: [out, in]; bias: [out] or None. On CPU the weight is reordered for oneDNN where that exists, elsewhere
    (CUDA, other builds) it stays plain and `F.linear` runs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.dtype = weight.dtype
        self.packed = weight.device.type == "cpu" and packing_available(weight.dtype)
        weight = weight.detach()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self.packed else weight.contiguous()
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in], T >= 1, dtype of the weight."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return F.linear(x, self._weight, self.bias)

    def weight(self) -> torch.Tensor:
        """The plain weight [out, in]: the stored tensor, or a copy where it is packed."""
        return self._weight.to_dense() if self.packed else self._weight

    @property
    def bytes(self) -> int:
        """Bytes of weight and bias."""
        count = self.out_features * self.in_features + (0 if self.bias is None else self.out_features)
        return count * self.dtype.itemsize
