from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.oracle import exhaustive
from trtllm_forespark.wcs.policies import POLICIES, Policy, fastest_caps, make_policy
from trtllm_forespark.wcs.schedule import goodput_of
from trtllm_forespark.wcs.stages import Draft, Estimate, Outcome, Plan, Selection
from trtllm_forespark.wcs.survival import prefix_survival

from .cases import dense_table, gpu_table, random_survival

SETTINGS = {"batchwise": {"caps": {1: 7, 8: 3, 32: 0}}}
BLOCK = 7


def policy(name: str) -> Policy:
    return make_policy(name, **SETTINGS.get(name, {}))


def keys(n: int) -> list[tuple[int, int]]:
    return [(i, 0) for i in range(n)]


def estimate(survival: np.ndarray) -> Estimate:
    return Estimate(survival, np.ones(len(survival), bool))


def drafted(plan: Plan, survival: np.ndarray) -> Draft:
    """A draft as long as planned whose post-draft survival is `survival` [n, K]."""
    cu = np.concatenate([[0], np.cumsum(plan.draft_lengths)])
    mask = np.arange(survival.shape[1]) < np.asarray(plan.draft_lengths)[:, None]
    tokens = np.zeros(cu[-1], np.int32)
    return Draft(tokens, cu, tokens[:, None], np.ones((len(tokens), 1)), np.where(mask, survival, 0).astype(np.float32))


def steps(
    name: str, table: LatencyTable, survival: np.ndarray, count: int = 3, greedy: bool = False
) -> tuple[Plan, Selection]:
    """The last of some steps in which the estimates stay as they are and the post-draft survival agrees with them."""
    n = len(survival)
    controller = WcsController(policy(name), table, BLOCK)
    for _ in range(count):
        plan = controller.plan(keys(n), estimate(survival), np.full(n, BLOCK), n)
        draft = drafted(plan, survival[:, -1])
        selection = controller.select(plan, draft, n, greedy)
        assert (selection.verified_lengths <= plan.draft_lengths).all()
        accepted = np.asarray(selection.verified_lengths) * 0
        controller.observe(keys(n), draft, selection, Outcome(accepted, [[1]] * n))
    return plan, selection


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_every_policy_plans_and_selects_any_batch(name: str, n: int) -> None:
    """docs/cases.md 2: the batch drains to one request, then to none."""
    survival = random_survival(np.random.default_rng(n), n, BLOCK)
    plan, selection = steps(name, gpu_table(), survival)
    assert len(plan.draft_lengths) == len(selection.verified_lengths) == n
    assert plan.budget <= np.sum(plan.draft_lengths) <= n * BLOCK
    assert np.isfinite([plan.expected_goodput, plan.draft_seconds, plan.verify_seconds]).all()


@pytest.mark.parametrize("name", ["wcs", "wcs-single-curve", "exhaustive", "ar"])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_policies_that_read_estimates_draft_nothing_when_nothing_is_accepted(name: str, n: int) -> None:
    plan, selection = steps(name, gpu_table(), np.zeros((n, BLOCK, BLOCK), np.float32))
    assert not plan.draft_lengths.any() and not selection.verified_lengths.any()


def test_policies_without_estimates_say_what_they_do_when_nothing_is_accepted() -> None:
    """`full` always drafts; `adaptive` verifies nothing of it; `batchwise` finds cap 0 when it is calibrated."""
    nothing = np.zeros((2, BLOCK, BLOCK), np.float32)
    table = dense_table(2, BLOCK, lambda m, t: 0.1, lambda m, t: 1 + 0.1 * t)
    plan, selection = steps("full", table, nothing)
    assert plan.draft_lengths.tolist() == selection.verified_lengths.tolist() == [BLOCK, BLOCK]
    plan, selection = steps("adaptive", table, nothing)
    assert plan.draft_lengths.tolist() == [BLOCK, BLOCK] and selection.verified_lengths.tolist() == [0, 0]
    caps = fastest_caps({2: {cap: 2 / (1.2 + 0.2 * cap) for cap in range(BLOCK + 1)}})
    controller = WcsController(make_policy("batchwise", caps=caps), None, BLOCK)
    assert not controller.plan(keys(2), None, [BLOCK, BLOCK], 2).draft_lengths.any()


