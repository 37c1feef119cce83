"""The higher priority goes first, equals by arrival, and nobody waits for ever behind smaller ones."""

from __future__ import annotations

import math

import pytest

from trtllm_forespark.runtime.request import Request, Status

from .paged import assert_empty, paged_executor, request, run


def order_of_ending(requests: list[Request], executor) -> list[object]:
    for r in requests:
        executor.submit(r)
    order: list[object] = []
    while not executor.idle:
        executor.step()
        executor.check()
        order += [r.id for r in requests if r.finished and r.id not in order]
    assert_empty(executor)
    return order


def test_the_queue_goes_by_priority_then_by_arrival() -> None:
    priorities = [0.5, 0.0, 1, 0.5, 1.0, 0.7]
    requests = [request(i, max_tokens=3, priority=p) for i, p in enumerate(priorities)]
    assert order_of_ending(requests, paged_executor("ar", batch=1)) == [2, 4, 5, 0, 3, 1]


def test_the_lowest_priority_is_preempted_though_it_came_first() -> None:
    expected = run(paged_executor("ar"), [request(i, [i], max_tokens=20) for i in range(3)])
    executor = paged_executor("full", num_pages=8)
    requests = [request(i, [i], max_tokens=20, priority=p) for i, p in enumerate([0.2, 0.9, 0.5])]
    assert run(executor, requests) == expected
    assert requests[0].generation > 0 and requests[1].generation == 0


def test_a_late_request_of_high_priority_takes_nothing_from_those_that_run() -> None:
    executor = paged_executor("ar", num_pages=4, batch=1)
    first = request("first", max_tokens=10)
    executor.submit(first)
    executor.step()
    for name, priority in (("low", 0.1), ("high", 1.0)):
        executor.submit(request(name, max_tokens=3, priority=priority))
    executor.step()
    assert first.status is Status.DECODE and [r.id for r in executor.scheduler.waiting] == ["high", "low"]
    executor.run()
    assert first.generation == 0
    assert_empty(executor)


def test_a_big_request_is_not_overtaken_for_ever() -> None:
    """Small ones that would fit keep coming; the big one at the head runs as soon as who ran before it is done."""
    executor = paged_executor("ar", num_pages=12)
    for i in range(3):
        executor.submit(request(("early", i), [1] * 3, max_tokens=10))
    executor.step()
    big = request("big", [1] * 40, max_tokens=8)
    executor.submit(big)
    late = []
    for i in range(30):
        late.append(request(("late", i), [1] * 2, max_tokens=4))
        executor.submit(late[-1])
        executor.step()
        executor.check()
        if big.status is Status.WAITING:
            assert all(r.status is Status.WAITING for r in late)
    assert big.finished and any(r.finished for r in late)
    executor.run()
    assert_empty(executor)


@pytest.mark.parametrize("priority", [-0.1, 1.01, math.nan, "high", True, None])
def test_a_wrong_priority_is_refused(priority: object) -> None:
    executor = paged_executor("ar")
    with pytest.raises(ValueError, match=r"priority = .*: must be a number from 0 to 1; give 0\.5"):
        executor.submit(request("a", priority=priority))
    assert_empty(executor)
