from __future__ import annotations

import numpy as np

from trtllm_forespark.wcs.correction import Correction


def taught(accepted_each: float, steps: int = 400) -> Correction:
    correction = Correction(3)
    for _ in range(steps):
        expected = correction.apply(np.array([[0.5, 0.25, 0.125]], np.float32))
        correction.learn(expected, accepted_each)
    return correction


def test_it_finds_the_factor_that_explains_what_was_accepted() -> None:
    # 0.4 + 0.16 + 0.064 tokens where 0.5 + 0.25 + 0.125 were promised: c = 0.8.
    correction = taught(0.4 + 0.16 + 0.064)
    assert abs(correction.factor - 0.8) < 0.02
    np.testing.assert_allclose(correction.apply([0.5, 0.25, 0.125]), [0.4, 0.16, 0.064], atol=0.02)


def test_corrected_survival_never_rises_and_never_passes_one() -> None:
    correction = taught(2.5)
    assert correction.factor > 1.2
    corrected = correction.apply(np.array([[0.95, 0.9, 0.18], [0.5, 0.49, 0.0], [0.0, 0.0, 0.0]], np.float32))
    assert (corrected <= 1).all() and (np.diff(corrected, axis=1) <= 0).all()
    assert corrected[0, 2] < 0.18 / 0.9 * correction.factor + 1e-6
    assert (corrected[2] == 0).all()


def test_what_was_learnt_fades_where_nothing_is_tried() -> None:
    correction = taught(0.1)
    low = correction.factor
    for _ in range(200):
        correction.fade()
    assert low < 0.6 and correction.factor > 0.99


def test_a_fresh_one_changes_nothing_and_a_nan_teaches_nothing() -> None:
    correction = Correction(3)
    survival = np.array([0.5, 0.2, 0.1], np.float32)
    assert correction.apply(survival) is survival
    correction.learn(np.full((1, 3), np.nan), 0.0)
    assert correction.factor == 1.0
