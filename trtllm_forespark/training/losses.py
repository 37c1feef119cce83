"""The losses of §4.5 and appendix A: drafter, path selector and both estimators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.dflash2 import CandidateSelector, DFlash2


@dataclass(frozen=True)
class Targets:
    """What the target says at m anchors x d positions, in draft-vocabulary ids.

    label: [m, d], -1 where the draft vocabulary lacks the token. valid: [m, d] position lies inside the text.
    top_ids, top_probs: [m, d, 32], id -1 where absent. previous: [m, d] target ids of the teacher-forced predecessors.
    """

    label: torch.Tensor
    valid: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    previous: torch.Tensor


@dataclass(frozen=True)
class DraftLoss:
    """loss: scalar. acceptance: [m, d] soft acceptance alpha over the selector's candidates (no gradient).
    matched: [m, d] the selector's best candidate is the text's token."""

    loss: torch.Tensor
    acceptance: torch.Tensor
    matched: torch.Tensor


def position_weights(length: int) -> torch.Tensor:
    """w_j = exp(-(j - 1) / 4)."""
    return torch.exp(-torch.arange(length) / 4.0)


def candidate_probability(top_ids: torch.Tensor, top_probs: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """P(v) of candidates [r, C] from the target's top-32 [r, 32]; 0 for a token outside them."""
    same = candidates[:, :, None] == top_ids[:, None, :]
    return (same * top_probs[:, None, :]).sum(-1)


class _HeadColumns(torch.autograd.Function):
    """Log-normaliser and chosen columns of ``hidden @ head.T + latents @ successors.T`` with one pass over the
    vocabulary each way.

    Autograd's own route writes a dense gradient per gather; here backward is softmax * g plus one scatter. The head is
    the target's and frozen, so it gets no gradient. Candidates are the top of the first product alone.
    """

    @staticmethod
    def forward(ctx, hidden, head, latents, successors, columns, top_k):
        logits = F.linear(hidden.to(head.dtype), head).float()
        candidates = logits.topk(top_k, dim=-1).indices
        columns = torch.cat([candidates, columns], 1)
        if latents is not None:
            logits += F.linear(latents.to(head.dtype), successors.to(head.dtype)).float()
        log_z = logits.logsumexp(-1)
        ctx.save_for_backward(head, latents, successors, logits, log_z, columns)
        ctx.mark_non_differentiable(candidates)
        return log_z, logits.gather(1, columns), candidates

    @staticmethod
    def backward(ctx, grad_log_z, grad_columns, *_):
        head, latents, successors, logits, log_z, columns = ctx.saved_tensors
        corrected = latents is not None
        grad = torch.empty(logits.shape[0], head.shape[1])
        grad_latents = torch.empty_like(latents if corrected else grad[:0])
        grad_successors = torch.zeros_like(successors if corrected else grad[:0])
        for rows in torch.arange(logits.shape[0]).split(256):
            block = torch.exp(logits[rows] - log_z[rows, None]).mul_(grad_log_z[rows, None])
            block.scatter_add_(1, columns[rows], grad_columns[rows])
            block = block.to(head.dtype)
            grad[rows] = (block @ head).float()
            if corrected:
                grad_latents[rows] = (block @ successors.to(head.dtype)).to(grad_latents.dtype)
                grad_successors += (block.T @ latents[rows].to(head.dtype)).to(grad_successors.dtype)
        if not corrected:
            return grad, None, None, None, None, None
        return grad, None, grad_latents, grad_successors, None, None


