"""`calibrate` beside a drafter: the files it writes, the table it gives, and the plots, with matplotlib and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.runtime import calibration as module
from trtllm_forespark.runtime import plots
from trtllm_forespark.runtime.calibration import calibrate, table, to_json
from trtllm_forespark.training.calibrate import fit
from trtllm_forespark.training.judging import judge
from trtllm_forespark.training.replay import Text

from ..drafters.kinds import KINDS, World
from ..training.test_calibrate import K
from ..training.test_judging import distorted, taken

CONFIG = KINDS["dflash2"]

PLOTS = ["reliability_pre_draft.png", "reliability_post_draft.png", "predicted_length.png"]


def make_report(n: int = 2000, accepted: int | None = None) -> dict[str, Any]:
    traces = taken(distorted(seed=0, n=2000), n, accepted)
    judged = judge(traces, traces, fit(traces, K, False, "test"), K, False)
    return {"source": "synthetic drafts", "held_out_prompts": 9, **judged}


def longer(report: dict[str, Any], block: int) -> dict[str, Any]:
    """The report as if there were ``block`` positions."""

    def grown(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**scores[j % K], "j": j + 1} for j in range(block)]

    survival = {name: grown(scores) for name, scores in report["survival"].items()}
    grown_too = {name: grown(report[name]) for name in ("pre_draft_by_position", "post_draft")}
    return {**report, **grown_too, "survival": survival}


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine with a random drafter; what the target answers is random too."""
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, 90, n), torch.randn(n, 2, 32), 5) for n in (9, 12, 17, 30, 22, 14, 8)]
    monkeypatch.setattr(module, "greedy_texts", lambda *_: list(texts))
    config = SimpleNamespace(model="random")
    return SimpleNamespace(
        backend=SimpleNamespace(runner=World(CONFIG).runner, kv=None),
        config=config,
        dtype=torch.float32,
        drafter_name=str(tmp_path),
    )


def test_calibrate_writes_calibration_report_and_plots(llm: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said: list[str] = []
    result = calibrate(llm, ["prompt"] * 12, 32, said.append)
    block = CONFIG.block
    Calibration.load(tmp_path / "calibration.json", block, CONFIG.estimator_outputs)
    report = json.loads((tmp_path / "calibration_report.json").read_text())
    assert report == json.loads(json.dumps(result["report"]))
    assert list(report) == [
        *("source", "held_out_prompts", "pre_draft", "pre_draft_by_position", "post_draft", "survival"),
        *("pre_draft_beats_constant", "post_draft_beats_constant", "acceptance_length", "conditional_by_position"),
        *("predicted_length", "notes"),
    ]
    assert len(report["pre_draft"]) == CONFIG.estimator_outputs and report["held_out_prompts"] == 2
    scores = {f"{name}_{when}" for name in ("ece", "brier", "auroc") for when in ("before", "after")}
    for entry in report["pre_draft"] + report["post_draft"]:
        assert set(entry) == {"d", "j", "count", "rate", "log_loss", "constant_log_loss", "bins", *scores}
    for name in ("pre_draft_by_position", "post_draft"):
        assert [e["j"] for e in report[name]] == list(range(1, block + 1))
    for survival in report["survival"].values():
        assert [set(e) for e in survival] == [{"j", "count", "rate", "bins", *scores}] * block
    assert result["plots"] == [str(tmp_path / name) for name in PLOTS] and all(
        Path(p).exists() for p in result["plots"]
    )
    assert not [line for line in said if "matplotlib" in line]


def test_without_matplotlib_the_report_stands_and_one_line_names_the_extra(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    said: list[str] = []
    result = calibrate(llm, ["prompt"] * 12, 32, said.append)
    assert result["plots"] == [] and not list(tmp_path.glob("*.png"))
    assert json.loads((tmp_path / "calibration_report.json").read_text())["pre_draft"]
    assert [line for line in said if "matplotlib" in line] == [plots.MISSING]
    assert "pip install 'trtllm-forespark[train]'" in plots.MISSING


def test_two_usable_answers_are_too_few(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two = module.greedy_texts(llm, [], 0, print)[:2]
    monkeypatch.setattr(module, "greedy_texts", lambda *_: two)
    with pytest.raises(ValueError, match="only 2 of 12 answers were long enough"):
        calibrate(llm, ["prompt"] * 12, 32, lambda line: None)


@pytest.mark.parametrize(("n", "accepted"), [(2000, None), (1, None), (40, 0), (40, K), (0, 0)])
def test_plots_are_small_pictures_of_any_report(tmp_path: Path, n: int, accepted: int | None) -> None:
    image = pytest.importorskip("matplotlib.image")
    report = json.loads(json.dumps(make_report(n, accepted)))
    for path in plots.draw(report, tmp_path, pytest.fail):
        assert path.stat().st_size < 80_000
        height, width, _ = image.imread(path).shape
        assert 300 < height < 1000 and 500 < width < 1300
    assert {p.name for p in tmp_path.iterdir()} == set(PLOTS)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_there_is_a_panel_a_position(tmp_path: Path, block: int) -> None:
    pytest.importorskip("matplotlib")
    report = longer(make_report(500), block)
    figure = plots.reliability("title", "source", report["post_draft"], report["survival"]["post_draft"])
    assert len(figure.axes) == 2 * block
    assert all(f"position {j + 1}:" in figure.axes[2 * j].get_title() for j in range(block))
    assert len(plots.png(figure)) < 80_000


def test_an_empty_position_says_so() -> None:
    pytest.importorskip("matplotlib")
    report = make_report(40, accepted=0)
    figure = plots.reliability("title", "source", report["post_draft"], report["survival"]["post_draft"])
    words = [[text.get_text() for text in axes.texts] for axes in figure.axes[::2]]
    assert words == [[], ["no draft got here"], ["no draft got here"]]


def test_the_legend_of_the_predicted_length_has_both_errors() -> None:
    pytest.importorskip("matplotlib")
    predicted = make_report()["predicted_length"]
    (legend,) = plots.length_bars(predicted).legends
    ours, other = (text.get_text() for text in legend.get_texts())
    assert ours == f"pre-draft estimate (mean error {predicted['pre_draft']['mean_absolute_error']:.2f} tokens)"
    assert f"{predicted['previous_step']['mean_absolute_error']:.2f}" in other


def test_the_table_has_a_line_a_position_and_dashes_where_nothing_is_known() -> None:
    report = make_report()
    lines = table(report).splitlines()
    assert len(lines) == 2 + 2 * (1 + K) + 1 and all(len(line) <= 120 for line in lines)
    first = report["pre_draft_by_position"][0]
    assert lines[3].split()[:6] == [
        *("position", "1", f"{first['count']:,}", f"{first['ece_before']:.3f}", "->", f"{first['ece_after']:.3f}")
    ]
    assert lines[3].split()[-2:] == [f"{first['brier_after']:.3f}", f"{first['auroc_after']:.3f}"]
    few = table(make_report(40, accepted=0)).splitlines()
    assert few[4].split() == ["position", "2", "0", "-", "->", "-", *few[4].split()[6:9], "-", "-"]


def test_json_with_lists_on_one_line_reads_the_same() -> None:
    data = {"a": [1, None, 2.5], "b": [{"c": ["x, [y\n,", "]{"], "d": []}], "e": {"f": [[1, 2], [3]]}}
    assert json.loads(to_json(data)) == data
    assert '"a": [1, null, 2.5]' in to_json(data)
