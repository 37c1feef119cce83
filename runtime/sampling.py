"""From logits to the distribution a token is drawn from, and the drafter's choice among its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trtllm_forespark.runtime.noise import draw, gumbel
from trtllm_forespark.runtime.request import GREEDY, SEEDED, UNSEEDED, Request

_TOP_P_LADDER = (64, 512, 4096)


@dataclass(frozen=True)
class SamplingRows:
    """What each of m rows of logits is sampled with, packed; made by `of`, cheap to shift and to select from.

    reals: [m, 3] float32, (temperature, top_p, min_p). ints: [m, 5] int64, (kind, top_k, seed, position, min_tokens),
    where position is the index in the request's output of the token this row decides, and top_k 0 is off.
    barred: [m, E] token ids that cannot be drawn while position < min_tokens (a row's list is padded by repetition),
    or None. kinds, top_k_most, has_top_p, has_min_p: what may occur in these rows, known on the host, so that a path
    nobody needs costs nothing and reads nothing back from the device.
    """

    reals: Tensor
    ints: Tensor
    barred: Tensor | None
    kinds: frozenset[int]
    top_k_most: int
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device | str = "cpu") -> SamplingRows:
        """One row a request, for the next token of its output (the one after the anchor)."""
        params = [r.params for r in requests]
        reals = np.array([p.row[0] for p in params], np.float32).reshape(-1, 3)
        ints = np.empty((len(params), 5), np.int64)
        ints[:, [0, 1, 2, 4]] = np.array([p.row[1] for p in params], np.int64).reshape(-1, 4)
        ints[:, 3] = [len(r.output_ids) for r in requests]
        early = ints[:, 3] < ints[:, 4]
        barred = [tuple(r.barred_ids) if e else () for r, e in zip(requests, early, strict=True)] if early.any() else []
        widest = max(map(len, barred), default=0)
        padded = [(ids + ids[-1:] * widest)[:widest] or (0,) * widest for ids in barred]
        if barred:  # A row without barred ids lists token 0; its min_tokens must not bar it.
            ints[[not ids for ids in barred], 4] = 0
        else:
            ints[:, 4] = 0
        return cls(
            reals=torch.from_numpy(reals).to(device),
            ints=torch.from_numpy(ints).to(device),
            barred=torch.tensor(padded, dtype=torch.int64).to(device) if widest else None,
            kinds=frozenset(ints[:, 0].tolist()),
            top_k_most=int(ints[:, 1].max(initial=0)),
            has_top_p=bool((reals[:, 1] < 1).any()),
            has_min_p=bool((reals[:, 2] > 0).any()),
        )

    def __len__(self) -> int:
        return self.ints.shape[0]

    @property
    def temperature(self) -> Tensor:
        return self.reals[:, 0]

    @property
    def top_p(self) -> Tensor:
        return self.reals[:, 1]

    @property
    def min_p(self) -> Tensor:
        return self.reals[:, 2]

    @property
    def kind(self) -> Tensor:
        return self.ints[:, 0]

    @property
    def top_k(self) -> Tensor:
        return self.ints[:, 1]

    @property
    def seed(self) -> Tensor:
        return self.ints[:, 2]

    @property
    def position(self) -> Tensor:
        return self.ints[:, 3]

    @property
    def min_tokens(self) -> Tensor:
        return self.ints[:, 4]

    def select(self, index: Tensor, kinds: frozenset[int] | None = None) -> SamplingRows:
        """The rows at index [k] (repeats allowed); kinds narrows what they are known to be."""
        barred = None if self.barred is None else self.barred[index]
        return replace(
            self,
            reals=self.reals[index],
            ints=self.ints[index],
            barred=barred,
            kinds=self.kinds if kinds is None else kinds,
        )

    def shift(self, offset: Tensor | int) -> SamplingRows:
        """The same rows for tokens `offset` ([m] or a number) further on in their outputs."""
        ints = self.ints.clone()
        ints[:, 3] += offset
        return replace(self, ints=ints)

    def unbarred(self) -> SamplingRows:
        """The same rows without min_tokens (for logits whose columns are not the vocabulary)."""
        return self if self.barred is None else replace(self, barred=None)

    def of_kind(self, kind: int) -> Tensor | None:
        """Index [k] of the rows of one kind; None where all are. Reads back from the device in mixed batches only."""
        return None if self.kinds <= {kind} else (self.kind == kind).nonzero()[:, 0]


def bar(logits: Tensor, rows: SamplingRows) -> Tensor:
    """logits [m, V] with -inf at tokens that min_tokens forbids; the same tensor where nothing is forbidden."""
    if rows.barred is None:
        return logits
    active = (rows.position < rows.min_tokens)[:, None]
    values = logits.gather(1, rows.barred).masked_fill(active, -torch.inf)
    return logits.scatter(1, rows.barred, values)


def target_logits(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Logits after min_tokens, temperature, top-k, top-p and min-p, in this order.

    logits: [m, V], any float type. Returns (float32 [m, V], the largest of a row 0, -inf where p = 0; bad [m] bool,
    rows with a NaN or without a finite largest logit, whose values mean nothing).
    """
    x = bar(logits, rows).to(torch.float32)
    top = x.amax(-1, keepdim=True) if x.shape[1] else x.new_full((x.shape[0], 1), torch.nan)
    x = x.sub(top).div_(rows.temperature[:, None])
    if rows.top_k_most:
        x = _keep_top_k(x, rows.top_k, rows.top_k_most)
    if rows.has_top_p:
        x = _keep_top_p(x, rows.top_p)
    if rows.has_min_p:
        x = x.masked_fill_(x < rows.min_p.log()[:, None], -torch.inf)  # the likeliest token's x is 0
    return x, ~top[:, 0].isfinite()


def target_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """p [m, V] float32: the target's distribution after all that is asked for; greedy rows are one-hot."""
    p = target_logits(logits, rows)[0].softmax(-1)
    if GREEDY in rows.kinds:
        best = torch.zeros_like(p).scatter_(1, bar(logits, rows).argmax(-1, keepdim=True), 1.0)
        p = torch.where((rows.kind == GREEDY)[:, None], best, p)
    return p


def _keep_top_k(x: Tensor, k: Tensor, most: int) -> Tensor:
    """-inf below a row's k-th largest value; ties with it stay, so that the result depends on values alone."""
    most = min(most, x.shape[1])
    values = x.topk(most, dim=-1).values
    least = values.gather(1, (k - 1).clamp(0, most - 1)[:, None])
    return x.masked_fill_((x < least) & (k > 0)[:, None], -torch.inf)


def _keep_top_p(x: Tensor, p: Tensor) -> Tensor:
    """-inf outside the fewest largest values whose probability reaches p (ties with the last of them stay).

    No sort of the vocabulary: the largest 64 are looked at first, more only for rows whose 64 do not reach p. A row's
    result does not depend on the other rows.
    """
    vocab = x.shape[1]
    share = x.softmax(-1)
    edge = torch.zeros_like(share[:, 0])
    todo: Tensor | None = None
    for count in (*(c for c in _TOP_P_LADDER if c < vocab), vocab):
        goal = (p if todo is None else p[todo]).double()
        most = (share if todo is None else share[todo]).topk(count, dim=-1).values
        mass = most.double().cumsum(-1)
        last = ((mass - most) < goal[:, None]).sum(-1, keepdim=True).clamp_(min=1) - 1
        found = most.gather(1, last)[:, 0].masked_fill(goal >= 1, 0.0)
        if todo is None:
            edge = found
        else:
            edge[todo] = found
        unreached = ~((mass[:, -1] >= goal) | (goal >= 1) | ~(most[:, -1] > 0))
        todo = unreached.nonzero()[:, 0] if todo is None else todo[unreached]
        if not len(todo):
            break
    return x.masked_fill_(share < edge[:, None], -torch.inf)


class Proposal(NamedTuple):
    """choice: [n] column of the drafted candidate. q: [n, C] what it was drawn from. bad: [n] drop this draft."""

    choice: Tensor
    q: Tensor
    bad: Tensor


def propose(scores: Tensor, candidates: Tensor, rows: SamplingRows, generator: torch.Generator) -> Proposal:
    """Choose one draft token a request among its candidates (rules 2 and 7).

    scores: [n, C] the drafter's logits for one position, -inf for a padded candidate. candidates: [n, C] token ids in
    the target's vocabulary. rows: [n], shifted to the position being drafted. generator: the draft stream.
    q is the softmax after temperature, top-k, top-p and min-p over the candidates, one-hot for greedy rows. Seeded
    rows take argmax(log q + gumbel) with the noise the target will use. A row with a NaN, or with no finite score, is
    bad: its choice is 0, its q is all zero, and the draft must end before it (docs/cases.md 21).
    """
    if rows.kinds <= {GREEDY}:
        choice = scores.argmax(-1)
        bad = ~scores.gather(1, choice[:, None])[:, 0].isfinite()
        choice = choice.masked_fill(bad, 0)
        return Proposal(choice, _one_hot(choice, scores.shape[1]).masked_fill_(bad[:, None], 0.0), bad)
    logits, bad = target_logits(scores, rows.unbarred())
    logits = logits.masked_fill_(bad[:, None], 0.0)
    q = logits.softmax(-1)
    choice = draw(q, generator) if UNSEEDED in rows.kinds else logits.argmax(-1)
    if SEEDED in rows.kinds:
        noisy = (logits + gumbel(rows.seed, rows.position, candidates)).argmax(-1)
        choice = torch.where(rows.kind == SEEDED, noisy, choice)
    if GREEDY in rows.kinds:
        greedy, best = rows.kind == GREEDY, scores.argmax(-1)
        choice = torch.where(greedy, best, choice)
        q = torch.where(greedy[:, None], _one_hot(best, scores.shape[1]), q)
    return Proposal(choice.masked_fill(bad, 0), q.masked_fill(bad[:, None], 0.0), bad)


@dataclass(frozen=True)
class Proposing:
    """`propose` for a whole draft: what a drafter calls.

    rows: [n], for the token after each anchor. generator: the draft stream. A bad row's choice is -1 (case 21).
    """

    rows: SamplingRows
    generator: torch.Generator

    def __call__(
        self, scores: Tensor, candidates: Tensor, rows: Tensor, position: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        greedy = self.rows.kinds <= {GREEDY}
        at = self.rows if greedy else self.rows.select(rows).shift(position - 1)
        choice, q, bad = propose(scores, candidates, at, self.generator)
        return choice.masked_fill(bad, -1), q


def _one_hot(index: Tensor, width: int) -> Tensor:
    return torch.zeros(len(index), width, device=index.device).scatter_(1, index[:, None], 1.0)
