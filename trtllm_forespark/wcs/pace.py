"""How this run's times compare with the table's: contexts and neighbours differ from those it was measured with."""

from __future__ import annotations

import math

from trtllm_forespark.wcs.latency import LatencyTable

#: What a step leaves of older evidence; the steps of both kinds before anything is concluded; how far a factor may go.
_KEEP, _ENOUGH, _FURTHEST = 0.95, 5.0, 3.0
#: Factors are powers of this, so that few tables are ever made.
_STEP = 1.1


class Pace:
    """The table a run should go by: T_draft scaled by how drafting fares against verification here.

    Schedules depend only on the ratio of the two (a common factor changes no comparison), so T_verify stays as it is.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.measured = table
        self._tables: dict[int, LatencyTable] = {0: table}
        self._ratios = {"draft": [0.0, 0.0], "verify": [0.0, 0.0]}  # decayed sums: measured / expected, weights

    def saw(self, kind: str, seconds: float, expected: float) -> None:
        """A draft or verification took ``seconds`` where the table, unscaled, says ``expected``."""
        if seconds > 0 and expected > 0:
            sums = self._ratios[kind]
            # One stalled step must not count for twenty: no ratio beyond what could be concluded.
            ratio = min(max(seconds / expected, 1 / _FURTHEST), _FURTHEST)
            sums[0], sums[1] = _KEEP * sums[0] + math.log(ratio), _KEEP * sums[1] + 1.0

    @property
    def factor(self) -> float:
        """What T_draft is multiplied by, a power of 1.1."""
        return _STEP ** self._power()

    @property
    def table(self) -> LatencyTable:
        """The table to price this step with."""
        power = self._power()
        if power not in self._tables:
            self._tables[power] = self.measured.with_draft_scaled(_STEP**power)
        return self._tables[power]

    def _power(self) -> int:
        draft, verify = self._ratios["draft"], self._ratios["verify"]
        if min(draft[1], verify[1]) < _ENOUGH:
            return 0
        return round((draft[0] / draft[1] - verify[0] / verify[1]) / math.log(_STEP))
