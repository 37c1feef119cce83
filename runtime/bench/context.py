"""`forespark bench context`: what drafting costs, and what a request's drafter state takes, by context length."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.models.transformer import PackedTransformer
from trtllm_forespark.runtime import plots
from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.runtime.backends.torch_backend import TorchBackend
from trtllm_forespark.runtime.bench.charts import by_context
from trtllm_forespark.runtime.request import Request
from trtllm_forespark.runtime.sampling import Proposing, SamplingRows

Say = Callable[[str], None]
PAGE = 64


@dataclass(frozen=True)
class Bench:
    """One drafter over a cache that holds the largest case; times are seconds.

    The cache holds zeros: latency does not depend on values.
    """

    name: str
    backend: TorchBackend

    @classmethod
    def of(
        cls, name: str, target: PackedTransformer, drafter: tuple[BlockDrafter, Calibration], tokens: int, batch: int
    ) -> Bench:
        """tokens: of context a request at most, before its draft."""
        block = drafter[0].config.block
        longest = min(target.config.max_position, drafter[0].config.max_position)
        if tokens + block + 1 > longest:
            raise ValueError(
                f"a context of {tokens} tokens leaves drafter {name} no room for {block} drafts within {longest}"
            )
        pages = batch * -(-(tokens + block + 1) // PAGE)
        backend = TorchBackend(
            target, drafter, max_batch_size=batch, max_seq_len=longest, num_pages=pages, page_size=PAGE
        )
        return cls(name, backend)

    @torch.inference_mode()
    def measure(self, context: int, requests: int) -> tuple[float, float]:
        """(seconds of a draft pass of full length, of taking in the two tokens each request got in the step before)."""
        backend = self.backend
        assert backend.spec is not None
        block = backend.spec.block
        pages = -(-(context + block + 1) // PAGE)
        table = np.arange(requests * pages).reshape(requests, pages)
        seats = list(range(requests))
        cu = (2 * np.arange(requests + 1)).tolist()
        positions = [context - 2 + i for _ in range(requests) for i in (0, 1)]
        backend.forward(TargetBatch([1] * (2 * requests), positions, cu, table, [0], seats))
        backend.commit([2] * requests)
        batch = DraftBatch([1] * requests, [context] * requests, table, seats)
        propose = Proposing(SamplingRows.of([Request(id=i, prompt_ids=[0]) for i in seats], backend.device), NO_NOISE)
        started = self._now()
        backend.draft(batch, [0] * requests, propose)  # drafts nothing: it takes in what waits
        updated = self._now()
        backend.draft(batch, [block] * requests, propose)
        return self._now() - updated, updated - started

    def _now(self) -> float:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)
        return time.perf_counter()


NO_NOISE = torch.Generator()


def run(
    target: PackedTransformer,
    drafters: dict[str, tuple[BlockDrafter, Calibration]],
    contexts: list[int],
    batches: list[int],
    rounds: int,
    say: Say,
) -> dict[str, Any]:
    """Every drafter at every context and batch size, taking turns; medians over the rounds. Safe to interrupt.

    Returns {"runs": [...], "over_shortest": [...]}: the latter has each drafter's drafting time over that at the
    shortest context, medians of ratios within a round.
    """
    benches = [Bench.of(name, target, d, max(contexts), max(batches)) for name, d in drafters.items()]
    keys = [(bench, context, batch) for batch in batches for context in contexts for bench in benches]
    times: dict[tuple[str, int, int], list[tuple[float, float]]] = {(b.name, c, n): [] for b, c, n in keys}
    interrupted = False
    try:
        for bench, context, batch in keys:
            bench.measure(context, batch)  # the first pass pays for memory
        for number in range(rounds):
            for bench, context, batch in keys:
                times[bench.name, context, batch].append(bench.measure(context, batch))
            if number % max(1, rounds // 5) == 0:
                say(f"round {number + 1} of {rounds}")
    except KeyboardInterrupt:
        interrupted = True
    runs, ratios = [], []
    for bench, context, batch in keys:
        mine, first = times[bench.name, context, batch], times[bench.name, contexts[0], batch]
        if not mine:
            continue
        draft, update = ([t[i] for t in mine] for i in (0, 1))
        assert bench.backend.runner is not None
        runs.append(
            {
                "drafter": bench.name,
                "context": context,
                "batch": batch,
                "draft_seconds": round(statistics.median(draft), 6),
                "update_seconds": round(statistics.median(update), 6),
                "state_bytes": bench.backend.runner.state_bytes(context),
                "quartiles": [round(q, 6) for q in np.quantile(draft, (0.25, 0.75)).tolist()],
            }
        )
        over = [a[0] / b[0] for a, b in zip(mine, first, strict=False)]
        entry = {"drafter": bench.name, "context": context, "batch": batch, "ratio": round(statistics.median(over), 3)}
        ratios.append(entry)
    return {"runs": runs, "over_shortest": ratios, "rounds": rounds, "interrupted": interrupted}


def table(result: dict[str, Any]) -> str:
    """A line a drafter, batch and context."""
    ratio = {(r["drafter"], r["context"], r["batch"]): r["ratio"] for r in result["over_shortest"]}
    lines = [
        f"{'drafter':28}{'batch':>6}{'context':>9}{'draft ms':>10}{'over first':>12}{'update ms':>11}{'state KiB':>11}"
    ]
    for run_ in result["runs"]:
        key = (run_["drafter"], run_["context"], run_["batch"])
        lines.append(
            f"{key[0]:28}{key[2]:>6}{key[1]:>9}{run_['draft_seconds'] * 1e3:>10.2f}{ratio[key]:>12.2f}"
            f"{run_['update_seconds'] * 1e3:>11.2f}{run_['state_bytes'] / 1024:>11.1f}"
        )
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path, say: Say) -> None:
    """Drafting time and state by context, a line a drafter and batch size."""
    if plots.available(say):
        plots.save(by_context(result["runs"]), path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafters", default="dflash2,longspark", help="comma-separated (default: %(default)s)")
    parser.add_argument("--contexts", default="512,2048,8000", help="tokens, comma-separated (default: %(default)s)")
    parser.add_argument("--batch", default="1,8", help="requests that draft together (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="times each is measured (default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE", default=None, help="also draw it (PNG)")
