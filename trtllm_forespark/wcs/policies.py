"""What to draft and what to verify: one interface, seven answers. The executor does not know which one runs.

| name | drafts | verifies |
|---|---|---|
| `ar` | nothing | nothing |
| `full` | the whole block (DFlash 2) | all |
| `batchwise` | one cap for all, by load (appendix B) | all |
| `adaptive` | the whole block | B by eq. 1 from confidences known before the drafts (the paper's "w/o JS") |
| `wcs` | by eq. 4 | B by the survival of the rows chosen |
| `wcs-single-curve` | the same, every row a prefix of row K | the same |
| `exhaustive` | the optimum of eq. 4 | the same |

Only policies that read estimates can draft nothing when nothing will be accepted: the last three. `adaptive` then
verifies only what its bucket has free, `batchwise` where its calibration found cap 0 fastest; `full` always drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs import schedule
from trtllm_forespark.wcs.envelope import limited
from trtllm_forespark.wcs.floor import beyond, forced_lengths
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.ops import Ops
from trtllm_forespark.wcs.oracle import exhaustive
from trtllm_forespark.wcs.schedule import NOTHING, Pieces, Totals
from trtllm_forespark.wcs.survival import prefix_survival

Array = Any
Decided = TypeVar("Decided")


@dataclass(frozen=True)
class BeforeDraft:
    """All a policy may look at before the drafts exist.

    survival: [n, K, K], the requests' estimates. confidence: [n, K], post-draft survival of each request's previous
    step. Both are zeros for a policy that does not read them. limits: [n] int64, 0..K. num_tokens: N. floors: [n], what
    requests ask for at least, in the place of the policy's own floor; None: nobody does.
    """

    survival: Array
    confidence: Array
    limits: npt.NDArray[np.int64]
    num_tokens: int
    table: LatencyTable | None
    ops: Ops
    floors: npt.NDArray[np.int64] | None = None


class Policy:
    """Base of all policies. `totals` and `split` are the two halves of stage 2; `plan` does both at once."""

    name = ""
    #: Reads the pre-draft estimator.
    needs_estimate = False
    #: Drafts at all.
    needs_drafter = True
    #: Prices what it does by a latency table.
    needs_table = False
    #: Reads each request's post-draft survival of the step before.
    needs_confidence = False
    #: Goes by the row of length K, whatever it drafts.
    single_row = False
    #: Draft tokens every request gets at least.
    floor = 0
    #: Where a whole batch is greedy, B may come from fresh post-draft survival (docs/lossless.md, rule 1).
    fresh_when_greedy = False

    def totals(self, step: BeforeDraft) -> Totals:
        """Batch totals (D, B); runs on the host."""
        return self._priced(step, self.lengths(step))

    def split(self, step: BeforeDraft, totals: Totals) -> npt.NDArray[np.int64]:
        """Draft lengths d_i [n] that sum to at most the total."""
        return self.lengths(step)

    def plan(self, step: BeforeDraft) -> tuple[Totals, npt.NDArray[np.int64]]:
        """`totals`, then `split`."""
        totals = self.totals(step)
        return totals, self.split(step, totals)

    def lengths(self, step: BeforeDraft) -> npt.NDArray[np.int64]:
        """Draft lengths of a policy that decides them without pricing."""
        return np.zeros(len(step.limits), dtype=np.int64)

    def forecast(self, step: BeforeDraft, lengths: npt.NDArray[np.int64]) -> Array | None:
        """[n, K], what each draft is expected to survive, known before it is drawn; None: verify all of it."""
        return None

    def _priced(self, step: BeforeDraft, lengths: npt.NDArray[np.int64]) -> Totals:
        # Verifies all it drafts; without estimates there is no goodput to expect.
        n, total = len(lengths), int(lengths.sum())
        if n == 0:
            return NOTHING
        if step.table is None:
            return Totals(total, total, 0.0, 0.0, 0.0)
        drafting = int(np.count_nonzero(lengths))
        prices = step.table.prices(n, step.survival.shape[-1], step.num_tokens)
        draft = float(prices.draft_at(drafting, total + drafting))
        return Totals(total, total, 0.0, draft, float(prices.verify_at(step.num_tokens + total)))


class Autoregressive(Policy):
    name = "ar"
    needs_drafter = False


class FullBlock(Policy):
    name = "full"

    def lengths(self, step: BeforeDraft) -> npt.NDArray[np.int64]:
        return step.limits


class Batchwise(Policy):
    """One length cap for the batch by its load.

    caps: {load: cap}, the fastest cap found at each measured load (`fastest_caps`); a load takes the cap of the
    measured load nearest to it by ratio, the higher one in the middle. JSON's string keys are fine.
    """

    name = "batchwise"

    def __init__(self, caps: Mapping[Any, int]) -> None:
        try:
            self.caps = sorted((int(load), int(cap)) for load, cap in caps.items())
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"caps of policy 'batchwise' must map loads to lengths, like {{1: 7, 32: 2}}: {caps!r}"
            ) from error
        if not self.caps or any(load < 1 or cap < 0 for load, cap in self.caps):
            raise ValueError(f"caps of policy 'batchwise' need loads >= 1 and lengths >= 0, at least one: {caps!r}")

    def cap(self, load: int) -> int:
        """The cap at a load of `load` requests."""
        return min(self.caps, key=lambda pair: (abs(math.log(max(load, 1) / pair[0])), -pair[0]))[1]

    def lengths(self, step: BeforeDraft) -> npt.NDArray[np.int64]:
        return np.minimum(step.limits, self.cap(len(step.limits)))


class Adaptive(Policy):
    name = "adaptive"
    needs_table = True
    needs_confidence = True
    fresh_when_greedy = True

    def totals(self, step: BeforeDraft) -> Totals:
        assert step.table is not None  # the controller sees to it, by needs_table
        budget, goodput, draft, verify = schedule.adaptive_budget(
            step.confidence, step.limits, step.num_tokens, step.table
        )
        return Totals(int(step.limits.sum()), budget, goodput, draft, verify)

    def lengths(self, step: BeforeDraft) -> npt.NDArray[np.int64]:
        return step.limits

    def forecast(self, step: BeforeDraft, lengths: npt.NDArray[np.int64]) -> Array | None:
        return step.confidence


class WorkConserving(Policy):
    """pieces, floor: see `schedule.joint_schedule`. greedy_budget: where the whole batch is greedy, price B by
    the post-draft survival ("fresh", which knows more) or by the estimates that chose the lengths ("planned")."""

    name = "wcs"
    needs_estimate = True
    needs_table = True

    def __init__(self, pieces: Pieces = "whole", floor: int = 0, greedy_budget: str = "fresh") -> None:
        if pieces not in ("whole", "paper"):
            raise ValueError(f"pieces of policy {self.name!r} must be 'whole' or 'paper', not {pieces!r}")
        if floor < 0:
            raise ValueError(f"floor of policy {self.name!r} must be 0 or more draft tokens, not {floor}")
        if greedy_budget not in ("planned", "fresh"):
            raise ValueError(
                f"greedy_budget of policy {self.name!r} must be 'planned' or 'fresh', not {greedy_budget!r}"
            )
        self.pieces, self.floor = pieces, floor
        self.fresh_when_greedy = greedy_budget == "fresh"

    def curves(self, step: BeforeDraft) -> Array:
        """Survival [n, K, K] this policy goes by."""
        return step.survival

    def floors(self, step: BeforeDraft) -> int | npt.NDArray[np.int64]:
        """The policy's floor, or each request's."""
        return self.floor if step.floors is None else step.floors

    def totals(self, step: BeforeDraft) -> Totals:
        return self._by(schedule.decide, step)

    def plan(self, step: BeforeDraft) -> tuple[Totals, npt.NDArray[np.int64]]:
        """The lengths of `totals` and `split`; B is priced by the rows chosen, in small batches and large."""
        both = self._by(schedule.joint_schedule, step)
        return both.totals, both.lengths

    def _by(self, decide: Callable[..., Decided], step: BeforeDraft) -> Decided:
        assert step.table is not None  # the controller sees to it, by needs_table
        survival = self.curves(step)
        return decide(
            step.ops.rewards(survival),
            survival,
            step.num_tokens,
            step.table,
            limits=step.limits,
            floor=self.floors(step),
            pieces=self.pieces,
        )

    def split(self, step: BeforeDraft, totals: Totals) -> npt.NDArray[np.int64]:
        rewards = step.ops.rewards(self.curves(step))
        floor = self.floors(step)
        if not np.any(floor):
            return step.ops.split(step.ops.scores(rewards, step.limits), totals.total, self.pieces)
        forced = forced_lengths(rewards, step.limits, floor)
        score = step.ops.scores(beyond(limited(rewards, step.limits), forced), step.limits - forced)
        return forced + step.ops.split(score, totals.total - int(forced.sum()), self.pieces)

    def forecast(self, step: BeforeDraft, lengths: npt.NDArray[np.int64]) -> Array | None:
        rows = self.curves(step)[np.arange(len(lengths)), np.maximum(lengths, 1) - 1]
        return np.where(lengths[:, None] > 0, rows, np.float32(0))


class SingleCurve(WorkConserving):
    """WCS that reads only the length-K curve, as if the drafter were directional (section 6.4)."""

    name = "wcs-single-curve"
    single_row = True

    def curves(self, step: BeforeDraft) -> Array:
        return prefix_survival(step.survival[:, -1])


class Exhaustive(WorkConserving):
    """The oracle as a policy, for measuring what it would gain and what it costs; never for serving."""

    name = "exhaustive"

    def __init__(self) -> None:
        super().__init__()

    def plan(self, step: BeforeDraft) -> tuple[Totals, npt.NDArray[np.int64]]:
        assert step.table is not None
        best = exhaustive(step.survival, step.num_tokens, step.table, limits=step.limits)
        return best.totals, best.lengths

    def totals(self, step: BeforeDraft) -> Totals:
        return self.plan(step)[0]

    def split(self, step: BeforeDraft, totals: Totals) -> npt.NDArray[np.int64]:
        return self.plan(step)[1]


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Autoregressive, FullBlock, Batchwise, Adaptive, WorkConserving, SingleCurve, Exhaustive)
}


def make_policy(name: str, **settings: Any) -> Policy:
    """The policy of that name; settings are its constructor's. ValueError lists the names, or names what is wrong."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; choose one of {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**settings)
    except TypeError as error:
        raise ValueError(f"policy {name!r}: {error} (given: {', '.join(settings) or 'nothing'})") from error


def fastest_caps(throughput: Mapping[int, Mapping[int, float]]) -> dict[int, int]:
    """The caps `batchwise` wants, from {load: {cap: tokens a second}}: each load's fastest, of equals the shortest.

    Measure every cap at every load, 0 (no drafts) among them (appendix B).
    """
    return {load: min(caps, key=lambda cap: (-caps[cap], cap)) for load, caps in sorted(throughput.items())}
