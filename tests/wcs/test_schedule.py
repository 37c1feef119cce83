from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_forespark.wcs.envelope import scores, vertices
from trtllm_forespark.wcs.oracle import exhaustive
from trtllm_forespark.wcs.schedule import adaptive_budget, decide, goodput_of, joint_schedule, split
from trtllm_forespark.wcs.survival import prefix_survival, rewards

from .cases import curves, dense_table, gpu_table, random_survival, stairs


def brute_force(survival: np.ndarray, num_tokens: int, table) -> float:  # type: ignore[no-untyped-def]
    """The best value over all lengths and budgets, in the plainest way."""
    n, block, _ = survival.shape
    return max(
        goodput_of(survival, np.array(lengths), budget, num_tokens, table)
        for lengths in itertools.product(range(block + 1), repeat=n)
        for budget in range(sum(lengths) + 1)
    )


# split ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(curves(), st.integers(-1, 90), st.sampled_from(["whole", "paper"]))
def test_split_takes_the_top_scores_as_prefixes(reward: np.ndarray, total: int, pieces: str) -> None:
    score = scores(reward)
    lengths = split(score, total, pieces)  # type: ignore[arg-type]
    positive = (score > 0).sum(axis=1)
    assert (lengths >= 0).all() and (lengths <= positive).all(), "zero-score slots are never drafted"
    assert lengths.sum() <= max(total, 0)
    taken = [score[i, d] for i, length in enumerate(lengths) for d in range(length)]
    left = [score[i, d] for i, length in enumerate(lengths) for d in range(length, positive[i])]
    assert not taken or not left or min(taken) >= max(left)
    if pieces == "paper":
        assert lengths.sum() == min(max(total, 0), positive.sum())
    else:
        assert vertices(score)[np.arange(len(lengths)), lengths].all(), "no stop inside a piece"


def test_ties_go_by_request_order() -> None:
    score = np.array([[0.5, 0.5], [0.5, 0.25], [0.5, 0.5]], np.float32)
    assert split(score, 3, "paper").tolist() == [2, 1, 0]
    assert split(score, 4, "whole").tolist() == [2, 1, 0]
    assert split(score, 5, "whole").tolist() == [2, 1, 2]


# joint schedule ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_schedule_is_optimal_when_rows_are_prefixes_and_drafts_cost_by_their_total(data: st.DataObject) -> None:
    n, block = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    value = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])
    acceptance = data.draw(st.lists(st.lists(value, min_size=block, max_size=block), min_size=n, max_size=n))
    survival = prefix_survival(np.cumprod(np.array(acceptance, np.float32), axis=1))
    width, step = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0.0, 0.05, 0.3, 2.0]))
    by_total = stairs(width, 0.2, step)
    table = dense_table(
        n, block, lambda m, t: by_total(0, max(t - m, 0)), stairs(data.draw(st.integers(1, 4)), 1.0, 0.2)
    )
    found = joint_schedule(rewards(survival), survival, n, table)
    assert found.goodput == pytest.approx(goodput_of(survival, found.lengths, found.budget, n, table), rel=1e-4)
    assert found.goodput == pytest.approx(exhaustive(survival, n, table).goodput, rel=1e-4)


@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_random_triangles_lose_less_than_a_thousandth(interpolation: str) -> None:
    rng = np.random.default_rng(7)
    losses: dict[str, list[float]] = {"whole": [], "paper": []}
    for _ in range(200):
        n, block = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        survival = random_survival(rng, n, block, float(rng.normal(0.5, 1)))
        a, b = rng.uniform(0.02, 0.4, 2)
        wide = int(rng.integers(1, 5)) if interpolation == "staircase" else 1
        table = dense_table(n, block, stairs(wide, 0.3, a), stairs(wide, 1.0, b), interpolation=interpolation)
        best = exhaustive(survival, n, table).goodput
        for pieces, lost in losses.items():
            found = joint_schedule(rewards(survival), survival, n, table, pieces=pieces)  # type: ignore[arg-type]
            lost.append(1 - goodput_of(survival, found.lengths, found.budget, n, table) / best)
    assert min(losses["whole"]) > -1e-5, "the oracle must not be beaten"
    assert np.mean(losses["whole"]) < 1e-3
    assert np.mean(losses["whole"]) < np.mean(losses["paper"])


