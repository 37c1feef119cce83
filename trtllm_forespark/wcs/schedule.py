"""The joint schedule (eq. 4), its split, and adaptive verification (eq. 1). The exhaustive reference: `oracle`.

The value of a step in which request i drafts d_i tokens and the batch verifies B of them is

    goodput(D, B) = (n + sum of the B largest S_i,d_i,j) / (T_draft(m, sum d_i + m) + T_verify(n, N + B)),

m the requests with d_i > 0, each with one anchor slot. `joint_schedule` finds the totals (sum d_i, B); `split` divides
the first among requests. Both take the scores of the concave envelopes in falling order, so each request gets a prefix.

Two ways to read the scores, `pieces`. "paper": a draft may stop anywhere, B is priced by the scores. "whole" (the
default): a draft stops only where its reward is on its envelope, since inside a flat piece it is below it, and B is
priced by the survival of the rows chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.envelope import limited, pooled_scores, scores
from trtllm_forespark.wcs.floor import beyond, forced_lengths
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.prices import Prices
from trtllm_forespark.wcs.survival import FloatArray

Pieces = Literal["whole", "paper"]
Ints = npt.NDArray[np.integer]
Lengths = npt.NDArray[np.int64]

#: Up to this many slots (n x K) every total is a candidate; above it one for each pair of buckets.
EXACT_SLOTS = 24
#: Survival values sorted, at most, to price candidates by their rows (about 20 microseconds).
PRICED_SLOTS = 4096
#: Totals tried at once where latencies are linear in tokens, and tried again around the best of them.
SAMPLES = 48


class Totals(NamedTuple):
    """What the host decides (eq. 4): draft tokens of the batch D, budget B <= D, tokens a second to expect, seconds."""

    total: int
    budget: int
    goodput: float
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class Schedule:
    """`Totals`, divided: lengths [n] int64, d_i."""

    lengths: Lengths
    totals: Totals

    @property
    def total(self) -> int:
        return self.totals.total

    @property
    def budget(self) -> int:
        return self.totals.budget

    @property
    def goodput(self) -> float:
        return self.totals.goodput


NOTHING = Totals(0, 0, 0.0, 0.0, 0.0)


def joint_schedule(
    rewards: FloatArray,
    survival: FloatArray,
    num_tokens: int,
    table: LatencyTable,
    *,
    limits: Ints | None = None,
    floor: int | Ints = 0,
    pieces: Pieces = "whole",
) -> Schedule:
    """Draft lengths and budget of the highest expected goodput (eq. 4).

    rewards: [n, K + 1]. survival: [n, K, K]. num_tokens: N, the step's tokens that are no drafts (anchors, prefill).
    limits: [n], longest draft of each request (K where None). floor: tokens every request (or each, [n]) drafts at
    least, where its limit allows and its curve is not NaN or 0 (section 7, fairness); what it forces is taken as given
    and the schedule goes on from there. Of equal goodputs the longer drafts are taken: their slots are free.

    Candidates are one schedule for each pair of latency buckets, the largest that fits; for small batches (see
    `EXACT_SLOTS`) every total, each priced exactly. Ignored: within one total, other divisions than that by scores
    (a request's anchor slot has no score).
    """
    n, block = rewards.shape[0], rewards.shape[1] - 1
    if n == 0:
        return Schedule(np.zeros(0, np.int64), NOTHING)
    rewards = limited(np.asarray(rewards, dtype=np.float32), limits)
    prices = table.prices(n, block, num_tokens)
    step = Step(n, block, num_tokens, prices, survival, pieces)
    if n == 1 and not np.any(floor) and pieces == "whole":
        one = _one_request(step, rewards[0])
        table.note_use(1, min(one.total, 1), one.total + 1, num_tokens + one.budget)
        return one
    if _is_small(n, block, floor):
        lengths = _every_total(step, rewards, forced_lengths(rewards, limits, floor))
    else:
        lengths = _largest_that_fit(step, rewards)
    total = int(np.add.reduce(lengths))
    if pieces == "paper":
        drafting, pool = int(np.count_nonzero(lengths)), _below(scores(rewards), lengths)
    else:
        drafting, pool = _rows(survival, lengths)
    draft_seconds = float(prices.draft_at(drafting, total + drafting))
    budget, goodput, verify_seconds = _best_budget(pool, total, step, draft_seconds)
    table.note_use(n, drafting, total + drafting, num_tokens + budget)
    return Schedule(lengths, Totals(total, budget, goodput, draft_seconds, verify_seconds))


def decide(
    rewards: FloatArray,
    survival: FloatArray | None,
    num_tokens: int,
    table: LatencyTable,
    *,
    limits: Ints | None = None,
    floor: int | Ints = 0,
    pieces: Pieces = "whole",
) -> Totals:
    """The batch totals of eq. 4, all the host decides before the drafter starts (section 5); arguments as above.

    For large batches (more than `EXACT_SLOTS` slots, no floor) this is the hot path: it reads nothing but the reward
    curves, and prices B by the scores; B is priced by the rows chosen afterwards, while the drafter runs
    (`adaptive_budget` on those rows). For small ones it is `joint_schedule`, and needs `survival`.
    """
    n, block = rewards.shape[0], rewards.shape[1] - 1
    if _is_small(n, block, floor):
        if survival is None:
            raise ValueError("small batches and floors are priced by survival: pass it to decide()")
        return joint_schedule(rewards, survival, num_tokens, table, limits=limits, floor=floor, pieces=pieces).totals
    rewards = limited(np.asarray(rewards, dtype=np.float32), limits)
    step = Step(n, block, num_tokens, table.prices(n, block, num_tokens), rewards, pieces)
    _, _, choice = _best_pair(step, rewards)
    return choice


def _is_small(n: int, block: int, floor: int | Ints = 0) -> bool:
    """Whether every total is a candidate, so that totals come with their lengths; else one for each pair of buckets."""
    return bool(np.any(floor)) or n * block <= EXACT_SLOTS


def split(score: FloatArray, total: int, pieces: Pieces = "whole") -> Lengths:
    """Divide `total` draft tokens among requests: the slots with the highest scores, ties by request order.

    score: [n, K], non-increasing along d (`scores`). Returns d_i [n]. Slots of score 0 are never drafted. "whole" stops
    before the first piece (run of equal scores of a request) that does not fit any more.
    """
    score = np.asarray(score, dtype=np.float32)
    positive = int(np.count_nonzero(score > 0))
    if total >= positive:
        return np.count_nonzero(score > 0, axis=1).astype(np.int64)
    if total <= 0:
        return np.zeros(len(score), dtype=np.int64)
    cut = np.partition(score.ravel(), score.size - total)[score.size - total]
    return _cut(np.count_nonzero(score > cut, axis=1), np.count_nonzero(score == cut, axis=1), total, pieces)


def adaptive_budget(
    survival: FloatArray, lengths: Ints, num_tokens: int, table: LatencyTable
) -> tuple[int, float, float, float]:
    """How many of the drafted tokens to verify (eq. 1): (B, goodput, draft seconds, verify seconds).

    survival: [n, K], what position j of each draft is expected to survive; lengths: [n], d_i. B must not depend on what
    was drawn (docs/lossless.md, rule 1): pass estimates made before the drafts, unless the whole batch is greedy.
    """
    n, block = survival.shape
    if n == 0:
        return 0, 0.0, 0.0, 0.0
    lengths = np.asarray(lengths, dtype=np.int64)
    prices = table.prices(n, block, num_tokens)
    drafting, total = int(np.count_nonzero(lengths)), int(lengths.sum())
    draft_seconds = float(prices.draft_at(drafting, total + drafting))
    step = Step(n, block, num_tokens, prices, survival, "whole")
    budget, goodput, verify_seconds = _best_budget(_below(survival, lengths), total, step, draft_seconds)
    return budget, goodput, draft_seconds, verify_seconds


def goodput_of(survival: FloatArray, lengths: Ints, budget: int, num_tokens: int, table: LatencyTable) -> float:
    """The value of (D, B) as this module's first lines define it, for checking schedules. survival: [n, K, K]."""
    pool = np.sort(_rows(survival, np.asarray(lengths, dtype=np.int64))[1].astype(np.float64))[::-1]
    drafting, total = int(np.count_nonzero(lengths)), int(np.sum(lengths))
    seconds = table.draft_seconds(drafting, total + drafting) + table.verify_seconds(len(survival), num_tokens + budget)
    return float((len(survival) + pool[:budget].sum()) / seconds)


class Step(NamedTuple):
    """One decision: n requests of up to `block` drafts, N other tokens, and what they cost."""

    n: int
    block: int
    num_tokens: int
    prices: Prices
    survival: FloatArray
    pieces: Pieces


def _largest_that_fit(step: Step, rewards: npt.NDArray[np.float32]) -> Lengths:
    """Lengths of the best pair of buckets, priced by the envelopes."""
    bits, rising, choice = _best_pair(step, rewards)
    if choice.total == 0:
        return np.zeros(step.n, dtype=np.int64)
    # Back from a total to lengths: count, for each request, the scores at or above the last one taken.
    rising_bits, place = rising.view(np.int32), len(rising) - choice.total
    cut = int(rising_bits[place]) & -2
    at_least = _count(bits >= cut)
    if place == 0 or int(rising_bits[place - 1]) & -2 != cut:
        return at_least.astype(np.int64)
    above = _count(bits > (cut | 1))
    return _cut(above, at_least - above, choice.total, step.pieces)


def _best_pair(
    step: Step, rewards: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], Totals]:
    """The hot path: bits and rising scores of `pooled_scores`, and the totals of the best pair of buckets."""
    bits, rising = pooled_scores(rewards)
    count = len(rising)
    rising_bits = rising.view(np.int32)
    # Of the k lowest scores: how many are the first of their request, and what all of them gain. (Sums over rising
    # scores, since sums over a reversed array take twice as long.)
    firsts = np.empty(count + 1, dtype=np.int32)
    gain = np.empty(count + 1, dtype=np.float32)
    firsts[0] = gain[0] = 0
    np.add.accumulate(rising_bits & 1, out=firsts[1:])
    np.add.accumulate(rising, out=gain[1:])
    total, budget, goodput, draft, verify = _best_totals(step, firsts, gain)
    if step.pieces == "whole" and 0 < total < count:
        # A piece that is not whole goes. Ties longer than a block belong to several requests: `split` sees to them.
        cut = int(rising_bits[count - total]) & -2
        if int(rising_bits[count - total - 1]) & -2 == cut:
            above = count - int(rising_bits.searchsorted(np.int32(cut | 1), side="right"))
            if total - above < step.block:
                total = above
    return bits, rising, Totals(total, min(budget, total), goodput, draft, verify)


