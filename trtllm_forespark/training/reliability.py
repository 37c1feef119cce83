"""How well probabilities fit what then happened: reliability bins, ECE, Brier score, AUROC and log-loss."""

from __future__ import annotations

from typing import Any

import numpy as np

BINS = 15


def bin_of(predicted: np.ndarray) -> np.ndarray:
    """The equal-width bin of every probability; 1 belongs to the last."""
    return np.minimum((predicted * BINS).astype(int), BINS - 1)


def expected_calibration_error(predicted: np.ndarray, happened: np.ndarray) -> float:
    """ECE over 15 equal-width bins; 0 where there is nothing to judge."""
    index = bin_of(predicted)
    count = np.bincount(index, minlength=BINS)
    gap = np.abs(np.bincount(index, predicted, BINS) - np.bincount(index, happened, BINS))
    return float(gap.sum() / max(count.sum(), 1))


def log_loss(predicted: np.ndarray, happened: np.ndarray) -> float:
    p = np.clip(predicted, 1e-6, 1 - 1e-6)
    return float(-(happened * np.log(p) + (1 - happened) * np.log(1 - p)).mean())


def brier_score(predicted: np.ndarray, happened: np.ndarray) -> float:
    """Mean squared difference of probability and outcome (0 or 1)."""
    return float(((predicted - happened) ** 2).mean())


def auroc(predicted: np.ndarray, happened: np.ndarray) -> float | None:
    """Chance that a case that happened was given more than one that did not; a tie counts half.

    From ranks alone: whatever keeps the order of the predictions keeps it too. None where only one outcome is there.
    """
    positive = happened > 0.5
    yes, no = int(positive.sum()), int((~positive).sum())
    if not yes or not no:
        return None
    _, inverse, count = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = (count.cumsum() - (count - 1) / 2)[inverse]  # from 1; equal predictions share their mean rank
    return float((rank[positive].sum() - yes * (yes + 1) / 2) / (yes * no))


def curve(predicted: np.ndarray, happened: np.ndarray) -> dict[str, list[Any]]:
    """A reliability curve, 15 numbers a list: count, mean predicted and share that happened, None in empty bins."""
    index = bin_of(predicted)
    count = np.bincount(index, minlength=BINS)
    sums = {"predicted": np.bincount(index, predicted, BINS), "happened": np.bincount(index, happened, BINS)}
    means = {
        name: [round(float(s / n), 4) if n else None for s, n in zip(total, count, strict=True)]
        for name, total in sums.items()
    }
    return {"count": count.tolist(), **means}


def compare(before: np.ndarray, after: np.ndarray, happened: np.ndarray) -> dict[str, Any]:
    """One estimate before and after calibration, beside what happened (0 or 1); [n] each, n may be 0.

    Keys: count, rate (share that happened), then ece, brier and auroc with _before and _after, and bins, the `curve`
    of each. Scores are None where nothing can be judged: everything without a case, AUROC without both outcomes.
    """
    out: dict[str, Any] = {"count": len(happened), "rate": rounded(happened.mean(), 4) if len(happened) else None}
    for name, score, digits in (
        ("ece", expected_calibration_error, 4),
        ("brier", brier_score, 5),
        ("auroc", auroc, 4),
    ):
        for when, predicted in (("before", before), ("after", after)):
            out[f"{name}_{when}"] = rounded(score(predicted, happened), digits) if len(happened) else None
    out["bins"] = {"before": curve(before, happened), "after": curve(after, happened)}
    return out


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(float(value), digits)
