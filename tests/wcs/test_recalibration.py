"""Online recalibration in a world whose acceptances are known, most of its drafts unverified."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.policies import make_policy
from trtllm_forespark.wcs.recalibration import Recalibration
from trtllm_forespark.wcs.stages import Draft, Estimate, Outcome, Selection
from trtllm_forespark.wcs.survival import triangle_size, triangle_to_survival

from .cases import dense_table

K = 4
BATCH = 256


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class World:
    """Drafts of random lengths. Both logits say something of their own; slope, shift: the domain's."""

    def __init__(self, seed: int, directional: bool = False, slope: float = 0.8, shift: float = -0.8) -> None:
        self.random, self.directional, self.slope, self.shift = np.random.default_rng(seed), directional, slope, shift
        self.outputs = K if directional else triangle_size(K)

    def offline(self) -> Recalibration:
        return Recalibration(K, np.full(self.outputs, 0.9), np.full(self.outputs, 0.1), np.ones(K), "one")

    def drafts(self, n: int) -> tuple[np.ndarray, ...]:
        """pre [n, outputs], post [n, K], lengths [n], true acceptance of every position [n, K], verdicts [n, K]."""
        draw = self.random.normal
        pre = 0.7 + draw(size=(n, 1)) + 0.6 * draw(size=(n, self.outputs))
        lengths = self.random.integers(1, K + 1, n)
        z = np.take_along_axis(pre, entries(lengths, self.directional), axis=1)
        post = 0.7 * z + 1.2 * draw(size=(n, K))
        chance = logistic(self.slope * post + 0.4 * z + self.shift)
        return pre.astype(np.float32), post.astype(np.float32), lengths, chance, self.random.random((n, K)) < chance


def entries(lengths: np.ndarray, directional: bool) -> np.ndarray:
    j, d = np.arange(K), lengths[:, None]
    return np.broadcast_to(j, (len(lengths), K)) if directional else d * (d - 1) // 2 + np.minimum(j, d - 1)


def top(survival: np.ndarray, share: float, lengths: np.ndarray) -> np.ndarray:
    """Verified lengths: the share of all positions that survives best."""
    if share == 1:
        return lengths
    limit = np.quantile(survival[survival > 0], 1 - share)
    return (survival > limit).sum(axis=1)


def run(world: World, share: float, naive: bool = False, batches: int = 120) -> Recalibration:
    made = world.offline()
    for _ in range(batches):
        pre, post, lengths, _, right = world.drafts(BATCH)
        verified = top(made.after(post, lengths, lengths, pre), share, lengths)
        accepted = np.minimum((right * (np.arange(K) < lengths[:, None])).cumprod(axis=1).sum(axis=1), verified)
        # Naive: what was not verified might as well not have been drafted.
        made.learn(pre, post, lengths, verified if naive else lengths, verified, accepted)
    return made


def rates(made: Recalibration, world: World) -> tuple[np.ndarray, np.ndarray]:
    """Mean predicted and true conditional acceptance of every entry over the drafts that reach it."""
    pre, _, lengths, chance, right = world.drafts(60_000)
    at = entries(lengths, world.directional)
    a, b = made.pre.weight[made._flat].T
    predicted = logistic(np.take_along_axis(pre, at, axis=1) * a[at] + b[at])
    before = np.concatenate([np.ones((len(right), 1), bool), right[:, :-1].cumprod(axis=1).astype(bool)], axis=1)
    reached = before & (np.arange(K) < lengths[:, None])
    count = np.bincount(at[reached], minlength=world.outputs)
    return tuple(np.bincount(at[reached], x[reached], world.outputs) / count for x in (predicted, chance))


@pytest.mark.parametrize("directional", [False, True])
def test_truncation_brings_no_bias_where_a_naive_fit_is_wrong(directional: bool) -> None:
    """A fifth of the positions is verified, those that survive best; judged by a run that verifies everything."""
    whole = run(World(1, directional), 1.0)
    made, naive = run(World(2, directional), 0.2), run(World(2, directional), 0.2, naive=True)
    reference, truth = rates(whole, World(3, directional))
    np.testing.assert_allclose(reference, truth, atol=0.08)

    def gaps(found: Recalibration) -> np.ndarray:
        """Furthest rate, a and b."""
        change = np.abs(found.pre.exact - whole.pre.exact)[found._flat].max(axis=0)
        return np.array([np.abs(rates(found, World(3, directional))[0] - reference).max(), *change])

    tolerance = np.array([0.07, 0.15, 0.3])
    assert (gaps(made) < tolerance).all()
    assert (gaps(naive) > 2 * tolerance).all()
    bias = rates(naive, World(3, directional))[0] - reference
    assert bias.min() > 0.04 and bias.mean() > 0.14, "the bias of truncation is there, and upwards"


