"""`forespark bench executor`: what it times and what it leaves out. No figure is judged here."""

from __future__ import annotations

import time

import pytest

from trtllm_forespark.runtime.bench import executor as bench
from trtllm_forespark.runtime.request import Request, SamplingParams


def requests(n: int) -> list[Request]:
    return [Request(i, [i], SamplingParams(max_tokens=None, ignore_eos=True)) for i in range(n)]


@pytest.mark.parametrize("policy", ["ar", "full", "wcs"])
def test_runs_on_the_stub(policy: str) -> None:
    said: list[str] = []
    result = bench.run([1, 5], [policy], 6, None, said.append)
    assert [run["requests"] for run in result["runs"]] == [1, 5] and len(said) == 2
    for run in result["runs"]:
        assert 0 < run["own_ms"] <= run["step_ms"] and 0 < run["share"] <= 1
        assert (run["drafted_per_step"] > 0) == (policy != "ar")


def test_passes_are_not_the_loops_own_time() -> None:
    executor = bench.stub_executor(2, "full", 512)
    slow = executor.backend.forward

    def forward(*args: object) -> object:
        time.sleep(0.05)
        return slow(*args)  # type: ignore[arg-type]

    executor.backend.forward = forward  # type: ignore[method-assign,assignment]
    figures = bench.measure(executor, requests(2), 3)
    assert figures["step_ms"] >= 50 and figures["own_ms"] < figures["step_ms"] - 45
    executor.check()
    assert executor.idle


def test_the_stub_counts_upwards_whatever_it_drafts() -> None:
    executor = bench.stub_executor(3, "wcs", 256)
    asked = requests(3)
    for request in asked:
        executor.submit(request)
    while any(len(r.output_ids) < 100 for r in asked):
        executor.step()
    for request in asked:
        assert request.output_ids[:100] == [(request.id + 1 + i) % bench.VOCAB for i in range(100)]  # type: ignore[operator]
    assert 0 < executor.metrics.accepted < executor.metrics.verified


def test_a_run_that_is_too_long_says_so() -> None:
    executor = bench.stub_executor(1, "ar", 16)
    with pytest.raises(RuntimeError, match="lower --steps"):
        bench.measure(executor, requests(1), 100)
