from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.wcs.survival import directional_to_survival, rewards, triangle_to_survival


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def test_logits_are_packed_row_by_row() -> None:
    acceptance = [0.5, 0.6, 0.7, 0.8, 0.9, 0.4]  # rows (0.5), (0.6, 0.7), (0.8, 0.9, 0.4)
    survival = triangle_to_survival(np.array([[logit(p) for p in acceptance]]))
    expected = [[0.5, 0, 0], [0.6, 0.42, 0], [0.8, 0.72, 0.288]]
    np.testing.assert_allclose(survival[0], expected, atol=1e-6)


def test_the_papers_example_of_a_length_3_draft() -> None:
    """Section 4.2: benefits 0.9, 0.7, 0.3 give Reward(3, 3) = 1.9."""
    survival = np.zeros((1, 3, 3), np.float32)
    survival[0, 2] = [0.9, 0.7, 0.3]
    np.testing.assert_allclose(rewards(survival), [[0, 0, 0, 1.9]], atol=1e-6)


def test_scale_and_bias_calibrate_each_entry() -> None:
    survival = triangle_to_survival(np.array([[1.0, 2.0, -1.0]]), np.array([2.0, 0.5, 1.0]), np.array([0.0, -1.0, 1.0]))
    np.testing.assert_allclose(survival[0], [[1 / (1 + np.exp(-2)), 0], [0.5, 0.25]], atol=1e-6)


def test_a_directional_drafter_has_prefix_rows() -> None:
    logits = np.array([[0.3, -0.2, 1.0], [2.0, 0.0, -3.0]])
    survival = directional_to_survival(logits, 1.5, 0.1)
    for d in (1, 2, 3):
        np.testing.assert_array_equal(survival[:, d - 1, :d], survival[:, 2, :d])
        assert not survival[:, d - 1, d:].any()


def test_extreme_logits_do_not_overflow_and_nan_stays() -> None:
    with np.errstate(all="raise"):
        survival = triangle_to_survival(np.array([[1e30, -1e30, 5.0], [0.0, 0.0, 0.0]]))
    assert survival[0, 0, 0] == 1 and survival[0, 1, 0] == 0
    assert np.isnan(triangle_to_survival(np.array([[np.nan]]))).all()


def test_empty_batches_and_wrong_shapes() -> None:
    assert triangle_to_survival(np.zeros((0, 6))).shape == (0, 3, 3)
    assert rewards(np.zeros((0, 3, 3), np.float32)).shape == (0, 4)
    with pytest.raises(ValueError, match="not \\[n, K"):
        triangle_to_survival(np.zeros((2, 5)))
    with pytest.raises(ValueError, match="not \\[n, K"):
        directional_to_survival(np.zeros(4))
