"""`forespark bench recalibration` judges both calibrations on the same drafts, by hand-checked figures."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.runtime.bench.recalibration import errors
from trtllm_forespark.training.replay import Trace
from trtllm_forespark.wcs.recalibration import Recalibration


def trace(accepted: list[int], labelled: int = 2) -> Trace:
    """Full drafts of two tokens by a directional drafter that gives every position logit 0: conditional 1/2."""
    n = len(accepted)
    zeros = np.zeros((n, 2), np.float32)
    return Trace(2, zeros, zeros, np.array(accepted), np.full(n, labelled), np.full(n, -1))


def make(traces: dict[int, Trace], taught: bool) -> dict:
    offline = Calibration.identity(2, 2)
    learnt = Recalibration(2, offline.scale, offline.bias, offline.temperature)
    if taught:
        n = 64
        zeros, two = np.zeros((n, 2), np.float32), np.full(n, 2)
        for _ in range(60):
            learnt.learn(zeros, zeros, two, two, two, np.zeros(n, np.int64))
    return errors(traces, offline, learnt, directional=True)


def test_errors_by_hand() -> None:
    """Survival 1/2 and 1/4 is predicted; of four drafts one is wholly accepted and none in part."""
    of = trace([2, 0, 0, 0])
    out = make(
        {1: Trace(1, of.pre_logits, of.post_logits, np.minimum(of.accepted, 1), of.labelled, of.previous), 2: of}, False
    )
    # Rates are 1/4 at every entry: gaps 1/4, 1/4 and 0.
    assert out["pre_draft"]["entry_gap_before"] == out["pre_draft"]["entry_gap_after"] == pytest.approx(1 / 6, abs=1e-4)
    assert out["post_draft"]["entry_gap_before"] == pytest.approx(1 / 8, abs=1e-4)
    assert out["pre_draft"]["ece_before"] == pytest.approx(2 / 3 * 0.25, abs=1e-4)
    # Expected length 3/4: off by 5/4 once and by 3/4 three times.
    assert out["predicted_length"]["mean_absolute_error_before"] == pytest.approx((1.25 + 3 * 0.75) / 4, abs=1e-4)


def test_what_was_learnt_shows() -> None:
    """Where nothing is ever accepted, following that must bring every error down."""
    out = make({2: trace([0] * 20), 1: trace([0] * 20, labelled=1)}, True)
    for estimate in ("pre_draft", "post_draft"):
        assert out[estimate]["ece_after"] < 0.2 < out[estimate]["ece_before"]
        assert out[estimate]["entry_gap_after"] < out[estimate]["entry_gap_before"] / 2
    assert out["predicted_length"]["mean_absolute_error_after"] < 0.2
