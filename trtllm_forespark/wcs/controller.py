"""The one brain: called before drafting, after drafting and after verification, by any backend."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.correction import Correction
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.live import LiveTable, Pass
from trtllm_forespark.wcs.ops import NumpyOps, Ops
from trtllm_forespark.wcs.policies import BeforeDraft, Policy
from trtllm_forespark.wcs.recalibration import Recalibration
from trtllm_forespark.wcs.rest import Rest
from trtllm_forespark.wcs.schedule import Totals, adaptive_budget
from trtllm_forespark.wcs.stages import Draft, Estimate, Outcome, Plan, Selection

#: (request, generation). A request that is preempted and comes back has a new, higher generation.
Key = tuple[Hashable, int]
#: How fast the mean of post-draft survival follows the last steps.
_FOLLOW = 0.1
#: Drafts that are judged together: the arithmetic for so many takes no longer than for one.
_JUDGED_TOGETHER = 32
#: Steps that are recalibrated by together, for the same reason: 1, 2, 4, … up to so many, from 1 again after a look
#: that found nothing, so that a try which fails is soon over.
_STEPS_TOGETHER = 16


class _Judged(NamedTuple):
    """Drafts whose outcome is known. forecast, survival: [m, K], of before and after the draft, the second not yet
    corrected; lengths, verified, accepted: [m] tokens."""

    forecast: npt.NDArray[np.floating]
    survival: npt.NDArray[np.floating]
    lengths: npt.NDArray[np.int64]
    verified: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]


class WcsController:
    """Decides draft lengths and verified lengths for a batch, step by step.

    table: None where the policy prices nothing. block: K (0 without a drafter). prior: [K, K] survival to expect of a
    request nothing is known about, when nothing is known of any other (the drafter's calibrated mean); None: expect
    nothing, so draft nothing then.

    adapt: correct both estimates by what is accepted (`Correction`) and the table by what steps take (`LiveTable`), and
    pass over steps at loads where looking for drafts has not paid (`Rest`): there speculation costs next to nothing.
    recalibration: where estimates and drafts bring their logits, survival is made of them by this, which follows what
    is accepted, and not corrected any further. Needs adapt.

    State: the previous step's post-draft survival of each live request, a decaying mean of it, the two corrections,
    the recalibration, the live table, and whether looking has paid. Not thread-safe.
    """

    def __init__(
        self,
        policy: Policy,
        table: LatencyTable | None,
        block: int,
        *,
        prior: npt.NDArray[np.floating] | None = None,
        ops: Ops | None = None,
        adapt: bool = True,
        recalibration: Recalibration | None = None,
    ) -> None:
        if block < (1 if policy.needs_drafter else 0):
            raise ValueError(f"block must be 1 or more draft tokens for policy {policy.name!r}, not {block}")
        if policy.needs_table and table is None:
            raise ValueError(f"policy {policy.name!r} needs a latency table; make one with `forespark profile`")
        self.policy, self.block, self.ops = policy, block, ops or NumpyOps()
        self.live = None if table is None else LiveTable(table)
        self._context = 0  # of the step at hand, mean tokens a request
        self.prior = np.zeros((block, block), np.float32) if prior is None else np.asarray(prior, np.float32)
        if self.prior.shape != (block, block):
            raise ValueError(f"prior has shape {self.prior.shape}; a block of {block} needs ({block}, {block})")
        if recalibration is not None and recalibration.block != block:
            raise ValueError(f"the recalibration is for a block of {recalibration.block}, not {block}")
        self._generation: dict[Hashable, int] = {}
        self._confidence: dict[Hashable, npt.NDArray[np.float32]] = {}
        self._mean = self.prior[-1].copy() if block else np.zeros(0, np.float32)
        self._seen = np.zeros(block, dtype=bool)
        self._adapt = adapt
        self.before, self.after = Correction(block), Correction(block)  # of pre-draft and post-draft survival
        self._to_judge: list[_Judged] = []  # what neither has learnt from yet
        self.recalibration = recalibration if adapt else None
        self._to_recalibrate: list[tuple[npt.NDArray[Any], ...]] = []
        self._together = 1  # steps
        # Never with a floor of draft tokens: every step owes them.
        self.rest = Rest() if adapt and policy.needs_estimate and not policy.floor else None

    @property
    def table(self) -> LatencyTable | None:
        """What this step is priced with: the table that was given, as this run's steps corrected it."""
        return None if self.live is None else self.live.at(self._context)

    def rests(self, n: int) -> bool:
        """Whether this step of n decoding requests is passed over: no estimate, and `nothing` for a plan. Ask once."""
        return self.rest is not None and n > 0 and self.rest.skips(n)

    def nothing(self, n: int) -> Plan:
        """The plan that drafts nothing."""
        return Plan(np.zeros(n, np.int64), 0, 0.0, 0.0, 0.0, looked=False)

    def plan(
        self,
        keys: Sequence[Key],
        estimate: Estimate | None,
        limits: Any,
        num_tokens: int,
        max_budget: int | None = None,
        *,
        floors: npt.NDArray[np.int64] | None = None,
        overdue: npt.NDArray[np.bool_] | None = None,
        context: int = 0,
    ) -> Plan:
        """Stages 1 and 2: draft lengths of this step (`totals`, then `split`).

        keys: the n decoding requests. estimate: their pre-draft estimates, None where the policy needs none or none
        exists yet. limits: [n], the most tokens each may draft now (context limit, max_tokens, ...); below 0 is 0.
        num_tokens: N, tokens of the step that are no drafts: one anchor a request, and prefill tokens. max_budget: the
        most draft tokens that may be verified in this step, for a step's limit of tokens. floors: [n], draft tokens
        each gets at least within its limit; None: the policy's own floor. overdue: [n], who gets one at least if
        anything is drafted. context: mean tokens a request has in the cache, by which the table may differ.
        """
        self._context = context
        step = self.before_draft(keys, estimate, limits, num_tokens, floors)
        totals, lengths = self.policy.plan(step)
        if self.policy.needs_drafter and floors is not None:
            lengths = np.maximum(lengths, np.minimum(floors, step.limits))
        if overdue is not None and lengths.any():
            lengths = np.maximum(lengths, np.minimum(overdue, step.limits))
        if self._adapt and not lengths.any():
            if self.recalibration is not None and estimate is not None and estimate.logits is not None:
                self.recalibration.fade()
                self._together = 1
            else:
                self.before.fade()
        return Plan(
            draft_lengths=lengths,
            budget=_least(totals.budget, int(lengths.sum()), max_budget),
            expected_goodput=totals.goodput,
            draft_seconds=totals.draft_seconds,
            verify_seconds=totals.verify_seconds,
            forecast=self.policy.forecast(step, lengths),
            max_budget=max_budget,
            looked=True if step.limits.any() else None,
            logits=self._logits(estimate),
        )

    def totals(self, keys: Sequence[Key], estimate: Estimate | None, limits: Any, num_tokens: int) -> Totals:
        """The host's half of `plan`: (D, B) of the batch, from whatever estimates it has."""
        return self.policy.totals(self.before_draft(keys, estimate, limits, num_tokens))

    def split(
        self, totals: Totals, keys: Sequence[Key], estimate: Estimate | None, limits: Any, num_tokens: int
    ) -> npt.NDArray[np.int64]:
        """The other half: draft lengths from totals and the current estimates."""
        return self.policy.split(self.before_draft(keys, estimate, limits, num_tokens), totals)

    def select(self, plan: Plan, draft: Draft, num_tokens: int, greedy: bool = False) -> Selection:
        """Stage 4: verified lengths. num_tokens: N as it now is. greedy: the whole batch decodes at temperature 0.

        B is priced anew with the actual N, by forecasts made before the drafts; only where the whole batch is greedy
        may a policy use the fresh survival for it. What is verified goes by the fresh survival.
        """
        lengths: Any = np.diff(np.asarray(draft.cu_lengths, dtype=np.int64))
        drafted = int(lengths.sum())
        if drafted == 0:
            return Selection(np.zeros(len(lengths), np.int64))
        if plan.forecast is None:
            if draft.survival is None:  # no post-draft estimator: verify in request order, as far as the step allows
                room = _least(drafted, plan.max_budget)
                return Selection(np.clip(room - (np.cumsum(lengths) - lengths), 0, lengths))
            return Selection(self.ops.distribute(draft.survival, lengths, _least(drafted, plan.max_budget)))
        if draft.survival is None or self.table is None:
            raise ValueError(f"policy {self.policy.name!r} needs a latency table and drafts with post-draft survival")
        survival = self._after(draft, plan)
        fresh = greedy and self.policy.fresh_when_greedy
        forecast = np.asarray(survival if fresh else plan.forecast)
        budget = adaptive_budget(forecast, lengths, num_tokens, self.table)[0]
        return Selection(self.ops.distribute(survival, lengths, _least(budget, plan.max_budget)))

    def observe(
        self, keys: Sequence[Key], draft: Draft, selection: Selection, outcome: Outcome, plan: Plan | None = None
    ) -> None:
        """After verification: remember what the next step goes by. Results of an old generation are discarded.

        plan: the step's, whose forecast is judged by what was accepted.
        """
        if draft.survival is None or len(draft.token_ids) == 0:
            return
        live = [self._generation.get(request) == generation for request, generation in keys]
        lengths = np.diff(np.asarray(draft.cu_lengths)) * live
        if self._adapt and plan is not None and plan.forecast is not None:
            if self.recalibration is not None and draft.logits is not None:
                self._recalibrate(self.recalibration, draft, plan, lengths, selection, outcome)
            else:
                self._correct(draft, plan, lengths, selection, outcome)
        if self.policy.needs_confidence:
            survival = self._after(draft, plan)
            self._remember(keys, survival, self._drafted(survival, lengths))

    def _after(self, draft: Draft, plan: Plan | None) -> npt.NDArray[np.float32]:
        """Post-draft survival as it is now known to be, [n, K]."""
        if self.recalibration is None or draft.logits is None or plan is None:
            return self.after.apply(draft.survival)
        lengths = np.diff(np.asarray(draft.cu_lengths))
        return self.recalibration.after(np.asarray(draft.logits), self._rows(plan), lengths, plan.logits)

    def _rows(self, plan: Plan) -> npt.NDArray[np.int64]:
        rows = np.asarray(plan.draft_lengths)  # a draft that broke off came from the pass of its planned length
        return np.full_like(rows, self.block) if self.policy.single_row else rows

    def _logits(self, estimate: Estimate | None) -> npt.NDArray[np.float32] | None:
        if self.recalibration is None or estimate is None or estimate.logits is None:
            return None
        return np.where(np.asarray(estimate.known, bool)[:, None], estimate.logits, np.float32(np.nan))

    def _recalibrate(
        self,
        recalibration: Recalibration,
        draft: Draft,
        plan: Plan,
        lengths: npt.NDArray[np.int64],
        selection: Selection,
        outcome: Outcome,
    ) -> None:
        n = len(lengths)
        nothing = np.broadcast_to(np.float32(np.nan), (n, recalibration.outputs))
        pre = nothing if plan.logits is None else plan.logits
        verified, accepted = np.asarray(selection.verified_lengths), np.asarray(outcome.accepted)[:n]
        self._to_recalibrate.append((pre, np.asarray(draft.logits), self._rows(plan), lengths, verified, accepted))
        if len(self._to_recalibrate) >= self._together:
            recalibration.learn(*map(np.concatenate, zip(*self._to_recalibrate, strict=True)))
            self._to_recalibrate.clear()
            self._together = min(2 * self._together, _STEPS_TOGETHER)

    def _correct(
        self, draft: Draft, plan: Plan, lengths: npt.NDArray[np.int64], selection: Selection, outcome: Outcome
    ) -> None:
        self._to_judge.append(
            _Judged(
                np.asarray(plan.forecast),
                np.asarray(draft.survival),
                lengths,
                np.asarray(selection.verified_lengths),
                np.asarray(outcome.accepted)[: len(lengths)],
            )
        )
        if sum(len(judged.lengths) for judged in self._to_judge) >= _JUDGED_TOGETHER:
            self._learn(_Judged(*map(np.concatenate, zip(*self._to_judge, strict=True))))
            self._to_judge.clear()

    def _drafted(self, survival: npt.NDArray[np.floating], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return (np.arange(self.block) < lengths[:, None]) & ~np.isnan(survival)

    def _remember(self, keys: Sequence[Key], survival: npt.NDArray[np.float32], drafted: npt.NDArray[np.bool_]) -> None:
        counts = drafted.sum(axis=0)
        fresh = np.where(drafted, survival, 0).sum(axis=0) / np.maximum(counts, 1)
        follow = np.where(self._seen, _FOLLOW, 1.0) * (counts > 0)
        mean = self._mean + follow * (fresh - self._mean)
        self._mean = np.minimum.accumulate(mean).astype(np.float32)
        self._seen |= counts > 0
        for i, (request, _) in enumerate(keys):
            if drafted[i].any():
                # A position it did not draft keeps the batch's mean.
                row = np.where(drafted[i], survival[i], self._mean)
                self._confidence[request] = np.minimum.accumulate(row)

    def _learn(self, drafts: _Judged) -> None:
        survival = self.after.apply(drafts.survival)
        drafted = self._drafted(survival, drafts.lengths)
        who = drafted[:, 0].nonzero()[0]
        if not len(who):
            return
        drafted, survival = drafted[who], survival[who]
        forecast, verified, accepted = drafts.forecast[who], drafts.verified[who], drafts.accepted[who]
        judged = drafted & (np.arange(self.block) < verified[:, None])
        self.after.learn(np.where(judged, survival, 0), float(accepted.sum()))
        # What was dropped would have been accepted as the post-draft estimate says, if all before it was.
        at_last = np.where(verified > 0, survival[np.arange(len(who)), np.maximum(verified, 1) - 1], 1.0)
        survived = (accepted == verified)[:, None] & drafted & ~judged
        dropped = np.where(survived, survival / np.maximum(at_last, 1e-6)[:, None], 0).sum()
        self.before.learn(np.where(drafted, forecast, 0), float(accepted.sum() + dropped))

    def timed(
        self,
        plan: Plan,
        selection: Selection,
        num_tokens: int,
        *,
        tokens: int,
        draft: float,
        verify: float,
        whole: float,
        look: float = 0.0,
    ) -> None:
        """What the step just done gave and took: tokens, seconds of the draft pass, of verification, of all, and of the
        estimate and the schedule together."""
        lengths = np.asarray(plan.draft_lengths)
        n = len(lengths)
        if not self._adapt or self.live is None or num_tokens != n or n == 0:
            return  # with prefill in the step the table only extrapolates
        prices = self.live.plain(self._context).prices(n, self.block, num_tokens)
        drafting, total = int(np.count_nonzero(lengths)), int(lengths.sum())
        verified = num_tokens + int(np.asarray(selection.verified_lengths).sum())
        draft_price = float(prices.draft_at(drafting, total + drafting)) if drafting else 0.0
        verify_price = float(prices.verify_at(verified))
        self.live.saw(
            Pass(n, verified, verify, verify_price),
            Pass(drafting, total + drafting, draft, draft_price) if drafting else None,
            self._context,
        )
        if self.rest is not None and plan.looked is not None:
            price, plain = draft_price + verify_price, float(prices.verify_at(n))
            self.rest.saw(n, plan.looked, tokens, whole, price, plain, look)

    def forget(self, key: Key) -> None:
        """A request ended or was preempted. A key of an old generation forgets nothing."""
        request, generation = key
        if self._generation.get(request, generation) <= generation:
            self._generation.pop(request, None)
            self._confidence.pop(request, None)

    @property
    def known(self) -> frozenset[Key]:
        """Requests that something is remembered of."""
        return frozenset((r, self._generation.get(r, -1)) for r in {*self._generation, *self._confidence})

    def before_draft(
        self,
        keys: Sequence[Key],
        estimate: Estimate | None,
        limits: Any,
        num_tokens: int,
        floors: npt.NDArray[np.int64] | None = None,
    ) -> BeforeDraft:
        """Gather what a policy reads, with the mean of the others for a request nothing is known about (section 5)."""
        for request, generation in keys:
            known = self._generation.get(request)
            if known is None or known < generation:
                self._generation[request] = generation
                self._confidence.pop(request, None)
        confidence = np.zeros((len(keys), self.block), dtype=np.float32)
        if self.policy.needs_confidence:
            for i, (request, _) in enumerate(keys):
                confidence[i] = self._confidence.get(request, self._mean)
        limits = np.clip(np.asarray(limits, dtype=np.int64), 0, self.block)
        if limits.shape != (len(keys),):
            raise ValueError(f"limits have shape {limits.shape} for {len(keys)} requests")
        survival = self._survival(len(keys), estimate)
        if self.recalibration is None or estimate is None or estimate.logits is None:
            survival = self.before.apply(survival)
        return BeforeDraft(survival, confidence, limits, num_tokens, self.table, self.ops, floors)

    def _survival(self, n: int, estimate: Estimate | None) -> npt.NDArray[np.float32]:
        shape = (n, self.block, self.block)
        if not self.policy.needs_estimate:
            return np.zeros(shape, dtype=np.float32)
        if estimate is None:
            return np.broadcast_to(self.prior, shape)
        if self.recalibration is not None and estimate.logits is not None:
            survival = self.recalibration.before(estimate.logits)
        else:
            survival = np.asarray(estimate.survival, dtype=np.float32)
        if survival.shape != shape:
            raise ValueError(
                f"the estimate has shape {survival.shape}; {n} requests and a block of {self.block} need {shape}"
            )
        known = np.asarray(estimate.known, dtype=bool)
        if known.all():
            return survival
        sound = known & np.isfinite(survival).all(axis=(1, 2))
        mean = survival[sound].mean(axis=0) if sound.any() else self.prior
        return np.where(known[:, None, None], survival, mean)


def _least(*values: int | None) -> int:
    return min(value for value in values if value is not None)
