from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.ops import NumpyOps
from trtllm_forespark.wcs.policies import make_policy
from trtllm_forespark.wcs.stages import Draft, Estimate, Outcome, Selection
from trtllm_forespark.wcs.survival import prefix_survival

from .cases import dense_table, gpu_table, random_survival

K = 4
TABLE = dense_table(4, K, lambda m, t: 0.01 * t, lambda m, t: 1 + 0.05 * t, prefill=40)


def block_draft(survival: np.ndarray, lengths: list[int]) -> Draft:
    cu = np.concatenate([[0], np.cumsum(lengths)])
    return Draft(np.zeros(cu[-1]), cu, np.zeros((cu[-1], 1)), np.ones((cu[-1], 1)), np.asarray(survival, np.float32))


def observe(controller: WcsController, keys: list, survival: list, lengths: list[int]) -> None:
    n = len(keys)
    draft = block_draft(np.array(survival), lengths)
    controller.observe(keys, draft, Selection(np.zeros(n, int)), Outcome(np.zeros(n, int), [[1]] * n))


def test_a_request_without_an_estimate_takes_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(0)
    survival = random_survival(rng, 3, K)
    controller = WcsController(make_policy("wcs"), TABLE, K)
    keys = [(i, 0) for i in range(3)]
    mixed = survival.copy()
    mixed[1] = 123.0  # whatever stands there is not read
    step = controller.before_draft(keys, Estimate(mixed, np.array([True, False, True])), [K] * 3, 3)
    np.testing.assert_allclose(step.survival[1], (survival[0] + survival[2]) / 2, rtol=1e-6)
    np.testing.assert_array_equal(step.survival[[0, 2]], survival[[0, 2]])


def test_a_broken_estimate_is_no_part_of_the_mean() -> None:
    survival = random_survival(np.random.default_rng(0), 3, K)
    survival[0] = np.nan
    controller = WcsController(make_policy("wcs"), TABLE, K)
    plan = controller.plan([(i, 0) for i in range(3)], Estimate(survival, np.array([True, False, True])), [K] * 3, 3)
    assert plan.draft_lengths[0] == 0 and plan.draft_lengths[1] > 0


def test_where_nothing_is_known_the_prior_is_used_and_without_one_nothing_is_drafted() -> None:
    prior = prefix_survival(np.array([[0.9, 0.8, 0.7, 0.6]]))[0]
    nothing = Estimate(np.zeros((2, K, K)), np.zeros(2, bool))
    keys = [("a", 0), ("b", 0)]
    for estimate in (nothing, None):
        assert WcsController(make_policy("wcs"), TABLE, K, prior=prior).plan(
            keys, estimate, [K, K], 2
        ).draft_lengths.tolist() == [K, K]
        assert not WcsController(make_policy("wcs"), TABLE, K).plan(keys, estimate, [K, K], 2).draft_lengths.any()


def test_plan_is_totals_then_split() -> None:
    """The same lengths; of many requests the plan prices B by the rows chosen, the totals alone by the scores."""
    for table, n in ((TABLE, 3), (gpu_table(), 90)):
        survival = random_survival(np.random.default_rng(n), n, K)
        controller = WcsController(make_policy("wcs"), table, K)
        arguments = [(i, 0) for i in range(n)], Estimate(survival, np.ones(n, bool)), np.full(n, K), n
        plan = controller.plan(*arguments)
        totals = controller.totals(*arguments)
        np.testing.assert_array_equal(controller.split(totals, *arguments), plan.draft_lengths)
        assert plan.draft_lengths.sum() <= totals.total
        assert plan.expected_goodput == pytest.approx(totals.goodput, rel=0 if n == 3 else 0.03)


