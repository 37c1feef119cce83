"""A block drafter at work: packed blocks of different lengths over each request's own context (§4.4).

`BlockRunner` does what all kinds share; where the context lives, and how a block attends to it, is a subclass's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, DrafterSpec, Proposer, Verified
from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.layers import Attend
from trtllm_forespark.drafters.packing import Blocks
from trtllm_forespark.models.kv import PagedKV
from trtllm_forespark.models.linear import PackedLinear
from trtllm_forespark.wcs.stages import Draft, Estimate
from trtllm_forespark.wcs.survival import directional_to_survival, sigmoid, triangle_to_survival


class Slots(NamedTuple):
    """D draft slots before anything is drawn: hidden [D, H]; of each one's candidates the logits, the columns of the
    head and the target ids, [D, C]; anchors [m] of the blocks."""

    at: Blocks
    hidden: torch.Tensor
    logits: torch.Tensor
    columns: torch.Tensor
    candidates: torch.Tensor
    anchors: torch.Tensor


class Drawn(NamedTuple):
    """What the correction drew for D draft slots. On the host: column [D] of each token among its candidates (-1 where
    the draft ended). On the device: previous [D] token before each, proposal [D, C]."""

    column: np.ndarray
    previous: torch.Tensor
    proposal: torch.Tensor


class BlockRunner:
    """See `DrafterRunner`. Everything but the context."""

    def __init__(
        self,
        model: BlockDrafter,
        calibration: Calibration,
        embedding: torch.Tensor,
        head: torch.Tensor,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        """embedding [V, H], head [V, H] of the target (the head's draft-vocabulary rows are copied). Call `begin`."""
        config = model.config
        device = embedding.device
        self.spec = DrafterSpec(
            name=config.kind,
            block=config.block,
            length_space="request",
            parallel=True,
            directional=config.causal,
            anchor_slots=config.anchor_slots,
            capture_layers=config.capture_layers,
            kv_layers=getattr(config, "kv_layers", ()),
            max_position=config.max_position,
        )
        self.calibration = calibration
        self.model = model.prepare(device, dtype)
        self.embedding = embedding
        self.d2t = self.model.d2t.to(device)
        self.head = PackedLinear(head[self.d2t].to(dtype))
        self.device = device
        self.page_size, self._dtype = page_size, dtype
        self.num_pages = self.seats = 0

    # The context ------------------------------------------------------------------------------------------------------

    def begin(self, num_pages: int, seats: int, target_kv: PagedKV | None = None) -> None:
        self.num_pages, self.seats = num_pages, seats
        self.boundary = torch.zeros(seats, self.model.config.hidden_size, dtype=self._dtype, device=self.device)

    def append(self, tokens: Verified) -> None:
        raise NotImplementedError

    def truncate(self, seat: int, slots: torch.Tensor, length: int) -> None:
        self.boundary[seat] = 0.0

    def free(self, seat: int) -> None:
        self.boundary[seat] = 0.0

    def clear(self, pages: torch.Tensor) -> None:
        """No pages of its own."""

    def state_bytes(self, tokens: int) -> int:
        raise NotImplementedError

    def attention(self, context: DraftContext, at: Blocks, page_table: np.ndarray) -> Attend:
        """How the packed blocks attend to their contexts and themselves."""
        raise NotImplementedError

    @staticmethod
    def by_seat(seats: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of packed tokens' seats [T]: the order that puts a seat's together, which occur, how many of each, and the
        row of each one's last."""
        order = np.argsort(seats, kind="stable")
        whose, counts = np.unique(seats, return_counts=True)
        return order, whose, counts, order[np.cumsum(counts) - 1]

    # Estimates --------------------------------------------------------------------------------------------------------

    def estimate(self, context: DraftContext) -> Estimate:
        features = self.boundary.index_select(0, self._to(np.asarray(context.seats, np.int64)))
        anchors = self._to(np.asarray(context.anchors, np.int64))
        logits = self.model.pre_draft_estimator(features, self.embedding[anchors]).float().cpu().numpy()
        to_survival = directional_to_survival if self.spec.directional else triangle_to_survival
        survival = to_survival(logits, self.calibration.scale, self.calibration.bias)
        return Estimate(survival=survival, known=np.ones(len(logits), bool), logits=logits)

    # Drafting ---------------------------------------------------------------------------------------------------------

    def draft(
        self, context: DraftContext, lengths: Sequence[int] | np.ndarray, page_table: np.ndarray, propose: Proposer
    ) -> Draft:
        """Draft lengths[i] tokens for request i; requests with length 0 take no part in the pass.

        A row whose scores are NaN ends its draft there.
        """
        wanted = np.asarray(lengths, np.int64)
        n, block = len(wanted), self.spec.block
        post = np.full((n, block), -np.inf, np.float32)
        at = Blocks.of(wanted, self.spec.anchor_slots)
        if len(at.who) == 0:
            none = self._to(np.zeros(0, np.int64))
            cu = torch.zeros(n + 1, dtype=torch.int64)
            empty = none.view(0, 1)
            return Draft(none, cu, empty, empty.float(), torch.zeros(n, block), post)
        h = self.hidden(context, at, page_table).index_select(0, self._to(at.drafts))
        corrector = self.model.corrector
        logits, columns = self.head(h).topk(corrector.top_k, dim=-1)
        candidates = self.d2t[columns]
        anchors = self._to(np.asarray(context.anchors, np.int64)[at.who])
        draw = self._draw_paired if corrector.paired else self._draw_in_turn
        drawn = draw(Slots(at, h, logits, columns, candidates, anchors), propose)
        tokens = candidates.gather(1, self._to(np.maximum(drawn.column, 0))[:, None]).squeeze(1)
        raw = self.model.post_logits(h, drawn.previous)

        # The controller decides on the host: what it reads goes there now.
        there = np.zeros((len(at.d), block), bool)
        there[at.owner, at.position - 1] = drawn.column >= 0
        reach = np.zeros(n, np.int64)
        reach[at.who] = np.logical_and.accumulate(there, axis=1).sum(axis=1)
        post[at.who[at.owner], at.position - 1] = raw.cpu().numpy()
        conditional = sigmoid(post / self.calibration.temperature)
        there = np.arange(block) < reach[:, None]
        survival = np.where(there, np.multiply.accumulate(conditional, axis=1), np.float32(0))
        proposal = drawn.proposal
        kept = np.flatnonzero(at.position <= reach[at.who[at.owner]])
        if len(kept) < len(tokens):
            index = self._to(kept)
            tokens, candidates, proposal, h = (x.index_select(0, index) for x in (tokens, candidates, proposal, h))
        cu = torch.from_numpy(np.concatenate([[0], np.cumsum(reach)]))
        return Draft(tokens, cu, candidates, proposal, torch.from_numpy(survival), post, h)

    def _draw_paired(self, slots: Slots, propose: Proposer) -> Drawn:
        """A position's predecessor is one of the candidates before it (the anchor before the first): a token is drawn
        for each of them at once, then the walk follows the drawn columns."""
        at, h, logits, columns, candidates, anchors = slots
        corrector, width = self.model.corrector, candidates.shape[1]
        first = at.position == 1
        owner = self._to(at.owner)
        before = torch.where(self._to(first)[:, None], anchors[owner][:, None], candidates.roll(1, 0))
        scores = corrector.scores(logits, corrector.latents(h, before)[0], columns)
        choice, q = propose(
            scores.flatten(0, 1),
            candidates.repeat_interleave(width, 0),
            self._to(np.repeat(at.who[at.owner], width)),
            self._to(np.repeat(at.position, width)),
        )
        steps = at.walk(choice.view(-1, width).cpu().numpy())
        column = steps[at.owner, at.position - 1]
        came_from = self._to(np.where(first, 0, np.roll(np.maximum(column, 0), 1)))[:, None]
        previous = before.gather(1, came_from).squeeze(1)
        proposal = q.view(len(h), width, width).gather(1, came_from[:, :, None].expand(-1, 1, width)).squeeze(1)
        return Drawn(column, previous, proposal)

    def _draw_in_turn(self, slots: Slots, propose: Proposer) -> Drawn:
        """Position by position, for a correction that reads the whole path, or has too many candidates for pairs."""
        at, h, logits, columns, candidates, anchors = slots
        corrector = self.model.corrector
        column = np.full(len(h), -1, np.int64)
        previous = torch.zeros(len(h), dtype=torch.int64, device=self.device)
        proposal = torch.zeros(candidates.shape, device=self.device)
        last, state = anchors, None
        for position in range(1, int(at.d.max()) + 1):
            where = np.flatnonzero(at.position == position)  # one row a block that is so long, in order of blocks
            rows, who = self._to(where), self._to(at.owner[where])
            before = last.index_select(0, who)
            latents, new = corrector.latents(h[rows], before[:, None], None if state is None else state[who])
            scores = corrector.scores(logits[rows], latents, columns[rows]).squeeze(1)
            choice, q = propose(scores, candidates[rows], self._to(at.who[at.owner[where]]), position)
            column[where] = choice.cpu().numpy()
            previous[rows], proposal[rows] = before, q
            token = candidates[rows].gather(1, choice.clamp(min=0)[:, None]).squeeze(1)
            last = last.index_copy(0, who, token)
            if new is not None:
                state = new.new_zeros(len(at.d), new.shape[1]).index_copy(0, who, new)
        return Drawn(column, previous, proposal)

    def hidden(self, context: DraftContext, at: Blocks, page_table: np.ndarray) -> torch.Tensor:
        """Hidden states [S, H] of the packed blocks."""
        anchors = self._to(np.asarray(context.anchors, np.int64)[at.who])
        seats = self._to(np.asarray(context.seats, np.int64)[at.who][at.block])
        index = self._to(at.index)
        length = np.asarray(context.positions)[at.who][at.block]
        blocks = self.model.embed_blocks(
            self.embedding[anchors], self._to(at.starts), index, self.boundary.index_select(0, seats)
        )
        attend = self.attention(context, at, page_table)
        return self.model(blocks, index, self._to(length + at.index), attend)

    def warm(self, rows: int) -> None:
        model, config = self.model, self.model.config
        zeros = self._to(np.zeros(rows, np.int64))
        context = model.fuse(self.embedding.new_zeros(rows, len(config.capture_layers), config.hidden_size))
        if model.owns_context:
            model.context_keys_values(context, model.rotary(zeros))
        model.pre_draft_estimator(context, self.embedding[zeros])
        blocks = model.embed_blocks(self.embedding[zeros[:1]], zeros[:1], zeros, context)
        hidden = model(blocks, zeros, zeros, lambda layer, query, key, value: query)
        self.head(hidden)
        model.corrector.latents(hidden, zeros[:, None])
        model.post_logits(hidden, zeros)

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def make_runner(
    model: BlockDrafter,
    calibration: Calibration,
    embedding: torch.Tensor,
    head: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
) -> BlockRunner:
    """The runner of a model's kind."""
    from trtllm_forespark.drafters.paged_context import PagedRunner
    from trtllm_forespark.drafters.view_context import ViewRunner

    kind = PagedRunner if model.owns_context else ViewRunner
    return kind(model, calibration, embedding, head, page_size, dtype)
