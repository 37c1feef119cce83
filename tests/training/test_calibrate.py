"""Calibration recovers what it should, and the replay it rests on visits the anchors a real run visits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.base import DraftContext
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.training.calibrate import (
    entries,
    fit,
    fit_logistic,
    fit_temperatures,
    sigmoid,
)
from trtllm_forespark.training.judging import judge
from trtllm_forespark.training.replay import Replay, Text, Trace, greedy_choice
from trtllm_forespark.wcs.survival import triangle_to_survival

from ..drafters.kinds import KINDS, World

K = 3


def synthetic(length: int, scale: float, bias: float, theta: float, n: int = 20000, seed: int = 0) -> Trace:
    """Drafts whose conditional acceptance is sigmoid(scale z + bias) = sigmoid(l / theta) for the given logits."""
    rng = np.random.default_rng(seed + length)
    true = rng.normal(0.3, 1.2, (n, length))
    accepted = (rng.random((n, length)) < sigmoid(true)).cumprod(1).sum(1)
    pre = np.zeros((n, K * (K + 1) // 2), np.float32)
    start = length * (length - 1) // 2
    pre[:, start : start + length] = (true - bias) / scale
    post = np.full((n, K), -np.inf, np.float32)
    post[:, :length] = true * theta
    return Trace(length, pre, post, accepted, np.full(n, length), np.full(n, 1))


def test_logistic_regression_recovers_scale_and_bias() -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(size=40000)
    happened = (rng.random(40000) < sigmoid(0.6 * z - 0.8)).astype(float)
    assert fit_logistic(z, happened) == pytest.approx((0.6, -0.8), abs=0.05)


def test_logistic_regression_without_labels_or_with_one_kind_stays_finite() -> None:
    assert fit_logistic(np.zeros(0), np.zeros(0)) == (1.0, 0.0)
    a, b = fit_logistic(np.linspace(-1, 1, 50), np.ones(50))
    assert np.isfinite([a, b]).all() and sigmoid(np.array(b)) > 0.8


def test_entries_follow_the_triangles_order() -> None:
    logits = np.arange(6, dtype=np.float32)[None]
    first = triangle_to_survival(logits)[0]
    for output, d, j in entries(K, directional=False):
        if j == 1:
            assert first[d - 1, 0] == pytest.approx(sigmoid(logits[0, output]), abs=1e-6)
    assert entries(K, directional=True) == [(0, 3, 1), (1, 3, 2), (2, 3, 3)]


def test_temperatures_are_found_one_position_after_the_other() -> None:
    theta = fit_temperatures(synthetic(K, 1.0, 0.0, theta=2.0))
    assert theta == pytest.approx(np.full(K, 2.0), rel=0.3)


def test_fit_undoes_a_distortion_and_the_report_shows_it() -> None:
    traces = {d: synthetic(d, scale=0.5, bias=1.0, theta=2.0) for d in range(1, K + 1)}
    calibration = fit(traces, K, directional=False, source="test")
    assert calibration.scale == pytest.approx(np.full(6, 0.5), abs=0.08)
    assert calibration.bias == pytest.approx(np.full(6, 1.0), abs=0.12)
    assert (np.diff(calibration.mean_survival) <= 0).all()
    held = {d: synthetic(d, 0.5, 1.0, 2.0, seed=50) for d in range(1, K + 1)}
    report = judge(held, traces, calibration, K, directional=False)
    assert report["pre_draft_beats_constant"] == report["post_draft_beats_constant"] == 1.0
    assert all(e["ece_after"] < e["ece_before"] for e in report["pre_draft"] + report["post_draft"])


def test_positions_past_the_text_are_no_labels() -> None:
    trace = synthetic(K, 1.0, 0.0, 1.0, n=4000)
    short = Trace(
        K, trace.pre_logits, trace.post_logits, np.minimum(trace.accepted, 1), np.full(4000, 1), trace.previous
    )
    calibration = fit({K: short, 1: synthetic(1, 1, 0, 1), 2: synthetic(2, 1, 0, 1)}, K, False, "test")
    assert calibration.scale[-1] == 1.0 and calibration.bias[-1] == 0.0, "nothing is known of position 3"
    assert calibration.temperature[1:] == pytest.approx([1.0, 1.0])


def test_an_entry_with_few_labels_goes_by_its_position() -> None:
    many, few = synthetic(2, 0.5, 1.0, 1.0), synthetic(3, 0.5, 1.0, 1.0, n=12)
    traces = {1: synthetic(1, 0.5, 1.0, 1.0), 2: many, 3: few}
    calibration = fit(traces, K, False, "test")
    by_entry = {(d, j): calibration.scale[o] for o, d, j in entries(K, False)}
    assert by_entry[3, 1] == pytest.approx(0.5, abs=0.1) and by_entry[3, 2] == pytest.approx(0.5, abs=0.1)


def test_calibration_files_round_trip_and_wrong_ones_name_the_field(tmp_path) -> None:
    path = tmp_path / "calibration.json"
    made = Calibration.identity(3, 6)
    made.save(path)
    again = Calibration.load(path, 3, 6)
    assert np.array_equal(made.scale, again.scale) and np.allclose(made.mean_survival, again.mean_survival)
    with pytest.raises(ValueError, match="scale needs 10 finite numbers"):
        Calibration.load(path, 4, 10)
    path.write_text("{}")
    with pytest.raises(ValueError, match="'pre_draft' is missing"):
        Calibration.load(path, 3, 6)


@pytest.mark.parametrize("kind", ["dflash2", "dspark-causal", "longspark"])
@pytest.mark.parametrize("length", [1, 3, 5])
def test_replay_steps_past_what_was_accepted_and_the_targets_next_token(kind: str, length: int) -> None:
    config, world, by_hand = KINDS[kind], World(KINDS[kind]), World(KINDS[kind])
    rng = np.random.default_rng(0)
    sizes, prompts = [30, 19, 12], [7, 3, 10]
    seen = world.texts(sizes)
    layers = list(getattr(config, "kv_layers", ()))
    texts = [
        Text(rng.integers(0, 90, n), features, prompt, kv[layers] if layers else None)
        for n, prompt, (features, kv) in zip(sizes, prompts, seen, strict=True)
    ]
    replay = Replay(world.runner, texts, world.kv)
    trace = replay.run(length)
    # By hand, one text after the other.
    expected = []
    for i, text in enumerate(texts):
        anchor, before, done = text.prompt_length, -1, 0
        while anchor < len(text.tokens) - 1:
            by_hand.append(i, seen[i], replay.page_table[i], done, anchor)
            done = anchor
            context = DraftContext(torch.tensor([int(text.tokens[anchor])]), torch.tensor([anchor]), torch.tensor([i]))
            draft = by_hand.runner.draft(context, torch.tensor([length]), replay.page_table[i : i + 1], greedy_choice)
            truth = text.tokens[anchor + 1 : anchor + 1 + length]
            accepted = 0
            while accepted < len(truth) and draft.token_ids[accepted] == truth[accepted]:
                accepted += 1
            expected.append((i, accepted, len(truth), before))
            before, anchor = accepted, anchor + accepted + 1
    assert sorted((a, n, b) for _, a, n, b in expected) == sorted(
        zip(trace.accepted.tolist(), trace.labelled.tolist(), trace.previous.tolist(), strict=True)
    )
    assert trace.pre_logits.shape[1] == config.estimator_outputs


def test_a_replay_that_does_not_fit_says_how_many_pages_it_needs() -> None:
    runner = World(KINDS["dflash2"]).runner
    with pytest.raises(ValueError, match="the replay needs 40 pages and 1 seats, the runner has 24 and 8"):
        Replay(runner, [Text(np.zeros(640, np.int64), torch.zeros(640, 2, 32), 3)])
