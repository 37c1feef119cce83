"""`forespark bench recalibration`: what following the observed acceptances is worth on text of another domain."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.runtime.bench.decode import cache_for, decode_in_turns
from trtllm_forespark.runtime.bench.prompts import load_prompts
from trtllm_forespark.runtime.calibration import greedy_texts, page_chunks
from trtllm_forespark.runtime.llm import LLM
from trtllm_forespark.training.reliability import expected_calibration_error
from trtllm_forespark.training.replay import Replay, Text, Trace
from trtllm_forespark.wcs.recalibration import Recalibration
from trtllm_forespark.wcs.survival import directional_to_survival, sigmoid, triangle_to_survival

Say = Callable[[str], None]


def run(
    llm: LLM, dataset: str | None, load: int, tokens: int, limit: int, rounds: int, say: Say, policy: str = "wcs"
) -> dict[str, Any]:
    """Serve half of the prompts with recalibration and without, in turns; then judge both calibrations on the rest.

    The judged half is replayed at every draft length with all of it verified. Returns throughputs (tokens/s, medians
    over batches, and the median of their ratios), and errors before (the offline calibration) and after.
    """
    spec = llm.backend.spec
    if spec is None or llm.calibration is None:
        raise ValueError("bench recalibration needs a drafter; give --drafter")
    prompts = [p["prompt"] for p in load_prompts(dataset)][:limit]
    served, judged = prompts[::2], prompts[1::2]
    if len(served) < load or not judged:
        raise ValueError(f"{len(prompts)} prompts: load {load} needs at least {2 * load}")
    ids = [llm.chat_ids(p) for p in served[: len(served) // load * load]]
    room = cache_for(llm, ids, load, tokens)
    executors = {name: llm.new_executor(policy, cache_tokens=room, recalibrate=name == "on") for name in ("on", "off")}
    learnt = executors["on"].controller.recalibration
    if learnt is None:
        raise ValueError("recalibrate or adapt is off")
    speeds: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds):
        for start in range(0, len(ids) - load + 1, load):
            batch = ids[start : start + load]
            for name, decoded in decode_in_turns(llm, executors, batch, tokens).items():
                speeds[name].append(decoded.throughput)
        say(f"round {number + 1} of {rounds}: {len(speeds['on'])} batches of {load}")
    texts = greedy_texts(llm, judged, tokens, say)
    traces = replayed(llm, texts, range(1, spec.block + 1))
    ratios = [a / b for a, b in zip(speeds["on"], speeds["off"], strict=True)]
    return {
        "drafter": llm.drafter_name,
        "dataset": Path(dataset).name if dataset else "own",
        "calibrated_on": llm.calibration.source,
        "load": load,
        "prompts_served": len(ids),
        "prompts_judged": len(texts),
        "throughput_on": round(statistics.median(speeds["on"]), 2),
        "throughput_off": round(statistics.median(speeds["off"]), 2),
        "throughput_ratio": round(statistics.median(ratios), 4),
        "throughput_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        **errors(traces, llm.calibration, learnt, spec.directional),
    }


def replayed(llm: LLM, texts: list[Text], lengths: range) -> dict[int, Trace]:
    """Drafts at every length, all verified."""
    runner = llm.backend.runner
    assert runner is not None
    traces: dict[int, Trace] = {}
    for chunk in page_chunks(texts, runner):
        replay = Replay(runner, chunk, llm.backend.kv)
        for length in lengths:
            traces[length] = replay.run(length).joined(traces.get(length))
    return traces


def errors(
    traces: dict[int, Trace], offline: Calibration, learnt: Recalibration, directional: bool
) -> dict[str, dict[str, float]]:
    """Of survival, before and after: ece (15 bins), and entry_gap, the mean over entries of |mean predicted - rate|.

    pre_draft: every length; post_draft: full length; predicted_length: mean absolute error of the expected one.
    """
    block = max(traces)
    convert = directional_to_survival if directional else triangle_to_survival
    out: dict[str, dict[str, float]] = {}
    before = {d: convert(t.pre_logits, offline.scale, offline.bias)[:, d - 1, :d] for d, t in traces.items()}
    after = {d: learnt.before(t.pre_logits)[:, d - 1, :d] for d, t in traces.items()}
    full = traces[block]
    lengths = np.full(len(full.accepted), block)
    post = np.multiply.accumulate(sigmoid(full.post_logits / offline.temperature), axis=1)
    new_post = learnt.after(full.post_logits, lengths, lengths, full.pre_logits)
    for name, old, new, of in (
        ("pre_draft", before, after, traces),
        ("post_draft", {block: post}, {block: new_post}, {block: full}),
    ):
        for when, survival in (("before", old), ("after", new)):
            predicted, happened, gaps = [], [], []
            for d, trace in of.items():
                for j in range(1, d + 1):
                    rows = trace.labelled >= j
                    if rows.any():
                        predicted.append(survival[d][rows, j - 1])
                        happened.append((trace.accepted[rows] >= j).astype(float))
                        gaps.append(abs(predicted[-1].mean() - happened[-1].mean()))
            ece = expected_calibration_error(np.concatenate(predicted), np.concatenate(happened))
            out.setdefault(name, {})[f"ece_{when}"] = round(ece, 4)
            out[name][f"entry_gap_{when}"] = round(float(np.mean(gaps)), 4)
    whole = full.labelled == block
    for when, survival in (("before", before), ("after", after)):
        error = np.abs(survival[block][whole].sum(1) - full.accepted[whole]).mean()
        out.setdefault("predicted_length", {})[f"mean_absolute_error_{when}"] = round(float(error), 4)
    return out


def text(result: dict[str, Any]) -> str:
    low, high = result["throughput_ratio_range"]
    lines = [
        f"{result['drafter']} on {result['dataset']}, load {result['load']}: throughput with recalibration "
        f"{result['throughput_ratio']:.3f} times that without (batches {low:.2f} to {high:.2f})"
    ]
    for name in ("pre_draft", "post_draft"):
        e = result[name]
        lines.append(
            f"{name}: ECE of survival {e['ece_before']:.3f} -> {e['ece_after']:.3f}, "
            f"mean gap of an entry's rate {e['entry_gap_before']:.3f} -> {e['entry_gap_after']:.3f}"
        )
    e = result["predicted_length"]
    lines.append(
        f"accepted length: mean absolute error {e['mean_absolute_error_before']:.2f} -> "
        f"{e['mean_absolute_error_after']:.2f}"
    )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default=None, help="JSONL (or .jsonl.gz) of prompts; default: the package's own")
    parser.add_argument("--load", type=int, default=4, help="requests in a batch (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens an answer at most (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=80, help="prompts, half of them judge (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="times the served half is gone through")
