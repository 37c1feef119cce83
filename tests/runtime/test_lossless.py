"""Whatever the policy decides, the output distribution is the target's own (docs/lossless.md)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from trtllm_forespark.runtime.executor import Executor, ExecutorConfig
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.policies import make_policy

from .chain import TARGET, VOCAB
from .markov import BLOCK, TABLE, MarkovBackend, make_executor

POLICIES = ["ar", "full", "batchwise", "adaptive", "wcs", "wcs-single-curve", "exhaustive"]
SETTINGS: dict[str, dict] = {"batchwise": {"caps": {1: 4, 8: 2}}}
LENGTH = 3


def exact(first: int, temperature: float = 1.0) -> np.ndarray:
    """Probability of every 3-token continuation of token ``first``, [VOCAB ** 3]."""
    p = torch.softmax(TARGET / temperature, -1).double().numpy()
    return (p[first][:, None, None] * p[:, :, None] * p[None, :, :]).reshape(-1)


def sample(executor: Executor, count: int, batch: int, tokens: int = 6, **params) -> np.ndarray:
    """First three tokens of ``count`` requests that start at token 0; [count] sequence indices."""
    seen = []
    serial = 0
    while len(seen) < count:
        requests = [
            Request(
                id=(serial := serial + 1),
                prompt_ids=[0],
                params=SamplingParams(max_tokens=tokens, temperature=1.0, **params),
            )
            for _ in range(batch)
        ]
        for request in requests:
            executor.submit(request)
        executor.run()
        seen += [np.polyval(r.output_ids[:LENGTH], VOCAB) for r in requests]
    executor.scheduler.check()
    return np.array(seen[:count], np.int64)


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(observed, minlength=len(expected)).astype(float)
    wanted = expected * len(observed)
    rare = wanted < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] < 1e-9:
        counts, wanted = counts[:-1], wanted[:-1]
    return float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("policy", ["adaptive", "wcs", "exhaustive"])
def test_correcting_estimates_while_serving_changes_no_distribution(policy: str) -> None:
    executor = make_executor(policy, adapt=True)
    assert p_value(sample(executor, 1000 if policy == "exhaustive" else 4000, 16), exact(0)) > 1e-4
    assert executor.controller.after.factor != 1.0 and executor.metrics.drafted > 0


@pytest.mark.parametrize("policy", ["adaptive", "wcs"])
def test_recalibrating_while_serving_changes_no_distribution(policy: str) -> None:
    executor = make_executor(policy, adapt=True, recalibrate=True)
    assert p_value(sample(executor, 4000, 16), exact(0)) > 1e-4
    learnt = executor.controller.recalibration
    assert learnt is not None and np.abs(learnt.post.change).max() > 0.1 and executor.metrics.drafted > 0
    assert executor.controller.after.factor == 1.0, "nothing is corrected twice"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [4000, pytest.param(60000, marks=pytest.mark.full)])
def test_sequences_have_the_targets_distribution(policy: str, count: int) -> None:
    executor = make_executor(policy, **SETTINGS.get(policy, {}))
    # The exhaustive search is slow: fewer requests at once, fewer in all.
    observed = sample(executor, count // 4, 8) if policy == "exhaustive" else sample(executor, count, 32)
    assert p_value(observed, exact(0)) > 1e-4
    m = executor.metrics
    if policy in ("wcs", "wcs-single-curve"):
        assert m.varied / m.steps > 0.5, "draft lengths must differ within a step for this test to mean anything"
    if policy in ("wcs", "wcs-single-curve", "adaptive"):
        assert 1 - m.verified / m.drafted >= 0.2, "a fifth of the drafts must be dropped before verification"
    if policy != "ar":
        assert 0 < m.accepted < m.verified


class Peeking(WcsController):
    """Verifies a position because of the token that was drawn there: what docs/lossless.md, rule 1, forbids."""

    def select(self, plan, draft, num_tokens, greedy):
        liked = (draft.token_ids % 2 == 0).float() * 0.9 + 0.05
        survival = torch.zeros_like(draft.survival)
        lengths = draft.cu_lengths.diff()
        for i, (start, d) in enumerate(zip(draft.cu_lengths.tolist(), lengths.tolist(), strict=False)):
            survival[i, :d] = liked[start : start + d].cumprod(0)
        return super().select(plan, dataclasses.replace(draft, survival=survival), num_tokens, greedy)


def test_a_scorer_that_peeks_at_the_drawn_token_is_caught() -> None:
    controller = Peeking(make_policy("wcs"), TABLE, block=BLOCK, adapt=False)
    executor = Executor(MarkovBackend(), controller, ExecutorConfig(64, 1024, 3))
    assert p_value(sample(executor, 4000, 32), exact(0)) < 1e-6


@pytest.mark.parametrize("policy", ["adaptive", "wcs", "full"])
def test_a_seeded_request_repeats_in_any_batch(policy: str) -> None:
    """Rule 7, docs/cases.md 22."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    texts = []
    for neighbours in (0, 3, 11):
        executor = make_executor(policy, seed=neighbours)
        requests = [
            Request(id=i, prompt_ids=[i % VOCAB], params=SamplingParams(max_tokens=9 + i, temperature=1.0))
            for i in range(neighbours)
        ]
        mine = Request(id="mine", prompt_ids=[2], params=params)
        for request in [*requests[::2], mine, *requests[1::2]]:
            executor.submit(request)
        executor.run()
        texts.append(mine.output_ids)
        if neighbours > 1:
            twins = [r for r in requests if r.prompt_ids == [0]]
            assert len({tuple(r.output_ids[:6]) for r in twins}) == len(twins), "unseeded requests must differ"
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 20


def test_seeded_sampling_has_the_targets_distribution() -> None:
    executor = make_executor("wcs")
    seen = []
    for seed in range(3000):
        executor.submit(
            Request(id=seed, prompt_ids=[0], params=SamplingParams(max_tokens=5, temperature=1.0, seed=seed))
        )
    done = list(executor.requests.values())
    executor.run()
    seen = np.array([np.polyval(r.output_ids[:LENGTH], VOCAB) for r in done], np.int64)
    assert p_value(seen, exact(0)) > 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_the_targets_greedy_output(policy: str) -> None:
    expected = [0]
    for _ in range(20):
        expected.append(int(TARGET[expected[-1]].argmax()))
    executor = make_executor(policy, **SETTINGS.get(policy, {}))
    requests = [Request(id=i, prompt_ids=expected[: i + 1], params=SamplingParams(max_tokens=20 - i)) for i in range(3)]
    for request in requests:
        executor.submit(request)
        executor.step()
    executor.run()
    for i, request in enumerate(requests):
        assert request.output_ids == expected[i + 1 :]