def calibration_error(predicted: np.ndarray, happened: np.ndarray) -> float:
    """ECE over 15 bins."""
    index = np.minimum((predicted * 15).astype(int), 14)
    return float(np.abs(np.bincount(index, predicted) - np.bincount(index, happened)).sum() / len(index))


def test_on_foreign_text_the_calibration_error_falls() -> None:
    world = World(0)
    errors = []
    for made in (world.offline(), run(world, 0.3)):
        pre, post, lengths, _, right = World(9).drafts(20_000)
        survival = made.before(pre)[np.arange(len(pre)), lengths - 1]
        survived = right.cumprod(axis=1) * (np.arange(K) < lengths[:, None])
        drafted = np.arange(K) < lengths[:, None]
        after = made.after(post, lengths, lengths, pre)
        errors.append([calibration_error(s[drafted], survived[drafted]) for s in (survival, after)])
    offline, online = np.array(errors)
    assert (offline > 0.08).all() and (online < 0.03).all()


def test_few_labels_change_little_and_what_stops_comes_back() -> None:
    world = World(0)
    made = world.offline()
    pre, post, lengths, _, _ = world.drafts(2)
    made.learn(pre, post, lengths, lengths, lengths, np.zeros(2, np.int64))
    assert 0 < np.abs(made.pre.exact - world.offline().pre.exact).max() < 0.35, "two rejections"
    made = run(world, 1.0, batches=60)
    assert np.abs(made.pre.exact - world.offline().pre.exact)[made._flat].max() > 0.5
    for _ in range(400):
        made.fade()
    np.testing.assert_allclose(made.pre.exact, world.offline().pre.exact, atol=0.02)


def test_a_position_that_is_never_drafted_keeps_its_offline_entries_exactly() -> None:
    world = World(0)
    made = world.offline()
    for _ in range(20):
        pre, post, lengths, _, right = world.drafts(BATCH)
        lengths = np.minimum(lengths, 2)
        accepted = np.minimum(right.cumprod(axis=1).sum(axis=1), lengths)
        made.learn(pre, post, lengths, lengths, lengths, accepted)
    change = np.abs(made.pre.exact - world.offline().pre.exact).max(axis=2)
    assert (change[:2, 0] > 0.1).all() and (change[:, 2:] == 0).all()
    # Rows 3 and 4 were not drafted either, but follow what is known of positions 1 and 2.
    np.testing.assert_allclose(made.pre.change[2:], 0, atol=1e-9)
    assert (change[2:, :2] > 0.1).all()


def test_memory_is_bounded_and_an_update_is_small() -> None:
    world = World(0)
    made = world.offline()
    size = len(json.dumps(made.state()))
    for _ in range(10):
        before = made.pre.exact.copy(), made.post.exact.copy()
        pre, post, lengths, _, _ = world.drafts(2000)
        made.learn(pre * 1e6, post * 1e6, lengths, lengths, lengths, np.zeros(2000, np.int64))
        for old, new in zip(before, (made.pre.exact, made.post.exact), strict=True):
            assert np.isfinite(new).all() and np.abs(new - old).max() < 2
    assert all(np.abs(fit.change).max() <= 4 for fit in made.fits().values())
    assert len(json.dumps(made.state())) < 10 * size


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_teaches_nothing(bad: float) -> None:
    world = World(0)
    made, clean = world.offline(), world.offline()
    pre, post, lengths, _, right = world.drafts(BATCH)
    accepted = np.minimum(right.cumprod(axis=1).sum(axis=1), lengths)
    for spoilt in (np.full_like(pre, bad), pre):
        made = world.offline()
        broken = np.where(np.arange(K) >= 1, bad, post).astype(np.float32) if spoilt is pre else post
        made.learn(spoilt, broken, lengths, lengths, lengths, accepted)
        assert np.isfinite(made.pre.exact).all() and np.isfinite(made.post.exact).all()
        if spoilt is not pre:
            np.testing.assert_array_equal(made.pre.exact, clean.pre.exact)
        else:
            np.testing.assert_array_equal(made.pre.exact[:, 1:], clean.pre.exact[:, 1:])
    made.learn(pre, post, np.zeros(BATCH, np.int64), np.zeros(BATCH, np.int64), lengths, accepted)
    made.after(np.full_like(post, -np.inf), lengths, np.zeros(BATCH, np.int64), pre)


