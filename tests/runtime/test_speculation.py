"""What a request says about its own speculation, and how long it can be passed over."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.runtime.executor import ExecutorConfig
from trtllm_forespark.runtime.speculation import Speculation
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.policies import POLICIES, make_policy
from trtllm_forespark.wcs.stages import Estimate
from trtllm_forespark.wcs.survival import prefix_survival

from .markov import BLOCK, TABLE
from .paged import paged_executor, request, run

DRAFTING = ["full", "adaptive", "wcs", "wcs-single-curve", "exhaustive"]


def planned(executor) -> list[dict[object, int]]:
    """The draft lengths of each step from now on, by request."""
    steps: list[dict[object, int]] = []
    plan_of = executor.controller.plan

    def plan(keys, *args, **kwargs):
        made = plan_of(keys, *args, **kwargs)
        steps.append({key[0]: int(d) for key, d in zip(keys, made.draft_lengths, strict=True)})
        return made

    executor.controller.plan = plan
    return steps


@pytest.mark.parametrize("policy", DRAFTING)
def test_off_and_a_longest_draft_are_kept_and_the_text_is_the_same(policy: str) -> None:
    expected = run(paged_executor("ar"), [request(i, [i], max_tokens=20) for i in range(3)])
    executor = paged_executor(policy)
    steps = planned(executor)
    overrides = [Speculation(enabled=False), Speculation(max_draft_len=2), Speculation(max_draft_len=99)]
    requests = [request(i, [i], max_tokens=20, speculation=s) for i, s in enumerate(overrides)]
    assert run(executor, requests) == expected
    longest = [max(step.get(i, 0) for step in steps) for i in range(3)]
    assert longest[0] == 0 and 1 <= longest[1] <= 2 < longest[2] <= BLOCK
    assert policy != "full" or longest[1] == 2
    assert requests[0].drafted == 0 and requests[2].drafted > 0


@pytest.mark.parametrize("policy", DRAFTING)
def test_a_floor_of_ones_own_is_kept_while_the_limits_allow(policy: str) -> None:
    executor = paged_executor(policy, adapt=True)
    steps = planned(executor)
    run(executor, [request(i, [i], max_tokens=20, speculation=Speculation(min_draft=3 * i)) for i in range(2)])
    own = [step[1] for step in steps[:4] if 1 in step]
    assert own and min(own) >= 3


def plan(policy: str, survival: float, floors=None, overdue=None, n: int = 3, **settings) -> list[int]:
    controller = WcsController(make_policy(policy, **settings), TABLE, BLOCK, adapt=False)
    curves = prefix_survival(np.full((n, BLOCK), survival, np.float32) ** np.arange(1, BLOCK + 1))
    limits = np.array([BLOCK, BLOCK, 1], np.int64)
    keys = [(i, 0) for i in range(n)]
    made = controller.plan(keys, Estimate(curves, np.ones(n, bool)), limits, n, floors=floors, overdue=overdue)
    return made.draft_lengths.tolist()


def test_a_requests_floor_goes_before_the_engines() -> None:
    assert plan("wcs", 1e-6, floor=2) == [2, 2, 1]
    assert plan("wcs", 1e-6, floors=np.array([0, 3, 2]), floor=2) == [0, 3, 1]


@pytest.mark.parametrize("policy", ["wcs", "wcs-single-curve", "exhaustive"])
def test_who_is_overdue_drafts_where_anybody_does(policy: str) -> None:
    overdue = np.array([True, False, True])
    assert plan(policy, 1e-6, overdue=overdue) == [0, 0, 0], "where no draft pays nobody is owed one"
    assert plan(policy, 0.9, overdue=overdue)[0] >= 1
    forced = plan(policy, 1e-6, floors=np.array([0, 2, 0]), overdue=overdue)
    assert forced == [1, 2, 1]


def test_a_policy_that_drafts_nothing_owes_nothing() -> None:
    assert plan("ar", 0.9, floors=np.array([3, 3, 3]), overdue=np.ones(3, bool)) == [0, 0, 0]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_is_passed_over_longer_than_the_bound(bound: int) -> None:
    """One request whose drafts never pay beside one whose drafts always do."""
    executor = paged_executor("wcs", max_passed_over=bound)
    backend = executor.backend

    def estimate(batch) -> Estimate:
        worth = np.array([0.95 if seat == 0 else 1e-9 for seat in batch.seats], np.float32)
        return Estimate(prefix_survival(worth[:, None] ** np.arange(1, BLOCK + 1)), np.ones(len(worth), bool))

    backend.estimate = estimate  # type: ignore[method-assign]
    steps = planned(executor)
    run(executor, [request(i, [i], max_tokens=25) for i in range(2)])
    together = [step for step in steps if len(step) == 2 and step[0]]
    passed = longest = 0
    for step in together:
        passed = 0 if step[1] else passed + 1
        longest = max(longest, passed)
    assert len(together) > 4
    assert longest == (len(together) if bound == 0 else bound)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"enabled": 1}, "enabled = 1: must be True or False; "),
        ({"max_draft_len": 0}, "max_draft_len = 0: must be an integer >= 1; "),
        ({"max_draft_len": 2.0}, "max_draft_len = 2.0: must be"),
        ({"min_draft": -1}, "min_draft = -1: must be an integer >= 0; "),
        ({"min_draft": True}, "min_draft = True: must be"),
        ({"min_draft": 3, "max_draft_len": 2}, "min_draft = 3: must not exceed max_draft_len = 2; lower it"),
        ({"min_draft": 1, "enabled": False}, "min_draft = 1: goes against enabled = False; "),
    ],
    ids=str,
)
def test_a_wrong_override_names_field_value_and_mend(settings: dict, says: str) -> None:
    with pytest.raises(ValueError) as error:
        Speculation(**settings)
    assert str(error.value).startswith(f"Speculation.{says}") and len(str(error.value).splitlines()) == 1


def test_wrong_kinds_of_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="speculation = 2: must be a Speculation; give"):
        paged_executor("full").submit(request("a", speculation=2))
    for bound in (-1, True, 1.5):
        with pytest.raises(ValueError, match=r"max_passed_over = .*: must be an integer >= 0; give 0"):
            ExecutorConfig(max_passed_over=bound)  # type: ignore[arg-type]


def test_every_policy_is_tried_here_or_drafts_by_caps() -> None:
    assert set(POLICIES) == {*DRAFTING, "ar", "batchwise"}
