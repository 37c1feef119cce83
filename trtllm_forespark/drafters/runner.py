"""A DFlash 2 drafter at work: packed blocks of different lengths over each request's own paged context (§4.4)."""

from __future__ import annotations

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, DrafterSpec, Proposer
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.models.attention import AttentionPlan
from trtllm_forespark.models.kv import PagedKV
from trtllm_forespark.models.linear import PackedLinear
from trtllm_forespark.wcs.stages import Draft, Estimate
from trtllm_forespark.wcs.survival import directional_to_survival, triangle_to_survival


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
        self.model = model.prepare(device, dtype)
        self.embedding = embedding
        self.d2t = self.model.d2t.to(device)
        self.head = PackedLinear(head[self.d2t].to(dtype))
        # A request in a batch holds a page, and drafts at most one block: that many scratch slots, after the pages.
        self.num_pages, self._scratch = num_pages, num_pages * page_size
        scratch_pages = -(-num_pages * (config.block + 1) // page_size)
        self.kv = PagedKV(
            config.num_layers,
            num_pages + scratch_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            device,
        )
        self.temperature = torch.from_numpy(calibration.temperature).to(device)

    def extend(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Absorb target features [T, L, H] of tokens at positions [T]; slots [T] of the paged context. -> c [T, H]."""
        context = self.model.fuse(features)
        rows = self.kv.rows(slots)
        for layer, (key, value) in enumerate(self.model.context_keys_values(context, self.model.rotary(positions))):
            self.kv.write_rows(layer, rows, key, value)
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
        selector = self.model.candidate_selector
        top = self.head(h).topk(selector.top_k, dim=-1)
        candidates = self.d2t[top.indices]
        request = who.repeat_interleave(d)

        # A position's predecessor is one of the candidates before it (the anchor before the first): a token is drawn
        # for each of them at once, then the walk follows the drawn columns.
        at_first = (position == 1)[:, None]
        before = torch.where(at_first, context.anchors[request][:, None], candidates.roll(1, 0))
        scores = selector.scores(top.values, selector.hidden_projection(h), before, top.indices)
        width = selector.top_k
        choice, q = propose(
            scores.flatten(0, 1),
            candidates.repeat_interleave(width, 0),
            request.repeat_interleave(width),
            position.repeat_interleave(width),
        )
        column, reach = self._walk(choice.view(-1, width), d)
        came_from = torch.where(at_first[:, 0], 0, column.roll(1))[:, None]
        tokens = candidates.gather(1, column[:, None]).squeeze(1)
        previous = before.gather(1, came_from).squeeze(1)
        proposal = q.view(len(h), width, width).gather(1, came_from[:, :, None].expand(-1, 1, width)).squeeze(1)
        predecessor = selector.predecessor_codebook[previous]
        raw = self.model.post_draft_estimator(h, predecessor).float()
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

    @staticmethod
    def _walk(choice: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Follow choices [D, P] (where each predecessor column leads, -1 for nowhere) along blocks of d [m] positions.

        Returns the column taken at each packed position [D], and how far each request came [m].
        """
        first = torch.cumsum(d, 0) - d
        column = torch.zeros_like(d)
        path = []
        for j in range(int(d.max())):
            step = choice[first + torch.minimum(d - 1, torch.full_like(d, j)), column]
            path.append(step)
            column = step.clamp(min=0)
        steps = torch.stack(path, 1)
        inside = torch.arange(len(path), device=d.device) < d[:, None]
        reach = ((steps >= 0) & inside).cumprod(1).sum(1)
        return steps[inside].clamp(min=0), reach

    def _hidden(
        self, context: DraftContext, who: torch.Tensor, d: torch.Tensor, page_table: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [S, H] of the packed blocks of requests ``who`` and each slot's in-block index [S]."""
        slots = d + 1
        cu = torch.zeros(len(who) + 1, dtype=torch.int64, device=d.device)
        cu[1:] = slots.cumsum(0)
        packed = torch.arange(int(cu[-1]), device=d.device)
        slot_index = packed - cu[:-1].repeat_interleave(slots)
        context_length = context.positions[who].repeat_interleave(slots)
        own = packed + self._scratch
        plan = AttentionPlan(
            cu,
            context_length,
            page_table[who.cpu().numpy()],
            self.kv.page_size,
            d.device,
            own.cpu().numpy(),
            self.model.config.causal,
        )
        blocks = self.model.embed_blocks(self.embedding[context.anchors[who]], slot_index)
        attend = BlockAttention(plan, self.kv, own)
        return self.model(blocks, slot_index, context_length + slot_index, attend), slot_index