@pytest.mark.parametrize("accept", [0.2, 0.9])
def test_a_block_of_one(accept: float) -> None:
    made = Recalibration(1, np.ones(1), np.zeros(1), np.ones(1))
    random, zeros, ones = np.random.default_rng(0), np.zeros((64, 1), np.float32), np.ones(64, np.int64)
    for _ in range(80):
        made.learn(zeros, zeros, ones, ones, ones, (random.random(64) < accept).astype(np.int64))
    assert made.before(zeros)[0, 0, 0] == pytest.approx(accept, abs=0.05)
    assert made.after(zeros, ones, ones, zeros)[0, 0] == pytest.approx(accept, abs=0.05)


def test_a_fresh_one_is_the_offline_calibration() -> None:
    made, (pre, post, lengths, _, _) = World(0).offline(), World(0).drafts(50)
    np.testing.assert_array_equal(made.before(pre), triangle_to_survival(pre, 0.9, 0.1))
    rows = logistic(post).cumprod(axis=1) * (np.arange(K) < lengths[:, None])
    np.testing.assert_allclose(made.after(post, lengths, lengths, pre), rows, rtol=1e-5)


@pytest.mark.parametrize("directional", [False, True])
def test_what_was_learnt_is_saved_and_goes_on_where_it_was(tmp_path: Path, directional: bool) -> None:
    world = World(0, directional)
    made, again = run(world, 0.5, batches=5), world.offline()
    (tmp_path / "state.json").write_text("an older one")
    made.save(tmp_path / "state.json")
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
    again.load(tmp_path / "state.json")
    pre, post, lengths, _, _ = world.drafts(BATCH)
    for _ in range(2):
        np.testing.assert_array_equal(made.before(pre), again.before(pre))
        np.testing.assert_array_equal(made.after(post, lengths, lengths, pre), again.after(post, lengths, lengths, pre))
        for one in (made, again):
            one.learn(pre, post, lengths, lengths, lengths, lengths)


def test_a_file_that_does_not_fit_is_named_with_its_field(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    made = World(0).offline()
    made.save(path)
    state = json.loads(path.read_text())
    wrong = {
        "drafter is 'one', here it is 'two'": (Recalibration(K, np.ones(10), np.zeros(10), np.ones(K), "two"), state),
        "offline is ": (Recalibration(K, np.ones(10), np.zeros(10), np.ones(K), "one"), state),
        "block is 4, here it is 2": (Recalibration(2, np.ones(3), np.zeros(3), np.ones(2), "one"), state),
        "outputs is 10, here it is 4": (World(0, directional=True).offline(), state),
        "post_draft.evidence": (made, {**state, "post_draft": {**state["post_draft"], "evidence": [1.0]}}),
        "pre_draft.start": (made, {**state, "pre_draft": {}}),
        "position.gathered": (made, {**state, "position": {**state["position"], "gathered": [[["x"]]]}}),
        "all.start": (made, {**state, "all": None}),
        "cannot be read as JSON": (made, "{"),
    }
    for says, (reader, content) in wrong.items():
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ValueError, match=r"state\.json: ") as error:
            reader.load(path)
        assert says in str(error.value)
    with pytest.raises(ValueError, match="cannot be read"):
        made.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Recalibration(4, np.ones(9), np.zeros(9), np.ones(4)), "K is 4"),
        (lambda: Recalibration(4, np.ones(10), np.zeros(4), np.ones(4)), "K is 4"),
        (lambda: Recalibration(4, np.ones(10), np.zeros(10), np.ones(3)), "temperature has shape"),
        (lambda: controller(recalibration=Recalibration(2, np.ones(3), np.zeros(3), np.ones(2))), "block of 2, not 4"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=says):
        make()


# In the controller ------------------------------------------------------------------------------------------------

TABLE = dense_table(8, K, lambda m, t: 0.2 + 0.02 * t, lambda m, t: 2 + 0.08 * t, prefill=0)


def controller(policy: str = "wcs", **settings) -> WcsController:  # type: ignore[no-untyped-def]
    return WcsController(make_policy(policy), TABLE, K, **settings)


