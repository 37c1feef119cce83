"""The scores by hand, and both estimators judged: what calibration mends shows, and few drafts do no harm."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.training.calibrate import fit
from trtllm_forespark.training.judging import judge
from trtllm_forespark.training.reliability import (
    auroc,
    brier_score,
    compare,
    curve,
    expected_calibration_error,
    log_loss,
)
from trtllm_forespark.training.replay import Trace

from .test_calibrate import K, synthetic


def numbers(*values: float) -> np.ndarray:
    return np.array(values, float)


def distorted(seed: int, n: int = 20000) -> dict[int, Trace]:
    return {d: synthetic(d, scale=0.5, bias=1.0, theta=2.0, n=n, seed=seed) for d in range(1, K + 1)}


def taken(traces: dict[int, Trace], n: int, accepted: int | None = None) -> dict[int, Trace]:
    """The first n drafts of every length; accepted: how many tokens of each, where given."""
    out = {}
    for d, t in traces.items():
        counts = t.accepted[:n] if accepted is None else np.full(n, min(accepted, d))
        out[d] = Trace(d, t.pre_logits[:n], t.post_logits[:n], counts, t.labelled[:n], t.previous[:n])
    return out


def test_expected_calibration_error_by_hand() -> None:
    assert expected_calibration_error(numbers(0.5, 0.5, 0.9), numbers(1, 0, 1)) == pytest.approx(0.1 / 3)
    assert expected_calibration_error(numbers(1), numbers(1)) == 0.0
    # Bins [3/15, 4/15) and [9/15, 10/15): |0.5 - 1| for two cases, |0.64 - 0.5| for two.
    four = expected_calibration_error(numbers(0.21, 0.25, 0.61, 0.66), numbers(0, 1, 1, 0))
    assert four == pytest.approx((abs(0.46 - 1) + abs(1.27 - 1)) / 4)


def test_log_loss_by_hand() -> None:
    assert log_loss(numbers(0.8, 0.4), numbers(1, 0)) == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2)


def test_brier_score_by_hand() -> None:
    assert brier_score(numbers(0.8, 0.4, 1.0), numbers(1, 0, 0)) == pytest.approx((0.04 + 0.16 + 1.0) / 3)


@pytest.mark.parametrize(
    ("predicted", "happened", "expected"),
    [
        ((0.1, 0.4, 0.35, 0.8), (0, 0, 1, 1), 3 / 4),
        ((0.1, 0.2, 0.8, 0.9), (0, 0, 1, 1), 1.0),
        ((0.9, 0.1), (0, 1), 0.0),
        ((0.5, 0.5, 0.5), (0, 1, 1), 0.5),
        ((0.3, 0.5, 0.5, 0.7), (0, 0, 1, 1), 3.5 / 4),  # one tie of four pairs
        ((0.3, 0.7), (1, 1), None),
        ((0.3, 0.7), (0, 0), None),
        ((), (), None),
    ],
)
def test_auroc_by_hand(predicted: tuple, happened: tuple, expected: float | None) -> None:
    assert auroc(numbers(*predicted), numbers(*happened)) == (expected and pytest.approx(expected))


def test_auroc_counts_pairs() -> None:
    rng = np.random.default_rng(0)
    predicted, happened = rng.integers(0, 8, 60) / 8, rng.integers(0, 2, 60)
    pairs = predicted[happened == 1][:, None] - predicted[happened == 0][None, :]
    assert auroc(predicted, happened) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_a_curve_holds_means_and_leaves_empty_bins_open() -> None:
    made = curve(numbers(0.02, 0.04, 1.0), numbers(0, 1, 1))
    assert made["count"] == [2, *[0] * 13, 1]
    assert made["predicted"] == [0.03, *[None] * 13, 1.0]
    assert made["happened"] == [0.5, *[None] * 13, 1.0]


def test_a_curve_gives_the_ece_again() -> None:
    rng = np.random.default_rng(1)
    predicted = rng.random(500)
    scores = compare(predicted, predicted**2, rng.random(500) < predicted)
    for when in ("before", "after"):
        bins = scores["bins"][when]
        gaps = [n * abs(p - h) for n, p, h in zip(*bins.values(), strict=True) if n]
        assert sum(gaps) / sum(bins["count"]) == pytest.approx(scores[f"ece_{when}"], abs=2e-4)


def test_scores_of_nothing_are_null() -> None:
    nothing = compare(numbers(), numbers(), numbers())
    assert nothing["count"] == 0 and nothing["bins"]["after"]["count"] == [0] * 15
    assert {v for k, v in nothing.items() if k not in ("count", "bins")} == {None}


def test_calibration_mends_every_entry_and_the_survival_that_ranks() -> None:
    fitted = distorted(seed=0)
    report = judge(distorted(seed=50), fitted, fit(fitted, K, False, "test"), K, False)
    judged = [
        *report["pre_draft"],
        *report["pre_draft_by_position"],
        *report["post_draft"],
        *report["survival"]["pre_draft"],
        *report["survival"]["post_draft"],
    ]
    assert len(judged) == 6 + 4 * K
    for scores in judged:
        assert scores["ece_after"] < 0.03 < scores["ece_before"], scores
        assert scores["brier_after"] < scores["brier_before"]
        assert 0.6 < scores["auroc_after"] < 1
    for scores in report["pre_draft"] + report["post_draft"]:
        assert scores["auroc_before"] == scores["auroc_after"], "a positive scale keeps the ranks of one entry"


def test_positions_and_survival_count_the_drafts_they_say() -> None:
    traces = distorted(seed=0, n=400)
    report = judge(traces, traces, Calibration.identity(K, 6), K, False)
    for scores in report["pre_draft_by_position"]:
        cases = [e for e in report["pre_draft"] if e["j"] == scores["j"]]
        assert len(cases) == K - scores["j"] + 1 and scores["count"] == sum(e["count"] for e in cases)
        assert scores["rate"] == pytest.approx(sum(e["rate"] * e["count"] for e in cases) / scores["count"], abs=1e-3)
    for name in ("pre_draft", "post_draft"):
        for scores in report["survival"][name]:
            assert scores["count"] == 400
            assert scores["rate"] == pytest.approx((traces[K].accepted >= scores["j"]).mean(), abs=1e-4)
    first = report["survival"]["post_draft"][0]
    assert first["ece_after"] == report["post_draft"][0]["ece_after"], "at position 1 survival is the condition"


def test_survival_is_the_product_of_the_conditionals() -> None:
    post = np.log(numbers(4, 1 / 4, 1))[None].repeat(4, 0)  # 0.8, 0.2, 0.5
    trace = Trace(K, np.zeros((4, 6)), post, np.array([0, 1, 2, 3]), np.array([3, 3, 3, 2]), np.full(4, -1))
    traces = {d: replace(trace, length=d, accepted=np.minimum(trace.accepted, d)) for d in (1, 2, 3)}
    report = judge(traces, traces, Calibration.identity(K, 6), K, False)
    pre, after = report["survival"]["pre_draft"], report["survival"]["post_draft"]
    assert [s["count"] for s in after] == [4, 4, 3]
    assert [s["ece_after"] for s in after] == pytest.approx([0.05, abs(0.16 - 0.5), 0.08], abs=1e-4)
    assert [s["brier_after"] for s in pre] == pytest.approx([0.25, (0.0625 * 2 + 0.5625 * 2) / 4, 0.125**2], abs=1e-4)


@pytest.mark.parametrize(("n", "accepted"), [(1, None), (1, 0), (1, K), (40, 0), (40, 1), (40, K), (0, 0)])
def test_few_or_one_sided_drafts_leave_open_what_they_do_not_tell(n: int, accepted: int | None) -> None:
    traces = taken(distorted(seed=0, n=40), n, accepted)
    calibration = fit(traces, K, False, "test")
    for values in (calibration.scale, calibration.bias, calibration.temperature, calibration.mean_survival):
        assert np.isfinite(values).all()
    report = json.loads(json.dumps(judge(traces, traces, calibration, K, False), allow_nan=False))
    for scores in report["pre_draft"] + report["pre_draft_by_position"] + report["post_draft"]:
        known = {k for k, v in scores.items() if v is not None}
        assert {"count", "bins"} <= known
        assert ("ece_after" in known) == ("brier_after" in known) == ("rate" in known) == (scores["count"] > 0)
        if accepted is not None:
            assert scores["auroc_before"] is scores["auroc_after"] is None
            assert (scores["count"] > 0) == (n > 0 and scores["j"] <= accepted + 1)
    length = report["predicted_length"]
    assert length["drafts"] == n and (length["pre_draft"]["within_2"] is None) == (n == 0)


def test_a_directional_drafter_has_one_entry_a_position() -> None:
    full = synthetic(K, 1.0, 0.0, 1.0, n=300)
    trace = replace(full, pre_logits=full.pre_logits[:, -K:])
    calibration = fit({K: trace}, K, True, "test")
    report: dict[str, Any] = judge({K: trace}, {K: trace}, calibration, K, True)
    assert [(e["d"], e["j"]) for e in report["pre_draft"]] == [(K, 1), (K, 2), (K, 3)]
    for entry, pooled in zip(report["pre_draft"], report["pre_draft_by_position"], strict=True):
        assert pooled.items() <= entry.items()
