"""`forespark bench acceptance`: how much of a full-length draft the greedy target accepts, by position, and what one
takes."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_forespark.runtime.bench.prompts import load_prompts
from trtllm_forespark.runtime.calibration import greedy_texts, page_chunks
from trtllm_forespark.runtime.llm import LLM
from trtllm_forespark.runtime.profile import Probe
from trtllm_forespark.training.judging import conditional_by_position
from trtllm_forespark.training.replay import Replay

#: Times a draft of one request is timed.
TIMINGS = 15


def run(llm: LLM, dataset: str | None, limit: int, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    """One entry of `runs` for one drafter and dataset (a path; None: the package's own prompts).

    The target answers ``limit`` prompts greedily, once; drafting at full length is replayed over the answers.
    draft_seconds: median of one request's full draft at a context of 160 tokens.
    """
    runner = llm.backend.runner
    if runner is None:
        raise ValueError("bench acceptance needs a drafter; give --drafters")
    prompts = [p["prompt"] for p in load_prompts(dataset)][:limit]
    texts = greedy_texts(llm, prompts, tokens, say)
    trace = None
    for chunk in page_chunks(texts, runner):
        replay = Replay(runner, chunk, llm.backend.kv)
        trace = replay.run(runner.spec.block).joined(trace)
    assert trace is not None
    probe = Probe(llm.backend, min(160, llm.max_seq_len // 2), 1)
    seconds = [probe.draft(1, runner.spec.block + 1) for _ in range(TIMINGS)]
    probe.close()
    return {
        "drafter": llm.drafter_name,
        "dataset": Path(dataset).name if dataset else "own",
        "prompts": len(texts),
        "drafts": len(trace.accepted),
        "acceptance_length": round(1.0 + float(trace.accepted.mean()), 4),
        "conditional_by_position": conditional_by_position(trace),
        "draft_seconds": round(statistics.median(seconds), 6),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafters", default=None, help="comma-separated (default: the one shipped for the model)")
    parser.add_argument(
        "--dataset", nargs="+", default=[None], help="JSONL (or .jsonl.gz) of prompts; default: the package's own"
    )
    parser.add_argument("--limit", type=int, default=40, help="prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens an answer at most (default: %(default)s)")