def serve(made: WcsController, world: World, steps: int, logits: bool = True, known: bool = True) -> list:
    """Lengths of every step; estimates and drafts with their logits or without."""
    n, seen = 8, []
    keys, one = [(i, 0) for i in range(n)], world.offline()
    for _ in range(steps):
        pre, post, _, _, right = world.drafts(n)
        estimate = Estimate(one.before(pre), np.full(n, known), pre if logits else None)
        plan = made.plan(keys, estimate if made.policy.needs_estimate else None, np.full(n, K), n)
        lengths = np.asarray(plan.draft_lengths)
        drafted = np.arange(K) < lengths[:, None]
        draft = Draft(
            np.zeros(lengths.sum()),
            np.append(0, lengths.cumsum()),
            None,
            None,
            one.after(post, lengths, lengths),
            np.where(drafted, post, -np.inf) if logits else None,
        )
        verified = made.select(plan, draft, n).verified_lengths
        accepted = np.minimum((right & drafted).cumprod(axis=1).sum(axis=1), verified)
        made.observe(keys, draft, Selection(verified), Outcome(accepted, [[1]] * n), plan)
        seen.append((lengths.tolist(), verified.tolist(), plan.expected_goodput))
    return seen


def test_without_it_the_logits_change_nothing() -> None:
    for adapt in (True, False):
        plain = serve(controller(adapt=adapt), World(0), 40, logits=False)
        assert serve(controller(adapt=adapt), World(0), 40) == plain
    off = controller(adapt=False, recalibration=World(0).offline())
    assert off.recalibration is None and serve(off, World(0), 40) == plain, "adapt off: nothing follows anything"


def test_without_logits_estimates_are_corrected_instead() -> None:
    made = controller(recalibration=World(0).offline())
    assert serve(made, World(0), 40, logits=False) == serve(controller(), World(0), 40, logits=False)
    assert made.before.factor != 1.0


@pytest.mark.parametrize("policy", ["wcs", "wcs-single-curve", "adaptive"])
def test_the_controller_feeds_it_and_goes_by_it(policy: str) -> None:
    made = controller(policy, recalibration=World(0).offline())
    serve(made, World(0), 200)
    assert made.recalibration is not None
    assert made.before.factor == made.after.factor == 1.0, "nothing is corrected twice"
    assert made.recalibration.post.exact[0, 0, 2] < -0.2
    changed = np.abs(made.recalibration.pre.change).max(axis=2) > 1e-3
    if policy == "adaptive":
        assert not changed.any()
    elif policy == "wcs-single-curve":
        assert changed[K - 1, 0] and not changed[: K - 1].any()
    else:
        assert changed[:, 0].sum() > 1
        pre = World(5).drafts(8)[0]
        step = made.before_draft([(i, 0) for i in range(8)], Estimate(None, np.ones(8, bool), pre), [K] * 8, 8)
        np.testing.assert_array_equal(step.survival, made.recalibration.before(pre))


def test_a_request_that_is_not_known_teaches_nothing_before_the_draft() -> None:
    prior = np.tril(np.full((K, K), 0.5, np.float32))
    made = controller(recalibration=World(0).offline(), prior=prior)
    serve(made, World(0), 60, known=False)
    assert made.recalibration is not None and not made.recalibration.pre.change.any()
    assert made.recalibration.post.change.any()


def test_drafting_that_stopped_is_tried_again() -> None:
    made = controller(recalibration=World(0).offline())
    bad, good = World(0, shift=-6.0), World(0, slope=1.0, shift=0.5)
    drafted = [sum(sum(lengths) for lengths, _, _ in serve(made, world, 50)) for world in [bad] * 8 + [good] * 4]
    assert sum(drafted[1:8]) < 0.1 * 7 * drafted[-1], "hardly anything is drafted while nothing is accepted"
    assert sum(drafted[2:8]) > 0, "but it is tried now and then"
    assert drafted[9] > 0.8 * drafted[-1] > 400, "and comes back within a hundred steps"


def test_a_draft_that_broke_off_counts_for_the_length_it_was_drafted_at() -> None:
    made = World(0).offline()
    pre, post, _, _, _ = World(0).drafts(64)
    rows, two = np.full(64, K), np.full(64, 2)
    made.learn(pre, post, rows, two, two, np.zeros(64, np.int64))
    told = made.pre.evidence[..., 1, 1] > 0
    assert told.sum() == 1 and told[K - 1, 0], "rejected at once: one entry of row K"
