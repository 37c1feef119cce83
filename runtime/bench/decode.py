"""`forespark bench decode`: decode-only closed batches, every policy on the same prompts in one run (appendix C)."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trtllm_forespark.runtime.bench.prompts import load_prompts
from trtllm_forespark.runtime.executor import Executor
from trtllm_forespark.runtime.llm import LLM
from trtllm_forespark.runtime.metrics import Metrics
from trtllm_forespark.runtime.request import SamplingParams, Status

Say = Callable[[str], None]
Name = TypeVar("Name", str, int)

#: Turns of a policy in a batch.
TURNS = 32


@dataclass
class Point:
    """One policy at one load: a figure a round, and the counts of all rounds."""

    policy: str
    load: int
    throughput: list[float] = field(default_factory=list)
    interactivity: list[float] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)

    def add(self, batches: list[Decoded]) -> None:
        """Take in one round."""
        self.throughput.append(statistics.fmean(b.throughput for b in batches))
        self.interactivity.append(statistics.fmean(b.interactivity for b in batches))
        for batch in batches:
            self.metrics.add(batch.metrics)

    def to_json(self, drafter: str | None) -> dict[str, Any]:
        m, seconds = self.metrics, self.metrics.seconds
        total = sum(seconds.values()) or 1.0
        middle = statistics.median(self.throughput)
        return {
            "policy": self.policy,
            "drafter": None if self.policy == "ar" else drafter,
            "load": self.load,
            "throughput_tok_s": round(middle, 2),
            "interactivity_tok_s": round(statistics.median(self.interactivity), 2),
            "acceptance_length": round(m.acceptance_length, 3),
            "drafted_per_step": round(m.drafted / m.steps, 2) if m.steps else 0.0,
            "verified_per_step": round(m.verified / m.steps, 2) if m.steps else 0.0,
            "varied_steps_share": round(m.varied / m.steps, 3) if m.steps else 0.0,
            "draft_share": round(seconds["draft"] / total, 4),
            "verify_share": round(seconds["verify"] / total, 4),
            "other_share": round(1 - (seconds["draft"] + seconds["verify"]) / total, 4),
            "spread": round((max(self.throughput) - min(self.throughput)) / middle, 4) if middle else 0.0,
            "rounds": [round(t, 2) for t in self.throughput],
        }


@dataclass(frozen=True)
class Decoded:
    """One timed batch: throughput is the sum of its requests' token rates, interactivity their median (tokens/s)."""

    throughput: float
    interactivity: float
    metrics: Metrics


class Batch:
    """A batch of one policy, prefilled and released together; its clock runs while it steps."""

    def __init__(self, llm: LLM, executor: Executor, prompts: list[list[int]], tokens: int, temperature: float) -> None:
        """tokens: timed for each request, after its first."""
        params = SamplingParams(max_tokens=tokens + 1, temperature=temperature)
        self.executor, self.whole = executor, tokens * len(prompts)
        self.requests = [llm.request(p, params) for p in prompts]
        for request in self.requests:
            executor.submit(request)
        while any(r.status in (Status.WAITING, Status.PREFILL) for r in self.requests):
            # A request that has its first token waits at the barrier, as in the paper.
            executor.prefill_step()
        executor.metrics = Metrics()
        self._seconds = 0.0
        self._ended: dict[object, float] = {}

    def advance(self, share: float = 1.0) -> None:
        """Step until that share of the batch's tokens is there; 1: to the end."""
        started = time.perf_counter() - self._seconds
        while not self.executor.idle and (share >= 1 or self._decoded() < share * self.whole):
            self.executor.step()
            self._seconds = time.perf_counter() - started
            for request in self.requests:
                if request.finished and request.id not in self._ended:
                    self._ended[request.id] = self._seconds

    def _decoded(self) -> int:
        return sum(len(r.output_ids) - 1 for r in self.requests)

    def result(self) -> Decoded:
        """Of a batch at its end. Raises RuntimeError where a request failed, ValueError where nothing was timed."""
        failed = next((r for r in self.requests if r.finish_reason == "error"), None)
        if failed is not None:
            raise RuntimeError(failed.error or "a request failed")
        rates = [(len(r.output_ids) - 1) / self._ended[r.id] for r in self.requests if len(r.output_ids) > 1]
        if not rates:
            raise ValueError("every answer ended with its first token; give other prompts")
        return Decoded(sum(rates), statistics.median(rates), self.executor.metrics)


