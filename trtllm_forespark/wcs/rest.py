"""Whether to look for drafts at all: a look (estimate, schedule and what it leads to) must earn what it costs.

The schedule compares steps by the table; what the estimate and the schedule themselves cost is paid before it can say
anything. So each load's steps are of two kinds, looked at and passed over, and the kind that has given more tokens for
its time is preferred; the other is tried now and then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: What a step leaves of older evidence of its own kind; what a look leaves of that of steps passed over, and these of
#: that of looks (few, and dear).
_KEEP, _FADE_PASSED, _FADE_LOOKED = 0.97, 0.99, 0.998
#: Looks that are believed to have given what the table says of a plain step, before any; and the standard deviation of
#: what a request is believed to get in one.
_BELIEF, _SPREAD = 8.0, 0.5
#: What the table's word for a step passed over counts for at first; evidence of such steps below which one is passed
#: over, to know what they give: little where looking gives more by `_CLEARLY` (or `_LOOKS` have not told), else more.
_WORD, _THIN, _CLOSE, _CLEARLY, _LOOKS = 0.54, 0.5, 4.0, 1.15, 16
#: How many standard errors looking must be worse before it rests.
_DOUBT = 0.5
#: The longest rest between two looks, in steps, and how many times its price a step may count for (one that stalled).
_LONGEST_REST, _FURTHEST = 64, 2.0


@dataclass
class _Kind:
    """Decayed sums over the steps of one kind: steps, tokens a request and their squares, time over that of the table's
    plain step."""

    steps: float
    tokens: float
    squares: float
    time: float

    def fade(self, share: float) -> None:
        self.steps, self.tokens = share * self.steps, share * self.tokens
        self.squares, self.time = share * self.squares, share * self.time

    def worth(self, steps: float) -> _Kind:
        """The same, as if it came from so many steps."""
        return _Kind(*(steps / self.steps * x for x in (self.steps, self.tokens, self.squares, self.time)))

    @property
    def rate(self) -> float:
        return self.tokens / self.time

    def add(self, tokens: float, time: float) -> None:
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.squares, self.time = self.squares + tokens**2, self.time + time

    @property
    def chance(self) -> float:
        """Standard error of the tokens, as a share of them."""
        variance = max(self.squares / self.steps - (self.tokens / self.steps) ** 2, 0.0)
        return math.sqrt(variance * self.steps) / self.tokens


@dataclass
class _Load:
    """What is known of a load; ``believed``: only what the table says, whose level this run's first step puts right."""

    looked: _Kind
    passed: _Kind
    believed: bool = True
    looks: int = 0
    rest: int = 1

    @classmethod
    def new(cls, n: int) -> _Load:
        looked = _Kind(1.0, 1.0, 1 + _SPREAD**2 / n, 1.0)
        return cls(looked.worth(_BELIEF), _Kind(1.0, 1.0, 1.0, 1.0).worth(_WORD))

    def neighbour(self) -> _Load:
        """What is believed of a load next to this one."""
        return _Load(self.looked.worth(_BELIEF), self.passed.worth(_WORD), self.believed, self.looks)

    def scale(self, level: float) -> None:
        """The table's times are off by this factor here."""
        self.looked.time, self.passed.time, self.believed = level * self.looked.time, level * self.passed.time, False

    @property
    def looking_pays(self) -> bool:
        """Unless it is worse by more than chance explains."""
        return self.looked.rate * (1 + _DOUBT * self.looked.chance) >= self.passed.rate

    @property
    def passed_is_thin(self) -> bool:
        """Whether too little is known of steps passed over: the closer the two kinds, the more must be."""
        clear = self.looks < _LOOKS or self.looked.rate > _CLEARLY * self.passed.rate
        return self.passed.steps < (_THIN if clear else _CLOSE)


class Rest:
    """Loads are told apart by half octaves, and a new one begins with what is known of the nearest; what is learnt
    about one waits for the next batch of its size.

    Each look after which looking still does not pay doubles the rest before the next one. The first look after a rest
    is not judged: it also pays for what the rest put off (the drafter's context of all the tokens since).
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._left, self._resting = 0, 0  # steps left of this rest, and the load it is for
        self._rested = False

    def skips(self, n: int) -> bool:
        """Whether this step of n decoding requests is to be passed over. Ask once a step."""
        known = self._at(n)
        if _load(n) < self._resting and known.looking_pays:
            self._left = 0  # the load has fallen
        if self._left > 0:
            self._left -= 1
            return True
        return known.passed_is_thin

    def saw(self, n: int, looked: bool, tokens: int, seconds: float, price: float, plain: float) -> None:
        """One step of n requests, looked at or passed over: tokens it gave, seconds it took in all, what the table says
        of it and of a step without drafts."""
        if n == 0 or seconds <= 0 or plain <= 0:
            return
        first, self._rested = looked and self._rested, not looked
        if first:
            return
        known = self._at(n)
        if known.believed:
            known.scale(min(max(seconds / price, 1 / _FURTHEST), _FURTHEST))
        known.looks += looked
        known.looked.fade(_KEEP if looked else _FADE_LOOKED)
        known.passed.fade(_FADE_PASSED if looked else _KEEP)
        mine = known.looked if looked else known.passed
        mine.add(tokens / n, min(seconds, _FURTHEST * price) / plain)
        if looked and known.looking_pays:
            known.rest = 1
        elif looked:
            self._left, self._resting = known.rest, _load(n)
            known.rest = min(2 * known.rest, _LONGEST_REST)

    def _at(self, n: int) -> _Load:
        load = _load(n)
        if load not in self._loads:
            near = [other for other in self._loads if abs(other - load) <= 2]
            nearest = min(near, key=lambda other: abs(other - load), default=None)
            self._loads[load] = _Load.new(n) if nearest is None else self._loads[nearest].neighbour()
        return self._loads[load]


def _load(n: int) -> int:
    """Half octaves: 1, 2, 3, 4, 5-6, 7-9, 10-13, 14-19, …"""
    return round(2 * math.log2(n))
