"""A DFlash 2 drafter at work: packed blocks of different lengths over each request's own paged context (§4.4)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, DrafterSpec, Proposer
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.models.attention import AttentionPlan
from trtllm_forespark.models.kv import PagedKV
from trtllm_forespark.models.linear import PackedLinear
from trtllm_forespark.wcs.stages import Draft, Estimate
from trtllm_forespark.wcs.survival import directional_to_survival, sigmoid, triangle_to_survival


@dataclass(frozen=True)
class Blocks:
    """Where everything lies in a packed pass of m blocks, an anchor's slot and d drafts each; known on the host.

    who: [m] requests that draft. d: [m]. starts: [m] slot of each anchor. index: [S] in-block index of each slot,
    block: [S] whose it is. drafts: [D] slots that are drafts, owner: [D] their block, position: [D] from 1.
    """

    who: np.ndarray
    d: np.ndarray
    starts: np.ndarray
    index: np.ndarray
    block: np.ndarray
    drafts: np.ndarray
    owner: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> Blocks:
        """lengths: [n] draft lengths, some 0."""
        who = np.flatnonzero(lengths)
        d = lengths[who]
        starts = np.cumsum(d + 1) - (d + 1)
        block = np.repeat(np.arange(len(who)), d + 1)
        index = np.arange(len(block)) - starts[block]
        drafts = np.flatnonzero(index)
        return cls(who, d, starts, index, block, drafts, block[drafts], index[drafts])

    @property
    def cu_slots(self) -> np.ndarray:
        """[m + 1]."""
        return np.append(self.starts, len(self.index))

    def walk(self, choice: np.ndarray) -> np.ndarray:
        """Follow choices [D, P] (where each predecessor column leads, -1 for nowhere) -> columns taken [m, longest],
        a shorter block's last row read again. On the host: some thousand integers, and a step a position."""
        first = np.cumsum(self.d) - self.d
        column = np.zeros(len(self.d), np.int64)
        steps = []
        for position in range(self.d.max()):
            steps.append(choice[first + np.minimum(position, self.d - 1), column])
            column = np.maximum(steps[-1], 0)
        return np.stack(steps, 1)


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
        self.num_pages, self._page_size, self._dtype = num_pages, page_size, dtype
        self._begin()

    def beside(self, num_pages: int) -> DFlash2Runner:
        """Another one over the same weights, with a context of its own, of so many pages."""
        other = copy.copy(self)
        other.num_pages = num_pages
        other._begin()
        return other

    def _begin(self) -> None:
        # A request in a batch holds a page, and drafts at most one block: that many scratch slots, after the pages.
        config, page_size = self.model.config, self._page_size
        self._scratch = self.num_pages * page_size
        scratch_pages = -(-self.num_pages * (config.block + 1) // page_size)
        self.kv = PagedKV(
            config.num_layers,
            self.num_pages + scratch_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            self._dtype,
            self.embedding.device,
        )

    def extend(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Absorb target features [T, L, H] of tokens at positions [T]; slots [T] of the paged context. -> c [T, H]."""
        context = self.model.fuse(features)
        rows = self.kv.rows(slots)
        for layer, (key, value) in enumerate(self.model.context_keys_values(context, self.model.rotary(positions))):
            self.kv.write_rows(layer, rows, key, value)
        return context

    def warm(self, rows: int) -> None:
        """Every kind of product a pass over ``rows`` slots makes, once (see `TorchBackend.warm`)."""
        model, config = self.model, self.model.config
        positions = self._to(np.zeros(rows, np.int64))
        context = model.fuse(self.embedding.new_zeros(rows, len(config.capture_layers), config.hidden_size))
        model.context_keys_values(context, model.rotary(positions))
        self.estimate_logits(positions, context)
        hidden = model(torch.zeros_like(context), positions, positions, lambda layer, query, key, value: query)
        self.head(hidden)
        selector = model.candidate_selector
        selector.hidden_projection(hidden)
        model.post_draft_estimator(hidden, selector.predecessor_codebook[positions])

    def estimate_logits(self, anchors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Raw pre-draft logits z [n, outputs] (eq. 2), float32; anchors [n], features c [n, H]."""
        return self.model.pre_draft_estimator(features, self.embedding[anchors]).float()

    def estimate(self, anchors: torch.Tensor, features: torch.Tensor) -> Estimate:
        """Calibrated pre-draft survival (eq. 3), on the host."""
        logits = self.estimate_logits(anchors, features).cpu().numpy()
        to_survival = directional_to_survival if self.spec.directional else triangle_to_survival
        survival = to_survival(logits, self.calibration.scale, self.calibration.bias)
        return Estimate(survival=survival, known=np.ones(len(logits), bool))

    def draft(
        self,
        context: DraftContext,
        lengths: Sequence[int] | np.ndarray,
        page_table: np.ndarray,
        propose: Proposer,
    ) -> Draft:
        """Draft lengths[i] tokens for request i; requests with length 0 take no part in the pass.

        page_table [n, P] on the host: pages of each request's context. A row whose scores are NaN ends its draft there.
        """
        return self.draft_with_logits(context, lengths, page_table, propose)[0]

    def draft_with_logits(
        self,
        context: DraftContext,
        lengths: Sequence[int] | np.ndarray,
        page_table: np.ndarray,
        propose: Proposer,
    ) -> tuple[Draft, torch.Tensor]:
        """`draft`, and the raw post-draft logits [n, K] (eq. 5 before theta) that calibration fits on."""
        wanted = np.asarray(lengths, np.int64)
        n, block = len(wanted), self.spec.block
        post = np.full((n, block), -np.inf, np.float32)
        at = Blocks.of(wanted)
        if len(at.who) == 0:
            none = self._to(np.zeros(0, np.int64))
            cu = torch.zeros(n + 1, dtype=torch.int64)
            empty = none.view(0, 1)
            return Draft(none, cu, empty, empty.float(), torch.zeros(n, block)), torch.from_numpy(post)
        h = self._hidden(context, at, page_table).index_select(0, self._to(at.drafts))
        selector = self.model.candidate_selector
        width = selector.top_k
        top = self.head(h).topk(width, dim=-1)
        candidates = self.d2t[top.indices]

        # A position's predecessor is one of the candidates before it (the anchor before the first): a token is drawn
        # for each of them at once, then the walk follows the drawn columns.
        first = at.position == 1
        at_first = self._to(first)
        anchors = self._to(np.asarray(context.anchors)[at.who[at.owner]])
        before = torch.where(at_first[:, None], anchors[:, None], candidates.roll(1, 0))
        scores = selector.scores(top.values, selector.hidden_projection(h), before, top.indices)
        choice, q = propose(
            scores.flatten(0, 1),
            candidates.repeat_interleave(width, 0),
            self._to(np.repeat(at.who[at.owner], width)),
            self._to(np.repeat(at.position, width)),
        )
        steps = at.walk(choice.view(-1, width).cpu().numpy())
        taken = np.maximum(steps[at.owner, at.position - 1], 0)
        column = self._to(taken)[:, None]
        came_from = self._to(np.where(first, 0, np.roll(taken, 1)))[:, None]
        tokens = candidates.gather(1, column).squeeze(1)
        previous = before.gather(1, came_from).squeeze(1)
        proposal = q.view(len(h), width, width).gather(1, came_from[:, :, None].expand(-1, 1, width)).squeeze(1)
        raw = self.model.post_draft_estimator(h, selector.predecessor_codebook[previous])

        # The controller decides on the host: what it reads goes there now.
        drawn = (steps >= 0) & (np.arange(steps.shape[1]) < at.d[:, None])
        reach = np.zeros(n, np.int64)
        reach[at.who] = np.logical_and.accumulate(drawn, axis=1).sum(axis=1)
        post[at.who[at.owner], at.position - 1] = raw.cpu().numpy()
        conditional = sigmoid(post / self.calibration.temperature)
        survival = np.multiply.accumulate(conditional, axis=1) * (np.arange(block) < reach[:, None])
        kept = np.flatnonzero(at.position <= reach[at.who[at.owner]])
        if len(kept) < len(tokens):
            index = self._to(kept)
            tokens, candidates, proposal = tokens[index], candidates[index], proposal[index]
        cu = torch.from_numpy(np.concatenate([[0], np.cumsum(reach)]))
        return Draft(tokens, cu, candidates, proposal, torch.from_numpy(survival)), torch.from_numpy(post)

    def _hidden(self, context: DraftContext, at: Blocks, page_table: np.ndarray) -> torch.Tensor:
        """Hidden states [S, H] of the packed blocks."""
        slots = len(at.index)
        length = np.asarray(context.positions)[at.who][at.block]
        own = np.arange(slots) + self._scratch
        plan = AttentionPlan(
            at.cu_slots,
            length,
            page_table[at.who],
            self.kv.page_size,
            self.embedding.device,
            own,
            self.model.config.causal,
        )
        anchors = self._to(np.asarray(context.anchors)[at.who])
        blocks = self.model.embed_blocks(self.embedding[anchors], self._to(at.starts), slots)
        attend = BlockAttention(plan, self.kv, self._to(own))
        return self.model(blocks, self._to(at.index), self._to(length + at.index), attend)

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.embedding.device)
