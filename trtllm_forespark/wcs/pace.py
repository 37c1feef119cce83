"""How this run's times compare with the table's: contexts and neighbours differ from those it was measured with."""

from __future__ import annotations

import math

from trtllm_forespark.wcs.latency import LatencyTable

#: What a step leaves of older evidence of what it did, and of what it did not do; the weight from which anything is
#: concluded; how far a factor may go.
_KEEP, _FADE, _ENOUGH, _FURTHEST = 0.95, 0.99, 5.0, 3.0
#: Plain steps that are enough to go by (they vary less), and how often one is made where too few come by themselves.
_FEW, _EVERY = 1.5, 32
#: Factors are powers of this, so that few tables are ever made.
_STEP = 1.1


class Pace:
    """The table a run should go by: T_draft scaled by how drafting fares against verification here, and what a plain
    step costs against one that verifies drafts (whose lengths differ, which a table of even ones does not show).

    Schedules depend only on ratios (a common factor changes no comparison), so T_verify stays as it is.
    """

    def __init__(self, table: LatencyTable) -> None:
        self.measured = table
        self._tables: dict[int, LatencyTable] = {0: table}
        # Decayed sums of log(measured / expected), and their weights.
        self._ratios = {"draft": [0.0, 0.0], "verify": [0.0, 0.0], "plain": [0.0, 0.0]}
        self._since_plain = 0

    def saw(self, **times: tuple[float, float]) -> None:
        """One step's draft= and either verify= (with drafts) or plain=, each (seconds it took, seconds the table says).

        What a step did not do fades slowly, so that a few slow drafts cannot end drafting for good.
        """
        self._since_plain = 0 if "plain" in times else self._since_plain + 1
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
            self._tables[power] = self.measured.with_draft_scaled(_STEP**power)
        return self._tables[power]

    @property
    def plain_factor(self) -> float:
        """What T_verify(N) of a step without drafts is to be multiplied by beside one with drafts."""
        return math.exp(self._against_verify("plain", _FEW))

    @property
    def wants_plain(self) -> bool:
        """Whether it is time for a step without drafts, to know what one costs."""
        return self._ratios["plain"][1] < _FEW and self._since_plain >= _EVERY

    def _power(self) -> int:
        return round(self._against_verify("draft", _ENOUGH) / math.log(_STEP))

    def _against_verify(self, kind: str, enough: float) -> float:
        mine, verify = self._ratios[kind], self._ratios["verify"]
        if mine[1] < enough or verify[1] < _ENOUGH:
            return 0.0
        ratio = mine[0] / mine[1] - verify[0] / verify[1]
        return min(max(ratio, -math.log(_FURTHEST)), math.log(_FURTHEST))
