from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_forespark.wcs.envelope import envelope, pooled_scores, scores, vertices

from .cases import curves


def min_max(rewards: np.ndarray) -> np.ndarray:
    """Slopes of the least concave majorant of one curve by definition, clipped at 0."""
    block = len(rewards) - 1
    slope = [
        min(max((rewards[t] - rewards[s]) / (t - s) for t in range(d, block + 1)) for s in range(d))
        for d in range(1, block + 1)
    ]
    return np.maximum(slope, 0)


@settings(max_examples=80, deadline=None)
@given(curves())
def test_the_envelope_is_the_smallest_concave_rising_curve_above(rewards: np.ndarray) -> None:
    score, hull = scores(rewards), envelope(rewards)
    np.testing.assert_allclose(score, [min_max(r) for r in rewards.astype(float)], atol=2e-5)
    assert (hull >= rewards - 1e-4).all()
    assert (score >= 0).all() and (np.diff(score, axis=1) <= 0).all(), "scores must never rise, not even by rounding"


@settings(max_examples=60, deadline=None)
@given(curves())
def test_a_draft_may_stop_where_its_reward_is_on_the_envelope_and_nowhere_else(rewards: np.ndarray) -> None:
    score, hull = scores(rewards), envelope(rewards)
    stops = vertices(score)
    np.testing.assert_allclose(hull[stops], rewards[stops], atol=1e-3)
    inside = ~stops & (np.concatenate([np.ones((len(rewards), 1)), score], axis=1) > 0)
    assert (rewards[inside] < hull[inside]).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(2**-10, 1, width=32), min_size=1, max_size=16))
def test_a_rising_concave_curve_is_unchanged(steps: list[float]) -> None:
    rewards = np.concatenate([[0], np.cumsum(np.sort(np.array(steps, np.float32))[::-1])])[None].astype(np.float32)
    np.testing.assert_allclose(envelope(rewards), rewards, rtol=2e-5)
    assert vertices(scores(rewards)).all(), "every length of it is worth stopping at"


def test_equal_steps_are_separate_pieces_and_flat_hulls_are_one() -> None:
    score = scores(np.array([[0, 1, 2, 3], [0, 0, 0, 3]], np.float32))
    assert len(set(score[0])) == 3 and len(set(score[1])) == 1
    np.testing.assert_allclose(score, 1, atol=1e-5)


@pytest.mark.parametrize("tail", [[2.0, 2.0], [1.5, 1.9], [0.0, 0.0]])
def test_flat_and_falling_tails_score_nothing(tail: list[float]) -> None:
    score = scores(np.array([[0, 1.5, 2.0, *tail]], np.float32))
    np.testing.assert_allclose(score, [[1.5, 0.5, 0, 0]], atol=1e-5)
    assert not score[0, 2:].any()


def test_nan_rows_score_nothing_and_do_not_touch_others() -> None:
    rewards = np.array([[0, 1, 1.5], [0, np.nan, 1], [0, 0.2, 0.8]], np.float32)
    score = scores(rewards)
    assert not score[1].any()
    np.testing.assert_allclose(score[[0, 2]], scores(rewards[[0, 2]]), atol=1e-6)
    _, rising = pooled_scores(rewards)
    assert len(rising) == 4


def test_limits_cut_the_curve() -> None:
    rewards = np.array([[0, 0.1, 0.2, 3.0]] * 4, np.float32)
    score = scores(rewards, np.array([0, 1, 2, 3]))
    np.testing.assert_allclose(score, [[0, 0, 0], [0.1, 0, 0], [0.1, 0.1, 0], [1, 1, 1]], atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 7, 33])
@pytest.mark.parametrize("block", [1, 2, 5, 7, 15])
def test_shapes(n: int, block: int) -> None:
    rewards = np.random.default_rng(n).random((n, block + 1), np.float32)
    rewards[:, 0] = 0
    assert scores(rewards).shape == (n, block)
    assert np.allclose(scores(rewards), np.array([min_max(r) for r in rewards]).reshape(n, block), atol=2e-5)
