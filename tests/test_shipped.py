"""What ships with the package: the drafter, its calibration and report, and the recorded triangles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from trtllm_forespark.drafters.checkpoint import load_drafter
from trtllm_forespark.models.registry import default_drafter, locate_drafter
from trtllm_forespark.runtime.bench.scheduler import load_recorded
from trtllm_forespark.wcs.survival import rewards, triangle_to_survival

NAME = "smollm2-135m-dflash2"


def folder() -> Path:
    return locate_drafter(NAME)


def test_the_default_drafter_loads_is_calibrated_and_small() -> None:
    assert default_drafter("smollm2-135m") == NAME
    model, calibration = load_drafter(folder())
    assert model.config.block == 7 and model.config.target == "smollm2-135m"
    assert "not calibrated" not in calibration.source
    assert sum(f.stat().st_size for f in folder().iterdir()) < 40e6
    assert all(torch_finite(p) for p in model.parameters())


def torch_finite(parameter) -> bool:
    return bool(parameter.isfinite().all())


def test_model_card_and_log_say_how_it_was_made() -> None:
    card = (folder() / "README.md").read_text()
    for word in ("Data", "Licence", "anchors", "acceptance", "minutes"):
        assert word in card
    lines = [json.loads(line) for line in (folder() / "training_log.jsonl").read_text().splitlines()]
    assert lines[-1]["anchors"] > 300_000 and lines[-1]["held"]["acceptance_length"] > 1.5


def test_estimators_beat_the_constant_rate_on_held_out_prompts() -> None:
    """By log-loss, every output."""
    report = json.loads((folder() / "calibration_report.json").read_text())
    outputs = [*report["pre_draft"], *report["post_draft"]]
    assert len(outputs) == 35 and all(o["log_loss"] < o["constant_log_loss"] for o in outputs)
    predicted = report["predicted_length"]
    assert predicted["pre_draft"]["mean_absolute_error"] < predicted["previous_step"]["mean_absolute_error"]


def test_recorded_triangles_are_calibrated_survival() -> None:
    logits, block = load_recorded()  # type: ignore[misc]
    assert block == 7 and len(logits) > 1000
    gained = rewards(triangle_to_survival(logits))
    assert np.isfinite(gained).all() and 0.2 < gained[:, -1].mean() < 3
