"""Verification: which drafts the target accepts and which token follows them, without changing its distribution.

docs/lossless.md. Three kinds of request in one batch:

- greedy: a draft is accepted while it equals the target's argmax (rule 4);
- seeded: a draft is accepted while it equals argmax(log p + gumbel(seed, position)) (rule 7);
- unseeded: a draft x is accepted with probability min(1, p(x) / q(x)), else a token of the residual [p - q]+ follows,
  or of p where the residual has no mass (rule 3). After b_i accepted drafts a token of p follows: a draft that was
  dropped before verification is no rejection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_forespark.runtime.noise import draw, draw_seeded
from trtllm_forespark.runtime.sampling import GREEDY, SEEDED, UNSEEDED, SamplingRows, bar, target_logits
from trtllm_forespark.wcs.stages import Array, Draft, Outcome


@dataclass(frozen=True)
class Verified:
    """What the target decided, on its device. Rows of request i: cu_rows[i] to cu_rows[i + 1], b_i + 1 of them.

    accepted: [n] int64, drafts accepted, <= b_i.
    failed: [n] bool, the logits that were to give the next token held a NaN or no finite value: the request ends with
    an error after its accepted drafts.
    tokens: [sum(b_i + 1)] int64, the emitted tokens at a request's first rows (accepted drafts, then one more unless
    it failed), -1 after them.
    """

    accepted: Tensor
    failed: Tensor
    tokens: Tensor
    cu_rows: Tensor

    def outcome(self) -> Outcome:
        """The stage record, its emitted tokens as lists on the host (the one place that waits for the device)."""
        tokens, starts = self.tokens.tolist(), self.cu_rows.tolist()
        counts = (self.accepted + 1 - self.failed.long()).tolist()
        emitted = [tokens[start : start + count] for start, count in zip(starts, counts, strict=False)]
        return Outcome(accepted=self.accepted.cpu(), emitted=emitted)


@dataclass(frozen=True)
class _Layout:
    """For each packed row [R]: its request, its place there, and its draft row where it has one."""

    request: Tensor
    place: Tensor
    is_draft: Tensor
    draft_row: Tensor


def verify(
    draft: Draft, verified_lengths: Array, logits: Tensor, rows: SamplingRows, generator: torch.Generator
) -> Verified:
    """Verify the first b_i drafts of every request and draw the token after the accepted ones.

    draft: packed drafts of n requests (`proposal` and `candidates` are read for unseeded requests only).
    verified_lengths: [n] b_i <= d_i; 0 is plain autoregressive sampling.
    logits: [sum(b_i + 1), V], packed by request; row 0 of a request follows its anchor, row j its draft j.
    rows: [n], for the token after each anchor.
    generator: the verification stream, for unseeded requests alone, never the one that drafted (rule 2).
    Greedy and seeded rows need no softmax over the vocabulary.
    Raises ValueError where lengths and rows of logits do not match (checked on the CPU only: elsewhere it would wait).
    """
    n, total, device = len(rows), logits.shape[0], logits.device
    b = torch.as_tensor(verified_lengths, dtype=torch.int64, device=device)
    cu_rows = torch.zeros(n + 1, dtype=torch.int64, device=device)
    torch.cumsum(b + 1, 0, out=cu_rows[1:])
    if n == 0:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return Verified(none, none.bool(), none, cu_rows)
    if device.type == "cpu" and int(cu_rows[-1]) != total:
        raise ValueError(
            f"verify: {total} rows of logits for verified lengths that need {int(cu_rows[-1])} (b_i + 1 each)"
        )
    cu_draft = torch.as_tensor(draft.cu_lengths, dtype=torch.int64, device=device)
    drafted = torch.as_tensor(draft.token_ids, device=device).long()
    at = _layout(b, cu_rows, cu_draft, total)
    # Every request has a row that no draft can match (its last), so a padding token may stand in there.
    token = drafted[at.draft_row] if len(drafted) else torch.full_like(at.place, -1)

    target, accepts, bad, unseeded = _judge(draft, logits, rows, at, token, generator)
    accepts &= at.is_draft & ~bad
    beyond = at.place.masked_fill(accepts, total)
    accepted = torch.full_like(b, total).scatter_reduce_(0, at.request, beyond, "amin")
    last = cu_rows[:-1] + accepted
    failed = bad[last]
    if unseeded is not None:
        index, p, row_of = unseeded
        chosen = last if index is None else last[index]
        final = p[chosen if row_of is None else row_of[chosen]]
        final = _residual(final, draft, at.draft_row[chosen], at.is_draft[chosen])
        target[chosen] = draw(final, generator)
    tokens = torch.where(at.place < accepted[at.request], token, -1)
    tokens[last] = target[last].masked_fill(failed, -1)
    return Verified(accepted, failed, tokens, cu_rows)


def _layout(b: Tensor, cu_rows: Tensor, cu_draft: Tensor, total: int) -> _Layout:
    request = torch.repeat_interleave(torch.arange(len(b), device=b.device), b + 1, output_size=total)
    place = torch.arange(total, device=b.device) - cu_rows[request]
    is_draft = place < b[request]
    draft_row = (cu_draft[request] + place).masked_fill(~is_draft, 0)
    return _Layout(request, place, is_draft, draft_row)


Unseeded = tuple[Tensor | None, Tensor, Tensor | None]
"""Unseeded requests [u] (None: all), p at their rows [R_u, V], and packed row -> row of p (None: the same)."""


def _judge(
    draft: Draft, logits: Tensor, rows: SamplingRows, at: _Layout, token: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Unseeded | None]:
    """For every packed row: the token taken there (greedy, seeded), is the draft accepted, is the row bad."""
    plain = rows.kinds <= {GREEDY} and rows.barred is None
    by_row = rows if plain else rows.select(at.request).shift(at.place)
    target = torch.zeros_like(at.place)
    accepts = torch.zeros_like(at.is_draft)
    bad = torch.zeros_like(at.is_draft)
    unseeded: Unseeded | None = None
    for kind in sorted(rows.kinds):
        index = by_row.of_kind(kind)
        some = slice(None) if index is None else index
        part = by_row if index is None else by_row.select(index, frozenset({kind}))
        x = logits if index is None else logits[index]
        if kind == GREEDY:
            x = bar(x, part)
            most, best = x.max(-1)
            target[some], bad[some] = best, ~most.isfinite()
            accepts[some] = best == token[some]
            continue
        x, bad[some] = target_logits(x, part)
        if kind == SEEDED:
            taken = draw_seeded(x, part.seed, part.position)
            target[some], accepts[some] = taken, taken == token[some]
        else:
            p = x.softmax(-1)
            accepts[some] = _accept(p, draft, at.draft_row[some], at.is_draft[some], token[some], generator)
            row_of = None
            if index is not None:
                row_of = torch.zeros_like(at.place)
                row_of[index] = torch.arange(len(index), device=x.device)
            unseeded = (rows.of_kind(UNSEEDED), p, row_of)
    return target, accepts, bad, unseeded


def _accept(
    p: Tensor, draft: Draft, draft_row: Tensor, is_draft: Tensor, token: Tensor, generator: torch.Generator
) -> Tensor:
    """Accept draft `token` [m] with probability min(1, p / q); a token that q did not propose is never accepted."""
    uniform = torch.rand(len(p), generator=generator, device=p.device, dtype=torch.float64)
    candidates, q = _proposal(draft, draft_row, is_draft, p)
    q_token = (q * (candidates == token[:, None])).sum(-1)
    p_token = p.gather(1, token.clamp(min=0)[:, None])[:, 0]
    return (q_token > 0) & (uniform * q_token < p_token)


def _residual(p: Tensor, draft: Draft, draft_row: Tensor, rejected: Tensor) -> Tensor:
    """[p - q]+ [m, V] where a draft was rejected; p where none was, or where nothing is left of it."""
    candidates, q = _proposal(draft, draft_row, rejected, p)
    rest = p.scatter_add(1, candidates, -q).clamp_(min=0)
    return torch.where((rest.sum(-1, keepdim=True) > 0), rest, p)


def _proposal(draft: Draft, draft_row: Tensor, is_draft: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates and q [m, C] of the given draft rows; q = 0 for rows without a draft or with a q that holds a NaN."""
    if not len(draft.token_ids):
        zero = torch.zeros(len(draft_row), 1, device=like.device)
        return zero.long(), zero
    candidates = torch.as_tensor(draft.candidates, device=like.device).long()[draft_row]
    q = torch.as_tensor(draft.proposal, device=like.device).to(like.dtype)[draft_row]
    usable = is_draft & q.isfinite().all(-1)
    return candidates, q.masked_fill(~usable[:, None], 0.0)
