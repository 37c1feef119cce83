"""A drafter that keeps keys and values of every token of the prefix, in pages that share the target's tables."""

from __future__ import annotations

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, Verified
from trtllm_forespark.drafters.layers import Attend
from trtllm_forespark.drafters.packing import Blocks
from trtllm_forespark.drafters.runner import BlockRunner
from trtllm_forespark.models.attention import AttentionPlan
from trtllm_forespark.models.kv import PagedKV


class BlockAttention:
    """`Attend` while serving: a request's block sees its paged context and itself, never a neighbour.

    The block's own keys and values stand in scratch slots of the same storage for the time of the pass.
    """

    def __init__(self, plan: AttentionPlan, kv: PagedKV, own: torch.Tensor) -> None:
        """own: [S] scratch slot of each packed slot."""
        self.plan, self.kv, self.own = plan, kv, kv.rows(own)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.kv.write_rows(layer, self.own, key, value)
        return self.plan.attend(query, self.kv, layer, query.shape[-1] ** -0.5)


class PagedRunner(BlockRunner):
    """DFlash 2 and DSpark. The context is cut by attending to fewer positions: pages past them are written anew."""

    def begin(self, num_pages: int, seats: int, target_kv: PagedKV | None = None) -> None:
        super().begin(num_pages, seats, target_kv)
        # A request in a batch holds a page, and drafts at most one block: that many scratch slots, after the pages.
        config = self.model.config
        self._scratch = num_pages * self.page_size
        scratch_pages = -(-num_pages * (config.block + 1) // self.page_size)
        self.kv = PagedKV(
            config.num_layers,
            num_pages + scratch_pages,
            self.page_size,
            config.num_kv_heads,
            config.head_dim,
            self._dtype,
            self.device,
        )

    def append(self, tokens: Verified) -> None:
        context = self.model.fuse(tokens.features)
        rows = self.kv.rows(tokens.slots)
        rotary = self.model.rotary(tokens.positions)
        for layer, (key, value) in enumerate(self.model.context_keys_values(context, rotary)):
            self.kv.write_rows(layer, rows, key, value)
        _, whose, _, newest = self.by_seat(tokens.seats)
        self.boundary.index_copy_(0, self._to(whose), context.index_select(0, self._to(newest)))

    def clear(self, pages: torch.Tensor) -> None:
        self.kv.clear(pages)

    def state_bytes(self, tokens: int) -> int:
        c = self.model.config
        return (tokens * c.num_layers * 2 * c.num_kv_heads * c.head_dim + c.hidden_size) * self.kv.dtype.itemsize

    def attention(self, context: DraftContext, at: Blocks, page_table: np.ndarray) -> Attend:
        own = np.arange(len(at.index)) + self._scratch
        length = np.asarray(context.positions)[at.who][at.block]
        plan = AttentionPlan(
            at.cu_slots, length, page_table[at.who], self.page_size, self.device, own, self.model.config.causal
        )
        return BlockAttention(plan, self.kv, self._to(own))
