from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_forespark.wcs.latency import Entry, LatencyTable, LatencyTableError, Surface, isotonic, profile

MADE_FOR = {"device": "cpu EPYC", "model": "smollm2-135m", "drafter": "dflash2", "dtype": "float32"}


def small(interpolation: str = "staircase") -> LatencyTable:
    return profile(
        lambda n, t: 0.030 + 0.001 * t + 0.0005 * n,
        lambda n, t: 0.005 + 0.0002 * t,
        verify=[(n, n * k) for n in (1, 4) for k in (1, 2, 4)],
        draft=[(n, n * k) for n in (1, 4) for k in (2, 4)],
        timings=3,
        interpolation=interpolation,  # type: ignore[arg-type]
        **MADE_FOR,
    )


def test_a_bucket_costs_what_its_border_costs() -> None:
    surface = Surface([Entry(1, 8, 0.01), Entry(1, 16, 0.02)], "staircase", "verify")
    np.testing.assert_allclose(surface.at(1, [1, 8, 9, 16]), [0.01, 0.01, 0.02, 0.02])


def test_linear_tables_interpolate_between_profiled_counts() -> None:
    surface = Surface([Entry(1, 8, 0.01), Entry(1, 16, 0.02)], "linear", "verify")
    np.testing.assert_allclose(surface.at(1, [4, 8, 12, 16]), [0.005, 0.01, 0.015, 0.02])


def test_batch_sizes_between_measured_ones_are_interpolated() -> None:
    surface = Surface([Entry(4, 8, 0.01), Entry(8, 8, 0.03)], "staircase", "verify")
    np.testing.assert_allclose(surface.at([1, 4, 5, 6, 8], 8), [0.01, 0.01, 0.015, 0.02, 0.03])


def test_linear_tables_mix_batch_sizes_at_equal_drafts() -> None:
    """The first draft of a step is the dear one, whatever the batch."""
    costs = {(4, 4): 10.0, (4, 5): 12.0, (4, 8): 13.5, (8, 8): 20.0, (8, 9): 22.0, (8, 16): 25.5}
    surface = Surface([Entry(n, t, s) for (n, t), s in costs.items()], "linear", "verify")
    np.testing.assert_allclose(surface.at(4, [4, 5, 8]), [10.0, 12.0, 13.5])
    np.testing.assert_allclose(surface.at(8, [8, 9, 16]), [20.0, 22.0, 25.5])
    np.testing.assert_allclose(surface.at(6, [6, 7, 10]), [15.0, 17.0, (13.5 + 23.5) / 2])
    np.testing.assert_allclose(surface.at(2, [2, 3]), [10.0, 12.0], err_msg="below the smallest: as that one")
    table = LatencyTable(surface, surface, "linear")
    np.testing.assert_allclose(table.prices(6, 4, 6).verify_at(np.array([6, 7, 10])), [15.0, 17.0, 18.5])


def test_past_the_last_bucket_is_linear_and_warns_once() -> None:
    surface = Surface([Entry(1, 8, 0.01), Entry(1, 16, 0.02)], "staircase", "verify")
    with pytest.warns(UserWarning, match="verify latency table ends at 1 requests and 16 tokens"):
        np.testing.assert_allclose(surface.at(1, 32), 0.04)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        surface.at(1, 64)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=12))
def test_isotonic_rises_keeps_the_mean_and_leaves_rising_values_alone(pairs: list[tuple[float, int]]) -> None:
    values, weights = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    fitted = isotonic(values, weights)
    assert (np.diff(fitted) >= -1e-12).all()
    assert np.isclose((fitted * weights).sum(), (values * weights).sum())
    np.testing.assert_allclose(isotonic(np.sort(values), weights), np.sort(values))


@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_costs_never_fall_as_tokens_grow(interpolation: str) -> None:
    rng = np.random.default_rng(1)
    entries = [Entry(n, n * k, float(rng.random())) for n in (1, 3, 8, 20) for k in (1, 2, 4, 8)]
    surface = Surface(entries, interpolation, "verify")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (1, 2, 5, 20, 30):
            seconds = surface.at(n, np.arange(1, 300))
            assert (np.diff(seconds) >= -1e-12).all() and (seconds >= 0).all()


