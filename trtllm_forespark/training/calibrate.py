"""Fitting the calibration of both estimators (appendix B) and judging it on prompts it has not seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.training.replay import Trace

TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(10.0), 41))
BINS = 15
PULL = 30.0


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -60, 60)))


def expected_calibration_error(predicted: np.ndarray, happened: np.ndarray) -> float:
    """ECE over 15 equal-width bins."""
    index = np.minimum((predicted * BINS).astype(int), BINS - 1)
    count = np.bincount(index, minlength=BINS)
    gap = np.abs(np.bincount(index, predicted, BINS) - np.bincount(index, happened, BINS))
    return float(gap.sum() / max(count.sum(), 1))


def log_loss(predicted: np.ndarray, happened: np.ndarray) -> float:
    p = np.clip(predicted, 1e-6, 1 - 1e-6)
    return float(-(happened * np.log(p) + (1 - happened) * np.log(1 - p)).mean())


def fit_temperatures(trace: Trace) -> np.ndarray:
    """theta_1..theta_K, one after the other, each the grid value of least ECE of the survival so far (eq. 6)."""
    survival = np.ones(len(trace.accepted))
    temperatures = np.ones(trace.length, np.float32)
    for j in range(1, trace.length + 1):
        rows = trace.labelled >= j
        happened = (trace.accepted[rows] >= j).astype(float)
        errors = [
            expected_calibration_error(survival[rows] * sigmoid(trace.post_logits[rows, j - 1] / t), happened)
            for t in TEMPERATURES
        ]
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


@dataclass(frozen=True)
class EntryReport:
    """One estimator output on held-out drafts: log-loss beside that of the entry's constant rate, and ECE."""

    d: int
    j: int
    count: int
    rate: float
    log_loss: float
    constant_log_loss: float
    ece_before: float
    ece_after: float


def judge(
    traces: dict[int, Trace], fitted: dict[int, Trace], calibration: Calibration, block: int, directional: bool
) -> dict:
    """Both estimators on ``traces`` (held out); the constant rates come from ``fitted``, the drafts calibrated on."""
    pre = []
    for output, d, j in entries(block, directional):
        pre.append(
            _entry(
                traces[d],
                fitted[d],
                traces[d].pre_logits[:, output],
                d,
                j,
                calibration.scale[output],
                calibration.bias[output],
            )
        )
    full = traces[block]
    post = [
        _entry(full, fitted[block], full.post_logits[:, j - 1], block, j, 1.0 / calibration.temperature[j - 1], 0.0)
        for j in range(1, block + 1)
    ]
    return {
        "pre_draft": [vars(e) for e in pre],
        "post_draft": [vars(e) for e in post],
        "pre_draft_beats_constant": sum(e.log_loss < e.constant_log_loss for e in pre) / len(pre),
        "post_draft_beats_constant": sum(e.log_loss < e.constant_log_loss for e in post) / len(post),
        "acceptance_length": {d: round(1 + float(t.accepted.mean()), 4) for d, t in traces.items()},
        "conditional_by_position": conditional_by_position(full),
        "predicted_length": predicted_length(full, calibration, block, directional),
    }


def conditional_by_position(trace: Trace) -> list[float]:
    return [
        round(float((trace.accepted[reached(trace, j)] >= j).mean()), 4) if reached(trace, j).any() else 0.0
        for j in range(1, trace.length + 1)
    ]


def predicted_length(trace: Trace, calibration: Calibration, block: int, directional: bool) -> dict:
    """Accepted length of full drafts: the pre-draft estimate beside the previous step's acceptance as predictor."""
    outputs = [o for o, d, _ in entries(block, directional) if d == block]
    conditional = sigmoid(calibration.scale[outputs] * trace.pre_logits[:, outputs] + calibration.bias[outputs])
    predicted = conditional.cumprod(1).sum(1)
    rows = (trace.previous >= 0) & (trace.labelled == block)
    out = {}
    for name, guess in (("pre_draft", predicted), ("previous_step", trace.previous.astype(float))):
        error = np.abs(guess[rows] - trace.accepted[rows])
        out[name] = {"mean_absolute_error": round(float(error.mean()), 4)}
        rounded = np.abs(np.rint(guess[rows]) - trace.accepted[rows])
        out[name].update({f"within_{k}": round(float((rounded <= k).mean()), 4) for k in (0, 1, 2)})
    return out


def _entry(trace: Trace, fitted: Trace, z: np.ndarray, d: int, j: int, scale: float, bias: float) -> EntryReport:
    rows, base = reached(trace, j), reached(fitted, j)
    happened = (trace.accepted[rows] >= j).astype(float)
    rate = float((fitted.accepted[base] >= j).mean()) if base.any() else 0.5
    raw, calibrated = sigmoid(z[rows]), sigmoid(scale * z[rows] + bias)
    return EntryReport(
        d=d,
        j=j,
        count=int(rows.sum()),
        rate=round(float(happened.mean()), 4),
        log_loss=round(log_loss(calibrated, happened), 5),
        constant_log_loss=round(log_loss(np.full(len(happened), rate), happened), 5),
        ece_before=round(expected_calibration_error(raw, happened), 4),
        ece_after=round(expected_calibration_error(calibrated, happened), 4),
    )
