"""Whether to look for drafts at all: a look (estimate, schedule and what it leads to) must earn what it costs.

The schedule compares steps by the table; what the estimate and the schedule themselves cost is paid before it can say
anything. That much is timed. What drafts cost beyond their price is not: so some steps are passed over, and tell what a
step without drafts takes. Slow and fast minutes of the machine are common to both kinds: a filter follows them, lest
they be taken for a difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

#: What a look leaves of older evidence of the tokens looks give; looks that are believed to have given what they are
#: priced at, before any; and the standard deviation of what a request is believed to get in one.
_KEEP, _BELIEF, _SPREAD = 0.99, 8.0, 0.5
#: Standard deviations, in logs. What is believed of drafts' cost beyond their price, and how it drifts in a step; how
#: this run's times may differ from the table's, and how that drifts; and what is left over, step by step.
_COST, _COST_DRIFT, _LEVEL, _LEVEL_DRIFT, _NOISE = 0.06, 0.002, 0.5, 0.03, 0.08
#: A step further off than so many standard deviations counts as one so far off (it stalled).
_FURTHEST = 3.0
#: How many standard errors looking must be worse before it rests.
_DOUBT = 0.5
#: The cost is known well enough when its standard error is within this share of what looking gains or loses, or within
#: this much; until then one step is passed over after so many with drafts.
_SHARE, _FINE, _DRAFTS_BETWEEN = 0.5, 0.025, 4
#: How far one look moves what is known of a look's own time, as a share of a step without drafts: a stall says no more.
_MOVE = 0.02
#: The longest rest between two looks, in steps: longer than many answers, whose tokens then never enter the drafter's
#: context (a look takes in all that waits).
_LONGEST_REST = 256


@dataclass
class _Times:
    """Two unknowns of a load, followed by a Kalman filter in logs, with their variances and covariance: how its steps'
    times differ from the table's (level), and what drafts cost beyond their price."""

    level: float = 0.0
    cost: float = 0.0
    level_var: float = _LEVEL**2
    covariance: float = 0.0
    cost_var: float = _COST**2

    def drift(self, steps: int) -> None:
        self.level_var = min(self.level_var + steps * _LEVEL_DRIFT**2, _LEVEL**2)
        self.cost_var = min(self.cost_var + steps * _COST_DRIFT**2, _COST**2)

    def saw(self, drafted: bool, ratio: float) -> None:
        """ratio: seconds a step took, but for the look itself, over what it is priced at."""
        to_level = self.level_var + drafted * self.covariance
        to_cost = self.covariance + drafted * self.cost_var
        spread = to_level + drafted * to_cost + _NOISE**2
        limit = _FURTHEST * math.sqrt(spread)
        off = min(max(math.log(ratio) - self.level - drafted * self.cost, -limit), limit)
        self.level += to_level / spread * off
        self.cost += to_cost / spread * off
        self.level_var -= to_level**2 / spread
        self.covariance -= to_level * to_cost / spread
        self.cost_var -= to_cost**2 / spread


