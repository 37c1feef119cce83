"""A linear layer for inference whose weight lies in the layout the processor reads fastest."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

#: A weight [out, in] and its bias [out], if it has one.
Affine = tuple[torch.Tensor, torch.Tensor | None]

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

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in], T >= 1, dtype of the weight. add: [T, out] to add, in the same pass over the output."""
        if not self.packed:
            out = F.linear(x, self._weight, self.bias)
            return out if add is None else out.add_(add)
        if add is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, self._weight, self.bias, "add")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(x W^T + b)."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "swish", [], "")
        return F.silu(F.linear(x, self._weight, self.bias))

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """factor * (x W^T + b)."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self._weight, self.bias, "mul")
        return F.linear(x, self._weight, self.bias).mul_(factor)

    def weight(self) -> torch.Tensor:
        """The plain weight [out, in]: the stored tensor, or a copy where it is packed."""
        return self._weight.to_dense() if self.packed else self._weight

    @property
    def bytes(self) -> int:
        """Bytes of weight and bias."""
        count = self.out_features * self.in_features + (0 if self.bias is None else self.out_features)
        return count * self.dtype.itemsize


class GatedMLP:
    """SwiGLU: x [T, H] -> down(silu(gate(x)) * up(x)), with as few passes over its rows as the processor allows.

    Where products are short (bfloat16 in hardware) gate and up are two whose epilogues do the rest; where they are long
    (float32) one wide product is faster.
    """

    def __init__(self, gate: Affine, up: Affine, down: Affine) -> None:
        """Each: weight [out, in], and bias [out] or None."""
        (gate_weight, gate_bias), (up_weight, up_bias), down_pair = gate, up, down
        self.down = PackedLinear(*down_pair)
        if self.down.packed and gate_weight.dtype != torch.float32:
            self.parts = [PackedLinear(gate_weight, gate_bias), PackedLinear(up_weight, up_bias)]
        else:
            bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
            self.parts = [PackedLinear(torch.cat([gate_weight, up_weight]), bias)]

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """add: [T, H] to add to the result."""
        if len(self.parts) == 2:
            gate, up = self.parts
            return self.down(up.times(x, gate.silu(x)), add)
        gated, plain = self.parts[0](x).chunk(2, -1)
        return self.down(F.silu(gated).mul_(plain), add)

    def linears(self) -> list[PackedLinear]:
        return [*self.parts, self.down]
