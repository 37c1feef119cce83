"""Calibrating a drafter with the running engine: greedy answers, their features, replays at every length."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_forespark.drafters.base import DrafterRunner
from trtllm_forespark.files import write_text
from trtllm_forespark.models.registry import locate_drafter
from trtllm_forespark.runtime import plots
from trtllm_forespark.runtime.bench.scheduler import record
from trtllm_forespark.runtime.writing import answers, target_views
from trtllm_forespark.training.answers import Answer, AnswerLog
from trtllm_forespark.training.calibrate import fit
from trtllm_forespark.training.judging import judge
from trtllm_forespark.training.replay import Replay, Text, Trace

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM


def greedy_texts(
    llm: LLM, prompts: list[str], max_tokens: int, say: Callable[[str], None], log: AnswerLog | None = None
) -> list[Text]:
    """What the target answers greedily, with what the drafter reads of it; answers of one token are left out.

    log: answers of an earlier run are taken from it, new ones added.
    """
    spec = llm.backend.spec
    assert spec is not None
    read = target_views(llm, spec.capture_layers, spec.kv_layers)
    done = log.done if log else {}
    todo = log.todo() if log else list(enumerate(prompts))
    if len(todo) < len(prompts):
        say(f"{len(prompts) - len(todo)} answers of an earlier run are taken up")
    for index, prompt, response, ended in answers(llm, max_tokens, 0.0, 1.0, 0)(todo):
        if log:
            log.add(index, Answer(prompt, response, ended))
        else:
            done[index] = Answer(prompt, response, ended)
        if len(done) % max(1, len(prompts) // 10) == 0:
            say(f"{len(done)} of {len(prompts)} answers")
    texts = []
    for index in sorted(done):
        answer = done[index]
        if len(answer.response) >= 2:
            tokens = np.array(answer.prompt + answer.response)
            features, _, views = read(tokens, 1)
            texts.append(Text(tokens, features, len(answer.prompt), views))
    if not texts:
        raise ValueError("no answer was long enough to draft in; give longer answers (max tokens) or other prompts")
    return texts


def calibrate(
    llm: LLM, prompts: list[str], max_tokens: int, say: Callable[[str], None], triangles: Path | None = None
) -> dict[str, Any]:
    """Fit on two thirds of the prompts, judge on the rest, write calibration.json and calibration_report.json.

    Greedy, every drafted position verified. The report (`judge`) is also drawn (`plots.draw`). Answers are kept in
    calibration_answers.jsonl until the end, so that a run that stopped goes on; calibration_log.jsonl says when what
    was done. Returns {"calibration": file, "report": …, "plots": files}.
    """
    runner = llm.backend.runner
    if runner is None or llm.drafter_name is None:
        raise ValueError("calibrate needs a drafter; give --drafter")
    if len(prompts) < 12:
        raise ValueError(f"calibration needs at least 12 prompts, got {len(prompts)}")
    folder = locate_drafter(llm.drafter_name)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to; copy the drafter and give --drafter COPY")
    say = logged(say, folder / "calibration_log.jsonl")
    made = f"{llm.config.model}, {llm.dtype}, greedy, {max_tokens} tokens"
    log = AnswerLog(folder / "calibration_answers.jsonl", prompts, made)
    texts = greedy_texts(llm, prompts, max_tokens, say, log)
    if len(texts) < 3:
        raise ValueError(f"only {len(texts)} of {len(prompts)} answers were long enough to draft in; 3 are needed")
    held = {i for i in range(len(texts)) if i % 3 == 2}
    block, directional = runner.spec.block, runner.spec.directional
    lengths = [block] if directional else list(range(1, block + 1))
    traces = []
    for part in ([t for i, t in enumerate(texts) if i not in held], [t for i, t in enumerate(texts) if i in held]):
        by_length: dict[int, Trace] = {}
        for chunk in page_chunks(part, runner):
            replay = Replay(runner, chunk, llm.backend.kv)
            for length in lengths:
                trace = replay.run(length)
                by_length[length] = trace.joined(by_length.get(length))
                say(f"length {length}: {len(by_length[length].accepted)} drafts")
        traces.append(by_length)
    fitted, judged = traces
    date = datetime.date.today().isoformat()
    drafts = len(fitted[block].accepted)
    source = f"{len(texts) - len(held)} prompts, {drafts} drafts of length {block}, greedy, {llm.dtype}, {date}"
    calibration = fit(fitted, block, directional, source)
    calibration.save(folder / "calibration.json")
    report = {"source": source, "held_out_prompts": len(held), **judge(judged, fitted, calibration, block, directional)}
    if triangles:
        record(triangles, (judged[block].pre_logits * calibration.scale + calibration.bias)[:4096])
    write_text(folder / "calibration_report.json", to_json(report) + "\n")
    drawn = plots.draw(report, folder, say)
    log.remove()
    say(f"calibrated: acceptance length {report['acceptance_length']} by draft length, on held-out prompts")
    return {"calibration": str(folder / "calibration.json"), "report": report, "plots": [str(p) for p in drawn]}


#: What the report says at length; `forespark calibrate` prints the rest as JSON and a table of these.
LONG = ("pre_draft", "pre_draft_by_position", "post_draft", "survival", "notes")


def to_json(report: dict[str, Any]) -> str:
    """Indented, but a list of numbers or strings stands on one line."""

    def on_one_line(found: re.Match[str]) -> str:
        # A string in JSON holds no line break, so only the space between values is touched.
        return re.sub(r"\n *", "", re.sub(r",\n *", ", ", found[0]))

    return re.sub(r"\[[^][{}]*\]", on_one_line, json.dumps(report, indent=1))


def table(report: dict[str, Any]) -> str:
    """The report for people: both estimators by position, and how well the accepted length is predicted."""
    lines = [
        f"{report['held_out_prompts']} held-out prompts, before -> after calibration; Brier score and AUROC after it",
        f"{'':18}{'cases':>8}   {'ECE':17}{'ECE of survival':18}{'Brier':8}AUROC",
    ]
    for name, title, positions in (
        ("pre_draft", "pre-draft estimate, drafts of every length (survival: of full length)", "pre_draft_by_position"),
        ("post_draft", "post-draft estimate, drafts of full length", "post_draft"),
    ):
        lines.append(title)
        for scores, whole in zip(report[positions], report["survival"][name], strict=True):
            ece, survival = (f"{number(s['ece_before'])} -> {number(s['ece_after'])}" for s in (scores, whole))
            first = f"  position {scores['j']}"
            brier, auroc = number(scores["brier_after"]), number(scores["auroc_after"])
            lines.append(f"{first:18}{scores['count']:>8,}   {ece:17}{survival:18}{brier:8}{auroc}".rstrip())
    predicted = report["predicted_length"]
    estimate, previous = (number(predicted[name]["mean_absolute_error"], 2) for name in ("pre_draft", "previous_step"))
    errors = f"pre-draft estimate {estimate} tokens, previous step's acceptance {previous}"
    lines.append(f"accepted length, mean error: {errors} ({predicted['drafts']:,} drafts)")
    return "\n".join(lines)


def number(value: float | None, digits: int = 3) -> str:
    """A dash where there was nothing to judge, as wide as a number."""
    return f"{'-':^{digits + 2}}" if value is None else f"{value:.{digits}f}"


def logged(say: Callable[[str], None], path: Path) -> Callable[[str], None]:
    """``say``, and a JSON line with the time in ``path``."""

    def both(line: str) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with path.open("a") as file:
            file.write(json.dumps({"time": now, "message": line}) + "\n")
        say(line)

    return both


def page_chunks(texts: list[Text], runner: DrafterRunner) -> list[list[Text]]:
    """Texts in runs whose pages and seats the drafter has."""
    chunks: list[list[Text]] = [[]]
    used = 0
    for text in texts:
        pages = -(-len(text.tokens) // runner.page_size)
        if chunks[-1] and (used + pages > runner.num_pages or len(chunks[-1]) == runner.seats):
            chunks.append([])
            used = 0
        chunks[-1].append(text)
        used += pages
    return chunks