@dataclass(frozen=True)
class _Rows:
    """Targets of r = m * d positions, flat: see `Targets`; known: in the text and in the draft vocabulary."""

    label: torch.Tensor
    known: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, targets: Targets) -> _Rows:
        m, length = targets.label.shape
        label, valid = targets.label.reshape(-1), targets.valid.reshape(-1)
        top = targets.top_ids.flatten(0, 1), targets.top_probs.flatten(0, 1)
        return cls(label, (label >= 0) & valid, *top, position_weights(length).repeat(m) * valid)

    @property
    def some_label(self) -> torch.Tensor:
        return self.label.clamp(min=0)[:, None]

    def over_vocabulary(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        latents: torch.Tensor | None,
        successors: torch.Tensor | None,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Candidates and their logits [r, k], the label's logit [r, 1], the weighted sum of cross-entropy, and the
        total variation [r], of ``hidden @ head.T`` corrected by ``latents @ successors.T``."""
        columns = torch.cat([self.some_label, self.top_ids.clamp(min=0)], 1)
        log_z, logits, candidates = _HeadColumns.apply(hidden, head, latents, successors, columns, top_k)
        of_candidates, of_label, of_top = logits.split([top_k, 1, self.top_ids.shape[1]], 1)
        ce = self.cross_entropy(of_label.squeeze(1) - log_z)
        return candidates, of_candidates, of_label, ce, self.variation(of_top - log_z[:, None])

    def cross_entropy(self, log_q: torch.Tensor) -> torch.Tensor:
        """Weighted sum of -log q [r] of the labels, where there is one."""
        return (self.weights * self.known * torch.where(self.known, -log_q, 0.0)).sum()

    def variation(self, log_q_top: torch.Tensor) -> torch.Tensor:
        """1 - sum min(P, Q) over the target's top-32 [r, 32] -> [r]."""
        q = torch.exp(log_q_top) * (self.top_ids >= 0)
        return 1.0 - torch.minimum(q, self.top_probs).sum(-1)


def draft_loss(
    model: BlockDrafter, hidden: torch.Tensor, head: torch.Tensor, targets: Targets, total_variation: float
) -> DraftLoss:
    """(1 - tv) CE + tv TV of the drafter's proposal. hidden [m, d, H], head [draft_vocab, H].

    TV is taken over the target's top-32 as 1 - sum min(P, Q), and times `BlockDrafter.variation`.
    """
    loss = _selector_loss if isinstance(model.corrector, CandidateSelector) else _markov_loss
    return loss(model, hidden, head, targets, total_variation)  # type: ignore[arg-type]


def _selector_loss(
    model: DFlash2, hidden: torch.Tensor, head: torch.Tensor, targets: Targets, total_variation: float
) -> DraftLoss:
    """For the head's logits and again for the selector's choice among its candidates."""
    m, length, size = hidden.shape
    flat, rows = hidden.reshape(m * length, size), _Rows.of(targets)
    selector = model.candidate_selector
    candidates, candidate_logits, label_logits, ce, tv = rows.over_vocabulary(flat, head, None, None, selector.top_k)

    widened = torch.cat([candidates, rows.some_label], 1)
    latents = selector.latents(flat, targets.previous.reshape(-1, 1))[0]
    with torch.autocast("cpu", enabled=False):  # bfloat16 would flip the order of close candidates
        logits = torch.cat([candidate_logits, label_logits], 1)
        scores = selector.scores(logits, latents, widened).squeeze(1)
    missed = (candidates != rows.label[:, None]).all(1) & rows.known
    # The label joins the candidates only where the top-k missed it, so that it never counts twice.
    scores = torch.cat([scores[:, :-1], scores[:, -1:].masked_fill(~missed[:, None], -torch.inf)], 1)
    log_q = scores.log_softmax(-1)
    column = torch.where(missed, selector.top_k, (candidates == rows.label[:, None]).int().argmax(1))
    selector_ce = rows.cross_entropy(log_q.gather(1, column[:, None]).squeeze(-1))
    p_candidates = candidate_probability(rows.top_ids, rows.top_probs, widened)
    selector_tv = 1.0 - torch.minimum(log_q.exp(), p_candidates).sum(-1)

    variation = (rows.weights * (tv + selector_tv)).sum()
    loss = ((1 - total_variation) * (ce + selector_ce) + total_variation * model.variation * variation) / (
        rows.weights.sum()
    )
    return DraftLoss(loss, *_accepted(scores[:, :-1], candidates, p_candidates[:, :-1], rows, (m, length)))


def _markov_loss(
    model: BlockDrafter, hidden: torch.Tensor, head: torch.Tensor, targets: Targets, total_variation: float
) -> DraftLoss:
    """For the corrected logits over the whole draft vocabulary, teacher-forced (LongSpark eq. 7-9)."""
    m, length, size = hidden.shape
    flat, rows = hidden.reshape(m * length, size), _Rows.of(targets)
    corrector = model.corrector
    latents = corrector.along(hidden, targets.previous).reshape(m * length, -1)
    candidates, candidate_logits, _, ce, tv = rows.over_vocabulary(
        flat, head, latents, corrector.successors, corrector.top_k
    )
    variation = (rows.weights * tv).sum()
    loss = ((1 - total_variation) * ce + total_variation * model.variation * variation) / rows.weights.sum()
    p_candidates = candidate_probability(rows.top_ids, rows.top_probs, candidates)
    return DraftLoss(loss, *_accepted(candidate_logits, candidates, p_candidates, rows, (m, length)))


@torch.no_grad()
def _accepted(
    scores: torch.Tensor, candidates: torch.Tensor, p: torch.Tensor, rows: _Rows, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft acceptance over the candidates [r, C], and whether the best one is the text's token; both [m, d]."""
    q = scores.softmax(-1)
    alpha = torch.minimum(q, p).sum(-1)
    matched = candidates.gather(1, q.argmax(-1, keepdim=True)).squeeze(1) == rows.label
    return alpha.view(shape), (matched & rows.known).view(shape)


def binary_cross_entropy(logits: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of the soft-label BCE weighted by ``weights`` (0 drops an entry)."""
    loss = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    return (loss * weights).sum() / weights.sum().clamp(min=1e-9)
