"""What one stage of a decode step hands to the next.

n requests, K maximum draft length, d_i draft length, b_i <= d_i verified length. "Packed" arrays hold the rows of all
requests one after another, request i in rows ``cu_lengths[i]:cu_lengths[i + 1]``. The fields are array-likes: NumPy on
the host, tensors where a backend keeps them on its device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any


@dataclass(frozen=True)
class Estimate:
    """Stage 1, pre-draft estimate (eq. 2-3): what each candidate length would yield for each request.

    survival: [n, K, K] float32, ``survival[i, d - 1, j - 1]`` = Pr(A_i,d >= j); entries with j > d are 0.
    known: [n] bool, False for a request whose estimate does not exist yet (it takes the mean of the others).
    logits: [n, outputs] raw pre-draft logits z, K(K+1)/2 of them or K of a directional drafter; None: it has none.
    """

    survival: Array
    known: Array
    logits: Array | None = None


@dataclass(frozen=True)
class Plan:
    """Stage 2, joint schedule (eq. 4).

    draft_lengths: [n] int64, d_i. budget: B as planned. expected_goodput: tokens a second the schedule expects.
    draft_seconds, verify_seconds: the latencies it was priced at. forecast: [n, K], what each draft is expected to
    survive, by estimates made before it; B is priced by it once N is certain. None: all that is drafted is verified.
    max_budget: the most the step has room to verify; None: no limit. looked: whether the step looked for drafts that
    pay, False where it was passed over; None: it says nothing about either (no request had room to draft).
    logits: the estimate's, NaN where it was not known; None: there are none.
    """

    draft_lengths: Array
    budget: int
    expected_goodput: float
    draft_seconds: float
    verify_seconds: float
    forecast: Array | None = None
    max_budget: int | None = None
    looked: bool | None = None
    logits: Array | None = None


@dataclass(frozen=True)
class Draft:
    """Stage 3, the drafts of a batch, packed over drafted tokens (D rows in all).

    token_ids: [D]. cu_lengths: [n + 1] int64, 0 for a request that drafts nothing.
    candidates: [D, C] token ids the proposal is restricted to; proposal: [D, C] q over them (sums to 1 a row;
    one-hot for a greedy request). survival: [n, K] post-draft survival S^_i,j, 0 past d_i. logits: [n, K] raw
    post-draft logits l, -inf past d_i; None: there are none (a drafter has pre-draft and post-draft logits or neither).
    hidden: [D, H], the drafter's state at each drafted token, where it gives one.
    """

    token_ids: Array
    cu_lengths: Array
    candidates: Array
    proposal: Array
    survival: Array
    logits: Array | None = None
    hidden: Array | None = None


@dataclass(frozen=True)
class Selection:
    """Stage 4, distribute: verified_lengths [n] int64, b_i <= d_i, always a prefix of the draft."""

    verified_lengths: Array


@dataclass(frozen=True)
class Outcome:
    """What verification decided: accepted [n] int64 (drafts accepted, <= b_i), emitted: n lists of new token ids."""

    accepted: Array
    emitted: list[list[int]]