def test_the_budget_is_priced_anew_with_the_actual_number_of_tokens() -> None:
    """Section 5: prefill that joined the step after planning makes it longer, so more drafts are worth their place."""
    survival = prefix_survival(np.array([[0.9, 0.5, 0.3, 0.2]] * 2, np.float32))
    controller = WcsController(make_policy("wcs"), TABLE, K)
    plan = controller.plan([(0, 0), (1, 0)], Estimate(survival, np.ones(2, bool)), [K, K], 2)
    draft = block_draft(survival[:, -1] * (np.arange(K) < plan.draft_lengths[:, None]), plan.draft_lengths.tolist())
    few = controller.select(plan, draft, 2).verified_lengths.sum()
    many = controller.select(plan, draft, 42).verified_lengths.sum()
    assert few == plan.budget <= many <= plan.draft_lengths.sum()


def test_the_budget_is_capped_by_what_was_drafted() -> None:
    survival = prefix_survival(np.full((2, K), 0.99, np.float32))
    controller = WcsController(make_policy("wcs"), TABLE, K)
    plan = controller.plan([(0, 0), (1, 0)], Estimate(survival, np.ones(2, bool)), [K, K], 2)
    selection = controller.select(plan, block_draft([[0.9, 0, 0, 0], [0, 0, 0, 0]], [1, 0]), 2)
    assert plan.budget == 2 * K and selection.verified_lengths.tolist() == [1, 0]


def test_adaptive_goes_by_each_requests_previous_step_and_by_the_mean_for_a_new_one() -> None:
    controller = WcsController(make_policy("adaptive"), TABLE, K)
    keys = [("a", 0), ("b", 0)]
    controller.plan(keys, None, [K, K], 2)
    observe(controller, keys, [[0.9, 0.9, 0.9, 0.9], [0.1, 0.0, 0.0, 0.0]], [K, K])
    confidence = controller.before_draft([*keys, ("new", 0)], None, [K] * 3, 3).confidence
    np.testing.assert_allclose(confidence[0], [0.9] * K)
    np.testing.assert_allclose(confidence[2], [0.5, 0.45, 0.45, 0.45])
    observe(controller, keys, [[0.4, 0.2, 0.0, 0.0], [0.1, 0.0, 0.0, 0.0]], [2, 0])
    confidence = controller.before_draft([*keys, ("new", 0)], None, [K] * 3, 3).confidence
    np.testing.assert_allclose(confidence[0, :2], [0.4, 0.2])
    assert (np.diff(confidence, axis=1) <= 1e-6).all()
    assert confidence[2, 0] == pytest.approx(0.5 + 0.1 * (0.4 - 0.5)), "the mean follows slowly"


def test_late_results_of_an_old_generation_are_discarded() -> None:
    """docs/cases.md 19: preempted, resumed with a new generation; then the old step's result arrives."""
    controller = WcsController(make_policy("adaptive"), TABLE, K)
    controller.plan([("a", 0)], None, [K], 1)
    observe(controller, [("a", 0)], [[0.5] * K], [K])
    controller.plan([("a", 1)], None, [K], 1)
    mean = controller.before_draft([("a", 1)], None, [K], 1).confidence.copy()
    observe(controller, [("a", 0)], [[1.0] * K], [K])
    np.testing.assert_array_equal(controller.before_draft([("a", 1)], None, [K], 1).confidence, mean)
    controller.forget(("a", 0))
    observe(controller, [("a", 1)], [[0.25] * K], [K])
    np.testing.assert_allclose(controller.before_draft([("a", 1)], None, [K], 1).confidence, [[0.25] * K])
    controller.forget(("a", 1))
    observe(controller, [("a", 1)], [[0.9] * K], [K])
    assert controller._generation == {} and controller._confidence == {}, "a request that ended leaves nothing"