def cache_for(llm: LLM, prompts: list[list[int]], load: int, tokens: int) -> int:
    """Tokens of a cache that holds ``load`` of the prompts and ``tokens`` answered to each, in whole pages."""
    page = llm.backend.page_size
    return load * -(-(max(map(len, prompts)) + tokens + 1) // page) * page


def decode_in_turns(
    llm: LLM, executors: dict[Name, Executor], prompts: list[list[int]], tokens: int, temperature: float = 0.0
) -> dict[Name, Decoded]:
    """The same batch under every executor, each over a cache of its own, in `TURNS` turns.

    A machine's fast and slow seconds then fall on all of them alike.
    """
    batches = {name: Batch(llm, executor, prompts, tokens, temperature) for name, executor in executors.items()}
    for turn in range(1, TURNS + 1):
        for batch in batches.values():
            batch.advance(turn / TURNS)
    return {name: batch.result() for name, batch in batches.items()}


def run(
    llm: LLM,
    policies: list[str],
    loads: list[int],
    tokens: int = 64,
    rounds: int = 3,
    requests: int = 8,
    prompts: list[str] | None = None,
    temperature: float = 0.0,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Every policy at every load, policies taking turns within each batch. Returns {"runs": …, "gains": …}.

    A round times at least ``requests`` requests at each load, in as many batches as that takes, and is their mean.
    Before the first every policy decodes one batch at every load untimed.
    """
    texts = prompts or [p["prompt"] for p in load_prompts()]
    ids = [llm.chat_ids(t) for t in texts]
    room = cache_for(llm, ids, max(loads), tokens)
    executors = {name: llm.new_executor(name, cache_tokens=room) for name in policies}
    points = {(name, load): Point(name, load) for load in loads for name in policies}
    interrupted = False
    try:
        for load in loads:  # untimed: the first batch pays for memory, and for what a policy must find out
            last = [ids[-1 - i % len(ids)] for i in range(load)]
            decode_in_turns(llm, executors, last, max(tokens // 2, 4), temperature)
        for round_index in range(rounds):
            order = policies[round_index % len(policies) :] + policies[: round_index % len(policies)]
            for load in loads:
                # The same prompts in every round and for every policy: the spread is the machine's.
                count = -(-requests // load)
                batches = [[ids[(b * load + i) % len(ids)] for i in range(load)] for b in range(count)]
                timed: dict[str, list[Decoded]] = {name: [] for name in policies}
                for batch in batches:
                    in_order = {name: executors[name] for name in order}
                    for name, decoded in decode_in_turns(llm, in_order, batch, tokens, temperature).items():
                        timed[name].append(decoded)
                for name in policies:
                    points[name, load].add(timed[name])
                say(
                    f"round {round_index + 1} of {rounds}, load {load}: "
                    + ", ".join(f"{name} {points[name, load].throughput[-1]:.1f}" for name in policies)
                    + " tok/s"
                )
    except KeyboardInterrupt:
        interrupted = True
    done = [p for p in points.values() if p.throughput]
    runs = [p.to_json(llm.drafter_name) for p in done]
    return {
        "runs": runs,
        "gains": gains(runs),
        "tokens": tokens,
        "rounds": rounds,
        "requests": requests,
        "interrupted": interrupted,
        **llm.identity,
    }


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of several drafters as one: runs and gains name theirs."""
    if len(results) == 1:
        return results[0]
    of_each = [(r, [{"drafter": r["drafter"], **gain} for gain in r["gains"]]) for r in results]
    return {
        **results[-1],
        "drafter": ",".join(r["drafter"] for r in results),
        "runs": [run_ for r in results for run_ in r["runs"]],
        "gains": [gain for _, gained in of_each for gain in gained],
    }


def gains(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each load: each policy over autoregressive decoding, and WCS over the best other one.

    Medians over the rounds of the ratio of a round's two figures, which were taken side by side and so share the
    machine's slow minutes; `…_range`: the least and the largest. The best other policy is the one WCS gains least on.
    """
    out = []
    for load in sorted({r["load"] for r in runs}):
        rounds = {r["policy"]: r["rounds"] for r in runs if r["load"] == load}
        entry: dict[str, Any] = {"load": load}
        if "ar" in rounds:
            over = {name: _ratios(mine, rounds["ar"]) for name, mine in rounds.items()}
            entry["over_ar"] = {name: round(statistics.median(r), 3) for name, r in over.items()}
            entry["over_ar_range"] = {name: _range(r) for name, r in over.items()}
        others = [name for name in rounds if name != "wcs"]
        if "wcs" in rounds and others:
            over = {name: _ratios(rounds["wcs"], rounds[name]) for name in others}
            best = min(over, key=lambda name: statistics.median(over[name]))
            entry["best_other"] = best
            entry["wcs_over_best_other"] = round(statistics.median(over[best]), 3)
            entry["wcs_over_best_other_range"] = _range(over[best])
        out.append(entry)
    return out


def _ratios(mine: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=False)]  # an interrupted round has some of the policies


def _range(ratios: list[float]) -> list[float]:
    return [round(min(ratios), 3), round(max(ratios), 3)]


def table(result: dict[str, Any]) -> str:
    """The result as a text table: throughput by policy and load (medians), beside autoregressive decoding and, for WCS,
    the best other policy (medians of the rounds' ratios)."""
    runs, gained = result["runs"], {g["load"]: g for g in result["gains"]}
    policies = list(dict.fromkeys(r["policy"] for r in runs))
    at = {(r["policy"], r["load"]): r for r in runs}
    compared = any("best_other" in g for g in gained.values())
    lines = ["tokens/s by policy and load (in brackets: times autoregressive)"]
    lines.append("load      " + "".join(f"{name:>18}" for name in policies) + "   wcs / best other" * compared)
    for load, gain in gained.items():
        cells = []
        for name in policies:
            run_ = at.get((name, load))
            if run_ is None:
                cells.append(f"{'-':>18}")
                continue
            ratio = f" ({gain['over_ar'][name]:.2f})" if "over_ar" in gain else ""
            cells.append(f"{run_['throughput_tok_s']:.1f}{ratio}".rjust(18))
        if "best_other" in gain:
            low, high = gain["wcs_over_best_other_range"]
            best = f"{gain['wcs_over_best_other']:.2f} ({gain['best_other']}; rounds {low:.2f} to {high:.2f})"
            cells.append("   " + best)
        lines.append(f"{load:<10}" + "".join(cells))
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", default="ar,full,batchwise,adaptive,wcs", help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--loads", default="1,4,8,16,32", help="requests in a batch, comma-separated (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens timed a request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=8, help="requests of a round, at least (default: %(default)s)")
    parser.add_argument("--prompts", help="JSONL (or .jsonl.gz) with a prompt a line; default: the package's own")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafters", default=None, help="several, one after the other (comma-separated)")