def _count(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    # int8, because adding bool is not vectorised; K is far below 127.
    return np.add.reduce(mask.view(np.int8), axis=0, dtype=np.int8)  # type: ignore[no-any-return]


def _best_totals(
    step: Step, firsts: npt.NDArray[np.int32], gain: npt.NDArray[np.float32]
) -> tuple[int, int, float, float, float]:
    """(D, B, goodput, draft and verify seconds).

    firsts, gain: [R + 1], requests' first scores among, and expected accepted tokens of, the k lowest of R scores.
    """
    count = len(gain) - 1
    prices = step.prices
    budgets, verify = prices.budgets(step.num_tokens)
    requests, base = firsts[count], step.n + gain[count]
    tokens = firsts + prices.ranks[: count + 1]  # with their anchor slots
    if not prices.linear:
        # The fewest scores to leave out so that the others fit each bucket. Longest drafts first, so that ties go to
        # them; the last border is 0, draft nothing.
        left = tokens.searchsorted(tokens[count] - prices.draft_borders)
        draft = prices.draft_at_borders[requests - firsts.take(left), prices.each_border]
        return _argmax(base, gain, left, draft, budgets, verify)
    low, high, low_budget, high_budget = 0, count, 0, count
    while True:
        left, some = _sample(low, high), _sample(low_budget, high_budget)
        draft = prices.draft_at(requests - firsts[left], tokens[count] - tokens[left])
        best = _argmax(base, gain, left, draft, some, verify[some])
        if high - low < SAMPLES and high_budget - low_budget < SAMPLES:
            return best
        # Look again between the neighbours of the best.
        width, width_budget = -(-(high - low) // (SAMPLES - 1)), -(-(high_budget - low_budget) // (SAMPLES - 1))
        low, high = max(count - best[0] - width, 0), min(count - best[0] + width, count)
        low_budget, high_budget = max(best[1] - width_budget, 0), min(best[1] + width_budget, count)


def _argmax(
    base: Any, gain: Any, left: Any, draft: Any, budgets: Any, verify: Any
) -> tuple[int, int, float, float, float]:
    """Best of drafting all but the `left` lowest scores x `budgets`; base: n and the gain of all scores.

    The gain of min(D, B) is the lesser of both gains, since `gain` never falls. Budgets past all scores are allowed.
    """
    count = len(gain) - 1
    drafted, verified = base - gain.take(left), base - gain.take(count - budgets, mode="clip")
    value = np.minimum(drafted[:, None], verified)
    value /= draft[:, None] + verify
    best = int(value.argmax())
    row, column = divmod(best, len(budgets))
    return (
        count - int(left[row]),
        int(budgets[column]),
        float(value[row, column]),
        float(draft[row]),
        float(verify[column]),
    )


def _sample(low: int, high: int) -> npt.NDArray[np.intp]:
    if high - low < SAMPLES:
        return np.arange(low, high + 1)
    return low + np.arange(SAMPLES) * (high - low) // (SAMPLES - 1)


def _budgets(step: Step, most: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Budgets worth a look, rising, at most `most`, and T_verify(n, N + B) of each."""
    budgets, verify = step.prices.budgets(step.num_tokens)
    if step.prices.linear:
        return budgets[: most + 1], verify[: most + 1]
    return np.minimum(budgets, most), verify


def _best_budget(pool: FloatArray, drafted: int, step: Step, draft_seconds: float) -> tuple[int, float, float]:
    """(B, goodput, verify seconds); pool: survival > 0 of the drafted positions in any order, sorted here in place."""
    pool.sort()
    gain = np.zeros(len(pool) + 1, dtype=np.float32)
    np.add.accumulate(pool[::-1], out=gain[1:])
    budgets, verify = _budgets(step, drafted)
    goodput = gain[np.minimum(budgets, len(pool))]
    goodput += step.n
    goodput /= verify + np.float32(draft_seconds)
    best = int(goodput.argmax())
    return int(budgets[best]), float(goodput[best]), float(verify[best])


def _rows(survival: FloatArray, lengths: Lengths) -> tuple[int, npt.NDArray[np.float32]]:
    """How many requests draft, and the survival > 0 of their positions, S_i,d_i,j, pooled. survival: [n, K, K]."""
    n, block, _ = survival.shape
    drafting = lengths.nonzero()[0]
    index = drafting * block
    index += lengths[drafting]
    index -= 1
    rows = survival.reshape(n * block, block).take(index, axis=0)
    return len(drafting), rows[rows > 0]  # NaN goes too


def _below(survival: FloatArray, lengths: Ints) -> npt.NDArray[np.float32]:
    """The same for one curve a request, [n, K]."""
    pool = survival[np.arange(survival.shape[1]) < lengths[:, None]]
    return np.asarray(pool[pool > 0], dtype=np.float32)


def _cut(above: Any, tied: Any, total: int, pieces: Pieces) -> Lengths:
    """d_i = scores above the cut, and of the tied ones what `total` leaves room for, in request order."""
    above = above.astype(np.int64)
    room = total - int(np.add.reduce(above))
    upto = np.add.accumulate(tied, dtype=np.int64)
    if pieces == "whole":
        above += tied * (upto <= room)
    else:
        above += np.minimum(np.maximum(room - upto + tied, 0), tied)
    return above  # type: ignore[no-any-return]


def _one_request(step: Step, rewards: npt.NDArray[np.float32]) -> Schedule:
    """A batch of one: every length whose reward is above all shorter ones', with every budget, each priced exactly."""
    block, prices = step.block, step.prices
    tokens = np.arange(block + 1)
    gain = np.zeros((block + 1, block + 1), dtype=np.float32)
    np.add.accumulate(step.survival[0], axis=1, out=gain[1:, 1:])
    gain += np.float32(1)
    draft = prices.draft_at(1, tokens + 1)
    draft[0] = 0.0
    gain /= draft[:, None] + prices.verify_at(step.num_tokens + tokens)
    worth = np.ones(block + 1, dtype=bool)
    np.greater(rewards[1:], np.maximum.accumulate(rewards)[:-1], out=worth[1:])
    if np.isnan(np.add.reduce(rewards)):
        worth[1:] = False
    gain = np.where(worth[:, None] & (tokens <= tokens[:, None]), gain, np.float32(0))
    best = gain.size - 1 - int(gain[::-1, ::-1].argmax())  # ties go to the longer
    length, budget = divmod(best, block + 1)
    return Schedule(
        np.array([length]),
        Totals(
            length,
            budget,
            float(gain[length, budget]),
            float(draft[length]),
            float(prices.verify_at(step.num_tokens + budget)),
        ),
    )


def _every_total(step: Step, rewards: npt.NDArray[np.float32], forced: Lengths) -> Lengths:
    """Small batches, and floors: each total of the split is a candidate, the best are priced by their rows."""
    n, block = step.n, step.block
    lowest = float(rewards[np.arange(n), forced].sum())
    rewards = beyond(rewards, forced)
    score = scores(rewards).ravel()
    order = np.argsort(-score, kind="stable")[: np.count_nonzero(score)]
    owner, value = order // block, score[order]
    drafting = np.add.accumulate((order % block == 0) & (forced[owner] == 0), dtype=np.int64)
    tokens = np.concatenate([[0], np.arange(1, len(order) + 1) + drafting]) + forced.sum() + np.count_nonzero(forced)
    gain = np.concatenate([np.zeros(1, np.float32), np.add.accumulate(value)])
    ends = np.ones(len(order) + 1, dtype=bool)
    if step.pieces == "whole":
        ends[1:-1] = (owner[1:] != owner[:-1]) | (value[1:] != value[:-1])
    ranks = np.flatnonzero(ends)[::-1]  # longest first, so that ties go to it
    draft = step.prices.draft_at(tokens[ranks] - ranks - forced.sum(), tokens[ranks])
    # Envelope prices: the forced tokens are worth their average each.
    forced_gain = lowest * np.arange(forced.sum() + 1, dtype=np.float32) / max(int(forced.sum()), 1)
    gain = np.concatenate([forced_gain[:-1], lowest + gain])
    budgets, verify = _budgets(step, len(gain) - 1)
    worth = (n + np.minimum(gain[ranks + forced.sum()][:, None], gain[budgets])) / (draft[:, None] + verify)
    best = worth.max(axis=1)
    place = np.full((n, block), n * block)
    place.ravel()[order] = np.arange(len(order))
    if step.pieces == "paper":
        return forced + np.count_nonzero(place < ranks[int(best.argmax())], axis=1)
    affordable = max(1, PRICED_SLOTS // (n * block))
    if len(ranks) > affordable:
        keep = np.sort(np.argsort(-best, kind="stable")[:affordable])
        ranks, draft = ranks[keep], draft[keep]
    lengths = forced + np.count_nonzero(place[None] < ranks[:, None, None], axis=2)
    rows = step.survival[np.arange(n), np.maximum(lengths, 1) - 1]
    rows = np.where((lengths > 0)[:, :, None] & (rows > 0), rows, np.float32(0)).reshape(len(ranks), n * block)
    rows.sort(axis=1)
    gains = np.zeros((len(ranks), n * block + 1), dtype=np.float32)
    np.add.accumulate(rows[:, ::-1], axis=1, out=gains[:, 1:])
    exact = (n + gains[:, budgets]) / (draft[:, None] + verify)
    return lengths[int(exact.max(axis=1).argmax())]
