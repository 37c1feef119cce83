from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.pace import Pace
from trtllm_forespark.wcs.policies import make_policy
from trtllm_forespark.wcs.stages import Estimate, Plan, Selection
from trtllm_forespark.wcs.survival import prefix_survival

from .cases import dense_table

K = 4
TABLE = dense_table(4, K, lambda m, t: 0.02 * t, lambda m, t: 1 + 0.02 * t, prefill=8)


def test_nothing_is_concluded_from_little() -> None:
    pace = Pace(TABLE)
    assert pace.table is TABLE
    for _ in range(4):
        pace.saw(draft=(9.0, 1.0), verify=(1.0, 1.0))
    assert pace.factor == 1.0 and pace.table is TABLE


@pytest.mark.parametrize(("draft", "verify", "factor"), [(2.0, 1.0, 2.0), (1.0, 2.0, 0.5), (3.0, 3.0, 1.0)])
def test_only_the_ratio_of_the_two_counts(draft: float, verify: float, factor: float) -> None:
    pace = Pace(TABLE)
    for _ in range(40):
        pace.saw(draft=(draft * 0.3, 0.3), verify=(verify * 0.7, 0.7))
    assert pace.factor == pytest.approx(factor, rel=0.06)
    assert pace.table.draft_seconds(2, 6) == pytest.approx(pace.factor * TABLE.draft_seconds(2, 6))
    assert pace.table.verify_seconds(2, 6) == TABLE.verify_seconds(2, 6)
    assert pace.table is pace.table, "a factor's table is made once"


def test_one_stalled_step_changes_little() -> None:
    pace = Pace(TABLE)
    for _ in range(60):
        pace.saw(draft=(1.0, 1.0), verify=(1.0, 1.0))
    pace.saw(verify=(1000.0, 1.0))
    assert 0.9 <= pace.factor <= 1.1


def test_a_few_slow_drafts_do_not_end_drafting_for_good() -> None:
    pace = Pace(TABLE)
    for _ in range(8):
        pace.saw(draft=(50.0, 1.0), verify=(1.0, 1.0))
    assert pace.factor == pytest.approx(3.0, rel=0.06), "no factor goes further"
    for _ in range(200):
        pace.saw(verify=(1.0, 1.0))
    assert pace.factor == 1.0


def test_drafting_that_takes_longer_than_its_price_is_drafted_less() -> None:
    n = 4
    survival = prefix_survival(np.cumprod(np.full((n, K), 0.6, np.float32), axis=1))
    totals = {}
    for slower in (1.0, 3.0):
        for adapt in (True, False):
            controller = WcsController(make_policy("wcs"), TABLE, K, adapt=adapt)
            for _ in range(30):
                plan = controller.plan([(i, 0) for i in range(n)], Estimate(survival, np.ones(n, bool)), [K] * n, n)
                drafting = int((plan.draft_lengths > 0).sum())
                tokens = int(plan.draft_lengths.sum()) + drafting
                selection = Selection(plan.draft_lengths)
                seconds = slower * float(TABLE.draft_seconds(drafting, tokens))
                verify = float(TABLE.verify_seconds(n, n + tokens - drafting))
                controller.timed(plan, selection, n, tokens=2 * n, draft=seconds, verify=verify, whole=seconds + verify)
            totals[slower, adapt] = int(plan.draft_lengths.sum())
    assert totals[3.0, True] < totals[1.0, True] == totals[1.0, False] == totals[3.0, False]


def test_steps_with_prefill_and_policies_without_a_table_are_not_judged() -> None:
    controller = WcsController(make_policy("wcs"), TABLE, K)
    plan, selection = Plan(np.zeros(2, int), 0, 0.0, 0.0, 0.0, looked=True), Selection(np.zeros(2, int))
    for _ in range(99):
        controller.timed(plan, selection, 12, tokens=2, draft=0.0, verify=99.0, whole=99.0)
        assert not controller.rests(2)
    assert controller.live is not None and controller.live.factor() == 1.0 and controller.live.drift is None
    WcsController(make_policy("ar"), None, 0).timed(plan, selection, 2, tokens=2, draft=0.0, verify=1.0, whole=1.0)
