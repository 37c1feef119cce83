"""The losses of §4.5 and appendix A: drafter, path selector and both estimators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trtllm_forespark.drafters.dflash2 import DFlash2


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
    """Log-normaliser and chosen columns of ``hidden @ head.T`` with one pass over the vocabulary each way.

    Autograd's own route writes a dense gradient per gather; here backward is softmax * g plus one scatter. The head is
    the target's and frozen, so it gets no gradient.
    """

    @staticmethod
    def forward(ctx, hidden, head, columns, top_k):
        logits = F.linear(hidden.to(head.dtype), head).float()
        candidates = logits.topk(top_k, dim=-1).indices
        columns = torch.cat([candidates, columns], 1)
        log_z = logits.logsumexp(-1)
        ctx.save_for_backward(head, logits, log_z, columns)
        ctx.mark_non_differentiable(candidates)
        return log_z, logits.gather(1, columns), candidates

    @staticmethod
    def backward(ctx, grad_log_z, grad_columns, _):
        head, logits, log_z, columns = ctx.saved_tensors
        grad = torch.empty(logits.shape[0], head.shape[1])
        for rows in torch.arange(logits.shape[0]).split(256):
            block = torch.exp(logits[rows] - log_z[rows, None]).mul_(grad_log_z[rows, None])
            block.scatter_add_(1, columns[rows], grad_columns[rows])
            grad[rows] = (block.to(head.dtype) @ head).float()
        return grad, None, None, None


def draft_loss(
    model: DFlash2, hidden: torch.Tensor, head: torch.Tensor, targets: Targets, total_variation: float
) -> DraftLoss:
    """(1 - tv) CE + tv TV for the head's logits and again for the selector's choice among its candidates.

    hidden [m, d, H], head [draft_vocab, H]. TV is taken over the target's top-32 as 1 - sum min(P, Q).
    """
    m, length, size = hidden.shape
    flat = hidden.reshape(m * length, size)
    label, valid = targets.label.reshape(-1), targets.valid.reshape(-1)
    top_ids, top_probs = targets.top_ids.flatten(0, 1), targets.top_probs.flatten(0, 1)
    selector = model.candidate_selector
    known = (label >= 0) & valid
    some_label = label.clamp(min=0)[:, None]
    log_z, columns, candidates = _HeadColumns.apply(
        flat, head, torch.cat([some_label, top_ids.clamp(min=0)], 1), selector.top_k
    )
    candidate_logits, label_logits, top_logits = columns.split([selector.top_k, 1, top_ids.shape[1]], 1)
    ce = log_z - label_logits.squeeze(1)
    q_top = torch.exp(top_logits - log_z[:, None]) * (top_ids >= 0)
    tv = 1.0 - torch.minimum(q_top, top_probs).sum(-1)

    widened = torch.cat([candidates, some_label], 1)
    projected = selector.hidden_projection(flat)
    with torch.autocast("cpu", enabled=False):  # bfloat16 would flip the order of close candidates
        logits = torch.cat([candidate_logits, label_logits], 1)
        scores = selector.scores(logits, projected, targets.previous.reshape(-1, 1), widened).squeeze(1)
    missed = (candidates != label[:, None]).all(1) & known
    # The label joins the candidates only where the top-k missed it, so that it never counts twice.
    scores = torch.cat([scores[:, :-1], scores[:, -1:].masked_fill(~missed[:, None], -torch.inf)], 1)
    log_q = scores.log_softmax(-1)
    column = torch.where(missed, selector.top_k, (candidates == label[:, None]).int().argmax(1))
    selector_ce = -log_q.gather(1, column[:, None]).squeeze(-1)
    p_candidates = candidate_probability(top_ids, top_probs, widened)
    selector_tv = 1.0 - torch.minimum(log_q.exp(), p_candidates).sum(-1)

    weights = position_weights(length).repeat(m) * valid
    has_label = known.to(ce.dtype)
    ce_part = (weights * has_label * (torch.where(known, ce, 0.0) + torch.where(known, selector_ce, 0.0))).sum()
    tv_part = (weights * (tv + selector_tv)).sum()
    loss = ((1 - total_variation) * ce_part + total_variation * tv_part) / weights.sum()

    with torch.no_grad():
        q = scores[:, :-1].softmax(-1)
        alpha = torch.minimum(q, p_candidates[:, :-1]).sum(-1)
        matched = candidates.gather(1, q.argmax(-1, keepdim=True)).squeeze(1) == label
    return DraftLoss(loss, alpha.view(m, length), (matched & known).view(m, length))


def binary_cross_entropy(logits: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of the soft-label BCE weighted by ``weights`` (0 drops an entry)."""
    loss = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
    return (loss * weights).sum() / weights.sum().clamp(min=1e-9)