@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_a_batch_of_one_is_planned_exactly(interpolation: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        block = int(rng.integers(1, 8))
        survival = random_survival(rng, 1, block, float(rng.normal(0.5, 1)))
        limits = np.array([rng.integers(0, block + 1)])
        wide = int(rng.integers(1, 5)) if interpolation == "staircase" else 1
        a, b = rng.uniform(0.02, 0.4, 2)
        table = dense_table(1, block, stairs(wide, 0.3, a), stairs(wide, 1.0, b), interpolation=interpolation)
        found = joint_schedule(rewards(survival), survival, 1, table, limits=limits)
        assert found.lengths[0] <= limits[0]
        value = goodput_of(survival, found.lengths, found.budget, 1, table)
        assert found.goodput == pytest.approx(value, rel=1e-4)
        assert value == pytest.approx(exhaustive(survival, 1, table, limits=limits).goodput, rel=1e-4)
    free = dense_table(1, 4, lambda m, t: 0.0, lambda m, t: 1.0)
    assert joint_schedule(rewards(survival * 0), survival * 0, 1, table).lengths.tolist() == [0], "nothing to gain"
    flat = prefix_survival(np.array([[0.5, 0.5, 0.0, 0.0]], np.float32))
    assert joint_schedule(rewards(flat), flat, 1, free).lengths.tolist() == [2], "free, and of use up to the second"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.sampled_from([1, 4, 7, 15]),
    st.sampled_from(["staircase", "linear"]),
    st.sampled_from(["whole", "paper"]),
    st.integers(0, 2**16),
)
def test_what_always_holds(n: int, block: int, interpolation: str, pieces: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, n, block)
    limits, num_tokens = rng.integers(0, block + 3, n), n + int(rng.integers(0, 50))
    table = gpu_table(interpolation)
    found = joint_schedule(rewards(survival), survival, num_tokens, table, limits=limits, pieces=pieces)  # type: ignore[arg-type]
    assert 0 <= found.budget <= found.total == found.lengths.sum()
    assert (found.lengths >= 0).all() and (found.lengths <= np.minimum(limits, block)).all()
    if n == 0:
        return
    if pieces == "whole":
        assert found.goodput == pytest.approx(
            goodput_of(survival, found.lengths, found.budget, num_tokens, table), rel=1e-3
        )
        assert found.goodput >= goodput_of(survival, np.zeros(n, int), 0, num_tokens, table) * (1 - 5e-3)
    score = scores(rewards(survival), limits)
    np.testing.assert_array_equal(found.lengths, split(score, found.total, pieces))  # type: ignore[arg-type]
    totals = decide(rewards(survival), survival, num_tokens, table, limits=limits, pieces=pieces)  # type: ignore[arg-type]
    assert 0 <= totals.budget <= totals.total
    assert abs(totals.total - found.total) <= block, "one decision, read two ways"


@pytest.mark.parametrize("n", [1, 3, 30])
@pytest.mark.parametrize("pieces", ["whole", "paper"])
@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_nothing_accepted_drafts_nothing_and_all_accepted_for_free_drafts_all(
    n: int, pieces: str, interpolation: str
) -> None:
    block = 15
    nothing = np.zeros((n, block, block), np.float32)
    found = joint_schedule(rewards(nothing), nothing, n, gpu_table(interpolation), pieces=pieces)  # type: ignore[arg-type]
    assert (found.total, found.budget) == (0, 0)
    everything = prefix_survival(np.ones((n, block), np.float32))
    free = dense_table(n, block, lambda m, t: 0.0, lambda m, t: 1 + 0.001 * t, interpolation=interpolation)
    found = joint_schedule(rewards(everything), everything, n, free, pieces=pieces)  # type: ignore[arg-type]
    assert found.total == found.budget == n * block


def test_free_slots_of_a_bucket_are_drafted_but_not_those_of_no_use() -> None:
    """Over-drafting (section 4.3): what a bucket has left is filled, unless nothing can be gained there."""
    survival = prefix_survival(np.array([[0.9, 0.5, 0.2, 0.1], [0.8, 0.0, 0.0, 0.0]], np.float32))
    table = dense_table(2, 4, stairs(16, 0.1, 0.1), lambda m, t: 1 + t)
    found = joint_schedule(rewards(survival), survival, 2, table)
    assert found.lengths.tolist() == [4, 1] and found.budget < 5


