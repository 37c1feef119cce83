"""What all block drafters share: one pass over packed slots, then a correction by the token before.

One forward serves training and serving. It works on *packed* slots: the blocks of all requests one after another,
request i's anchor followed by its masks, no padding (ForeSpark §4.4). How a slot attends (to its request's context
and to its own block) is the caller's, as an `Attend`; everything else is here.
"""

from __future__ import annotations

import torch
from torch import nn

from trtllm_forespark.drafters.config import BlockConfig
from trtllm_forespark.drafters.estimators import PreDraftEstimator
from trtllm_forespark.drafters.layers import Attend, DraftAttention, PlainLayer, rotary_frequencies
from trtllm_forespark.models.linear import PackedLinear
from trtllm_forespark.models.norm import RMSNorm, rms_norm
from trtllm_forespark.models.transformer import Rope, rotate

#: Kept ready for any predecessor, the scores of m positions are m * C * C numbers; past this many candidates the
#: positions are walked one after the other instead.
MOST_PAIRED = 64


class Corrector(nn.Module):
    """score(b | a, h) = logit(b) + <z(a, h), successor[b]> over a position's candidates b, in float32.

    Predecessors a are target token ids (an anchor may be any token), successors draft-vocabulary ids. recurrent: z also
    depends on the path before a, through a state.
    """

    recurrent = False
    top_k: int

    @property
    def successors(self) -> torch.Tensor:
        """[draft vocabulary, r]."""
        raise NotImplementedError

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """Predecessors [...] -> [..., r]."""
        raise NotImplementedError

    def latents(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """z of P predecessors at each of m positions: hidden [m, H], previous [m, P], state [m, r] -> [m, P, r]."""
        raise NotImplementedError

    def along(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """z along given paths (teacher forcing): hidden [m, d, H], previous [m, d] -> [m, d, r]."""
        m, d, size = hidden.shape
        return self.latents(hidden.reshape(m * d, size), previous.reshape(-1, 1))[0].view(m, d, -1)

    def scores(self, logits: torch.Tensor, latents: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """logits, candidates [m, C], latents [m, P, r] -> [m, P, C]."""
        successors = self.successors[candidates].float()
        return torch.baddbmm(logits.float().unsqueeze(1), latents.float(), successors.transpose(1, 2))

    @property
    def paired(self) -> bool:
        """Whether a position's scores may be made for every possible predecessor at once."""
        return not self.recurrent and self.top_k <= MOST_PAIRED


class BlockDrafter(nn.Module):
    """A drafter's weights. Embedding and head are the target's; the head is cut to the draft vocabulary's rows.

    owns_context: it keeps keys and values of the whole prefix, made from the fused features c; else it reads the
    target's. variation: factor of total variation in its loss.
    """

    d2t: torch.Tensor
    owns_context = True
    variation = 1.0

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.capture_layers) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        self.layers = nn.ModuleList(self.new_layer() for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.add_heads()
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size))
        self.rope = Rope(rotary_frequencies(config))
        self.fused_context: tuple[PackedLinear, torch.Tensor] | None = None

    # What a kind of drafter says of itself ----------------------------------------------------------------------------

    def new_layer(self) -> nn.Module:
        return PlainLayer(self.config)

    def add_heads(self) -> None:
        """Corrector and estimators."""
        config = self.config
        self.pre_draft_estimator = PreDraftEstimator(
            config.hidden_size, config.estimator_rank, config.estimator_outputs
        )

    @property
    def corrector(self) -> Corrector:
        raise NotImplementedError

    def post_logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Post-draft logits from hidden [..., H] and the token before [...] -> [...] float32; never reads the token
        that is scored (lossless rule 1)."""
        raise NotImplementedError

    # Serving ----------------------------------------------------------------------------------------------------------

    def prepare(self, device: torch.device, dtype: torch.dtype) -> BlockDrafter:
        """Make the drafter ready to serve, for good: no gradient, packed weights, products that can be one made one."""
        self.to(device=device, dtype=dtype).eval().requires_grad_(False)
        config = self.config
        self.rope = Rope(rotary_frequencies(config).to(device), dtype=dtype)
        attentions: list[DraftAttention] = [layer.self_attn for layer in self.layers]  # type: ignore[misc]
        if self.owns_context:
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

    # The pass ---------------------------------------------------------------------------------------------------------

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

    def embed_blocks(
        self, anchor_embeddings: torch.Tensor, starts: torch.Tensor, slot_index: torch.Tensor, boundary: torch.Tensor
    ) -> torch.Tensor:
        """Anchor embeddings [m, H] at slots ``starts`` [m], the learned mask at all others -> [S, H].

        slot_index [S]: in-block index of each slot. boundary [S, H]: c of each slot's request, where a kind reads it.
        """
        masks = self.mask_embedding.expand(len(slot_index), -1)
        return masks.index_copy(0, starts, anchor_embeddings.to(masks.dtype))

    def forward(
        self, blocks: torch.Tensor, slot_index: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Packed blocks [S, H], in-block index and true position of each slot -> h [S, H] after the norm."""
        rotary = self.rotary(positions)
        x = blocks
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotary, attend)
        return self.norm(x)
