"""PackedLinear is F.linear, for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trtllm_forespark.models import linear
from trtllm_forespark.models.linear import PackedLinear


@pytest.mark.parametrize("rows", [1, 7, 33, 130])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_equals_f_linear(rows, bias, packed, monkeypatch):
    if not packed:
        monkeypatch.setattr(linear, "packing_available", lambda dtype: False)
    torch.manual_seed(0)
    weight, b, x = torch.randn(45, 37), torch.randn(45) if bias else None, torch.randn(rows, 37)
    layer = PackedLinear(weight, b)
    torch.testing.assert_close(layer(x), F.linear(x, weight, b), atol=1e-4, rtol=0)
    assert torch.equal(layer.weight(), weight)
    assert layer.bytes == 4 * (45 * 37 + (45 if bias else 0))


def test_bfloat16_works_on_any_processor():
    weight, x = torch.randn(45, 37).bfloat16(), torch.randn(3, 37).bfloat16()
    torch.testing.assert_close(PackedLinear(weight)(x), F.linear(x, weight), atol=0.1, rtol=0.02)
