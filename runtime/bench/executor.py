"""`forespark bench executor`: the loop's own time, all of a step that is no pass of a model.

Passes are the backend's `forward`, `estimate`, `draft` and `commit`; what is left is scheduling, the decision, packing,
acceptance and bookkeeping. Twice: on the embedded model, where it is a share of the step, and on a stub whose passes
take next to no time, so that the loop meets hundreds of requests. The stub's vocabulary is small: on the embedded
model the loop's own time also holds the argmax over 49,152 logits a row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trtllm_forespark.drafters.base import DrafterSpec, Proposer
from trtllm_forespark.runtime.backends.base import Backend, DraftBatch, TargetBatch
from trtllm_forespark.runtime.bench.scheduler import load_recorded, serving_table
from trtllm_forespark.runtime.executor import Executor, ExecutorConfig
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.policies import make_policy
from trtllm_forespark.wcs.recalibration import Recalibration
from trtllm_forespark.wcs.stages import Draft, Estimate
from trtllm_forespark.wcs.survival import triangle_to_survival

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM

Model = Callable[[str, int], tuple[Executor, list[Request]]]
"""(policy, number of requests) -> an executor, and requests for it that are not submitted yet."""

PASSES = ("forward", "estimate", "draft", "commit")
#: Steps that are run before any is timed.
WARM_STEPS = 20
VOCAB = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", default="32,256", help="requests that decode at once, each number a run")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each run")
    parser.add_argument("--policies", default="ar,wcs")
    parser.add_argument("--stub-only", action="store_true", help="leave the embedded model out")


class Timed:
    """A backend whose passes are timed together."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.seconds = backend, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in PASSES:
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = found(*args, **kwargs)
            if self._backend.device.type == "cuda":
                torch.cuda.synchronize()
            self.seconds += time.perf_counter() - started
            return result

        return timed


