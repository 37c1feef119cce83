"""How this run's times compare with the table's: contexts and neighbours differ from those it was measured with."""

from __future__ import annotations

import math

from trtllm_forespark.wcs.latency import LatencyTable

#: What a step leaves of older evidence of what it did, and of what it did not do; the weight from which anything is
#: concluded; how far a factor may go.
_KEEP, _FADE, _ENOUGH, _FURTHEST = 0.95, 0.99, 5.0, 3.0
#: Factors are powers of this, so that few tables are ever made.
_STEP = 1.1


class Pace:
    """The table a run should go by: T_draft scaled by how drafting fares against verification here.

    Schedules depend only on ratios (a common factor changes no comparison), so T_verify stays as it is.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.measured = table
        # Decayed sums of log(measured / expected), and their weights.
        self._ratios = {"draft": [0.0, 0.0], "verify": [0.0, 0.0]}

    @property
    def measured(self) -> LatencyTable:
        """The table that is scaled. Setting another keeps what is known of the ratio."""
        return self._tables[0]

    @measured.setter
    def measured(self, table: LatencyTable) -> None:
        self._tables: dict[int, LatencyTable] = {0: table}

    def another(self) -> Pace:
        """One that knows the same and learns on its own."""
        made = Pace(self.measured)
        made._ratios = {kind: list(sums) for kind, sums in self._ratios.items()}
        return made

    def saw(self, **times: tuple[float, float]) -> None:
        """One step's draft= and verify=, each (seconds it took, seconds the table says).

        What a step did not do fades slowly, so that a few slow drafts cannot end drafting for good.
        """
        for kind, sums in self._ratios.items():
            seconds, expected = times.get(kind, (0.0, 0.0))
            known = seconds > 0 and expected > 0
            keep = _KEEP if known else _FADE
            # One stalled step must not count for twenty: no ratio beyond what could be concluded.
            ratio = min(max(seconds / expected, 1 / _FURTHEST), _FURTHEST) if known else 1.0
            sums[0], sums[1] = keep * sums[0] + math.log(ratio), keep * sums[1] + known

    @property
    def factor(self) -> float:
        """What T_draft is multiplied by, a power of 1.1."""
        return _STEP ** self._power()

    @property
    def table(self) -> LatencyTable:
        """The table to price this step with."""
        power = self._power()
        if power not in self._tables:
            self._tables[power] = self.measured.scaled(draft=_STEP**power)
        return self._tables[power]

    def _power(self) -> int:
        draft, verify = self._ratios["draft"], self._ratios["verify"]
        if draft[1] < _ENOUGH or verify[1] < _ENOUGH:
            return 0
        ratio = draft[0] / draft[1] - verify[0] / verify[1]
        return round(min(max(ratio, -math.log(_FURTHEST)), math.log(_FURTHEST)) / math.log(_STEP))
