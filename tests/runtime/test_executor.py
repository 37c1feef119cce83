"""The step loop around the four stages: batching, limits, endings, cancellation, and nothing lost or leaked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trtllm_forespark.runtime.executor import Executor, ExecutorConfig
from trtllm_forespark.runtime.request import Request, SamplingParams, Status
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.policies import make_policy

from .chain import TARGET, VOCAB
from .markov import BLOCK, TABLE, MarkovBackend, make_executor


def greedy_chain(first: int, count: int) -> list[int]:
    out = [first]
    for _ in range(count):
        out.append(int(TARGET[out[-1]].argmax()))
    return out[1:]


def request(name, prompt=(0,), **params) -> Request:
    eos = params.pop("eos", frozenset())
    callback = params.pop("callback", None)
    return Request(id=name, prompt_ids=list(prompt), params=SamplingParams(**params), eos_ids=eos, callback=callback)


def run(executor: Executor, *requests: Request) -> None:
    for r in requests:
        executor.submit(r)
    executor.run()
    assert_clean(executor)


def assert_clean(executor: Executor) -> None:
    executor.scheduler.check()
    assert executor.idle and not executor.scheduler.running and not executor.scheduler.waiting
    assert executor.scheduler.cache.used_pages == 0 and len(executor.scheduler.seats) == 0


@pytest.mark.parametrize("policy", ["ar", "full", "wcs"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_max_tokens_is_exact(policy: str, count: int) -> None:
    """docs/cases.md 14: four drafts accepted, one token left: exactly one token out."""
    r = request("a", max_tokens=count)
    run(make_executor(policy), r)
    assert r.output_ids == greedy_chain(0, count) and r.finish_reason == "length"


def test_an_end_token_in_the_middle_of_a_block_ends_there() -> None:
    """docs/cases.md 10, 11: nothing after it is emitted or counted."""
    chain = greedy_chain(5, 12)
    end = chain[2]
    assert chain.index(end) == 2, "the end must come in the middle of the first block"
    executor = make_executor("full", perfect=True)
    streamed: list[int] = []
    r = request("a", [5], max_tokens=12, eos=frozenset({end}), callback=lambda _, tokens: streamed.extend(tokens))
    run(executor, r)
    assert r.output_ids == chain[:3] == streamed
    assert r.finish_reason == "stop"
    assert executor.metrics.steps == 1 and executor.metrics.accepted == executor.metrics.emitted == 2


def test_chunked_prefill_keeps_every_step_within_its_tokens() -> None:
    """docs/cases.md 6 and 7: prompts in chunks beside decoding; N + B never exceeds max_num_tokens."""
    backend = MarkovBackend()
    executor = Executor(backend, WcsController(make_policy("wcs"), TABLE, block=BLOCK), ExecutorConfig(8, 16, 0))
    requests = [request(i, prompt=[i % VOCAB] * (3 + 7 * i), max_tokens=9, temperature=1.0) for i in range(6)]
    run(executor, *requests)
    assert all(len(r.output_ids) == 9 for r in requests)
    assert max(tokens for _, tokens in backend.passes) <= 16
    assert any(tokens == 16 for _, tokens in backend.passes), "the limit must bind for this test to mean anything"


def test_two_prefills_share_one_step() -> None:
    executor = make_executor("wcs", max_batch_size=4, max_num_tokens=16)
    for i in range(2):
        executor.submit(request(i, prompt=[1] * 8, max_tokens=2))
    work = executor.step()
    assert [c.count for c in work.chunks] == [8, 8] and all(c.last for c in work.chunks)
    executor.run()


def test_the_batch_drains_to_one_and_to_none() -> None:
    """docs/cases.md 2."""
    executor = make_executor("wcs")
    requests = [request(i, max_tokens=1 + 3 * i, temperature=1.0) for i in range(5)]
    run(executor, *requests)
    assert [len(r.output_ids) for r in requests] == [1, 4, 7, 10, 13]
    assert not executor.step(), "a step without work does nothing"


def test_more_requests_than_seats_wait_their_turn() -> None:
    executor = make_executor("wcs", max_batch_size=2)
    requests = [request(i, max_tokens=4) for i in range(7)]
    for r in requests:
        executor.submit(r)
    order = []
    while not executor.idle:
        executor.step()
        executor.scheduler.check()
        assert len(executor.scheduler.running) <= 2
        order += [r.id for r in requests if r.finished and r.id not in order]
    assert order == sorted(order), "first come, first served"


def test_admission_waits_for_pages_and_a_request_that_can_never_fit_is_refused() -> None:
    backend = MarkovBackend()
    backend.num_pages = 4  # 16 tokens
    executor = Executor(backend, WcsController(make_policy("wcs"), TABLE, block=BLOCK), ExecutorConfig(8, 64, 0))
    with pytest.raises(ValueError, match="may grow to 20 tokens, the KV cache holds 16"):
        executor.submit(request("big", prompt=[0] * 10, max_tokens=10))
    requests = [request(i, prompt=[0] * 3, max_tokens=5) for i in range(4)]
    for r in requests:
        executor.submit(r)
    executor.step()
    assert len(executor.scheduler.running) == 2
    executor.run()
    assert all(r.finish_reason == "length" for r in requests)
    assert_clean(executor)


def test_bad_requests_are_refused_before_any_work() -> None:
    executor = make_executor("wcs")
    executor.submit(request("a", max_tokens=3))
    for bad, text in (
        (request("b", prompt=()), "empty"),
        (request("c", prompt=[0] * 64), "leaves no room"),
        (request("d", prompt=[VOCAB]), "outside the vocabulary"),
        (request("a"), "in use"),
    ):
        with pytest.raises(ValueError, match=text):
            executor.submit(bad)
    executor.run()
    assert_clean(executor)


def test_a_prompt_one_token_short_of_the_context_gives_one_token() -> None:
    """docs/cases.md 35."""
    r = request("a", prompt=[0] * 63, max_tokens=10)
    run(make_executor("wcs"), r)
    assert r.output_ids == greedy_chain(0, 1) and r.finish_reason == "length"


def test_nothing_is_drafted_past_the_drafters_last_position() -> None:
    """docs/cases.md 29."""
    executor = make_executor("full")
    backend = executor.backend
    backend.spec = dataclasses.replace(backend.spec, max_position=10)
    furthest = []
    draft = backend.draft

    def watched(batch, lengths, propose):
        furthest.append(max(p + d for p, d in zip(batch.positions, lengths, strict=True)))
        return draft(batch, lengths, propose)

    backend.draft = watched
    r = request("a", max_tokens=30)
    run(executor, r)
    assert r.output_ids == greedy_chain(0, 30)
    assert furthest and max(furthest) == 9, "up to the last position, and not beyond"


def test_cancelling_waiting_and_running_requests_frees_everything_once() -> None:
    """docs/cases.md 19, and a client that leaves."""
    executor = make_executor("wcs", max_batch_size=2)
    requests = [request(i, max_tokens=20) for i in range(4)]
    for r in requests:
        executor.submit(r)
    executor.step()
    executor.step()
    assert executor.cancel(0) and executor.cancel(3) and not executor.cancel(0) and not executor.cancel("nobody")
    assert requests[0].finish_reason == "cancelled" and requests[3].output_ids == []
    executor.run()
    assert requests[1].output_ids == requests[2].output_ids == greedy_chain(0, 20)
    assert_clean(executor)


class Broken(MarkovBackend):
    """NaN logits for every row after token 3."""

    def forward(self, batch, capture=True):
        logits = super().forward(batch).clone()
        rows = torch.tensor(batch.token_ids)[torch.tensor(batch.logits_at)] == 3
        logits[rows] = torch.nan
        return logits


def test_a_nan_row_ends_its_own_request_with_an_error_and_no_other() -> None:
    """docs/cases.md 21: never token 0."""
    executor = Executor(Broken(), WcsController(make_policy("wcs"), TABLE, block=BLOCK), ExecutorConfig(8, 64, 0))
    sound = [t for t in range(VOCAB) if 3 not in [t, *greedy_chain(t, 12)[:-1]]]
    assert sound, "the chain must have a start that never meets token 3"
    bad = request("bad", prompt=[3], max_tokens=12)
    good = request("good", prompt=[sound[0]], max_tokens=12)
    run(executor, bad, good)
    assert bad.finish_reason == "error" and "not finite" in (bad.error or "") and bad.output_ids == []
    assert executor.backend.cleared, "its pages are wiped before another request gets them"
    assert good.output_ids == greedy_chain(sound[0], 12)


def test_streaming_delivers_each_token_once_and_the_end_once() -> None:
    executor = make_executor("wcs")
    streamed: dict[int, list[int]] = {i: [] for i in range(5)}
    endings: list[int] = []

    def callback(r: Request, tokens: list[int]) -> None:
        streamed[r.id] += tokens
        if r.finished:
            endings.append(r.id)

    requests = [request(i, max_tokens=5 + i, temperature=1.0, callback=callback) for i in range(5)]
    run(executor, *requests)
    assert all(streamed[r.id] == r.output_ids for r in requests)
    assert sorted(endings) == [0, 1, 2, 3, 4]


def test_a_callback_that_raises_ends_its_own_request_alone() -> None:
    executor = make_executor("wcs")

    def raises(r: Request, tokens: list[int]) -> None:
        raise OSError("the client is gone")

    gone = request("gone", max_tokens=12, callback=raises)
    here = request("here", max_tokens=12)
    run(executor, gone, here)
    assert gone.finish_reason == "error" and "the client is gone" in (gone.error or "")
    assert here.output_ids == greedy_chain(0, 12)


def test_a_callback_may_cancel_another_request_of_the_same_step() -> None:
    executor = make_executor("wcs")

    def cancels(r: Request, tokens: list[int]) -> None:
        executor.cancel("other")

    first = request("first", max_tokens=8, callback=cancels)
    other = request("other", max_tokens=8)
    run(executor, first, other)
    assert other.finish_reason == "cancelled" and first.output_ids == greedy_chain(0, 8)


def test_prompts_that_fill_a_step_leave_nothing_to_draft_for() -> None:
    executor = make_executor("full", max_num_tokens=16, max_batch_size=4)
    executor.submit(request("decoding", max_tokens=30))
    executor.step()
    executor.submit(request("long", prompt=[0] * 50, max_tokens=2))
    before = executor.metrics.drafted
    work = executor.step()
    assert work.num_tokens == 16 and executor.metrics.drafted == before
    executor.run()
    assert_clean(executor)


@pytest.mark.parametrize("policy", ["full", "adaptive", "wcs"])
def test_the_drafter_context_follows_the_accepted_tokens(policy: str) -> None:
    """What commit keeps adds up to every token but the newest."""
    executor = make_executor(policy)
    r = request("a", prompt=[0, 1, 2], max_tokens=15, temperature=1.0)
    executor.submit(r)
    backend = executor.backend
    while not r.finished:
        executor.step()
        if not r.finished:
            assert r.num_computed_tokens == r.num_tokens - 1
            assert sum(k[0] for k in backend.kept) == r.num_computed_tokens
            assert executor.scheduler.cache.num_tokens("a") == r.num_computed_tokens


def test_load_that_forces_no_drafting_and_then_falls() -> None:
    """docs/cases.md 5: drafting resumes, the tokens are those autoregressive decoding gives."""
    executor = make_executor("wcs")
    long = request("long", max_tokens=50)
    crowd = [request(i, prompt=[i % VOCAB], max_tokens=10) for i in range(60)]
    executor.submit(long)
    for _ in range(2):
        executor.step()
    for r in crowd:
        executor.submit(r)
    per_request = []
    while not executor.idle:
        before = executor.metrics.drafted
        work = executor.step()
        if work.decoding:
            per_request.append((len(work.decoding), (executor.metrics.drafted - before) / len(work.decoding)))
    assert long.output_ids == greedy_chain(0, 50)
    busy = np.mean([d for n, d in per_request if n > 40])
    alone = np.mean([d for n, d in per_request[-6:-1] if n == 1])
    assert alone > busy


def test_status_moves_forward_only() -> None:
    executor = make_executor("ar", max_batch_size=1, max_num_tokens=4)
    r = request("a", prompt=[0] * 10, max_tokens=3)
    executor.submit(r)
    seen = [r.status]
    while not r.finished:
        executor.step()
        seen.append(r.status)
    order = [Status.WAITING, Status.PREFILL, Status.DECODE, Status.FINISHED]
    assert [order.index(s) for s in seen] == sorted(order.index(s) for s in seen)
    assert r.steps == 2
