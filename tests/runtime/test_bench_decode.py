"""What `bench decode` reports, from figures done by hand."""

from __future__ import annotations

from trtllm_forespark.runtime.bench.decode import Decoded, Point, gains, table
from trtllm_forespark.runtime.metrics import Metrics


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
