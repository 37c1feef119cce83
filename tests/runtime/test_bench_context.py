"""`forespark bench context`: what it measures, and that a state which should not grow does not."""

from __future__ import annotations

import json

import pytest

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.models.loaders import open_checkpoint
from trtllm_forespark.models.registry import drafter_name
from trtllm_forespark.models.transformer import PackedTransformer
from trtllm_forespark.runtime import plots
from trtllm_forespark.runtime.bench import context
from trtllm_forespark.runtime.bench.decode import joined

from ..drafters.kinds import random_drafter
from ..models.tiny import reference, save
from .test_every_drafter import tiny_config


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    source = open_checkpoint(save(reference(), tmp_path_factory.mktemp("tiny")))
    target = PackedTransformer(source.config, source.weights)
    drafters = {}
    for kind in ("dflash2", "longspark"):
        config = tiny_config(kind)
        drafters[kind] = random_drafter(config), Calibration.identity(config.block, config.estimator_outputs)
    with pytest.raises(ValueError, match="a context of 251 tokens leaves drafter dflash2 no room for 5 drafts"):
        context.run(target, drafters, [251], [1], 1, lambda line: None)
    return context.run(target, drafters, [20, 200], [1, 3], 2, lambda line: None)


def test_every_drafter_context_and_batch_is_measured(result: dict) -> None:
    runs = {(r["drafter"], r["context"], r["batch"]): r for r in result["runs"]}
    assert len(runs) == len(result["over_shortest"]) == 8 and not result["interrupted"]
    assert all(r["draft_seconds"] > 0 and r["update_seconds"] > 0 for r in runs.values())
    grows, fixed = ([runs[name, c, 1]["state_bytes"] for c in (20, 200)] for name in ("dflash2", "longspark"))
    assert grows[1] - grows[0] == 180 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, size, bytes
    assert fixed[0] == fixed[1] == (48 + 2 * 6 * 3 * (16 + 1)) * 4  # boundary, and rows of values and log-normalisers
    assert all(r["ratio"] == 1.0 for r in result["over_shortest"] if r["context"] == 20)
    assert context.table(result).count("\n") == 8


def test_it_is_drawn(result: dict, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    context.plot(result, tmp_path / "context.png", lambda line: None)
    assert (tmp_path / "context.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "context.png").stat().st_size < 80_000
    assert plots.available(lambda line: None)


def test_short_names_are_the_models_own() -> None:
    assert drafter_name("smollm2-135m", "longspark") == "smollm2-135m-longspark"
    assert drafter_name("smollm2-135m", None) == "smollm2-135m-dflash2"
    assert drafter_name("smollm2-135m", "./folder") == "./folder"
    assert drafter_name("some/model", "longspark") == "longspark" and drafter_name("some/model", None) is None


def test_results_of_several_drafters_name_theirs() -> None:
    results = [
        {"runs": [{"policy": "ar"}], "gains": [{"load": 1}], "drafter": name, "interrupted": False}
        for name in ("a", "b")
    ]
    assert joined(results[:1]) is results[0]
    both = json.loads(json.dumps(joined(results)))
    assert both["drafter"] == "a,b" and len(both["runs"]) == 2
    assert both["gains"] == [{"drafter": "a", "load": 1}, {"drafter": "b", "load": 1}]
