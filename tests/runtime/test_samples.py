"""Several outputs of one prompt, bad words and stop strings through `LLM.generate`, over the Markov chain."""

from __future__ import annotations

import itertools

import pytest

from trtllm_forespark.runtime.llm import LLM
from trtllm_forespark.runtime.request import RequestOutput, SamplingParams

from . import plain
from .chain import VOCAB
from .markov import make_executor


class Letters:
    """Token i is the letter i of the alphabet."""

    eos_ids = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 97 for c in text]

    def decode(self, ids) -> str:
        return "".join(chr(97 + t) for t in ids)


def make_llm(policy: str = "wcs", seed: int = 3) -> LLM:
    """An `LLM` without a model: what it does between a prompt and its output is the real thing."""
    llm = LLM.__new__(LLM)
    llm.executor = make_executor(policy, seed=seed)
    llm.backend, llm.tokenizer = llm.executor.backend, Letters()  # type: ignore[assignment]
    llm.max_seq_len, llm._ids = llm.backend.max_seq_len, itertools.count()
    return llm


def texts(output: RequestOutput | list[RequestOutput]) -> list[str]:
    assert isinstance(output, RequestOutput)
    return [completion.text for completion in output.outputs]


def test_seeded_samples_differ_and_repeat_in_any_batch() -> None:
    params = SamplingParams(n=4, temperature=1.2, seed=11, max_tokens=20)
    first = make_llm().generate("a", params)
    assert len(set(texts(first))) == 4
    assert isinstance(first, RequestOutput) and [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert all(c.finish_reason == "length" and c.length == 20 for c in first.outputs) and first.finished
    other = make_llm("adaptive", seed=8)
    crowd = other.generate(["c", "a", "b"], [SamplingParams(n=2, top_k=3), params, SamplingParams()])
    assert isinstance(crowd, list) and [len(o.outputs) for o in crowd] == [2, 4, 1]
    assert texts(crowd[1]) == texts(first)
    alone = make_llm().generate("a", SamplingParams(temperature=1.2, seed=11, max_tokens=20))
    assert texts(alone) == texts(first)[:1], "the first sample takes the seed itself"
    assert first.accepted <= first.verified <= first.drafted
    assert sum(c.length for c in first.outputs) == first.steps + first.accepted + 4, "4 first tokens came with prompts"


def test_unseeded_samples_differ() -> None:
    assert len(set(texts(make_llm().generate("a", SamplingParams(n=5, temperature=1.2, max_tokens=20))))) == 5


def test_more_samples_than_one_can_stream_or_than_greedy_has_are_refused() -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match="give n = 1"):
        llm.generate("a", SamplingParams(n=2, temperature=1.0), on_tokens=lambda i, t: None)
    with pytest.raises(ValueError, match="greedy sampling has one output"):
        SamplingParams(n=2, temperature=0)
    assert llm.executor.idle


def test_words_are_encoded_and_the_text_is_cut() -> None:
    chain = "".join(chr(97 + t) for t in plain.greedy([1], {}, 20))
    assert chain.startswith("ceaea")
    output = make_llm().generate("b", SamplingParams(max_tokens=20, stop=["aea", "zz"]))
    assert isinstance(output, RequestOutput)
    (completion,) = output.outputs
    assert (completion.text, completion.stop_reason, completion.finish_reason) == ("ce", "aea", "stop")
    assert completion.token_ids == [2, 4, 0, 4, 0]
    kept = make_llm().generate("b", SamplingParams(max_tokens=20, stop="aea", include_stop_str_in_output=True))
    assert texts(kept) == ["ceaea"]
    words = [[4, 0], [2]]
    due = plain.greedy([1], {"words": words}, 20)
    barred = make_llm().generate("b", SamplingParams(max_tokens=20, bad="ea", bad_token_ids=[2]))
    assert texts(barred) == ["".join(chr(97 + t) for t in due)] and VOCAB == 6
