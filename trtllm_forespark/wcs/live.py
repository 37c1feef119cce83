"""A latency table that stays true: the steps of a run correct the table that was measured before it.

Schedules compare what could be done with one batch in one step. So what is common to all steps of a batch size (a slow
minute of the machine, its neighbours) is taken out, by a level that follows it, and what is left is how a bucket of
tokens differs from what the table says of it: the median of its last steps, pulled to no difference where they are few.
An entry of the table takes the differences of the buckets around it, the nearest first. Nothing is said of what no step
came near: there the measured entry stands.

Context length is a second axis: attention reads all of it, so each octave of the mean context, from 512 tokens up, has
levels, differences and a pace (`Pace`, drafting against verification) of its own, and begins with those of the nearest.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.latency import LatencyTable, Surface
from trtllm_forespark.wcs.pace import Pace

Kind = Literal["verify", "draft"]
#: Steps a bucket remembers; steps believed to have gone as the table says, before any; steps between two corrections.
_WINDOW, _BELIEF, _EVERY = 63, 16.0, 64
#: How fast a level follows, and how far one step's ratio may be from it (logs).
_FOLLOW, _STALL = 0.05, 0.7
#: A correction that would move no entry by more than this (logs) is not made: a new table has a price.
_LEAST = 0.03
#: The first octave of context that is told apart from shorter ones.
_SHORT = 512


class Pass(NamedTuple):
    """One timed pass: of so many requests (that draft, for a draft pass) and tokens; the seconds it took, and those the
    table in use says."""

    requests: int
    tokens: int
    seconds: float
    expected: float


class Drift(NamedTuple):
    """The bucket that differs most from the measured table, and by what factor (1: as measured)."""

    kind: Kind
    requests: int
    tokens: int
    factor: float


@dataclass
class _Level:
    """The log ratio common to the last steps of a batch size."""

    value: float = 0.0
    steps: int = 0

    def follow(self, ratio: float) -> float:
        """Take in one step's; returns how far it is from the level, within what a stall may count."""
        self.steps += 1
        off = ratio - self.value
        if self.steps > 1:
            off = min(max(off, -_STALL), _STALL)
        self.value += max(_FOLLOW, 1 / self.steps) * off
        return ratio - self.value


@dataclass
class _Axis:
    """What is known at one octave of context."""

    table: LatencyTable
    pace: Pace
    levels: dict[tuple[Kind, int], _Level] = field(default_factory=dict)
    ratios: dict[tuple[Kind, int, int], deque[float]] = field(default_factory=dict)
    applied: dict[Kind, npt.NDArray[np.float64]] = field(default_factory=dict)
    steps: int = 0

    def neighbour(self) -> _Axis:
        """What is believed of an octave that nothing is known of yet; the two share tables, nothing that changes."""
        known = copy.deepcopy((self.levels, self.ratios))
        return replace(self, pace=self.pace.another(), levels=known[0], ratios=known[1], applied=dict(self.applied))

    def saw(self, kind: Kind, timed: Pass, measured: Surface) -> None:
        bucket = _half_octave(timed.requests), _half_octave(timed.tokens)
        # Against the measured entry, so that corrections do not pile up on each other.
        corrected = self.applied.get(kind)
        own = 0.0 if corrected is None else corrected[_nearest(measured, timed.requests, timed.tokens)]
        ratio = math.log(timed.seconds / timed.expected) + own
        off = self.levels.setdefault((kind, bucket[0]), _Level()).follow(ratio)
        off = min(max(off, -_STALL), _STALL)
        self.ratios.setdefault((kind, *bucket), deque(maxlen=_WINDOW)).append(off)

    def corrections(self, kind: Kind, measured: Surface) -> npt.NDArray[np.float64]:
        """[entries] log factors: of each bucket its median, weighted by its steps and its distance in octaves."""
        known = [(n, t, float(np.median(r)), len(r)) for (k, n, t), r in self.ratios.items() if k == kind]
        if not known:
            return np.zeros(len(measured.entries))
        requests, tokens, medians, steps = np.array(known, np.float64).T
        at_requests = 2 * np.log2([e.requests for e in measured.entries])
        at_tokens = 2 * np.log2([e.tokens for e in measured.entries])
        away = np.abs(at_requests[:, None] - requests) + np.abs(at_tokens[:, None] - tokens)
        weights = np.exp2(-2 * away) * steps
        return np.asarray((weights * medians).sum(1) / (weights.sum(1) + _BELIEF))


