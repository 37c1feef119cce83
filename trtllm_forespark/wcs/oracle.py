"""The exhaustive reference that schedules are measured against; never on a serving path."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.schedule import NOTHING, Schedule, Step, Totals
from trtllm_forespark.wcs.survival import FloatArray


def exhaustive(
    survival: FloatArray, num_tokens: int, table: LatencyTable, *, limits: npt.NDArray[np.integer] | None = None
) -> Schedule:
    """The optimum of eq. 4's true value, for reference; never on a serving path.

    survival: [n, K, K]; limits: [n]. Up to 3 requests: every vector of lengths with every budget. Above: a knapsack
    dynamic program over rewards: for each number of tokens with anchor slots the lengths of the highest sum R_i(d_i),
    of which the best (at full verification) are priced at every budget. That is the optimum where T_draft depends on
    its tokens alone and all that is drafted is verified. It ignores: that T_draft also depends on how many requests
    draft (priced, not searched), and lengths which pay only when part of them is verified. About 10 ms at 192 x 15.
    """
    n, block, _ = survival.shape
    if n == 0:
        return Schedule(np.zeros(0, np.int64), NOTHING)
    survival = np.where(np.isnan(survival).any(axis=(1, 2), keepdims=True), np.float32(0), survival)
    most = np.full(n, block) if limits is None else np.clip(limits, 0, block)
    most = np.where((survival > 0).any(axis=(1, 2)), most, 0)
    prices = table.prices(n, block, num_tokens)
    step = Step(n, block, num_tokens, prices, survival, "whole")
    if n <= 3:
        lengths = np.array(list(itertools.product(*(range(int(limit) + 1) for limit in most))), dtype=np.int64)
    else:
        lengths = _knapsack(step, most)
    lengths = lengths[np.argsort(lengths.sum(axis=1), kind="stable")]  # of equal goodputs the shortest drafts
    best = (-1.0, 0, 0)
    budgets = np.arange(n * block + 1)
    verify = prices.verify_at(num_tokens + budgets)
    for start in range(0, len(lengths), 1024):
        part = lengths[start : start + 1024]
        rows = np.where((part > 0)[:, :, None], survival[np.arange(n), np.maximum(part, 1) - 1], 0)
        pool = np.sort(rows.reshape(len(part), n * block), axis=1)[:, ::-1]
        gains = np.zeros((len(part), n * block + 1))
        np.add.accumulate(pool, axis=1, out=gains[:, 1:], dtype=np.float64)
        drafting, total = np.count_nonzero(part, axis=1), part.sum(axis=1)
        goodput = (n + gains) / (prices.draft_at(drafting, total + drafting)[:, None] + verify)
        goodput = np.where(budgets <= total[:, None], goodput, -1)
        row, column = divmod(int(goodput.argmax()), len(budgets))
        if goodput[row, column] > best[0]:
            best = float(goodput[row, column]), start + row, column
    value, row, budget = best
    chosen = lengths[row]
    drafting, total = int(np.count_nonzero(chosen)), int(chosen.sum())
    draft_seconds = float(prices.draft_at(drafting, total + drafting))
    return Schedule(chosen, Totals(total, budget, value, draft_seconds, float(verify[budget])))


def _knapsack(step: Step, most: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[c, n] candidates: for each number of tokens with anchors the lengths of the highest reward, the best 64."""
    n = step.n
    reward = np.add.reduce(step.survival, axis=2)
    capacity = int((most + (most > 0)).sum())
    value = np.full(capacity + 1, -np.inf)
    value[0] = 0.0
    choice = np.zeros((n, capacity + 1), dtype=np.int16)
    drafting = np.zeros(capacity + 1, dtype=np.int64)
    reached = 0
    for i in range(n):
        best, count = value.copy(), drafting.copy()
        for d in range(1, int(most[i]) + 1):
            trial = value[: reached + 1] + reward[i, d - 1]
            where = slice(d + 1, d + 2 + reached)
            better = trial > best[where]
            np.copyto(best[where], trial, where=better)
            np.copyto(choice[i, where], d, where=better)
            np.copyto(count[where], drafting[: reached + 1] + 1, where=better)
        reached += int(most[i]) + 1 if most[i] > 0 else 0
        value, drafting = best, count
    tokens = np.flatnonzero(np.isfinite(value))
    drafted = tokens - drafting[tokens]
    seconds = step.prices.draft_at(drafting[tokens], tokens) + step.prices.verify_at(step.num_tokens + drafted)
    order = tokens[np.argsort(-(n + value[tokens]) / seconds, kind="stable")[:64]]
    lengths = np.zeros((len(order), n), dtype=np.int64)
    for row, left in enumerate(order):
        for i in reversed(range(n)):
            lengths[row, i] = choice[i, left]
            left -= choice[i, left] + (choice[i, left] > 0)
    return lengths
