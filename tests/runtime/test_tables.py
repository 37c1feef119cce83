"""Profiling goes on where it stopped, and never with times of something else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trtllm_forespark.runtime.profile import uneven
from trtllm_forespark.runtime.tables import Timings
from trtllm_forespark.wcs.latency import LatencyTable, profile

MADE_FOR = {"device": "here", "model": "m", "drafter": "d", "dtype": "float32"}


class Machine:
    """Times that never repeat; stops after so many."""

    def __init__(self, stops_after: int = 10**9) -> None:
        self.calls, self.stops_after = 0, stops_after

    def __call__(self, requests: int, tokens: int) -> float:
        if self.calls == self.stops_after:
            raise KeyboardInterrupt
        self.calls += 1
        return 1.0 + tokens + 1e-3 * self.calls


def run(path, machine: Machine, made_for: dict[str, str] = MADE_FOR) -> LatencyTable:
    kept = Timings(path, made_for)
    verify, draft = kept.of("verify", machine), kept.of("draft", machine)
    table = profile(
        verify, draft, verify=[(1, 1), (1, 4), (8, 8), (8, 16)], draft=[(1, 4), (8, 16)], timings=3, **MADE_FOR
    )
    kept.done()
    return table


def test_a_run_that_stopped_goes_on(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, Machine(stops_after=11))
    with path.open("a") as file:
        file.write('["verify", 1,')  # a crash in the middle of a line
    rest = Machine()
    run(path, rest)
    assert rest.calls == 36 - 11
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"made_for": MADE_FOR} and len(lines) == 1 + 36 + 1 and lines[-1] == "done"


def test_a_finished_log_is_begun_anew_and_so_is_another_machines(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    run(path, Machine())
    again = Machine()
    run(path, again)
    assert again.calls == 36
    with pytest.raises(KeyboardInterrupt):
        run(path, Machine(stops_after=5))
    other = Machine()
    run(path, other, {**MADE_FOR, "device": "there"})
    assert other.calls == 36


def test_another_grid_is_measured_from_where_it_differs(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    first = Timings(path, MADE_FOR)
    verify = first.of("verify", Machine())
    assert [verify(1, 1), verify(1, 4)] == [2.001, 5.002]
    second, machine = Timings(path, MADE_FOR), Machine()
    assert second.resumed == 2
    verify = second.of("verify", machine)
    assert verify(1, 1) == 2.001 and machine.calls == 0
    assert verify(2, 2) == 3.001 and second.resumed == 0 and machine.calls == 1


def test_uneven_lengths_add_up_and_differ() -> None:
    for requests, most in ((1, 7), (3, 4), (8, 7), (32, 1)):
        for total in (0, 1, requests * most // 2, requests * most):
            lengths = uneven(total, requests, most)
            assert lengths.shape == (requests,) and lengths.sum() == total and lengths.max(initial=0) <= most
            np.testing.assert_array_equal(lengths, uneven(total, requests, most))
    assert sorted(uneven(16, 8, 7)) == [0, 1, 1, 2, 2, 3, 3, 4]
    assert uneven(0, 2, 0).tolist() == [0, 0]