@dataclass
class _Load:
    """What is known of a load. Of its looks, decayed sums: tokens a request, their squares, prices over that of a step
    without drafts, their number, and how many drafted. look: a look's own time as a share of a step without drafts."""

    tokens: float
    squares: float
    price: float
    looks: float
    drafts: float
    look: float = 0.0
    times: _Times = field(default_factory=_Times)
    seen: int = 0
    rest: int = 1
    drafts_since: int = 0

    @classmethod
    def new(cls, n: int) -> _Load:
        return cls(_BELIEF, _BELIEF * (1 + _SPREAD**2 / n), _BELIEF, _BELIEF, _BELIEF)

    def neighbour(self, step: int) -> _Load:
        """What is believed of a load next to this one."""
        share = min(_BELIEF / self.looks, 1.0)
        known = replace(self, times=replace(self.times, level_var=_LEVEL**2, covariance=0.0, cost_var=_COST**2))
        known.tokens, known.squares, known.price = share * self.tokens, share * self.squares, share * self.price
        known.looks, known.drafts = share * self.looks, share * self.drafts
        known.seen, known.rest, known.drafts_since = step, 1, 0
        return known

    def looked(self, tokens: float, price: float, look: float | None) -> None:
        if look is not None:
            self.look += min(max(look - self.look, -_MOVE), _MOVE)
        self.tokens, self.squares = _KEEP * self.tokens + tokens, _KEEP * self.squares + tokens**2
        self.price, self.looks = _KEEP * self.price + price, _KEEP * self.looks + 1
        self.drafts = _KEEP * self.drafts + (price > 1)

    @property
    def gain(self) -> float:
        """Log of tokens a second with looks over those without (each request then gets one)."""
        priced = self.price + self.look * self.looks
        return math.log(self.tokens / priced) - self.drafts / self.looks * self.times.cost

    @property
    def doubt(self) -> float:
        """Standard error of the cost's part in the gain."""
        return self.drafts / self.looks * math.sqrt(self.times.cost_var)

    @property
    def looking_pays(self) -> bool:
        """Unless it is worse by more than chance explains."""
        luck = max(self.squares * self.looks / self.tokens**2 - 1, 0.0) / self.looks
        return self.gain + _DOUBT * math.sqrt(luck + self.doubt**2) >= 0

    @property
    def cost_is_vague(self) -> bool:
        return self.doubt > max(_SHARE * abs(self.gain), _FINE)


class Rest:
    """Loads are told apart by half octaves, and a new one begins with what is known of the nearest; what is learnt
    about one waits for the next batch of its size.

    Each look after which looking still does not pay doubles the rest before the next one. What the first look after a
    rest takes is not judged: it also pays for what the rest put off (the drafter's context of all the tokens since).
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._left, self._resting = 0, 0  # steps left of this rest, and the load it is for
        self._rested = False
        self._step = 0

    def skips(self, n: int) -> bool:
        """Whether this step of n decoding requests is to be passed over. Ask once a step."""
        known = self._at(n)
        if _load(n) < self._resting and known.looking_pays:
            self._left = 0  # the load has fallen
        if self._left > 0:
            self._left -= 1
            return True
        return known.drafts_since >= _DRAFTS_BETWEEN and known.cost_is_vague

    def saw(
        self, n: int, looked: bool, tokens: int, seconds: float, price: float, plain: float, look: float = 0.0
    ) -> None:
        """One step of n requests, looked at or passed over: tokens it gave, seconds it took in all and, of these, for
        the look itself, what the table says of it and of a step without drafts."""
        others = seconds - look
        if n == 0 or min(others, price, plain) <= 0:
            return
        self._step += 1
        first, self._rested = looked and self._rested, not looked
        known = self._at(n)
        drafted = looked and price > plain
        known.drafts_since = (known.drafts_since + 1) * drafted
        if not first:
            known.times.drift(self._step - known.seen)
            known.times.saw(drafted, others / price)
            known.seen = self._step
        if not looked:
            return
        known.looked(tokens / n, price / plain, None if first else look / others * price / plain)
        if known.looking_pays:
            known.rest = 1
        else:
            self._left, self._resting = known.rest, _load(n)
            known.rest = min(2 * known.rest, _LONGEST_REST)

    def _at(self, n: int) -> _Load:
        load = _load(n)
        if load not in self._loads:
            near = [other for other in self._loads if abs(other - load) <= 2]
            nearest = min(near, key=lambda other: abs(other - load), default=None)
            self._loads[load] = _Load.new(n) if nearest is None else self._loads[nearest].neighbour(self._step)
        return self._loads[load]


def _load(n: int) -> int:
    """Half octaves: 1, 2, 3, 4, 5-6, 7-9, 10-13, 14-19, …"""
    return round(2 * math.log2(n))
