"""What `bench decode` reports, from figures done by hand."""

from __future__ import annotations

import pytest

from trtllm_forespark.runtime.bench import decode
from trtllm_forespark.runtime.bench.decode import Decoded, Point, decode_in_turns, gains, table
from trtllm_forespark.runtime.metrics import Metrics
from trtllm_forespark.runtime.request import Request

from .markov import make_executor


def point(policy: str, load: int, rounds: list[list[float]]) -> Point:
    made = Point(policy, load)
    for batches in rounds:
        made.add([Decoded(throughput, throughput / load, Metrics(steps=1)) for throughput in batches])
    return made


RUNS = [
    point("ar", 4, [[8.0, 12.0], [20.0], [10.0]]).to_json(None),
    point("full", 4, [[9.0], [22.0], [11.0]]).to_json("d"),
    point("wcs", 4, [[12.0], [30.0], [11.0]]).to_json("d"),
]


def test_a_round_is_the_mean_of_its_batches_and_a_point_the_median_of_its_rounds() -> None:
    ar = RUNS[0]
    assert ar["rounds"] == [10.0, 20.0, 10.0] and ar["throughput_tok_s"] == 10.0 and ar["spread"] == 1.0
    assert ar["drafter"] is None and RUNS[1]["drafter"] == "d"


def test_gains_are_medians_of_the_ratios_within_rounds() -> None:
    (gain,) = gains(RUNS)  # ar 10, 20, 10; full 9, 22, 11; wcs 12, 30, 11
    assert gain["load"] == 4 and gain["over_ar"] == {"ar": 1.0, "full": 1.1, "wcs": 1.2}
    assert gain["over_ar_range"]["wcs"] == [1.1, 1.5]
    assert gain["best_other"] == "ar" and gain["wcs_over_best_other"] == 1.2
    assert gain["wcs_over_best_other_range"] == [1.1, 1.5]


def test_slow_rounds_do_not_choose_the_best_other_policy() -> None:
    """By the medians `full` (20) is far ahead of wcs (12); side by side wcs is."""
    rounds = {"full": [[20.0], [20.0], [5.0]], "wcs": [[22.0], [12.0], [6.0]]}
    (gain,) = gains([point(name, 1, figures).to_json(None) for name, figures in rounds.items()])
    assert gain["wcs_over_best_other"] == 1.1 and gain["wcs_over_best_other_range"] == [0.6, 1.2]


def test_without_a_policy_to_compare_with_there_is_no_ratio() -> None:
    assert gains(RUNS[2:]) == [{"load": 4}]
    assert "over_ar" not in gains(RUNS[1:])[0]
    assert "12.0" in table({"runs": RUNS[2:], "gains": gains(RUNS[2:])})
    whole = table({"runs": RUNS, "gains": gains(RUNS)})
    assert "(1.20)" in whole and "1.20 (ar; rounds 1.10 to 1.50)" in whole


class Asks:
    """The part of an engine that `decode_in_turns` needs."""

    def __init__(self, eos: int | None = None) -> None:
        self.eos, self.made = eos, 0

    def request(self, prompt, params) -> Request:
        self.made += 1
        return Request(self.made, prompt, params, frozenset() if self.eos is None else frozenset({self.eos}))


def test_policies_take_turns_within_a_batch(monkeypatch) -> None:
    turns = []
    advance = decode.Batch.advance

    def watched(batch: decode.Batch, share: float = 1.0) -> None:
        advance(batch, share)
        turns.append((batch.executor, [len(r.output_ids) - 1 for r in batch.requests]))

    monkeypatch.setattr(decode.Batch, "advance", watched)
    executors = {"ar": make_executor("ar"), "full": make_executor("full", perfect=True)}
    decoded = decode_in_turns(Asks(), executors, [[0], [1]], decode.TURNS // 2)
    assert [e for e, _ in turns] == [*executors.values()] * decode.TURNS
    assert [tokens for _, tokens in turns[::2]] == [[-(-turn // 2)] * 2 for turn in range(1, decode.TURNS + 1)]
    assert turns[-1][1] == [16, 16] and decoded["ar"].metrics.emitted == decoded["full"].metrics.emitted == 32
    assert decoded["ar"].metrics.steps == 16 > decoded["full"].metrics.steps
    for executor in executors.values():
        assert executor.idle and executor.scheduler.cache.used_pages == 0


def test_answers_that_end_with_their_first_token_cannot_be_timed() -> None:
    first = decode_first_token()
    with pytest.raises(ValueError, match="ended with its first token"):
        decode_in_turns(Asks(eos=first), {"ar": make_executor("ar")}, [[0]], 4)


def decode_first_token() -> int:
    executor = make_executor("ar")
    batch = decode.Batch(Asks(), executor, [[0]], 1, 0.0)
    batch.advance()
    return batch.requests[0].output_ids[0]
