"""LongSpark: a block drafter that keeps no context of its own.

It sees three views of the target, each of fixed size: the boundary state (captured layers at the newest token, fused),
the keys and values of a recent window at some layers, and a summary of the whole prefix at the same layers: frozen
queries U attend over all of the target's keys, and their result V is read back as values under keys U (eq. 5-6).
"""

from __future__ import annotations

import torch
from torch import nn

from trtllm_forespark.drafters.config import LongSparkConfig
from trtllm_forespark.drafters.dspark import MarkovDrafter


class LongSpark(MarkovDrafter):
    """See the module. ``norm`` is a copy of the target's final norm and is not trained."""

    config: LongSparkConfig
    owns_context = False
    variation = 2.0  # eq. 9 has the L1 norm, twice the total variation

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__(config)
        hidden, dim = config.hidden_size, config.head_dim
        self.norm.requires_grad_(False)
        self.block_positions = nn.Parameter(torch.zeros(config.block, hidden))
        self.input_projection = nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            self.input_projection.weight.zero_()
            self.input_projection.weight[:, :hidden] = torch.eye(hidden)
        shape = (config.num_layers, config.num_heads, config.summary_rows, dim)
        self.summary_queries = nn.Parameter(torch.randn(shape) * dim**-0.5)

    def embed_blocks(
        self, anchor_embeddings: torch.Tensor, starts: torch.Tensor, slot_index: torch.Tensor, boundary: torch.Tensor
    ) -> torch.Tensor:
        """W [e + p_slot; c]: embedding or mask, in-block position, and the boundary state of the request."""
        blocks = super().embed_blocks(anchor_embeddings, starts, slot_index, boundary)
        blocks = blocks + self.block_positions[slot_index]
        if "boundary" not in self.config.views:
            boundary = torch.zeros_like(blocks)
        return self.input_projection(torch.cat([blocks, boundary.to(blocks.dtype)], -1))