@pytest.mark.parametrize("name", [p for p in POLICIES if p not in ("ar", "batchwise")])
def test_everything_is_drafted_and_verified_when_all_is_accepted_and_drafts_are_free(name: str) -> None:
    everything = prefix_survival(np.ones((3, BLOCK), np.float32))
    free = dense_table(3, BLOCK, lambda m, t: 0.0, lambda m, t: 1 + 0.001 * t)
    plan, selection = steps(name, free, everything)
    assert plan.draft_lengths.tolist() == selection.verified_lengths.tolist() == [BLOCK] * 3


@pytest.mark.parametrize("name", ["adaptive", "wcs", "wcs-single-curve", "exhaustive"])
def test_a_confidence_cut_verifies_fewer_tokens(name: str) -> None:
    """docs/cases.md 32: not only fewer committed ones."""
    row = np.tile([0.9, 0.8, 0.1, 0.05, 0.02, 0.01, 0.01], (4, 1)).astype(np.float32)
    table = dense_table(4, BLOCK, lambda m, t: 0.01 if t else 0.0, lambda m, t: 1 + 0.2 * t)
    plan, selection = steps(name, table, prefix_survival(row))
    assert selection.verified_lengths.max() == 2 and plan.budget == selection.verified_lengths.sum()


@pytest.mark.parametrize("name", ["wcs", "wcs-single-curve", "exhaustive"])
def test_load_forces_no_drafting_and_it_resumes_when_the_load_falls(name: str) -> None:
    """docs/cases.md 5, at the policy: ten crowded steps with d = 0, then one request alone drafts again."""
    survival = np.repeat(prefix_survival(np.array([[0.6, 0.4, 0.2, 0.1, 0.1, 0, 0]], np.float32)), 64, axis=0)
    table = LatencyTable.from_functions(
        lambda n, t: 1 + 0.001 * n + (0.5 * (t - 48) if t > 48 else 0),
        lambda n, t: 0.05,
        requests=[1, 64],
        verify_tokens=range(1, 600),
        draft_tokens=[600],
    )
    controller = WcsController(policy(name), table, BLOCK)
    for _ in range(10):
        plan = controller.plan(keys(64), estimate(survival), np.full(64, BLOCK), 64)
        assert not plan.draft_lengths.any()
        draft = drafted(plan, survival[:, -1])
        controller.observe(keys(64), draft, controller.select(plan, draft, 64), Outcome(np.zeros(64), [[1]] * 64))
    assert controller.plan(keys(1), estimate(survival[:1]), [BLOCK], 1).draft_lengths.sum() > 0


@pytest.mark.parametrize("name", ["wcs", "wcs-single-curve", "exhaustive"])
def test_a_long_context_where_drafting_costs_more_than_it_gains(name: str) -> None:
    """docs/cases.md 34: D = 0 from the table."""
    survival = random_survival(np.random.default_rng(1), 3, BLOCK)
    plan, _ = steps(name, dense_table(3, BLOCK, lambda m, t: 30.0, lambda m, t: 1.0), survival)
    assert not plan.draft_lengths.any()


@pytest.mark.parametrize("name", POLICIES)
def test_limits_are_kept(name: str) -> None:
    """docs/cases.md 29 and 35: at the drafter's last position the limit is 0."""
    survival = prefix_survival(np.full((4, BLOCK), 0.99, np.float32))
    controller = WcsController(policy(name), gpu_table(), BLOCK)
    for limits in ([0, 0, 0, 0], [0, 1, 3, 99], [-4, 7, 7, 7]):
        plan = controller.plan(keys(4), estimate(survival), limits, 4)
        assert (plan.draft_lengths <= np.clip(limits, 0, BLOCK)).all() and (plan.draft_lengths >= 0).all()


@pytest.mark.parametrize("name", POLICIES)
def test_the_room_of_a_step_is_kept(name: str) -> None:
    """docs/cases.md 6: with prefill in the step, N + B stays within the step's tokens."""
    survival = prefix_survival(np.full((4, BLOCK), 0.99, np.float32))
    controller = WcsController(policy(name), gpu_table(), BLOCK)
    plan = controller.plan(keys(4), estimate(survival), [BLOCK] * 4, 4 + 20, max_budget=5)
    selection = controller.select(plan, drafted(plan, survival[:, -1]), 24)
    assert plan.budget <= 5 and selection.verified_lengths.sum() <= 5