def test_a_piece_that_pays_only_as_a_whole_is_taken_whole() -> None:
    survival = np.zeros((1, 3, 3), np.float32)
    survival[0, 0, 0], survival[0, 1, :2], survival[0, 2] = 0.1, [0.2, 0.1], [0.9, 0.9, 0.8]
    table = dense_table(1, 3, lambda m, t: 0.1 * t, lambda m, t: 1 + 0.1 * t)
    assert joint_schedule(rewards(survival), survival, 1, table).lengths.tolist() == [3]


def test_a_long_context_where_drafting_costs_more_than_it_gains() -> None:
    """docs/cases.md 34: the table says so, and the schedule drafts nothing."""
    survival = random_survival(np.random.default_rng(0), 8, 7)
    dear = dense_table(8, 7, lambda m, t: 10.0, lambda m, t: 1 + 0.001 * t)
    assert joint_schedule(rewards(survival), survival, 8, dear).total == 0


@pytest.mark.parametrize("n", [3, 40])
def test_a_floor_gives_every_request_its_tokens_where_its_limit_allows(n: int) -> None:
    rng = np.random.default_rng(n)
    survival = random_survival(rng, n, 7)
    survival[0], survival[1] = 0, np.nan
    limits = rng.integers(0, 8, n)
    table = gpu_table()
    found = joint_schedule(rewards(survival), survival, n, table, limits=limits, floor=2)
    expected = np.minimum(limits, 2)
    expected[:2] = 0
    assert (found.lengths >= expected).all() and (found.lengths <= limits).all() and found.lengths[:2].sum() == 0
    assert found.goodput == pytest.approx(goodput_of(survival, found.lengths, found.budget, n, table), rel=1e-4)


@pytest.mark.parametrize("n", [2, 60])
def test_nan_estimates_draft_nothing_and_leave_the_others(n: int) -> None:
    survival = random_survival(np.random.default_rng(3), n, 7)
    survival[1] = np.nan
    table = gpu_table()
    found = joint_schedule(rewards(survival), survival, n, table)
    survival[1] = 0
    expected = joint_schedule(rewards(survival), survival, n, table)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    assert found.lengths[1] == 0 and found.budget == expected.budget


def test_limits_of_zero_draft_nothing() -> None:
    survival = random_survival(np.random.default_rng(3), 20, 15)
    found = joint_schedule(rewards(survival), survival, 20, gpu_table(), limits=np.zeros(20, int))
    assert found.total == found.budget == 0 and found.goodput > 0


@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_large_batches_find_nearly_the_best_pair_of_totals(interpolation: str) -> None:
    """The hot path against every rank of its own scores, on prefix rows (where scores are exact)."""
    rng = np.random.default_rng(5)
    for n in (40, 120):
        row = np.cumprod(rng.uniform(0.3, 1.0, (n, 7)), axis=1).astype(np.float32)
        survival, table = prefix_survival(row), gpu_table(interpolation)
        found = joint_schedule(rewards(survival), survival, n, table)
        score = scores(rewards(survival))
        best = 0.0
        for total in range(0, n * 7 + 1, 3):
            lengths = split(score, total)
            budget = adaptive_budget(row, lengths, n, table)[0]
            best = max(best, goodput_of(survival, lengths, budget, n, table))
        assert found.goodput > best * (1 - 2e-3)


def test_tables_that_are_too_small_warn_once_and_only_when_used() -> None:
    survival = random_survival(np.random.default_rng(3), 40, 15, mean=2.0)
    table = gpu_table(most=8)
    with pytest.warns(UserWarning, match="ends at 8 requests"):
        joint_schedule(rewards(survival), survival, 40, table)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joint_schedule(rewards(survival), survival, 40, table)
        few = random_survival(np.random.default_rng(3), 4, 15)
        joint_schedule(rewards(few), few, 4, gpu_table(most=8))


# adaptive verification -----------------------------------------------------------------------------------------------


