"""`forespark bench acceptance`: how much of a full-length draft the greedy target accepts, by position."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_forespark.runtime.bench.prompts import load_prompts
from trtllm_forespark.runtime.calibration import greedy_texts, page_chunks
from trtllm_forespark.runtime.llm import LLM
from trtllm_forespark.training.calibrate import conditional_by_position
from trtllm_forespark.training.replay import Replay


def run(llm: LLM, dataset: str | None, limit: int, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One entry of `runs` for one drafter and dataset (a path; None: the package's own prompts).

    The target answers ``limit`` prompts greedily, once; drafting at full length is replayed over the answers.
    """
    runner = llm.backend.runner
    if runner is None:
        raise ValueError("bench acceptance needs a drafter; give --drafters")
    prompts = [p["prompt"] for p in load_prompts(dataset)][:limit]
    texts = greedy_texts(llm, prompts, tokens, say)
    trace, seconds = None, 0.0
    for chunk in page_chunks(texts, runner):
        replay = Replay(runner, chunk, llm.backend.kv)
        started = time.perf_counter()
        trace = replay.run(runner.spec.block).joined(trace)
        seconds += time.perf_counter() - started
    assert trace is not None
    return {
        "drafter": llm.drafter_name,
        "dataset": Path(dataset).name if dataset else "own",
        "prompts": len(texts),
        "drafts": len(trace.accepted),
        "acceptance_length": round(1.0 + float(trace.accepted.mean()), 4),
        "conditional_by_position": conditional_by_position(trace),
        "seconds_a_draft": round(seconds / len(trace.accepted), 6),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafters", default=None, help="comma-separated (default: the one shipped for the model)")
    parser.add_argument("--dataset", default=None, help="JSONL (or .jsonl.gz) of prompts; default: the package's own")
    parser.add_argument("--limit", type=int, default=40, help="prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens an answer at most (default: %(default)s)")
