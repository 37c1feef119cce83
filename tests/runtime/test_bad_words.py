"""Bad words of one and several tokens, across drafts; greedy and drawn."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.runtime.request import Request, SamplingParams

from . import plain
from .chain import VOCAB
from .markov import make_executor
from .test_lossless import p_value

CHAIN = plain.greedy([0], {}, 12)
WORDS = [
    [[CHAIN[0]]],
    [CHAIN[1:3]],
    [CHAIN[1:4], CHAIN[2:5], [5]],
    [[0, CHAIN[0]], [0, 0, CHAIN[0]], [3, CHAIN[0]]],
    [[4, 1, 2], [2, 2], [0, 3], [3, 0, 3, 0]],
]


def asked(name, prompt: list[int], words: list[list[int]], **params) -> Request:
    """Words of one token as ids, longer ones as if a tokenizer had made them."""
    single = [w[0] for w in words if len(w) == 1]
    return Request(
        name,
        prompt,
        SamplingParams(bad_token_ids=single, bad=["x"] * (len(words) - len(single)), **params),
        bad_words=[w for w in words if len(w) > 1],
    )


@pytest.mark.parametrize("policy", ["full", "wcs"])
def test_greedy_output_goes_round_bad_words_as_plain_decoding_does(policy: str) -> None:
    executor = make_executor(policy)
    requests = [asked((i, k), [k, 0], words, max_tokens=25) for i, words in enumerate(WORDS) for k in range(VOCAB)]
    free = Request("free", [0], SamplingParams(max_tokens=12))
    for request in [*requests, free]:
        executor.submit(request)
    executor.run()
    for request in requests:
        words = request.all_bad_words
        assert request.output_ids == plain.greedy(request.prompt_ids, {"words": words}, 25)
        text = [*request.prompt_ids, *request.output_ids]
        assert not any(text[i : i + len(w)] == list(w) for w in words for i in range(2, len(text)))
    assert free.output_ids == CHAIN
    assert 0 < executor.metrics.accepted < executor.metrics.verified


@pytest.mark.parametrize("policy", ["ar", "adaptive", "wcs"])
def test_sequences_with_bad_words_have_the_distribution_of_plain_decoding(policy: str) -> None:
    words = [[2], [3, 1], [1, 4, 3], [0, 0]]
    executor = make_executor(policy)
    requests = [asked(i, [0, 3], words, max_tokens=5, temperature=1.1, seed=i if i % 2 else None) for i in range(1500)]
    for request in requests:
        executor.submit(request)
    executor.run()
    seen = np.array([np.polyval(r.output_ids[:3], VOCAB) for r in requests], np.int64)
    expected = plain.exact([0, 3], {"words": words, "temperature": 1.1})
    assert (expected[np.unique(seen)] > 0).all()
    assert p_value(seen, expected) > 1e-4


def test_a_request_whose_every_token_is_bad_ends_with_an_error_alone() -> None:
    executor = make_executor("wcs")
    nothing = asked("nothing", [0], [[t] for t in range(VOCAB)], max_tokens=5)
    free = Request("free", [0], SamplingParams(max_tokens=12))
    for request in (nothing, free):
        executor.submit(request)
    executor.run()
    assert nothing.finish_reason == "error" and nothing.output_ids == [] and free.output_ids == CHAIN
