"""A DFlash 2 drafter at work: packed blocks of different lengths over each request's own paged context (§4.4)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from trtllm_forespark.drafters.base import DraftContext, DrafterSpec, Proposer
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.models.attention import AttentionPlan, merge
from trtllm_forespark.models.kv import PagedKV
from trtllm_forespark.models.linear import PackedLinear
from trtllm_forespark.wcs.stages import Draft, Estimate
from trtllm_forespark.wcs.survival import directional_to_survival, triangle_to_survival


class BlockAttention:
    """`Attend` while serving: a request's block sees its paged context and itself, never a neighbour.

    plan: attention over the context. lengths_plus_anchor: [m] slots of each block, packed in that order.
    """

    def __init__(self, plan: AttentionPlan, kv: PagedKV, slots: torch.Tensor, causal: bool) -> None:
        self.plan, self.kv = plan, kv
        widest = int(slots.max())
        m = len(slots)
        column = torch.arange(widest, device=slots.device)
        inside = column[None, :] < slots[:, None]
        self.padded = inside.flatten().nonzero()[:, 0]
        self.shape = (m, widest)
        bias = torch.zeros(m, 1, 1, widest, device=slots.device)
        bias.masked_fill_(~inside[:, None, None, :], -torch.inf)
        if causal:
            bias = bias.expand(m, 1, widest, widest).clone()
            bias.masked_fill_((column[None, :] > column[:, None])[None, None], -torch.inf)
        self.bias = bias

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """Packed [S, h, d] -> [m, widest, h, d]."""
        m, widest = self.shape
        if len(self.padded) == m * widest:
            return x.reshape(m, widest, *x.shape[1:])
        out = x.new_zeros(m * widest, *x.shape[1:])
        out[self.padded] = x
        return out.view(m, widest, *x.shape[1:])

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scale = query.shape[-1] ** -0.5
        outside, outside_lse = self.plan.attend(query, self.kv.k[layer], self.kv.v[layer], scale)
        m, widest = self.shape
        kv_heads, head_dim = key.shape[1:]
        groups = query.shape[1] // kv_heads
        q = self._pad(query).view(m, widest, kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(m * kv_heads, groups * widest, head_dim)
        k = self._pad(key).transpose(1, 2).reshape(m * kv_heads, widest, head_dim)
        v = self._pad(value).transpose(1, 2).reshape(m * kv_heads, widest, head_dim)
        scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale).view(m, kv_heads, groups, widest, widest)
        scores = scores + self.bias[:, :, None]
        lse = scores.logsumexp(-1)
        own = torch.bmm(torch.exp(scores - lse[..., None]).to(v.dtype).view(m * kv_heads, groups * widest, widest), v)
        own = own.view(m, kv_heads * groups, widest, head_dim).transpose(1, 2).reshape(m * widest, -1, head_dim)
        lse = lse.view(m, kv_heads * groups, widest).transpose(1, 2).reshape(m * widest, -1)
        if len(self.padded) != m * widest:
            own, lse = own[self.padded], lse[self.padded]
        return merge(outside, outside_lse, own, lse)[0].to(query.dtype)


class DFlash2Runner:
    """Runs a drafter for many requests; owns its context keys and values, which share the target's page tables."""

    def __init__(
        self,
        model: DFlash2,
        calibration: Calibration,
        embedding: torch.Tensor,
        head: torch.Tensor,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        name: str = "dflash2",
    ) -> None:
        """embedding [V, H], head [V, H] of the target (the head's draft-vocabulary rows are copied)."""
        config = model.config
        device = embedding.device
        self.spec = DrafterSpec(
            name=name,
            block=config.block,
            length_space="request",
            directional=config.causal,
            anchor_slots=1,
            capture_layers=config.capture_layers,
            max_position=config.max_position,
        )
        self.calibration = calibration
        self.model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.embedding = embedding
        self.d2t = self.model.d2t.to(device)
        self.head = PackedLinear(head[self.d2t].to(dtype))
        for layer in self.model.layers:
            layer.self_attn.fuse()  # type: ignore[operator, union-attr]
            layer.mlp.fuse()  # type: ignore[operator, union-attr]
        for module in list(self.model.modules()):
            for child_name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child.out_features > 1:
                    bias = None if child.bias is None else child.bias.data
                    del module._modules[child_name]
                    object.__setattr__(module, child_name, PackedLinear(child.weight.data, bias))
        self.kv = PagedKV(config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim, dtype, device)
        self.temperature = torch.from_numpy(calibration.temperature).to(device)

    def extend(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Absorb target features [T, L, H] of tokens at positions [T]; slots [T] of the paged context. -> c [T, H]."""
        context = self.model.fuse(features)
        rotary = self.model.rotary(positions)
        for layer in range(self.model.config.num_layers):
            self.kv.write(layer, slots, *self.model.context_keys_values(layer, context, rotary))
        return context

    def estimate_logits(self, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Raw pre-draft logits z [n, outputs] (eq. 2), float32; anchors [n], features c [n, H]."""
        return self.model.pre_draft_estimator(features, self.embedding[anchors]).float()

    def estimate(self, anchors: torch.Tensor, features: torch.Tensor) -> Estimate:
        """Calibrated pre-draft survival (eq. 3), on the host."""
        logits = self.estimate_logits(anchors, features).cpu().numpy()
        to_survival = directional_to_survival if self.spec.directional else triangle_to_survival
        survival = to_survival(logits, self.calibration.scale, self.calibration.bias)
        return Estimate(survival=survival, known=np.ones(len(logits), bool))

    def draft(self, context: DraftContext, lengths: torch.Tensor, page_table: np.ndarray, propose: Proposer) -> Draft:
        """Draft lengths[i] tokens for request i; requests with length 0 take no part in the pass.

        page_table [n, P] on the host: pages of each request's context. A row whose scores are NaN ends its draft there.
        """
        return self.draft_with_logits(context, lengths, page_table, propose)[0]

    def draft_with_logits(
        self, context: DraftContext, lengths: torch.Tensor, page_table: np.ndarray, propose: Proposer
    ) -> tuple[Draft, torch.Tensor]:
        """`draft`, and the raw post-draft logits [n, K] (eq. 5 before theta) that calibration fits on."""
        n, block, device = len(lengths), self.spec.block, self.embedding.device
        lengths = lengths.to(device)
        who = lengths.nonzero()[:, 0]
        survival = torch.zeros(n, block, device=device)
        post = torch.full((n, block), -torch.inf, device=device)
        if len(who) == 0:
            none = torch.zeros(0, dtype=torch.int64, device=device)
            empty = none.view(0, 1)
            cu = torch.zeros(n + 1, dtype=torch.int64, device=device)
            return Draft(none, cu.cpu(), empty, empty.float(), survival.cpu()), post
        d = lengths[who]
        hidden, slot_index = self._hidden(context, who, d, page_table)
        drafted = slot_index > 0
        h, position = hidden[drafted], slot_index[drafted]
        logits = self.head(h)
        top = logits.topk(self.model.candidate_selector.top_k, dim=-1)
        projected = self.model.candidate_selector.hidden_projection(h)
        candidates = self.d2t[top.indices]

        # The walk: position j of every request that drafts that far, its predecessor already chosen.
        first = torch.cumsum(d, 0) - d
        tokens = torch.zeros(len(h), dtype=torch.int64, device=device)
        previous = torch.zeros_like(tokens)
        proposal = torch.zeros(top.values.shape, dtype=torch.float32, device=device)
        alive = torch.ones(len(who), dtype=torch.bool, device=device)
        last = context.anchors[who]
        reach = torch.zeros_like(d)
        for j in range(1, int(d.max()) + 1):
            active = ((d >= j) & alive).nonzero()[:, 0]
            if len(active) == 0:
                break
            rows = first[active] + (j - 1)
            previous[rows] = last[active]
            scores = self.model.candidate_selector.scores(
                top.values[rows], projected[rows], last[active], top.indices[rows]
            )
            choice, q = propose(scores, candidates[rows], who[active], j)
            bad = choice < 0
            choice = choice.clamp(min=0)
            tokens[rows] = candidates[rows].gather(1, choice[:, None]).squeeze(1)
            proposal[rows] = q
            last[active] = tokens[rows]
            alive[active] = ~bad
            reach[active] += (~bad).long()
        predecessor = self.model.candidate_selector.predecessor_codebook[previous]
        raw = self.model.post_draft_estimator(h, predecessor).float()
        request = who.repeat_interleave(d)
        post[request, position - 1] = raw
        conditional = torch.sigmoid(post / self.temperature)
        survival = conditional.cumprod(1)
        kept = (position <= reach.repeat_interleave(d)).nonzero()[:, 0]
        counts = torch.zeros(n, dtype=torch.int64, device=device)
        counts[who] = reach
        survival = survival * (torch.arange(block, device=device)[None, :] < counts[:, None])
        cu = torch.zeros(n + 1, dtype=torch.int64, device=device)
        cu[1:] = counts.cumsum(0)
        if len(kept) != len(tokens):
            tokens, candidates, proposal = tokens[kept], candidates[kept], proposal[kept]
        # The controller decides on the host: lengths and survival go there in one copy each.
        return Draft(tokens, cu.cpu(), candidates, proposal, survival.cpu()), post

    def _hidden(
        self, context: DraftContext, who: torch.Tensor, d: torch.Tensor, page_table: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [S, H] of the packed blocks of requests ``who`` and each slot's in-block index [S]."""
        slots = d + 1
        cu = torch.zeros(len(who) + 1, dtype=torch.int64, device=d.device)
        cu[1:] = slots.cumsum(0)
        slot_index = torch.arange(int(cu[-1]), device=d.device) - cu[:-1].repeat_interleave(slots)
        context_length = context.positions[who].repeat_interleave(slots)
        plan = AttentionPlan(cu, context_length, page_table[who.cpu().numpy()], self.kv.page_size, d.device)
        attend = BlockAttention(plan, self.kv, slots, self.model.config.causal)
        blocks = self.model.embed_blocks(self.embedding[context.anchors[who]], slot_index)
        return self.model(blocks, slot_index, context_length + slot_index, attend), slot_index
