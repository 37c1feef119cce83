from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark.wcs.rest import Rest


def look(rest: Rest, n: int, tokens: float, seconds: float, count: int) -> str:
    """`count` steps: r passed over (n tokens in 1 second), l looked at (as the table prices it)."""
    seen = ""
    for _ in range(count):
        passes = rest.skips(n)
        seen += "r" if passes else "l"
        rest.saw(n, not passes, *((n, 1.0, 1.0) if passes else (tokens, seconds, seconds)), 1.0)
    return seen


def test_the_rate_decides_not_the_tokens() -> None:
    assert look(Rest(), 4, 8, 2.5, 400).count("l") < 50
    assert look(Rest(), 4, 8, 1.5, 400).count("r") < 9


@pytest.mark.parametrize(("n", "gain", "least", "most"), [(1, 1.25, 0, 40), (4, 1.08, 0, 40), (4, 0.85, 250, 399)])
def test_luck_is_no_reason_to_rest(n: int, gain: float, least: int, most: int) -> None:
    """Tokens of a step are random: half of the requests get a second one."""
    rests = []
    for seed in range(20):
        rest, random = Rest(), np.random.default_rng(seed)
        rests.append(0)
        for _ in range(400):
            passes = rest.skips(n)
            rests[-1] += passes
            tokens = n if passes else n + random.binomial(n, 0.5)
            seconds = 1.0 if passes else 1.5 / gain
            rest.saw(n, not passes, tokens, seconds, seconds, 1.0)
    assert least <= np.mean(rests) <= most


@pytest.mark.parametrize(("n", "gain", "least", "most"), [(1, 1.3, 0, 5), (8, 1.15, 0, 5), (16, 0.9, 330, 399)])
def test_slow_seconds_of_the_machine_are_no_reason_to_rest(n: int, gain: float, least: int, most: int) -> None:
    """40 steps at 1.3 times the pace, 40 at 0.7: what is common to both kinds of steps tells nothing of them."""
    rests, levels = [], np.exp(0.3 * np.where(np.arange(400) // 40 % 2, 1, -1))
    for seed in range(20):
        rest, random = Rest(), np.random.default_rng(seed)
        rests.append(0)
        for level in levels * np.exp(0.07 * random.standard_normal(400)):
            passes = rest.skips(n)
            rests[-1] += passes
            price = 1.5 / gain / 1.05
            tokens, seconds = (n, 1.0) if passes else (n + random.binomial(n, 0.5), 1.05 * price)
            rest.saw(n, not passes, tokens, level * seconds, 1.0 if passes else price, 1.0)
    assert least <= np.mean(rests) <= most


def test_the_tables_word_is_soon_put_to_the_test() -> None:
    """Plain steps are faster than it says: looking, which seemed to pay, does not."""
    rest, seen = Rest(), ""
    for _ in range(200):
        passes = rest.skips(4)
        seen += "r" if passes else "l"
        rest.saw(4, not passes, *((4, 0.7, 1.0) if passes else (5, 1.1, 1.1)), 1.0)
    assert seen.index("r") < 12 and seen.count("r") > 100


def test_a_table_that_is_off_by_a_factor_misleads_nobody() -> None:
    """Measured in a slow hour: all takes less than it says, drafts pay a little less than plain steps do."""
    for level in (0.6, 1.0, 1.7):
        rest, seen = Rest(), ""
        for _ in range(300):
            passes = rest.skips(16)
            seen += "r" if passes else "l"
            tokens, seconds, price = (16, 1.0, 1.0) if passes else (22.4, 1.5, 1.3)
            rest.saw(16, not passes, tokens, level * seconds, price, 1.0)
        assert seen[:60].count("r") > 20 and seen[100:].count("l") < 30, level


def test_one_stalled_step_is_no_reason_to_rest() -> None:
    rest = Rest()
    look(rest, 4, 6, 1.2, 12)
    rest.saw(4, True, 6, 1000.0, 1.0, 1.0)
    assert look(rest, 4, 6, 1.2, 12).count("r") <= 1


def test_the_first_look_after_a_rest_is_not_judged() -> None:
    """It takes in all the tokens of the rest: dear, whatever it brings."""
    rest = Rest()
    look(rest, 4, 4, 1.2, 100)
    seen = ""
    for _ in range(600):
        passes = rest.skips(4)
        first = seen.endswith("r") and not passes
        seen += "r" if passes else "l"
        rest.saw(4, not passes, *((4, 1.0) if passes else (8, 99.0 if first else 1.0)), 1.0, 1.0)
    assert seen.endswith("l" * 9)


def test_what_is_not_known_is_not_judged() -> None:
    rest = Rest()
    for _ in range(50):
        rest.saw(0, True, 0, 1.0, 1.0, 1.0)
        rest.saw(4, True, 4, 0.0, 1.0, 1.0)
        rest.saw(4, True, 4, 9.0, 1.0, 0.0)
    assert not rest.skips(4)


def test_what_a_look_itself_takes_is_timed_and_so_soon_known() -> None:
    """It finds nothing to draft and takes 4% of a step, less than steps differ by."""
    for seed in range(20):
        rest, random, seen = Rest(), np.random.default_rng(seed), ""
        for _ in range(100):
            passes = rest.skips(32)
            seen += "r" if passes else "l"
            step, look = np.exp(0.1 * random.standard_normal()), 0.0 if passes else 0.04
            rest.saw(32, not passes, 32, step + look, 1.0, 1.0, look)
        assert seen.count("l") <= 16, seed


@pytest.mark.parametrize("stalled", [0, 20])
def test_a_stalled_look_does_not_end_looking(stalled: int) -> None:
    rest, passed = Rest(), 0
    for step in range(60):
        passes = rest.skips(4)
        look = 50.0 if step == stalled else 0.0 if passes else 0.03
        passed += passes
        rest.saw(4, not passes, *((4, 1.0) if passes else (6, 1.2 + look)), 1.0 if passes else 1.2, 1.0, look)
    assert passed <= 12