def test_adaptive_verification_of_figure_2() -> None:
    """Survival 0.9, 0.72, 0.14, 0.10: at 0.2 a token on a pass of 1, (1 + 1.62) / 1.6 beats its neighbours."""
    survival = np.array([[0.9, 0.72, 0.14, 0.10]], np.float32)
    table = dense_table(1, 4, lambda m, t: 0.0, lambda m, t: 1 + 0.2 * t)
    budget, goodput, draft, verify = adaptive_budget(survival, np.array([4]), 1, table)
    assert (
        budget == 2 and goodput == pytest.approx(2.62 / 1.6, rel=1e-5) and (draft, verify) == (0.0, pytest.approx(1.6))
    )


@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_adaptive_verification_is_the_best_budget(interpolation: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        row = np.cumprod(rng.uniform(0.2, 1, (5, 7)), axis=1).astype(np.float32)
        lengths = rng.integers(0, 8, 5)
        table = dense_table(5, 7, stairs(3, 0.1, 0.1), stairs(int(rng.integers(1, 9)), 1, 0.2), 9, interpolation)
        budget, goodput, _, _ = adaptive_budget(row, lengths, 9, table)
        values = [goodput_of(prefix_survival(row), lengths, b, 9, table) for b in range(lengths.sum() + 1)]
        assert goodput == pytest.approx(max(values), rel=1e-4) and values[budget] == pytest.approx(
            max(values), rel=1e-4
        )


# the oracle ----------------------------------------------------------------------------------------------------------


def test_the_oracle_is_brute_force_for_small_batches() -> None:
    rng = np.random.default_rng(11)
    for n, block in ((1, 4), (2, 3), (3, 2)):
        survival = random_survival(rng, n, block)
        table = dense_table(n, block, stairs(2, 0.2, 0.2), stairs(3, 1.0, 0.3))
        found = exhaustive(survival, n, table)
        assert found.goodput == pytest.approx(brute_force(survival, n, table), rel=1e-5)


def test_the_dynamic_program_is_exact_where_it_says_so() -> None:
    """Draft costs by tokens alone, and verification so cheap that all is verified: against brute force at n = 4."""
    rng = np.random.default_rng(12)
    for _ in range(5):
        survival = random_survival(rng, 4, 2)
        table = dense_table(4, 2, lambda m, t: 0.05 * t, lambda m, t: 1.0)
        found = exhaustive(survival, 4, table, limits=np.array([2, 2, 1, 2]))
        values = [
            goodput_of(survival, np.array(lengths), sum(lengths), 4, table)
            for lengths in itertools.product(range(3), range(3), range(2), range(3))
        ]
        assert found.goodput == pytest.approx(max(values), rel=1e-5)


def test_the_oracle_on_empty_and_broken_batches() -> None:
    table = gpu_table()
    assert exhaustive(np.zeros((0, 3, 3), np.float32), 0, table).total == 0
    survival = random_survival(np.random.default_rng(0), 5, 3)
    survival[2] = np.nan
    assert exhaustive(survival, 5, table).lengths[2] == 0


# the benchmark -------------------------------------------------------------------------------------------------------


def test_the_scheduler_benchmark_reports_what_it_promises(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from trtllm_forespark.runtime.bench import scheduler

    report = scheduler.run(requests=20, block=15, rounds=2)
    names = "requests block decide_us_median np_sort_us_median oracle_us_median goodput_loss_mean goodput_loss_max"
    assert {*names.split(), "triangles", "random"} <= report.keys()
    assert report["random"]["small_batches"]["whole"]["goodput_loss_mean"] < 1e-3
    assert report["random"]["batches_that_draft"] > 0, "a loss over batches that draft nothing means nothing"
    logits = np.random.default_rng(0).normal(size=(5, 28))
    scheduler.record(tmp_path / "t.npz", logits)
    again, block = scheduler.load_recorded(tmp_path / "t.npz") or (None, 0)
    assert block == 7 and np.allclose(again, logits, atol=1e-2)
    survival = random_survival(np.random.default_rng(0), 3, 7)
    assert (scheduler.fit_block(survival, 5)[0] == survival[:, :5, :5]).all()
    longer, how = scheduler.fit_block(survival, 15)
    assert longer.shape == (3, 15, 15) and "recorded at K = 7" in how
    assert (longer[:, :7, :7] == survival).all() and (np.diff(longer[:, -1], axis=1) <= 0).all()
