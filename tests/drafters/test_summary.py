"""LongSpark's summary is attention over all that was kept, however it came and whatever was rejected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.summary import SummaryState, merge, partial_summary

from .kinds import KINDS, World


def full(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """queries [heads, R, d] over keys, values [T, kv_heads, d], the plain way, in float64."""
    heads, kv_heads, dim = queries.shape[0], keys.shape[1], queries.shape[2]
    out = []
    for head in range(heads):
        k, v = (x[:, head * kv_heads // heads].double() for x in (keys, values))
        out.append(torch.softmax(queries[head].double() @ k.T / dim**0.5, -1) @ v)
    return torch.stack(out).float()


@pytest.mark.parametrize("heads,kv_heads", [(4, 2), (6, 2), (3, 3), (9, 1)])
def test_hundreds_of_random_appends_equal_full_attention(heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    queries = torch.randn(1, heads, 5, 8) * 2
    state, seats = SummaryState(queries, 6), 4
    kept: list[list[torch.Tensor]] = [[] for _ in range(seats)]
    for _ in range(300):
        who = rng.permutation(seats)[: rng.integers(1, seats + 1)]
        counts = rng.choice([1, 2, 8, 17, 40], len(who), p=[0.5, 0.3, 0.1, 0.05, 0.05])
        rows = torch.randn(int(counts.sum()), 2, kv_heads, 8)
        state.absorb(0, torch.from_numpy(who), rows[:, 0], rows[:, 1], torch.from_numpy(counts))
        for seat, part in zip(who, rows.split(counts.tolist()), strict=True):
            kept[seat].append(part)
    for seat in range(seats):
        rows = torch.cat(kept[seat])
        torch.testing.assert_close(state.value[0, seat], full(queries[0], rows[:, 0], rows[:, 1]), atol=1e-5, rtol=1e-5)
    assert state.value[0, seats:].eq(0).all() and state.log[0, seats:].eq(-torch.inf).all(), "unused seats are empty"


def test_merging_by_hand() -> None:
    """One key a side: scores 0 and ln 3 weigh 1/4 and 3/4."""
    one, other = torch.tensor([[[1.0]]]), torch.tensor([[[5.0]]])
    value, log = merge(one, torch.zeros(1, 1), other, torch.full((1, 1), float(np.log(3))))
    assert value.item() == pytest.approx(0.25 * 1 + 0.75 * 5) and log.item() == pytest.approx(np.log(4))
    nothing = torch.zeros(1, 1, 1), torch.full((1, 1), -torch.inf)
    for a, b in (((one, torch.zeros(1, 1)), nothing), (nothing, (one, torch.zeros(1, 1)))):
        value, log = merge(*a, *b)
        assert torch.equal(value, one) and log.item() == 0.0
    value, log = merge(*nothing, *nothing)
    assert value.item() == 0.0 and log.item() == -np.inf


def test_scores_of_any_size_stay_finite() -> None:
    queries = torch.full((1, 1, 1, 4), 100.0)
    state = SummaryState(queries, 1)
    for scale in (50.0, -50.0, 80.0):
        keys = torch.full((3, 1, 4), scale)
        state.absorb(0, torch.tensor([0]), keys, torch.full((3, 1, 4), scale), torch.tensor([3]))
    assert state.value.isfinite().all() and state.value[0, 0, 0, 0, 0] == pytest.approx(80.0, rel=1e-4)


def test_what_is_not_finite_stays_with_its_own_request() -> None:
    torch.manual_seed(0)
    state = SummaryState(torch.randn(1, 2, 3, 4), 2)
    rows = torch.randn(7, 2, 1, 4)
    rows[5:] = torch.nan  # the last rows of the second request, which padding of the first might read
    state.absorb(0, torch.tensor([0, 1]), rows[:, 0], rows[:, 1], torch.tensor([2, 5]))
    assert state.value[0, 0].isfinite().all() and not state.value[0, 1].isfinite().any()
    state.reset(1)
    assert state.value.isfinite().all()


def test_padding_is_not_seen() -> None:
    queries, rows = torch.randn(2, 3, 4), torch.randn(2, 1, 5, 4)
    seen = torch.tensor([[True, True, False, False, False], [False] * 5])
    value, log = partial_summary(queries, rows, rows, seen)
    alone, alone_log = partial_summary(queries, rows[:1, :, :2], rows[:1, :, :2])
    torch.testing.assert_close(value[0], alone[0])
    torch.testing.assert_close(log[0], alone_log[0])
    assert value[1].eq(0).all() and log[1].eq(-torch.inf).all()


def test_rejected_tokens_never_enter() -> None:
    """Steps as in a run: K + 1 rows are written to the pages, the first few are kept, the next step overwrites."""
    rng = np.random.default_rng(1)
    world = World(KINDS["longspark"], num_pages=16)
    table, (features, kv) = world.table([200]), world.texts([260])[0]
    done, junk = 0, torch.randn(world.config.target_layers, 2, 6, 2, 8) * 9
    while done < 200:
        kept = int(rng.integers(1, 7))
        end = min(done + kept, 200)
        rejected = torch.arange(end, min(end + 6, 208))
        slots = torch.from_numpy(table[0])[rejected.clamp(max=207) // 16] * 16 + rejected % 16
        for layer in range(world.config.target_layers):
            world.kv.write(layer, slots, junk[layer, 0, : len(slots)], junk[layer, 1, : len(slots)])
        world.append(0, (features, kv), table[0], done, end)
        done = end
    summary = world.runner.summary
    for layer, source in enumerate(world.config.kv_layers):
        wanted = full(summary.queries[layer], kv[source, 0, :200], kv[source, 1, :200])
        torch.testing.assert_close(summary.value[layer, 0], wanted, atol=1e-5, rtol=1e-5)
