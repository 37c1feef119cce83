"""Calibrating a drafter with the running engine: greedy answers, their features, replays at every length."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtllm_forespark.files import write_text
from trtllm_forespark.models.registry import locate_drafter
from trtllm_forespark.runtime.bench.scheduler import record
from trtllm_forespark.runtime.writing import answers, target_features
from trtllm_forespark.training.calibrate import fit, judge
from trtllm_forespark.training.replay import Replay, Text, Trace

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM


def greedy_texts(llm: LLM, prompts: list[str], max_tokens: int, say: Callable[[str], None]) -> list[Text]:
    """What the target answers greedily, with the captured features; answers of one token are left out."""
    assert llm.backend.spec is not None
    read = target_features(llm, llm.backend.spec.capture_layers)
    texts: dict[int, Text] = {}
    for done, (index, prompt, response, _) in enumerate(
        answers(llm, max_tokens, 0.0, 1.0, 0)(list(enumerate(prompts))), 1
    ):
        if len(response) >= 2:
            tokens = np.array(prompt + response)
            texts[index] = Text(tokens, read(tokens, 1)[0], len(prompt))
        if done % max(1, len(prompts) // 10) == 0:
            say(f"calibrate: {done} of {len(prompts)} answers")
    if not texts:
        raise ValueError("no answer was long enough to draft in; give longer answers (max tokens) or other prompts")
    return [texts[i] for i in sorted(texts)]


def calibrate(
    llm: LLM, prompts: list[str], max_tokens: int, say: Callable[[str], None], triangles: Path | None = None
) -> dict[str, Any]:
    """Fit on two thirds of the prompts, judge on the rest, write calibration.json and calibration_report.json.

    Greedy, every drafted position verified. Returns {"calibration": file, "report": …}.
    """
    runner = llm.backend.runner
    if runner is None or llm.drafter_name is None:
        raise ValueError("calibrate needs a drafter; give --drafter")
    if len(prompts) < 12:
        raise ValueError(f"calibration needs at least 12 prompts, got {len(prompts)}")
    folder = locate_drafter(llm.drafter_name)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to; copy the drafter and give --drafter COPY")
    texts = greedy_texts(llm, prompts, max_tokens, say)
    held = {i for i in range(len(texts)) if i % 3 == 2}
    block, directional = runner.spec.block, runner.spec.directional
    lengths = [block] if directional else list(range(1, block + 1))
    traces = []
    for part in ([t for i, t in enumerate(texts) if i not in held], [t for i, t in enumerate(texts) if i in held]):
        by_length: dict[int, Trace] = {}
        for chunk in page_chunks(part, runner.num_pages, runner.kv.page_size):
            replay = Replay(runner, chunk)
            for length in lengths:
                trace = replay.run(length)
                by_length[length] = trace.joined(by_length.get(length))
                say(f"calibrate: length {length}, {len(by_length[length].accepted)} drafts")
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
    result = {"calibration": str(folder / "calibration.json"), "report": report}
    write_text(folder / "calibration_report.json", json.dumps(report, indent=1) + "\n")
    return result


def page_chunks(texts: list[Text], num_pages: int, page_size: int) -> list[list[Text]]:
    """Texts in runs whose pages fit the drafter's pool."""
    chunks: list[list[Text]] = [[]]
    used = 0
    for text in texts:
        pages = -(-len(text.tokens) // page_size)
        if used + pages > num_pages and chunks[-1]:
            chunks.append([])
            used = 0
        chunks[-1].append(text)
        used += pages
    return chunks
