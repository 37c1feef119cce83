"""Stop strings across token borders, as if the text had been looked at after every token."""

from __future__ import annotations

import itertools

import pytest

from trtllm_forespark.runtime.request import Request, RequestOutput, SamplingParams, cut
from trtllm_forespark.runtime.stops import StopStrings

from . import plain
from .chain import VOCAB
from .markov import make_executor

PIECES = ["a", "ab", " b", "", "é".encode()[:1], "é".encode()[1:]]  # token 3 is special, 4 and 5 are half a character


def decode(ids) -> str:
    raw = b"".join(p.encode() if isinstance(p, str) else p for p in (PIECES[t] for t in ids))
    return raw.decode(errors="replace")


def slow(ids: list[int], stops: list[str], least: int = 0) -> tuple[int, str] | None:
    """Tokens kept and text, by decoding everything after each token."""
    prior = ""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count]).rstrip("\ufffd")
        found = [text.find(s, max(0, len(prior) - len(s) + 1)) for s in stops]
        if count >= least and max(found) >= 0:
            return count, text[: min(f for f in found if f >= 0)]
        prior = text
    return None


@pytest.mark.parametrize("stops", [["aba"], ["b a", "bé"], ["é"], [" b"], ["aa", "a b b", "éé"]], ids=str)
@pytest.mark.parametrize("run", [1, 2, 5])
@pytest.mark.parametrize("least", [0, 4])
def test_it_ends_at_the_token_with_which_the_text_first_contains_one(stops: list[str], run: int, least: int) -> None:
    found = 0
    for ids in itertools.product(range(VOCAB), repeat=5):
        watch, output, match = StopStrings(stops, decode, min_tokens=least), [], None
        for start in range(0, 5, run):
            new = list(ids[start : start + run])
            match = watch.find(output, new)
            if match:
                output += new[: match.count]
                break
            output += new
        due = slow(list(ids), stops, least)
        assert (match is None) == (due is None)
        if match and due:
            found += 1
            assert (len(output), match.text) == due
    assert found > 50


def test_the_first_of_several_and_the_text_with_and_without_it() -> None:
    for include, text in ((False, "a"), (True, "ab")):
        match = StopStrings(["a b", "b", "ba"], decode, include=include).find([], [1, 0, 2])
        assert match is not None and (match.count, match.stop, match.text) == (1, "b", text)


STOPS = ["ab b", "aaé", "b aa"]


def watched(name, prompt: list[int], **params) -> Request:
    p = SamplingParams(**params)
    watch = StopStrings(p.stop_strings, decode, include=p.include_stop_str_in_output, min_tokens=p.min_tokens or 0)
    return Request(name, prompt, p, stops=watch)


def test_max_tokens_and_stop_tokens_before_a_stop_string_go_first() -> None:
    r = watched("a", [0], stop="b", max_tokens=2)
    assert cut([0, 0, 1], r, 99) == ([0, 0], "length")
    r = watched("a", [0], stop="b", max_tokens=3)
    assert cut([0, 0, 1, 0], r, 99) == ([0, 0, 1], "stop")
    r = watched("a", [0], stop="b", stop_token_ids=[0])
    assert cut([2, 0, 1], r, 99) == ([2], "stop") and r.stopped_by is not None


@pytest.mark.parametrize("policy", ["ar", "full", "wcs"])
def test_nothing_after_the_stop_string_is_emitted_or_counted(policy: str) -> None:
    executor = make_executor(policy, perfect=policy == "full")
    streamed: dict[int, list[int]] = {k: [] for k in range(VOCAB)}
    requests = [watched(k, [k], stop=STOPS, max_tokens=40, frequency_penalty=0.4) for k in range(VOCAB)]
    for r in requests:
        r.callback = lambda r, tokens: streamed[r.id].extend(tokens)
        executor.submit(r)
    executor.run()
    executor.scheduler.check()
    ended = 0
    for r in requests:
        chain = plain.greedy([r.id], {"frequency_penalty": 0.4}, 40)
        due = slow(chain, STOPS)
        output = RequestOutput.of(r, decode(r.output_ids)).outputs[0]
        assert r.output_ids == streamed[r.id] == chain[: due[0] if due else 40]
        assert (r.finish_reason == "stop") == (due is not None)
        if due:
            ended += 1
            assert output.text == due[1] and output.stop_reason in STOPS and output.length == due[0]
        assert r.accepted <= len(r.output_ids)
    assert ended > 3
