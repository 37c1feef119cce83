"""Judging both estimators, before and after calibration, on drafts that calibration has not seen."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.training.calibrate import conditional_by_position, entries, reached, sigmoid
from trtllm_forespark.training.reliability import BINS, compare, log_loss, rounded
from trtllm_forespark.training.replay import Trace

#: (before, after, happened) of the drafts that tell something, [n] each: probabilities twice, then 0 or 1.
Case = tuple[np.ndarray, np.ndarray, np.ndarray]
NOTES = (
    f"bins: {BINS} of equal width; null: nothing to judge, or for AUROC one outcome only",
    "AUROC goes by ranks: a positive scale does not change it for one entry, but may for several together or survival",
    "conditional: drafts whose earlier tokens were accepted; survival: all drafts of full length, accepted >= j",
)


def judge(
    traces: dict[int, Trace], fitted: dict[int, Trace], calibration: Calibration, block: int, directional: bool
) -> dict[str, Any]:
    """Both estimators on ``traces`` (held out); the constant rates come from ``fitted``, the drafts calibrated on.

    pre_draft has an object for every entry (d, j), post_draft one for every position: the scores of `compare` for the
    conditional acceptance, and the log-loss beside that of the entry's constant rate. pre_draft_by_position has the
    cases of all lengths d together; survival judges what ranks, the products over positions, on full-length drafts.
    """
    pre: list[dict[str, Any]] = []
    cases: dict[int, list[Case]] = {j: [] for j in range(1, block + 1)}
    for output, d, j in entries(block, directional):
        z = traces[d].pre_logits[:, output]
        case = conditional(traces[d], z, calibration.scale[output] * z + calibration.bias[output], j)
        cases[j].append(case)
        pre.append(_entry(case, fitted[d], d, j))
    full = traces[block]
    pooled = [{"j": j, **compare(*(np.concatenate(part) for part in zip(*c, strict=True)))} for j, c in cases.items()]
    post_logits = full.post_logits / calibration.temperature
    post = [
        _entry(conditional(full, full.post_logits[:, j - 1], post_logits[:, j - 1], j), fitted[block], block, j)
        for j in range(1, block + 1)
    ]
    outputs = full_length_outputs(block, directional)
    raw = full.pre_logits[:, outputs]
    calibrated = raw * calibration.scale[outputs] + calibration.bias[outputs]
    return {
        "pre_draft": pre,
        "pre_draft_by_position": pooled,
        "post_draft": post,
        "survival": {
            "pre_draft": survival(full, raw, calibrated),
            "post_draft": survival(full, full.post_logits, post_logits),
        },
        "pre_draft_beats_constant": beats_constant(pre),
        "post_draft_beats_constant": beats_constant(post),
        "acceptance_length": {
            d: round(1 + float(t.accepted.mean()), 4) if len(t.accepted) else None for d, t in traces.items()
        },
        "conditional_by_position": conditional_by_position(full),
        "predicted_length": predicted_length(full, calibration, block, directional),
        "notes": list(NOTES),
    }


def conditional(trace: Trace, raw: np.ndarray, calibrated: np.ndarray, j: int) -> Case:
    """Position j's conditional acceptance; raw and calibrated: its logits, [m]."""
    rows = reached(trace, j)
    # In float64 a sigmoid keeps the order of logits that float32 would round to one number.
    before, after = (sigmoid(z[rows].astype(np.float64)) for z in (raw, calibrated))
    return before, after, (trace.accepted[rows] >= j).astype(float)


def survival(trace: Trace, raw: np.ndarray, calibrated: np.ndarray) -> list[dict[str, Any]]:
    """Pr(accepted >= j) for every position of the full-length drafts that are labelled there; logits are [m, K]."""
    before, after = (sigmoid(z.astype(np.float64)).cumprod(1) for z in (raw, calibrated))
    out = []
    for j in range(1, trace.length + 1):
        rows = trace.labelled >= j
        happened = (trace.accepted[rows] >= j).astype(float)
        out.append({"j": j, **compare(before[rows, j - 1], after[rows, j - 1], happened)})
    return out


def full_length_outputs(block: int, directional: bool) -> list[int]:
    """The pre-draft outputs of a draft of K tokens, position after position."""
    return [output for output, d, _ in entries(block, directional) if d == block]


def beats_constant(scores: list[dict[str, Any]]) -> float | None:
    """Share of the judged entries whose log-loss lies below that of their constant rate."""
    judged = [s for s in scores if s["count"]]
    return sum(s["log_loss"] < s["constant_log_loss"] for s in judged) / len(judged) if judged else None


def predicted_length(trace: Trace, calibration: Calibration, block: int, directional: bool) -> dict[str, Any]:
    """Accepted length of full drafts: the pre-draft estimate beside the previous step's acceptance as predictor.

    pre_draft is the expected length; pre_draft_median the median of the same estimate, which of all guesses has the
    least absolute error where the estimate is right. drafts: how many have a draft before them and lie inside the text.
    within_k: share whose prediction, rounded, is at most k tokens off (figure 12a of the paper). None where there is no
    such draft.
    """
    outputs = full_length_outputs(block, directional)
    logits = calibration.scale[outputs] * trace.pre_logits[:, outputs] + calibration.bias[outputs]
    survival = sigmoid(logits).cumprod(1)
    guesses = {
        "pre_draft": survival.sum(1),
        "pre_draft_median": (survival >= 0.5).sum(1).astype(float),
        "previous_step": trace.previous.astype(float),
    }
    rows = (trace.previous >= 0) & (trace.labelled == block)
    out: dict[str, Any] = {"drafts": int(rows.sum())}
    for name, guess in guesses.items():
        error = np.abs(guess[rows] - trace.accepted[rows])
        off = np.abs(np.rint(guess[rows]) - trace.accepted[rows])
        out[name] = {"mean_absolute_error": round(float(error.mean()), 4) if rows.any() else None}
        for k in (0, 1, 2):
            out[name][f"within_{k}"] = round(float((off <= k).mean()), 4) if rows.any() else None
    return out


def _entry(case: Case, fitted: Trace, d: int, j: int) -> dict[str, Any]:
    before, after, happened = case
    base = reached(fitted, j)
    constant = float((fitted.accepted[base] >= j).mean()) if base.any() else 0.5
    losses = (log_loss(p, happened) if len(happened) else None for p in (after, np.full(len(happened), constant)))
    named = zip(("log_loss", "constant_log_loss"), losses, strict=True)
    return {"d": d, "j": j, **{name: rounded(loss, 5) for name, loss in named}, **compare(before, after, happened)}