def test_drafting_nothing_costs_nothing() -> None:
    assert small().draft_seconds(0, 0) == 0.0
    assert small().prices(3, 7, 3).draft_at(0, 0) == 0.0


@pytest.mark.parametrize("interpolation", ["staircase", "linear"])
def test_prices_are_the_table_read_out(interpolation: str) -> None:
    table = small(interpolation)
    prices = table.prices(4, 3, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for m, t in [(1, 2), (1, 4), (2, 7), (4, 11), (4, 16)]:
            assert np.isclose(prices.draft_at(m, t), table.draft_seconds(m, t), rtol=1e-5)
        for t in (4, 6, 11, 16):
            assert np.isclose(prices.verify_at(t), table.verify_seconds(4, t), rtol=1e-5)


def test_profile_is_not_misled_by_slow_minutes_and_counts_timings() -> None:
    calls: list[tuple[int, int]] = []

    def measure(n: int, t: int) -> float:
        calls.append((n, t))
        return 1.0 if len(calls) < 13 else 0.01 * t  # six slow rounds of nine must not stay in the table

    table = profile(measure, lambda n, t: 0.001, verify=[(8, 8), (8, 24)], draft=[(8, 24)], timings=9)
    assert [(e.requests, e.tokens, e.timings) for e in table.verify.entries] == [(8, 8, 9), (8, 24, 9)]
    assert [(e.requests, e.tokens) for e in table.draft.entries] == [(8, 24)]
    np.testing.assert_allclose(table.verify_seconds(8, [8, 24]), [0.08, 0.24])
    assert calls[:4] == [(8, 8), (8, 24), (8, 8), (8, 24)], "passes go round the grid"


def test_verifications_and_drafts_of_a_batch_size_take_turns() -> None:
    order: list[str] = []
    profile(
        lambda n, t: order.append(f"v{n},{t}") or 1.0,  # type: ignore[func-returns-value]
        lambda n, t: order.append(f"d{n},{t}") or 1.0,  # type: ignore[func-returns-value]
        verify=[(8, 8), (8, 9), (1, 1), (1, 2), (1, 4)],
        draft=[(1, 2), (8, 16), (1, 4), (1, 8), (1, 9)],
        timings=1,
    )
    few = ["v1,1", "d1,2", "v1,2", "d1,4", "v1,4", "d1,8", "d1,9"]
    assert order == [*few, *few, *few, "v8,8", "d8,16", "v8,9"], "small batches, whose passes are short, three times"


def test_json_round_trip(tmp_path: Path) -> None:
    table, path = small("linear"), tmp_path / "table.json"
    table.save(path)
    again = LatencyTable.load(path, expect=MADE_FOR)
    assert again.verify.entries == table.verify.entries and again.draft.entries == table.draft.entries
    assert (again.interpolation, again.date, again.device) == ("linear", table.date, "cpu EPYC")
    data = json.loads(path.read_text())
    assert data["version"] == 3 and data["verify"][0][3] == 9


@pytest.mark.parametrize("name", sorted(MADE_FOR))
def test_a_table_made_for_something_else_is_one_clear_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / "table.json"
    small().save(path)
    with pytest.raises(LatencyTableError, match=f"{name}=.*not 'other'.*forespark profile"):
        LatencyTable.load(path, expect={**MADE_FOR, name: "other"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read"),
        ("[]", "not a latency table"),
        ('{"kind": "forespark-latency-table", "version": 9}', "format version 9"),
        ('{"kind": "forespark-latency-table", "version": 3}', "interpolation is None"),
        ('{"kind": "forespark-latency-table", "version": 3, "interpolation": "linear"}', "entries of 'verify'"),
        (
            '{"kind": "forespark-latency-table", "version": 3, "interpolation": "linear", "verify": [[1, 1, -1, 1]]}',
            "bad entry",
        ),
        (
            '{"kind": "forespark-latency-table", "version": 3, "interpolation": "linear", "verify": []}',
            "no entries",
        ),
    ],
)
def test_broken_files_say_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(LatencyTableError, match=says):
        LatencyTable.load(path)
    with pytest.raises(LatencyTableError, match="cannot read"):
        LatencyTable.load(tmp_path / "missing.json")
