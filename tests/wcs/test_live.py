"""A table that follows the steps: what is learnt of buckets, what is left alone, and what is common to all."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.live import LiveTable, Pass

from .cases import dense_table

K = 4
TABLE = dense_table(8, K, lambda m, t: 0.02 * t, lambda m, t: 1 + 0.02 * t, prefill=8)


def step(live: LiveTable, n: int, tokens: int, factor: float, context: int = 0) -> None:
    """A verification of n requests that takes ``factor`` times what was measured."""
    expected = float(live.plain(context).verify_seconds(n, tokens))
    live.saw(Pass(n, tokens, factor * float(TABLE.verify_seconds(n, tokens)), expected), None, context)


def priced(live: LiveTable, n: int, tokens: int, context: int = 0) -> float:
    """Its price over the measured one."""
    return float(live.at(context).verify_seconds(n, tokens) / TABLE.verify_seconds(n, tokens))


def test_a_bucket_that_takes_longer_than_measured_is_priced_so() -> None:
    live = LiveTable(TABLE)
    assert live.at() is TABLE and live.drift is None
    for i in range(400):
        step(live, 4, (4, 16)[i % 2], (1.0, 1.5)[i % 2])
    more, fewer = priced(live, 4, 16), priced(live, 4, 4)
    assert more / fewer == pytest.approx(1.5, rel=0.15)
    assert live.drift is not None and live.drift.kind == "verify"
    assert 1.1 < max(live.drift.factor, 1 / live.drift.factor) < 1.3, "half of it either way: the level is in between"
    for i in range(400):  # and back, when it is as measured again
        step(live, 4, (4, 16)[i % 2], 1.0)
    assert priced(live, 4, 16) == pytest.approx(priced(live, 4, 4), rel=0.05)


def test_what_all_steps_have_in_common_changes_no_price() -> None:
    live, rng = LiveTable(TABLE), np.random.default_rng(0)
    for i in range(600):
        machine = 1 + 0.4 * np.sin(i / 60)
        step(live, 4, int(rng.choice([4, 8, 16])), machine * float(np.exp(rng.normal(0, 0.05))))
    for tokens in (4, 8, 16):
        assert priced(live, 4, tokens) == pytest.approx(1.0, abs=0.04)


def test_corrections_do_not_pile_up_and_a_stall_moves_nothing() -> None:
    live = LiveTable(TABLE)
    for i in range(2000):
        step(live, 4, (4, 16)[i % 2], (1.0, 1.3)[i % 2] * (100.0 if i % 97 == 0 else 1.0))
    assert priced(live, 4, 16) / priced(live, 4, 4) == pytest.approx(1.3, rel=0.1)


def test_nothing_is_said_of_what_no_step_came_near() -> None:
    live = LiveTable(TABLE)
    for i in range(400):
        step(live, 1, (1, 5)[i % 2], (1.0, 1.5)[i % 2])
    assert priced(live, 1, 5) > 1.1
    assert priced(live, 8, 8) == pytest.approx(1.0, abs=0.03)


def test_too_few_steps_change_nothing() -> None:
    live = LiveTable(TABLE)
    for i in range(63):
        step(live, 4, (4, 16)[i % 2], (1.0, 2.0)[i % 2])
    assert live.at() is TABLE


def test_contexts_are_told_apart_and_a_new_one_begins_with_the_nearest() -> None:
    live = LiveTable(TABLE)
    for i in range(400):
        step(live, 4, (4, 16)[i % 2], 1.0, 100)
        step(live, 4, (4, 16)[i % 2], (1.0, 1.6)[i % 2], 4000)
    assert priced(live, 4, 16, 100) == pytest.approx(1.0, abs=0.03) and priced(live, 4, 16, 511) < 1.03
    known = priced(live, 4, 16, 4000)
    assert known > 1.1 and priced(live, 4, 16, 8000) == known
    for i in range(400):
        step(live, 4, (4, 16)[i % 2], 1.0, 8000)
    assert priced(live, 4, 16, 8000) < 1.05 and priced(live, 4, 16, 4000) == known


def test_drafts_are_corrected_too_and_their_pace_is_kept_apart() -> None:
    """Drafting takes twice its price in all: that is its pace. Short drafts take longer still: that is their bucket."""
    live = LiveTable(TABLE)
    for i in range(600):
        tokens, factor = ((8, 2.4), (20, 2.0))[i % 2]
        draft = Pass(
            4, tokens, factor * float(TABLE.draft_seconds(4, tokens)), float(live.plain().draft_seconds(4, tokens))
        )
        verify = float(live.plain().verify_seconds(4, 8))
        live.saw(Pass(4, 8, float(TABLE.verify_seconds(4, 8)), verify), draft)
    ratio = float(live.at().draft_seconds(4, 8) / live.at().draft_seconds(4, 20))
    assert ratio / float(TABLE.draft_seconds(4, 8) / TABLE.draft_seconds(4, 20)) == pytest.approx(1.2, rel=0.1)
    assert float(live.at().draft_seconds(4, 20) / TABLE.draft_seconds(4, 20)) == pytest.approx(2.0, rel=0.12)


def test_passes_without_time_or_price_are_not_judged() -> None:
    live = LiveTable(TABLE)
    for _ in range(200):
        live.saw(Pass(4, 8, 0.0, 1.0), Pass(4, 8, 1.0, 0.0))
        live.saw(Pass(4, 8, 1.0, 0.0), None)
    assert live.at() is TABLE


@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_scaled_by_entry(interpolation: str) -> None:
    table = LatencyTable.from_functions(
        lambda n, t: 1.0 + t, lambda n, t: 0.1 * t, requests=[1, 2], verify_tokens=[2, 4], draft_tokens=[4],
        interpolation=interpolation,  # type: ignore[arg-type]
    )  # fmt: skip
    made = table.scaled(np.array([1.0, 2.0, 1.0, 1.0]), 3.0)
    assert made.verify_seconds(1, 4) == 10.0 and made.verify_seconds(2, 4) == 5.0 and made.verify_seconds(1, 2) == 3.0
    assert made.draft_seconds(2, 4) == pytest.approx(1.2) and table.draft_seconds(2, 4) == pytest.approx(0.4)