def test_whole_batches_that_are_greedy_may_use_fresh_scores_and_others_may_not() -> None:
    """docs/lossless.md, rule 1: B of a sampled batch does not move with what was drawn."""
    survival = prefix_survival(np.tile([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], (3, 1)).astype(np.float32))
    table = dense_table(3, BLOCK, lambda m, t: 0.01 * t, lambda m, t: 1 + 0.05 * t)
    for name in ("adaptive", "wcs", "exhaustive", "wcs-single-curve"):
        controller = WcsController(policy(name), table, BLOCK, prior=survival[0])
        plan = controller.plan(keys(3), estimate(survival), [BLOCK] * 3, 3)
        likes, dislikes = (drafted(plan, np.full((3, BLOCK), s)) for s in (0.95, 0.01))
        sampled = [controller.select(plan, d, 3, greedy=False).verified_lengths.sum() for d in (likes, dislikes)]
        greedy = [controller.select(plan, d, 3, greedy=True).verified_lengths.sum() for d in (likes, dislikes)]
        assert sampled[0] == sampled[1] > 0
        assert greedy[1] < greedy[0]
    planned = WcsController(make_policy("wcs", greedy_budget="planned"), table, BLOCK)
    plan = planned.plan(keys(3), estimate(survival), [BLOCK] * 3, 3)
    assert planned.select(plan, drafted(plan, np.full((3, BLOCK), 0.01)), 3, greedy=True).verified_lengths.sum() > 0


def test_batchwise_takes_the_cap_of_the_nearest_measured_load() -> None:
    caps = make_policy("batchwise", caps={"1": 7, "4": 5, "16": 2})
    assert [caps.cap(n) for n in (0, 1, 2, 3, 4, 7, 8, 9, 100)] == [7, 7, 5, 5, 5, 5, 2, 2, 2]  # type: ignore[attr-defined]
    assert fastest_caps({8: {0: 5.0, 1: 7.0, 2: 7.0}, 1: {0: 1.0, 7: 2.0}}) == {1: 7, 8: 1}


def test_the_exhaustive_policy_is_the_oracle_and_wcs_is_near_it() -> None:
    rng, table = np.random.default_rng(4), gpu_table()
    survival = random_survival(rng, 3, BLOCK)
    best = exhaustive(survival, 3, table)
    plan, selection = steps("exhaustive", table, survival)
    np.testing.assert_array_equal(plan.draft_lengths, best.lengths)
    assert selection.verified_lengths.sum() == best.budget
    plan, selection = steps("wcs", table, survival)
    budget = int(selection.verified_lengths.sum())
    assert goodput_of(survival, plan.draft_lengths, budget, 3, table) > 0.98 * best.goodput


@pytest.mark.parametrize("floor", [1, 3])
def test_a_floor_drafts_for_every_request(floor: int) -> None:
    survival = random_survival(np.random.default_rng(2), 40, BLOCK, mean=-2.0)
    controller = WcsController(make_policy("wcs", floor=floor), gpu_table(), BLOCK)
    plan = controller.plan(keys(40), estimate(survival), np.arange(40) % (BLOCK + 1), 40)
    assert (plan.draft_lengths >= np.minimum(np.arange(40) % (BLOCK + 1), floor)).all()


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("dspark", {}, "choose one of ar, full, batchwise, adaptive, wcs, wcs-single-curve, exhaustive"),
        ("wcs", {"pieces": "half"}, "'whole' or 'paper'"),
        ("wcs", {"floor": -1}, "0 or more"),
        ("wcs", {"greedy_budget": "x"}, "'planned' or 'fresh'"),
        ("wcs", {"pices": "whole"}, "policy 'wcs': .*pices"),
        ("batchwise", {}, "caps"),
        ("batchwise", {"caps": {}}, "at least one"),
        ("batchwise", {"caps": {"a": 1}}, "must map loads to lengths"),
    ],
)
def test_bad_settings_are_one_clear_error(name: str, settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy(name, **settings)
