from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_forespark.wcs.distribute import distribute


@st.composite
def drafts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    n, block = draw(st.integers(0, 6)), draw(st.integers(1, 7))
    value = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
    acceptance = draw(st.lists(st.lists(value, min_size=block, max_size=block), min_size=n, max_size=n))
    lengths = draw(st.lists(st.integers(0, block), min_size=n, max_size=n))
    survival = np.cumprod(np.array(acceptance, np.float32).reshape(n, block), axis=1)
    return survival, np.array(lengths, np.int64), draw(st.integers(0, n * block + 2))


@settings(max_examples=100, deadline=None)
@given(drafts())
def test_the_best_positions_are_verified_ties_to_the_earlier_position_then_request(case: tuple) -> None:
    survival, lengths, budget = case
    verified = distribute(survival, lengths, budget)
    slots = [(-survival[i, j], j, i) for i in range(len(lengths)) for j in range(lengths[i])]
    expected = np.zeros(len(lengths), np.int64)
    for _, j, i in sorted(slots)[:budget]:
        assert j == expected[i], "what is taken must be a prefix"
        expected[i] += 1
    np.testing.assert_array_equal(verified, expected)
    assert verified.sum() == min(budget, lengths.sum()) and (verified <= lengths).all()


def test_the_papers_figure_2() -> None:
    """Survival 0.9, 0.72, 0.14, 0.10 of one draft: two verified tokens are the first two."""
    survival = np.array([[0.9, 0.72, 0.14, 0.10], [0.3, 0.12, 0.11, 0.01]], np.float32)
    assert distribute(survival, np.array([4, 4]), 3).tolist() == [2, 1]
    assert distribute(survival, np.array([4, 4]), 4).tolist() == [3, 1]


def test_a_nan_position_and_what_follows_it_is_dropped() -> None:
    """docs/cases.md 21: broken logits of a draft cost that draft, not the request, and never become token 0."""
    survival = np.array([[0.9, np.nan, 0.8], [0.5, 0.4, 0.3]], np.float32)
    assert distribute(survival, np.array([3, 3]), 6).tolist() == [1, 3]
    assert distribute(survival, np.array([3, 3]), 2).tolist() == [1, 1]


def test_whether_a_position_is_verified_does_not_depend_on_what_comes_after_it() -> None:
    """docs/lossless.md, rule 1: b_i >= j may not change with S_i,j+1, S_i,j+2, ..."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        survival = np.cumprod(rng.choice([0.5, 0.8, 1.0], (3, 4)), axis=1).astype(np.float32)
        lengths, budget, j = np.array([4, 4, 4]), int(rng.integers(0, 13)), int(rng.integers(0, 4))
        other = survival.copy()
        other[1, j + 1 :] *= rng.choice([0.0, 0.3, 1.0])
        assert (distribute(survival, lengths, budget)[1] > j) == (distribute(other, lengths, budget)[1] > j)


@pytest.mark.parametrize("budget", [-1, 0])
def test_no_budget(budget: int) -> None:
    assert distribute(np.ones((2, 3)), np.array([3, 1]), budget).tolist() == [0, 0]
