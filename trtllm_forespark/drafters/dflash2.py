"""The DFlash 2 drafter: a few decoder layers over [anchor, masks] that read the target's context as keys and values,
each sublayer wrapped in an in-block convolution, and a path selector over the likeliest candidates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from trtllm_forespark.drafters.block import BlockDrafter, Corrector
from trtllm_forespark.drafters.config import DFlash2Config
from trtllm_forespark.drafters.estimators import PostDraftEstimator
from trtllm_forespark.drafters.layers import Attend, DraftAttention, DraftMLP
from trtllm_forespark.models.norm import RMSNorm


class Taps(NamedTuple):
    """For tap t = 1, 2, …: previous[t - 1] [S], the slot t places earlier in the same block (itself where there is
    none), and inside[t - 1] [S, 1, 1, 1], whether there is one."""

    previous: list[torch.Tensor]
    inside: list[torch.Tensor]

    @classmethod
    def of(cls, slot_index: torch.Tensor, taps: int) -> Taps:
        """slot_index [S]: each request's own in-block index, so taps never reach across a block's start."""
        inside = [slot_index >= tap for tap in range(1, taps)]
        slots = torch.arange(len(slot_index), device=slot_index.device)
        return cls(
            [slots - tap * there for tap, there in enumerate(inside, 1)], [there.view(-1, 1, 1, 1) for there in inside]
        )


class GroupedConvolution(nn.Module):
    """Token-conditioned causal convolution inside a block, before and after a sublayer; the identity at start."""

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * self.groups, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def kernels(self, x: torch.Tensor, taps: Taps) -> tuple[torch.Tensor, ...]:
        """x [S, H] -> each slot's kernels [S, groups, H / groups], by tap, those before the sublayer first."""
        offsets = self.kernel_projection(x).view(x.shape[0], 2 * self.taps, self.groups, 1)
        kernels = self.base_kernel.view(2 * self.taps, self.groups, -1) + offsets
        for tap, inside in enumerate(taps.inside, 1):
            kernels[:, tap :: self.taps].mul_(inside)
        return kernels.unbind(1)

    def forward(self, x: torch.Tensor, kernels: tuple[torch.Tensor, ...], side: int, taps: Taps) -> torch.Tensor:
        """x [S, H], side 0 before and 1 after the sublayer."""
        grouped = x.view(x.shape[0], self.groups, -1)
        own, *earlier = kernels[side * self.taps : (side + 1) * self.taps]
        out = grouped * own
        for previous, kernel in zip(taps.previous, earlier, strict=True):
            out = torch.addcmul(out, grouped.index_select(0, previous), kernel)
        return out.view_as(x)


class DraftLayer(nn.Module):
    """Attention and MLP, each wrapped in its in-block convolution."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        taps, group = config.conv_kernel_size, config.conv_group_size
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.attention_conv = GroupedConvolution(config.hidden_size, taps, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config)
        self.mlp_conv = GroupedConvolution(config.hidden_size, taps, group)

    def forward(
        self,
        x: torch.Tensor,
        layer: int,
        taps: Taps,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        h = self.input_layernorm(x)
        kernels = self.attention_conv.kernels(h, taps)
        h = self.attention_conv(h, kernels, 0, taps)
        h = attend(layer, *self.self_attn.project(h, *rotary))
        h = self.self_attn.o_proj(h.reshape(x.shape[0], -1))
        x = x + self.attention_conv(h, kernels, 1, taps)
        h = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(h, taps)
        h = self.mlp(self.mlp_conv(h, kernels, 0, taps))
        return x + self.mlp_conv(h, kernels, 1, taps)


class CandidateSelector(Corrector):
    """Path selector: z(a, h) = pred[a] * (W h), scores over the top candidates."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(
            torch.empty(config.draft_vocab_size, config.selector_rank).normal_(std=0.02)
        )
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    @property
    def successors(self) -> torch.Tensor:
        return self.successor_codebook

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        return self.predecessor_codebook[previous]

    def latents(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # In float32: bfloat16 would flip the order of close candidates.
        return self.embed(previous).float() * self.hidden_projection(hidden).float().unsqueeze(1), None


class DFlash2(BlockDrafter):
    """The whole drafter."""

    config: DFlash2Config

    def new_layer(self) -> nn.Module:
        return DraftLayer(self.config)

    def add_heads(self) -> None:
        config = self.config
        self.candidate_selector = CandidateSelector(config)
        super().add_heads()
        self.post_draft_estimator = PostDraftEstimator(config.hidden_size, config.selector_rank)

    @property
    def corrector(self) -> Corrector:
        return self.candidate_selector

    def post_logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return self.post_draft_estimator(hidden, self.candidate_selector.embed(previous))

    def forward(
        self, blocks: torch.Tensor, slot_index: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        rotary = self.rotary(positions)
        taps = Taps.of(slot_index, self.config.conv_kernel_size)
        x = blocks
        for index, layer in enumerate(self.layers):
            x = layer(x, index, taps, rotary, attend)
        return self.norm(x)