class StubBackend:
    """A model that takes no time. Its target counts upwards in a vocabulary of 64; its drafter counts too, and errs as
    often as the embedded one's recorded estimates say."""

    spec: DrafterSpec | None
    device = torch.device("cpu")
    vocab_size, page_size = VOCAB, 64

    def __init__(self, requests: int, max_seq_len: int, seed: int = 0) -> None:
        recorded = load_recorded()
        assert recorded is not None  # ships with the package
        self.logits, self.block = recorded
        self.survival = triangle_to_survival(self.logits)
        self.spec = DrafterSpec("stub", self.block, "request", False, 1, (), max_seq_len)
        self.max_seq_len, self.num_pages = max_seq_len, requests * (-(-max_seq_len // self.page_size) + 1)
        self._rng, self._next = np.random.default_rng(seed), torch.eye(VOCAB).roll(1, 1)

    def forward(self, batch: TargetBatch, capture: bool = True) -> torch.Tensor:
        return self._next[torch.as_tensor(np.asarray(batch.token_ids)[np.asarray(batch.logits_at)])]

    def commit(self, kept: Sequence[int]) -> None:
        pass

    def release(self, seat: int) -> None:
        pass

    def clear(self, pages: Sequence[int]) -> None:
        pass

    def estimate(self, batch: DraftBatch) -> Estimate:
        at = self._recorded(batch)
        return Estimate(self.survival[at], np.ones(len(at), bool), self.logits[at])

    def _recorded(self, batch: DraftBatch) -> np.ndarray:
        """Which recorded estimate each request has at its position [n]."""
        return (np.asarray(batch.positions) * 7919 + np.asarray(batch.seats) * 104729) % len(self.logits)

    def draft(self, batch: DraftBatch, lengths: Sequence[int], propose: Proposer) -> Draft:
        d = np.asarray(lengths, np.int64)
        n, block = len(d), self.block
        survival = self.survival[self._recorded(batch), np.maximum(d, 1) - 1] * (np.arange(block) < d[:, None])
        conditional = survival / np.concatenate([np.ones((n, 1), np.float32), survival[:, :-1]], 1).clip(1e-6)
        inside = np.arange(block) < d[:, None]
        right = self._rng.random((n, block)) < conditional
        tokens = (np.asarray(batch.anchors)[:, None] + 1 + np.arange(block) + ~right) % VOCAB
        ids = torch.from_numpy(tokens[inside])[:, None]
        odds = np.log(conditional.clip(1e-6, 1 - 1e-6)) - np.log1p(-conditional.clip(1e-6, 1 - 1e-6))
        return Draft(
            ids[:, 0],
            torch.from_numpy(np.concatenate([[0], np.cumsum(d)])),
            ids,
            torch.ones(len(ids), 1),
            torch.from_numpy(survival),
            np.where(inside, odds, -np.inf).astype(np.float32),
        )


def stub_executor(requests: int, policy: str, max_seq_len: int) -> Executor:
    """An executor over the stub, with the recalibration and the table that serving has."""
    backend = StubBackend(requests, max_seq_len)
    entries = backend.logits.shape[1]
    controller = WcsController(
        make_policy(policy),
        serving_table(token_cost=1 / 16),
        backend.block,
        prior=backend.survival.mean(0),
        recalibration=None
        if policy == "ar"
        else Recalibration(backend.block, np.ones(entries), np.zeros(entries), np.ones(backend.block), "stub"),
    )
    controller.rest = None  # or it may find that drafts do not pay beside the loop's own time, and draft nothing
    return Executor(backend, controller, ExecutorConfig(requests, requests * (backend.block + 1), seed=0))


def measure(executor: Executor, requests: Sequence[Request], steps: int) -> dict[str, Any]:
    """Medians over steps in which all requests decode: step_ms, own_ms, share (own / step), and drafted a step."""
    timed = Timed(executor.backend)
    executor.backend = timed  # type: ignore[assignment]
    for request in requests:
        executor.submit(request)
    while executor.scheduler.waiting or any(not r.output_ids for r in requests):
        executor.prefill_step()
    whole, own, drafted = [], [], executor.metrics.drafted
    for step in range(WARM_STEPS + steps):
        timed.seconds, started = 0.0, time.perf_counter()
        work = executor.step()
        took = time.perf_counter() - started
        if len(work.decoding) < len(requests):
            raise RuntimeError(
                f"only {len(work.decoding)} of {len(requests)} requests decode in step {step}; lower --steps"
            )
        if step < WARM_STEPS:
            drafted = executor.metrics.drafted
            continue
        whole.append(took)
        own.append(took - timed.seconds)
    for request in requests:
        executor.cancel(request.id)
    return {
        "step_ms": round(1e3 * statistics.median(whole), 3),
        "own_ms": round(1e3 * statistics.median(own), 3),
        "share": round(statistics.median(o / w for o, w in zip(own, whole, strict=True)), 4),
        "drafted_per_step": round((executor.metrics.drafted - drafted) / steps, 1),
    }


def embedded(llm: LLM, prompts: Sequence[str]) -> Model:
    """Executors of the embedded model, its requests over these prompts in turns."""
    ids = [llm.chat_ids(prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    return lambda policy, requests: (
        llm.new_executor(policy),
        [llm.request(ids[i % len(ids)], params, _listen) for i in range(requests)],
    )


def run(
    loads: Sequence[int],
    policies: Sequence[str],
    steps: int,
    model: Model | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """model: what makes an executor of the embedded model and its requests; None: the stub alone.

    Returns `runs`: model ("stub" or "embedded"), policy, requests and the figures of `measure`.
    """
    runs = []
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for n in loads:
        for policy in policies:
            longest = 2 + (WARM_STEPS + steps) * 16
            made = [Request(i, [i % VOCAB], params, callback=_listen) for i in range(n)]
            figures = measure(stub_executor(n, policy, longest), made, steps)
            runs.append({"model": "stub", "policy": policy, "requests": n, **figures})
            say(line(runs[-1]))
            if model is None:
                continue
            figures = measure(*model(policy, n), steps)
            runs.append({"model": "embedded", "policy": policy, "requests": n, **figures})
            say(line(runs[-1]))
    return {"steps": steps, "runs": runs}


def line(run: dict[str, Any]) -> str:
    return (
        f"{run['model']:>8} {run['policy']:>6} {run['requests']:>4} requests: own {run['own_ms']:.2f} ms of "
        f"{run['step_ms']:.2f} ms a step ({100 * run['share']:.1f}%), {run['drafted_per_step']} drafted"
    )


def _listen(request: Request, tokens: list[int]) -> None:
    """As a client that streams."""