def test_drafts_without_post_draft_survival_can_only_be_verified_whole() -> None:
    draft = Draft(np.zeros(5), np.array([0, 3, 5]), None, None, None)
    full = WcsController(make_policy("full"), None, K)
    plan = full.plan([(0, 0), (1, 0)], None, [3, 2], 2, max_budget=4)
    assert full.select(plan, draft, 2).verified_lengths.tolist() == [3, 1]
    wcs = WcsController(make_policy("wcs"), TABLE, K)
    plan = wcs.plan([(0, 0), (1, 0)], Estimate(np.full((2, K, K), 0.5), np.ones(2, bool)), [3, 2], 2)
    with pytest.raises(ValueError, match="post-draft survival"):
        wcs.select(plan, draft, 2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: WcsController(make_policy("wcs"), TABLE, 0), "block must be 1 or more"),
        (lambda: WcsController(make_policy("wcs"), None, K), "needs a latency table"),
        (lambda: WcsController(make_policy("wcs"), TABLE, K, prior=np.zeros((3, 3))), r"needs \(4, 4\)"),
        (lambda: WcsController(make_policy("full"), None, K).plan([("a", 0)], None, [1, 2], 1), "limits have shape"),
        (
            lambda: WcsController(make_policy("wcs"), TABLE, K).plan(
                [("a", 0)], Estimate(np.zeros((1, 3, 3)), np.ones(1, bool)), [1], 1
            ),
            "estimate has shape",
        ),
    ],
)
def test_what_does_not_fit_is_one_clear_error(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        make()


def test_autoregressive_needs_neither_table_nor_block() -> None:
    controller = WcsController(make_policy("ar"), None, 0)
    plan = controller.plan([("a", 0)], None, [5], 1)
    assert plan.draft_lengths.tolist() == [0] and plan.budget == 0


@pytest.mark.parametrize("proposal", [[0.5, 0.3, 0.2], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
def test_reference_verification_is_lossless(proposal: list[float]) -> None:
    """The first emitted token has the target's distribution, whatever was proposed (Leviathan et al., 2023)."""
    random, ops = np.random.default_rng(0), NumpyOps()
    q, p = np.array([proposal]), np.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])
    counts = np.zeros(3)
    for _ in range(1500):
        accepted, emitted = ops.verify(random.choice(3, 1, p=q[0]), q, p, random)
        assert len(emitted) == accepted + 1
        counts[emitted[0]] += 1
    np.testing.assert_allclose(counts / counts.sum(), p[0], atol=0.05)


def test_a_rejection_without_residual_mass_samples_the_target() -> None:
    p = np.array([[0.0, 1.0], [0.5, 0.5]])
    accepted, emitted = NumpyOps().verify(np.array([0]), np.array([[0.0, 1.0]]), p, np.random.default_rng(0))
    assert (accepted, emitted) == (0, [1])


def steps(controller: WcsController, survival: np.ndarray, count: int, overhead: float = 0.05) -> str:
    """What each of `count` steps did, every estimate coming true: r rested, - looked and drafted nothing, d drafted."""
    n, seen = len(survival), ""
    keys = [(i, 0) for i in range(n)]
    for _ in range(count):
        if controller.rests(n):
            plan = controller.nothing(n)
            seen += "r"
        else:
            plan = controller.plan(keys, Estimate(survival, np.ones(n, bool)), [K] * n, n)
            seen += "d" if plan.draft_lengths.any() else "-"
        lengths = np.asarray(plan.draft_lengths)
        draft = float(TABLE.draft_seconds((lengths > 0).sum(), lengths.sum() + (lengths > 0).sum()))
        verify = float(TABLE.verify_seconds(n, n + lengths.sum()))
        accepted = survival[np.arange(n), np.maximum(lengths, 1) - 1].sum() if lengths.any() else 0.0
        look = overhead if plan.looked else 0.0
        took = {"draft": draft, "verify": verify, "whole": draft + verify + look, "look": look}
        controller.timed(plan, Selection(lengths), n, tokens=n + accepted, **took)
    return seen


def test_where_no_draft_pays_most_steps_are_passed_over_and_drafting_comes_back() -> None:
    hopeless, good = np.zeros((3, K, K)), prefix_survival(np.full((3, K), [0.95, 0.9, 0.85, 0.8]))
    controller = WcsController(make_policy("wcs"), TABLE, K)
    seen = steps(controller, hopeless, 900)
    assert seen[:4] == "----" and seen.count("-") < 60 and "r" * 256 in seen and "r" * 257 not in seen
    steps(controller, hopeless, 20)
    assert steps(controller, hopeless[:1], 3) == "---", "a smaller load is looked at as if it were new"
    assert steps(controller, hopeless, 64).count("r") >= 55, "what the larger load told is not forgotten"
    seen = steps(controller, good, 500)
    assert seen.index("d") <= 256 and seen.endswith("d" * 20)
    assert steps(WcsController(make_policy("wcs"), TABLE, K, adapt=False), hopeless, 99) == "-" * 99
    assert steps(WcsController(make_policy("wcs", floor=1), TABLE, K), good * 0.01, 99) == "d" * 99
    assert "r" not in steps(WcsController(make_policy("ar"), None, 0), np.zeros((2, 0, 0)), 9)


def test_where_drafts_pay_less_than_looking_for_them_costs_steps_are_passed_over() -> None:
    little = prefix_survival(np.full((3, K), [0.12, 0.0, 0.0, 0.0]))
    assert "rr" not in steps(WcsController(make_policy("wcs"), TABLE, K), little, 300, overhead=0.0)
    assert steps(WcsController(make_policy("wcs"), TABLE, K), little, 300, overhead=0.2).count("r") > 240


def test_steps_are_passed_over_now_and_then_until_it_is_known_what_that_gives() -> None:
    good, fair = (prefix_survival(np.full((3, K), row)) for row in ([0.95, 0.9, 0.85, 0.8], [0.3, 0.2, 0.1, 0.0]))
    assert steps(WcsController(make_policy("wcs"), TABLE, K), good, 400) == "d" * 400
    seen = steps(WcsController(make_policy("wcs"), TABLE, K), fair, 400)
    assert "rr" not in seen and seen[:100].count("r") > 4 and seen[100:].count("r") < 10


@pytest.mark.parametrize(("token_cost", "adapt"), [(0.001, True), (0.001, False), (0.1, True), (0.1, False)])
def test_estimates_are_corrected_by_what_is_accepted(token_cost: float, adapt: bool) -> None:
    """Told 0.8 a token where 0.5 is the truth: the forecast comes near it, and drafting that does not pay ends."""
    random, n = np.random.default_rng(0), 8
    table = dense_table(n, K, lambda m, t: token_cost * t, lambda m, t: 2 + token_cost * t, prefill=0)
    claimed = prefix_survival(np.cumprod(np.full((n, K), 0.8, np.float32), axis=1))
    keys = [(i, 0) for i in range(n)]
    controller = WcsController(make_policy("wcs"), table, K, adapt=adapt)
    for _ in range(120):
        plan = controller.plan(keys, Estimate(claimed, np.ones(n, bool)), [K] * n, n)
        lengths = plan.draft_lengths
        draft = block_draft(claimed[:, -1] * (np.arange(K) < lengths[:, None]), lengths.tolist())
        selection = controller.select(plan, draft, n, greedy=True)
        true = np.minimum((random.random((n, K)) < 0.5).cumprod(axis=1).sum(axis=1), selection.verified_lengths)
        controller.observe(keys, draft, selection, Outcome(true, [[1]] * n), plan)
    if not adapt:
        assert controller.before.factor == 1.0 and lengths.any()
    elif token_cost < 0.01:
        assert controller.before.factor == pytest.approx(0.5 / 0.8, abs=0.08)
        assert controller.after.factor == pytest.approx(0.5 / 0.8, abs=0.08)
    else:
        assert lengths.sum() <= n, "0.5 a token pays for one at most"


def test_a_step_without_room_for_drafts_is_no_reason_to_rest() -> None:
    controller = WcsController(make_policy("wcs"), TABLE, K)
    estimate = Estimate(prefix_survival(np.full((2, K), [0.9, 0.8, 0.7, 0.6])), np.ones(2, bool))
    for _ in range(9):
        assert not controller.rests(2)
        controller.plan([(0, 0), (1, 0)], estimate, [0, 0], 40)
    assert controller.plan([(0, 0), (1, 0)], estimate, [K, K], 2).draft_lengths.any()
