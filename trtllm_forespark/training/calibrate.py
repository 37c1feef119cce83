"""Fitting the calibration of both estimators (appendix B)."""

from __future__ import annotations

import numpy as np

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.training.reliability import expected_calibration_error
from trtllm_forespark.training.replay import Trace

TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(10.0), 41))
PULL = 30.0


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -60, 60)))


def fit_temperatures(trace: Trace) -> np.ndarray:
    """theta_1..theta_K, one after the other, each the grid value of least ECE of the survival so far (eq. 6).

    A position without a label keeps 1.
    """
    survival = np.ones(len(trace.accepted))
    temperatures = np.ones(trace.length, np.float32)
    for j in range(1, trace.length + 1):
        rows = trace.labelled >= j
        happened = (trace.accepted[rows] >= j).astype(float)
        errors = [
            expected_calibration_error(survival[rows] * sigmoid(trace.post_logits[rows, j - 1] / t), happened)
            for t in TEMPERATURES
        ]
        if rows.any():
            temperatures[j - 1] = TEMPERATURES[int(np.argmin(errors))]
        survival = survival * sigmoid(trace.post_logits[:, j - 1] / temperatures[j - 1])
    return temperatures


def fit_logistic(
    z: np.ndarray, happened: np.ndarray, towards: tuple[float, float] = (1.0, 0.0), ridge: float = 1.0
) -> tuple[float, float]:
    """a, b of sigmoid(a z + b) by Newton's method with backtracking (far from the optimum a full step overshoots).

    The pull of strength ``ridge`` to ``towards`` keeps few or one-sided labels finite.
    """
    prior = np.array(towards)
    x = np.stack([z, np.ones_like(z)], 1).astype(np.float64)

    def loss(weight: np.ndarray) -> float:
        score = x @ weight
        return float((np.logaddexp(0, score) - happened * score).sum() + ridge / 2 * ((weight - prior) ** 2).sum())

    weight, now = prior, loss(prior)
    for _ in range(100):
        p = sigmoid(x @ weight)
        gradient = x.T @ (p - happened) + ridge * (weight - prior)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + ridge * np.eye(2)
        change = np.linalg.solve(hessian, gradient)
        step = 1.0
        while step > 1e-6 and loss(weight - step * change) > now:
            step /= 2
        weight = weight - step * change
        now = loss(weight)
        if np.abs(step * change).max() < 1e-8:
            break
    return float(weight[0]), float(weight[1])


def entries(block: int, directional: bool) -> list[tuple[int, int, int]]:
    """(output, d, j) of every pre-draft logit."""
    if directional:
        return [(j - 1, block, j) for j in range(1, block + 1)]
    return [(d * (d - 1) // 2 + j - 1, d, j) for d in range(1, block + 1) for j in range(1, d + 1)]


def reached(trace: Trace, j: int) -> np.ndarray:
    """Drafts whose first j - 1 tokens were accepted and whose position j is labelled."""
    return (trace.accepted >= j - 1) & (trace.labelled >= j)


def fit(traces: dict[int, Trace], block: int, directional: bool, source: str) -> Calibration:
    """traces: by draft length; K alone for a directional drafter, every length else."""
    table = entries(block, directional)
    scale, bias = np.ones(len(table), np.float32), np.zeros(len(table), np.float32)
    for position in range(1, block + 1):
        # Few drafts get far: an entry's own fit is pulled towards that of its position over all lengths.
        labels = {}
        for output, d, j in table:
            if j == position:
                rows = reached(traces[d], j)
                labels[output] = traces[d].pre_logits[rows, output], (traces[d].accepted[rows] >= j).astype(float)
        everything = [np.concatenate(column) for column in zip(*labels.values(), strict=True)]
        pooled = fit_logistic(everything[0], everything[1], ridge=PULL)
        for output, (z, happened) in labels.items():
            scale[output], bias[output] = fit_logistic(z, happened, pooled, PULL)
    full = traces[block]
    mean = np.array(
        [
            (full.accepted[full.labelled >= j] >= j).mean() if (full.labelled >= j).any() else 0.0
            for j in range(1, block + 1)
        ]
    )
    return Calibration(scale, bias, fit_temperatures(full), np.minimum.accumulate(mean).astype(np.float32), source)


def conditional_by_position(trace: Trace) -> list[float]:
    return [
        round(float((trace.accepted[reached(trace, j)] >= j).mean()), 4) if reached(trace, j).any() else 0.0
        for j in range(1, trace.length + 1)
    ]
