"""Bias and penalties under speculation: every row sees what autoregressive decoding would have seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_forespark.runtime import history
from trtllm_forespark.runtime.executor import no_draft
from trtllm_forespark.runtime.history import TokenCounts
from trtllm_forespark.runtime.penalties import shape_logits
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.wcs.stages import Draft

from . import plain
from .chain import VOCAB
from .markov import make_executor
from .test_lossless import POLICIES, SETTINGS, p_value

ALL = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.25,
    "embedding_bias": {1: 0.6, 4: -0.8},
    "min_p": 0.05,
}
EACH = [
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.3},
    {"embedding_bias": {2: 1.5, 0: -float("inf")}},
    {"embedding_bias": [0.5, -0.5, 1.0, 0.0, 0.2, -2.0]},
    ALL,
]


def drafts(*rows: list[int]) -> Draft:
    flat = torch.tensor([t for row in rows for t in row], dtype=torch.int32)
    cu = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    return Draft(flat, cu, flat[:, None].long(), torch.ones(len(flat), 1), None)


@pytest.mark.parametrize("params", EACH, ids=str)
def test_each_row_counts_what_stands_before_it_once_and_in_order(params: dict) -> None:
    """docs/cases.md 28: repeated drafts, drafts that the text holds already, uneven, empty and dropped ones."""
    settings = {k: v for k, v in params.items() if k != "min_p"}
    texts = [([0, 0, 3], [3, 5]), ([2], []), ([1, 4], [1]), ([5], [0, 1, 2, 3, 4])]
    drafted, lengths = [[1, 1, 3, 0], [2, 2], [], [4, 4, 4]], [3, 2, 0, 3]
    requests = [Request(i, p, SamplingParams(**settings), output_ids=list(o)) for i, (p, o) in enumerate(texts)]
    requests.insert(2, Request("plain", [3], SamplingParams()))
    drafted.insert(2, [1, 2])
    lengths.insert(2, 2)
    before, due = [], []
    for r, d, b in zip(requests, drafted, lengths, strict=True):
        for j in range(b + 1):
            text = r.prompt_ids + r.output_ids + d[:j]
            before.append(plain.LOGITS[text[-1]])
            due.append(plain.row(text, settings if r.id != "plain" else {}))
    logits = torch.tensor(np.array(before), dtype=torch.float32)
    for half in (False, True):
        given = logits.bfloat16() if half else logits.clone()
        shaped = shape_logits(given, requests, lengths, drafts(*drafted))
        assert shaped.dtype == torch.float32
        assert np.allclose(shaped.numpy(), np.array(due), atol=0.05 if half else 1e-5)


def test_requests_without_such_settings_keep_the_very_tensor() -> None:
    logits = torch.zeros(2, VOCAB)
    off = SamplingParams(repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0.0, temperature=0.5)
    requests = [Request(i, [0], off) for i in range(2)]
    assert shape_logits(logits, requests, [0, 0], no_draft(2, 4)) is logits
    assert all(r.token_counts is None for r in requests)


def test_counts_follow_the_output_and_nothing_is_counted_twice() -> None:
    counts = TokenCounts([3, 3, 1], VOCAB)
    output: list[int] = []
    for new in ([], [3, 0], [], [0, 0, 5]):
        output += new
        counts.follow(output)
        counts.follow(output)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {1: 1, 3: 3, 0: 3, 5: 1}


@pytest.mark.parametrize("params", EACH, ids=str)
@pytest.mark.parametrize("policy", ["full", "wcs"])
def test_greedy_output_is_that_of_plain_decoding(policy: str, params: dict) -> None:
    executor = make_executor(policy, adapt=False)
    prompts = [[0], [1, 1, 2], [5, 4, 3, 2, 1, 0], [3]]
    requests = [Request(i, p, SamplingParams(max_tokens=25, **params)) for i, p in enumerate(prompts)]
    other = Request("other", [2], SamplingParams(max_tokens=25))
    for request in [*requests, other]:
        executor.submit(request)
        executor.step()
    executor.run()
    for request in requests:
        assert request.output_ids == plain.greedy(request.prompt_ids, params, 25)
    assert other.output_ids == plain.greedy([2], {}, 25)
    assert 0 < executor.metrics.accepted < executor.metrics.verified, "some drafts are taken, some are not"


def sequences(policy: str, params: dict, count: int, prompt: list[int]) -> np.ndarray:
    executor = make_executor(policy, **SETTINGS.get(policy, {}))
    requests = [
        Request(i, prompt, SamplingParams(max_tokens=5, **params, seed=i if i % 2 else None)) for i in range(count)
    ]
    waves = [requests[i : i + 32] for i in range(0, count, 32)]
    for wave in waves:
        for request in wave:
            executor.submit(request)
        executor.run()
    if policy != "ar":
        assert 0 < executor.metrics.accepted < executor.metrics.verified
    return np.array([np.polyval(r.output_ids[:3], VOCAB) for r in requests], np.int64)


@pytest.mark.parametrize("policy", POLICIES)
def test_sequences_have_the_distribution_of_plain_decoding(policy: str) -> None:
    """Seeded and unseeded requests together, with everything at once."""
    params = {**ALL, "temperature": 0.9, "top_k": 5}
    observed = sequences(policy, params, 600 if policy == "exhaustive" else 2000, [0, 3])
    assert p_value(observed, plain.exact([0, 3], params)) > 1e-4


def test_penalties_that_do_not_see_the_drafts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = history.StepRows.of.__func__  # type: ignore[attr-defined]

    def blind(cls, chosen, lengths, draft, device):
        rows = real(cls, chosen, lengths, draft, device)
        return history.StepRows(rows.row, rows.owner, rows.place, torch.full_like(rows.drafts, -1))

    params = {"temperature": 1.0, "presence_penalty": 1.5}
    assert p_value(sequences("full", params, 1500, [0, 3]), plain.exact([0, 3], params)) > 1e-4
    monkeypatch.setattr(history.StepRows, "of", classmethod(blind))
    assert p_value(sequences("full", params, 1500, [0, 3]), plain.exact([0, 3], params)) < 1e-6