class LiveTable:
    """What a run goes by: `at` is the table for a mean context, `saw` takes in a step. Not thread-safe."""

    def __init__(self, measured: LatencyTable) -> None:
        self.measured = measured
        self._axes: dict[int, _Axis] = {}

    def at(self, context: int = 0) -> LatencyTable:
        """The table to price a step with whose requests have so many tokens on average."""
        return self._axis(context).pace.table

    def plain(self, context: int = 0) -> LatencyTable:
        """The same without the pace of drafting: what `Pass.expected` goes by."""
        return self._axis(context).table

    def factor(self, context: int = 0) -> float:
        """What drafting's pace multiplies T_draft by."""
        return self._axis(context).pace.factor

    def saw(self, verify: Pass, draft: Pass | None, context: int = 0) -> None:
        """One step; draft None: it drafted nothing. Passes that took or should take no time say nothing."""
        axis = self._axis(context)
        passes: dict[Kind, Pass | None] = {"verify": verify, "draft": draft}
        sound = {kind: p for kind, p in passes.items() if p is not None and min(p.seconds, p.expected) > 0}
        axis.pace.saw(**({kind: (p.seconds, p.expected) for kind, p in sound.items()} if draft is not None else {}))
        for kind, timed in sound.items():
            axis.saw(kind, timed, self._surface(kind))
        axis.steps += 1
        if axis.steps % _EVERY == 0:
            self._correct(axis)

    @property
    def drift(self) -> Drift | None:
        """The measured entry that this run's steps contradict most; None where none is corrected."""
        worst = None
        for axis in self._axes.values():
            for kind, logs in axis.applied.items():
                at = int(np.abs(logs).argmax())
                entry, factor = self._surface(kind).entries[at], math.exp(logs[at])
                if worst is None or abs(logs[at]) > abs(math.log(worst.factor)):
                    worst = Drift(kind, entry.requests, entry.tokens, factor)
        return worst

    def _correct(self, axis: _Axis) -> None:
        made: dict[Kind, npt.NDArray[np.float64]] = {
            kind: axis.corrections(kind, self._surface(kind)) for kind in ("verify", "draft")
        }
        moved = max(float(np.abs(logs - axis.applied.get(kind, 0.0)).max()) for kind, logs in made.items())
        if moved < _LEAST:
            return
        axis.applied = made
        axis.table = self.measured.scaled(np.exp(made["verify"]), np.exp(made["draft"]))
        axis.pace.measured = axis.table

    def _surface(self, kind: Kind) -> Surface:
        return self.measured.verify if kind == "verify" else self.measured.draft

    def _axis(self, context: int) -> _Axis:
        octave = max(0, int(math.log2(max(context, 1) / _SHORT)) + 1) if context >= _SHORT else 0
        axis = self._axes.get(octave)
        if axis is None:
            nearest = min(self._axes, key=lambda other: abs(other - octave), default=None)
            known = None if nearest is None else self._axes[nearest]
            axis = _Axis(self.measured, Pace(self.measured)) if known is None else known.neighbour()
            self._axes[octave] = axis
        return axis


def _half_octave(count: int) -> int:
    return round(2 * math.log2(count))


def _nearest(surface: Surface, requests: int, tokens: int) -> int:
    """The entry nearest to a pass, by ratios."""
    at = surface.log_counts - np.log2([requests, tokens])
    return int(np.abs(at).sum(1).argmin())
