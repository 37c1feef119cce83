"""What ships with the package: the drafters, their calibration and reports, and the recorded triangles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trtllm_forespark.drafters.checkpoint import load_drafter
from trtllm_forespark.models.registry import MODELS, default_drafter, locate_drafter
from trtllm_forespark.runtime.bench.scheduler import load_recorded
from trtllm_forespark.wcs.survival import rewards, triangle_to_survival

NAMES = ["smollm2-135m-dflash2", "smollm2-135m-dspark", "smollm2-135m-longspark"]
every_drafter = pytest.mark.parametrize("name", NAMES)


def folder(name: str) -> Path:
    return locate_drafter(name)


def size(name: str) -> int:
    return sum(f.stat().st_size for f in folder(name).iterdir())


@every_drafter
def test_a_drafter_loads_is_calibrated_and_small(name: str) -> None:
    model, calibration = load_drafter(folder(name))
    assert name == f"smollm2-135m-{model.config.kind}" and name in MODELS["smollm2-135m"].drafters
    assert model.config.block == 7 and model.config.target == "smollm2-135m"
    assert "not calibrated" not in calibration.source
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_all_are_within_what_a_repository_can_carry() -> None:
    assert default_drafter("smollm2-135m") == NAMES[0]
    assert sum(map(size, NAMES)) < 120e6


@every_drafter
def test_model_card_and_log_say_how_it_was_made(name: str) -> None:
    card = (folder(name) / "README.md").read_text()
    for word in ("Data", "Licence", "anchors", "acceptance", "HumanEval", "MT-Bench", "GSM8K"):
        assert word in card, word
    logs = {f.name: f.read_text().splitlines() for f in folder(name).glob("training_log*.jsonl")}
    assert sum(json.loads(lines[-1])["anchors"] for lines in logs.values()) >= 300_000
    assert json.loads(logs["training_log.jsonl"][-1])["held"]["acceptance_length"] > 1.5


@every_drafter
def test_it_is_served_as_it_was_trained(name: str) -> None:
    """The layers of config.json are those of the training command on the card, and of the run's own settings."""
    config = load_drafter(folder(name))[0].config
    assert f"--capture {','.join(map(str, config.capture_layers))}" in (folder(name) / "README.md").read_text()
    trained = json.loads((folder(name) / "training_settings.json").read_text())["drafter"]
    assert tuple(trained["capture_layers"]) == config.capture_layers
    assert tuple(trained.get("kv_layers", ())) == getattr(config, "kv_layers", ())


@every_drafter
def test_estimators_beat_the_constant_rate_on_held_out_prompts(name: str) -> None:
    """By log-loss, every output that many drafts reached; and the accepted length is predicted better than by the step
    before."""
    report = json.loads((folder(name) / "calibration_report.json").read_text())
    model, _ = load_drafter(folder(name))
    assert len(report["pre_draft"]) == model.config.estimator_outputs and len(report["post_draft"]) == 7
    reached = [o for o in (*report["pre_draft"], *report["post_draft"]) if o["count"] >= 300]
    assert len(reached) >= 6 and all(o["log_loss"] < o["constant_log_loss"] for o in reached)
    mine, previous = (report["predicted_length"][key] for key in ("pre_draft", "previous_step"))
    assert mine["mean_absolute_error"] < previous["mean_absolute_error"] and mine["within_1"] > previous["within_1"]


def test_recorded_triangles_are_calibrated_survival() -> None:
    logits, block = load_recorded()  # type: ignore[misc]
    assert block == 7 and len(logits) > 1000
    gained = rewards(triangle_to_survival(logits))
    assert np.isfinite(gained).all() and 0.2 < gained[:, -1].mean() < 3
