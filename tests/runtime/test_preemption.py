"""Short of pages: who waits, who gives up, and that nobody's text changes."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.runtime.batch import BatchScheduler
from trtllm_forespark.runtime.executor import Executor
from trtllm_forespark.runtime.kv_cache import KVCacheManager
from trtllm_forespark.runtime.request import Request, SamplingParams, Status

from .paged import POISON, assert_empty, paged_executor, request, run

POLICIES = ["ar", "full", "adaptive", "wcs", "exhaustive"]
KINDS = {"greedy": {}, "seeded": {"temperature": 1.0}}


def mixed(kind: str, callback=None) -> list[Request]:
    seeds = [{"seed": 40 + i} if kind == "seeded" else {} for i in range(8)]
    return [
        request(i, [(3 * i + j) % 5 for j in range(2 + 3 * (i % 4))], max_tokens=12 + 2 * i, callback=callback,
                **KINDS[kind], **seeds[i])
        for i in range(8)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_does_not_change_where_pages_run_short(policy: str, kind: str) -> None:
    """docs/cases.md 18: drafts pend, pages run out, the text goes on as if nothing had been, each token once."""
    expected = run(paged_executor("ar"), mixed(kind))
    streamed: dict[object, list[int]] = {i: [] for i in range(8)}
    tight = paged_executor(policy, num_pages=11)
    requests = mixed(kind, lambda r, tokens: streamed[r.id].extend(tokens))
    assert run(tight, requests) == expected
    assert [streamed[i] for i in range(8)] == expected
    assert max(r.generation for r in requests) > 0, "somebody must have been preempted for this to mean anything"
    assert all(r.generation == 0 for r in requests[:1]), "the first is never preempted"


def test_admission_asks_for_the_prompt_and_a_page_to_decode_into() -> None:
    executor = paged_executor("ar", num_pages=6)  # 24 tokens
    requests = [request(i, [1] * 3, max_tokens=20) for i in range(4)]
    for r in requests:
        executor.submit(r)
    executor.step()
    assert [r.status for r in requests] == [Status.DECODE] * 3 + [Status.WAITING], "two pages each, not six"
    executor.run()
    assert_empty(executor)
    assert [len(r.output_ids) for r in requests] == [20] * 4


def test_the_last_gives_up_first_and_comes_back_in_its_place() -> None:
    executor = paged_executor("ar", num_pages=6)
    requests = [request(i, [1] * 3, max_tokens=18) for i in range(5)]
    for r in requests:
        executor.submit(r)
    seen = []
    while not executor.idle:
        executor.step()
        executor.check()
        generations = [r.generation for r in requests]
        if not seen or seen[-1] != generations:
            seen.append(generations)
        assert [r.id for r in executor.scheduler.waiting] == sorted(r.id for r in executor.scheduler.waiting)
    assert seen[1] == [0, 0, 1, 0, 0], "of three that run the last gives up, not one that waits"
    assert all(generations[0] == 0 for generations in seen)
    assert_empty(executor)


class Beside:
    """Page accounts of requests that decode, without an executor."""

    def __init__(self, pages: int, computed: list[int], page_size: int = 4) -> None:
        self.cache = KVCacheManager(pages, page_size)
        self.scheduler = BatchScheduler(self.cache, 8, 64, 64)
        self.requests = []
        for i, count in enumerate(computed):
            r = Request(i, [1] * count, SamplingParams(max_tokens=30), output_ids=[1], num_computed_tokens=count)
            assert self.cache.reserve(i, count + 1)
            self.requests.append(r)

    def room(self, most: list[int]) -> list[int]:
        return self.scheduler.draft_room(self.requests, np.array(most, np.int64)).tolist()


@pytest.mark.parametrize(
    ("pages", "computed", "most", "room"),
    [
        (9, [3, 3], [4, 4], [4, 4]),
        (3, [3, 3], [4, 4], [4, 0]),
        (2, [3, 3], [4, 4], [0, 0]),
        (2, [1, 2], [4, 4], [2, 1]),
        (3, [1, 2], [0, 4], [0, 4]),
        (4, [1, 1], [7, 4], [7, 2]),
        (3, [1], [15, ], [10]),
        (2, [], [], []),
    ],
    ids=[
        "enough", "one page for two", "none", "what is left of the last page", "who may not draft takes none",
        "a long one takes two", "a part of a draft", "nobody",
    ],
)  # fmt: skip
def test_drafts_are_as_long_as_free_pages_hold(pages: int, computed: list[int], most: list[int], room: list[int]):
    assert Beside(pages, computed).room(most) == room


def test_room_for_drafts_asks_for_lengths_only() -> None:
    """Rule 1: the tokens of a request, drafted or not, say nothing about how much of its draft is verified."""
    beside = Beside(3, [3, 3])
    before = beside.room([4, 4])
    for r in beside.requests:
        r.output_ids[-1] = 5
    assert beside.room([4, 4]) == before
    assert beside.cache.free_pages == 1, "and takes nothing"


@pytest.mark.parametrize("policy", ["full", "wcs"])
def test_drafts_preempt_nobody(policy: str) -> None:
    """Pages for the tokens of both are there, for the drafts of both they are not."""
    executor = paged_executor(policy, num_pages=6)
    requests = [request(i, [i] * 3, max_tokens=9) for i in range(2)]
    run(executor, requests)
    assert [r.generation for r in requests] == [0, 0] and executor.metrics.drafted > 0


@pytest.mark.parametrize("policy", ["ar", "full", "wcs"])
def test_preempting_at_any_step_leaves_the_text(policy: str) -> None:
    """Also in the middle of its prompt, and twice in a row."""
    expected = run(paged_executor("ar"), [request("a", [1, 2, 3] * 5, max_tokens=20)])
    for at in range(12):
        executor = paged_executor(policy, tokens=8)
        r = request("a", [1, 2, 3] * 5, max_tokens=20)
        executor.submit(r)
        for _ in range(at):
            executor.step()
        if executor.idle:
            break
        assert executor.preempt("a") is (at > 0) and not executor.preempt("a")
        executor.check()
        executor.run()
        assert [r.output_ids] == expected
        assert_empty(executor)


def test_a_callback_that_preempts_another_discards_its_late_result() -> None:
    """docs/cases.md 19: the tokens of that step are void; they come again, once."""
    expected = run(paged_executor("ar"), [request(i, [i + 1], max_tokens=15) for i in range(2)])
    executor = paged_executor("full")
    streamed: list[int] = []
    requests = [
        request(0, [1], max_tokens=15, callback=lambda r, tokens: executor.preempt(1)),
        request(1, [2], max_tokens=15, callback=lambda r, tokens: streamed.extend(tokens)),
    ]
    assert run(executor, requests) == expected and streamed == expected[1]
    assert requests[1].generation > 2


def test_a_callback_may_preempt_its_own_request() -> None:
    expected = run(paged_executor("ar"), [request(0, [1], max_tokens=9)])
    executor = paged_executor("full")
    assert run(executor, [request(0, [1], max_tokens=9, callback=lambda r, _: executor.preempt(0))]) == expected


def test_cancelled_while_it_waits_to_go_on() -> None:
    executor = paged_executor("full")
    r = request("a", [1], max_tokens=20)
    executor.submit(r)
    executor.step()
    executor.step()
    executor.preempt("a")
    assert executor.cancel("a") and r.finish_reason == "cancelled" and not executor.preempt("a")
    assert_empty(executor)


@pytest.mark.parametrize("end", ["preempt", "cancel"])
def test_values_nobody_has_seen_are_wiped(end: str) -> None:
    """NaN in the middle of a prompt shows in no logits yet; the next owner of the pages must not meet it."""
    executor = paged_executor("ar", num_pages=8, tokens=8)
    executor.submit(request("bad", [POISON, 0, *[1] * 18], max_tokens=5))
    executor.step()
    assert np.isnan(executor.backend.slots).any()  # type: ignore[attr-defined]
    assert getattr(executor, end)("bad")
    assert not np.isnan(executor.backend.slots).any()  # type: ignore[attr-defined]
    executor.cancel("bad")
    assert_empty(executor)


def break_seat(executor: Executor) -> None:
    executor.scheduler._free_seats.append(executor.scheduler._free_seats[0])


def break_pages(executor: Executor) -> None:
    executor.scheduler.cache.reserve("nobody", 3)


def break_queue(executor: Executor) -> None:
    executor.scheduler.waiting.append(executor.scheduler.running[0])


def break_requests(executor: Executor) -> None:
    executor.requests["ghost"] = request("ghost")


def break_controller(executor: Executor) -> None:
    executor.controller.before_draft([("ghost", 0)], None, [0], 1)


@pytest.mark.parametrize("damage", [break_seat, break_pages, break_queue, break_requests, break_controller])
def test_check_finds_what_is_wrong(damage) -> None:
    executor = paged_executor("full")
    executor.submit(request("a", [1], max_tokens=20))
    executor.step()
    executor.step()
    executor.check()
    damage(executor)
    with pytest.raises(AssertionError):
        executor.check()
