"""What the block drafters are made of: attention whose context the caller owns, and the MLP."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_forespark.drafters.config import BlockConfig
from trtllm_forespark.models.linear import GatedMLP, PackedLinear
from trtllm_forespark.models.norm import RMSNorm, rms_norm
from trtllm_forespark.models.transformer import rotate


class Attend(Protocol):
    """Attention of one draft layer over the context and the block."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [S, heads, d], block key and value [S, kv_heads, d], all rotated -> [S, heads, d]."""
        ...


def rotary_frequencies(config: BlockConfig) -> torch.Tensor:
    """[head_dim / 2] float32."""
    return config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)


class DraftAttention(nn.Module):
    """Qwen3 attention whose keys and values come from the context and the block through the same projections."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, q_size, kv_size = config.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=False)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)
        self.fused: tuple[PackedLinear, torch.Tensor] | None = None  # by `fuse`
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [S, H] (context features, or a block's normed states) -> rotated keys and values [S, kv_heads, d]."""
        key = self.k_norm(self.k_proj(x).view(-1, self.kv_heads, self.head_dim))
        return rotate(key, cos, sin), self.v_proj(x).view(-1, self.kv_heads, self.head_dim)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A block's normed states [S, H] -> rotated queries and keys, and values, each [S, heads, d]."""
        if self.fused is None:
            query = rotate(self.q_norm(self.q_proj(x).view(-1, self.heads, self.head_dim)), cos, sin)
            return query, *self.keys_values(x, cos, sin)
        linear, norm = self.fused
        heads = linear(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        turned, value = heads.split([self.heads + self.kv_heads, self.kv_heads], 1)
        turned = rotate(rms_norm(turned, norm, self.q_norm.eps), cos, sin)
        return turned[:, : self.heads], turned[:, self.heads :], value

    def fuse(self) -> None:
        """For serving: one product for queries, keys and values of a block. The context's is the whole drafter's."""
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).detach()
        norm = torch.cat(
            [self.q_norm.weight.expand(self.heads, -1), self.k_norm.weight.expand(self.kv_heads, -1)]
        ).detach()
        self.fused = PackedLinear(weight), norm
        self.q_proj = self.k_proj = self.v_proj = None  # type: ignore[assignment]


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fused: GatedMLP | None = None

    def fuse(self) -> None:
        """For serving."""
        gate, up, down = (linear.weight.detach() for linear in (self.gate_proj, self.up_proj, self.down_proj))
        self.fused = GatedMLP((gate, None), (up, None), (down, None))
        self.gate_proj = self.up_proj = self.down_proj = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            return self.fused(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLayer(nn.Module):
    """A Qwen3 decoder layer over a block."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self, x: torch.Tensor, layer: int, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """x [S, H] -> [S, H]."""
        h = attend(layer, *self.self_attn.project(self.input_layernorm(x), *rotary))
        x = x + self.self_attn.o_proj(h.reshape(x.shape[0], -1))
        return x + self.mlp(self.post_attention_layernorm(x))
