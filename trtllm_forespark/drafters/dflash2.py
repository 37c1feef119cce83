"""The DFlash 2 drafter: a few decoder layers over [anchor, masks] that read the target's context as keys and values.

One forward serves training and serving. It works on *packed* slots: the blocks of all requests one after another,
request i's anchor followed by its d_i masks, no padding (ForeSpark §4.4). How a slot attends (to its request's context
and to its own block) is the caller's, as an `Attend`; everything else is here.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_forespark.drafters.config import DFlash2Config
from trtllm_forespark.drafters.estimators import PostDraftEstimator, PreDraftEstimator
from trtllm_forespark.models.linear import GatedMLP, PackedLinear
from trtllm_forespark.models.norm import RMSNorm, rms_norm
from trtllm_forespark.models.transformer import Rope, rotate


class Attend(Protocol):
    """Attention of one draft layer over the context and the block."""

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [S, heads, d], block key and value [S, kv_heads, d], all rotated -> [S, heads, d]."""
        ...


def rotary_frequencies(config: DFlash2Config) -> torch.Tensor:
    """[head_dim / 2] float32."""
    return config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)


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


class DraftAttention(nn.Module):
    """Qwen3 attention whose keys and values come from the context and the block through the same projections."""

    def __init__(self, config: DFlash2Config) -> None:
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

    def __init__(self, config: DFlash2Config) -> None:
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


class CandidateSelector(nn.Module):
    """Path selector: score(b | a, h) = logit(b) + <pred[a] * (W h), succ[b]> over the top candidates, in float32.

    Predecessors are target token ids (an anchor may be any token); successors are draft-vocabulary ids.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(
            torch.empty(config.draft_vocab_size, config.selector_rank).normal_(std=0.02)
        )
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(
        self, logits: torch.Tensor, projected: torch.Tensor, predecessors: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Scores of C candidates after each of P predecessors.

        logits [m, C] of the candidates, projected = W h [m, r], predecessors [m, P], candidates [m, C] -> [m, P, C].
        """
        context = self.predecessor_codebook[predecessors].float() * projected.float().unsqueeze(1)
        successors = self.successor_codebook[candidates].float()
        return torch.baddbmm(logits.float().unsqueeze(1), context, successors.transpose(1, 2))


class DFlash2(nn.Module):
    """The whole drafter. Embedding and head are the target's; the head is cut to the draft vocabulary's rows."""

    d2t: torch.Tensor

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.capture_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config)
        self.pre_draft_estimator = PreDraftEstimator(hidden, config.estimator_rank, config.estimator_outputs)
        self.post_draft_estimator = PostDraftEstimator(hidden, config.selector_rank)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size))
        self.rope = Rope(rotary_frequencies(config))
        self.fused_context: tuple[PackedLinear, torch.Tensor] | None = None

    def prepare(self, device: torch.device, dtype: torch.dtype) -> DFlash2:
        """Make the drafter ready to serve, for good: no gradient, packed weights, products that can be one made one."""
        self.to(device=device, dtype=dtype).eval().requires_grad_(False)
        config = self.config
        self.rope = Rope(rotary_frequencies(config).to(device), dtype=dtype)
        attentions: list[DraftAttention] = [layer.self_attn for layer in self.layers]  # type: ignore[misc]
        weight = torch.cat([w for a in attentions for w in (a.k_proj.weight, a.v_proj.weight)])
        norm = torch.stack([a.k_norm.weight.expand(config.num_kv_heads, -1) for a in attentions])
        self.fused_context = PackedLinear(weight), norm
        for layer in self.layers:
            layer.self_attn.fuse()  # type: ignore[operator, union-attr]
            layer.mlp.fuse()  # type: ignore[operator, union-attr]
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child.out_features > 1:
                    del module._modules[name]
                    object.__setattr__(module, name, PackedLinear(child.weight, child.bias))
        return self

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Captured target layers [T, L, H] -> context features c [T, H] (§4.1)."""
        return self.hidden_norm(self.fc(features.flatten(-2)))

    def context_keys_values(
        self, context: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [T, kv_heads, d] that the context features [T, H] give each draft layer."""
        if self.fused_context is None:
            return [layer.self_attn.keys_values(context, *rotary) for layer in self.layers]  # type: ignore
        linear, norm = self.fused_context
        config, (cos, sin) = self.config, rotary
        heads = linear(context).view(len(context), config.num_layers, 2 * config.num_kv_heads, config.head_dim)
        keys, values = heads.split(config.num_kv_heads, 2)
        keys = rotate(rms_norm(keys, norm, config.rms_norm_eps), cos.unsqueeze(1), sin.unsqueeze(1))
        return list(zip(keys.unbind(1), values.unbind(1), strict=True))

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables for `rotate` at positions [S]."""
        return self.rope.tables(positions)

    def embed_blocks(self, anchor_embeddings: torch.Tensor, starts: torch.Tensor, slots: int) -> torch.Tensor:
        """Anchor embeddings [m, H] at slots ``starts`` [m], the learned mask at all others -> [slots, H]."""
        masks = self.mask_embedding.expand(slots, -1)
        return masks.index_copy(0, starts, anchor_embeddings.to(masks.dtype))

    def forward(
        self, blocks: torch.Tensor, slot_index: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Packed blocks [S, H], in-block index and true position of each slot -> h [S, H] after the norm."""
        rotary = self.rotary(positions)
        taps = Taps.of(slot_index, self.config.conv_kernel_size)
        x = blocks
        for index, layer in enumerate(self.layers):
            x = layer(x, index, taps, rotary, attend)
        return self.norm(x)
