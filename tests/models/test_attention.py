"""The attention plan equals naive attention over each query's visible keys, whichever way it goes through the pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_forespark.models.attention import AttentionPlan
from trtllm_forespark.models.kv import PagedKV

DIM = 8


def naive(query, keys, values, visible, scale):
    """query [T, heads, dim], keys and values [S, kv_heads, dim] of one request."""
    group = query.shape[1] // keys.shape[1]
    out = torch.zeros_like(query)
    for token, seen in enumerate(visible):
        if seen == 0:
            continue
        k, v = (x[:seen].repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,shd->hs", query[token], k) * scale
        out[token] = torch.einsum("hs,shd->hd", scores.softmax(-1), v)
    return out


class Case:
    """Random requests whose keys are scattered over a pool: `contexts` keys and `lengths` query tokens a request."""

    def __init__(self, lengths, contexts, page, kv_heads=2, group=3, causal=True, pages=None, pool=None, seed=0):
        torch.manual_seed(seed)
        need = [-(-context // page) for context in contexts]
        ids = list(range(sum(need))) if pages is None else list(pages)
        pool = pool or max(ids, default=0) + 1
        self.kv = PagedKV(1, pool, page, kv_heads, DIM)
        self.table = np.full((len(lengths), max(need, default=0) or 1), -1, np.int64)
        self.cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.query = torch.randn(int(self.cu[-1]), kv_heads * group, DIM)
        self.visible, self.keys, self.page = [], [], page
        for row, (length, context, count) in enumerate(zip(lengths, contexts, need, strict=True)):
            self.table[row, :count] = [ids.pop(0) for _ in range(count)]
            keys, values = torch.randn(2, context, kv_heads, DIM)
            where = np.arange(context)
            slots = torch.from_numpy(self.table[row, where // page] * page + where % page)
            if context:
                self.kv.write(0, slots, keys, values)
            self.keys.append((keys, values))
            self.visible += [context - length + 1 + i if causal else context for i in range(length)]
        self.visible = np.maximum(np.asarray(self.visible, np.int64), 0)

    def check(self, tolerance=1e-5):
        plan = AttentionPlan(self.cu, self.visible, self.table, self.page)
        for _ in range(2):  # a second layer reuses the plan's masks
            out = plan.attend(self.query, self.kv, 0, DIM**-0.5)
        for i, (keys, values) in enumerate(self.keys):
            rows = slice(int(self.cu[i]), int(self.cu[i + 1]))
            want = naive(self.query[rows], keys, values, self.visible[rows], DIM**-0.5)
            torch.testing.assert_close(out[rows], want, atol=tolerance, rtol=0)
        return plan


@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("page", [1, 5, 16])
def test_decode(n, page):
    rng = np.random.default_rng(n)
    Case([1] * n, rng.integers(1, 40, n).tolist(), page).check()


@pytest.mark.parametrize("n", [1, 7, 33])
def test_verification_runs_of_mixed_length(n):
    rng = np.random.default_rng(n)
    lengths = rng.integers(0, 9, n)
    Case(lengths.tolist(), (lengths + rng.integers(0, 40, n)).tolist(), 16).check()


def test_prefill_chunks_beside_decode():
    plan = Case([400, 1, 0, 250, 3, 1], [400, 17, 5, 600, 32, 16], 16).check()
    assert len(plan.groups) > 1


def test_only_prefill():
    Case([40, 33], [40, 64], 16).check()


def test_one_long_request_among_short_ones_is_a_group_of_its_own():
    plan = Case([1] * 9, [2000, *range(1, 9)], 4).check()
    assert sorted(group.m for group in plan.groups) == [1, 8]


def test_requests_of_a_kind_are_one_group():
    assert len(Case([1] * 32, [200 + i for i in range(32)], 64).check().groups) == 1


def test_stale_nan_in_free_pages_is_never_read():
    for contexts in ([33, 20], [160, *[3] * 9]):
        case = Case([1] * len(contexts), contexts, 16, pages=range(1, 60))
        case.kv.k[0, 0] = case.kv.v[0, 0] = float("nan")
        case.check()


def test_a_request_with_nan_leaves_its_neighbours_alone():
    case = Case([2, 3, 1], [33, 20, 5], 16)
    case.kv.k[0, int(case.table[1, 0])] = float("nan")
    plan = AttentionPlan(case.cu, case.visible, case.table, 16)
    out = plan.attend(case.query, case.kv, 0, 1.0)
    assert out[2:5].isnan().all() and out[:2].isfinite().all() and out[5:].isfinite().all()


def test_pages_anywhere_in_the_pool():
    rng = np.random.default_rng(0)
    Case([1, 2, 1], [33, 20, 16], 16, pages=rng.permutation(400)[:6]).check()


def test_a_page_shared_by_two_requests():
    case = Case([1, 1], [16, 16], 16)
    case.table[1] = case.table[0]
    case.keys[1] = case.keys[0]
    case.check()


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_see_their_context_and_themselves(causal):
    """Keys of the block lie in scratch slots; a request without context sees its block alone."""
    case = Case([3, 1, 2], [20, 0, 7], 16, causal=False, pages=range(3), pool=5)
    own = np.arange(6) + 3 * 16
    keys, values = torch.randn(2, 6, 2, DIM)
    case.kv.write(0, torch.from_numpy(own), keys, values)
    plan = AttentionPlan(case.cu, case.visible, case.table, 16, own=own, causal=causal)
    out = plan.attend(case.query, case.kv, 0, DIM**-0.5)
    for i, (context_keys, context_values) in enumerate(case.keys):
        for row in range(int(case.cu[i]), int(case.cu[i + 1])):
            block = slice(int(case.cu[i]), row + 1 if causal else int(case.cu[i + 1]))
            k, v = torch.cat([context_keys, keys[block]]), torch.cat([context_values, values[block]])
            want = naive(case.query[row : row + 1], k, v, [len(k)], DIM**-0.5)
            torch.testing.assert_close(out[row : row + 1], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [[1, 3], [20, 3]])
def test_tokens_that_see_nothing(lengths):
    case = Case(lengths, [0, 0], 16, causal=False, pool=2)
    case.check()
    case = Case([*lengths, 2], [0, 20, 0], 16, causal=False)
    case.check()


def test_a_drafter_block_sees_the_whole_context():
    Case([4, 1, 8], [30, 1, 64], 16, causal=False).check()


def test_no_tokens_and_no_requests():
    Case([], [], 16, pool=1).check()
    Case([0, 0], [5, 0], 16).check()


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1)])
def test_head_layouts(kv_heads, group):
    Case([1, 5, 30], [9, 20, 44], 16, kv_heads=kv_heads, group=group).check()


def test_large_scores_do_not_overflow():
    case = Case([1, 2], [40, 20], 16)
    case.query *= 300
    case.check(tolerance=1e-3)


def test_too_few_pages_is_an_error():
    with pytest.raises(ValueError, match="sees 17 keys, the page table holds 16"):
        AttentionPlan(np.array([0, 1]), np.array([17]), np.array([[0]]), 16)
    with pytest.raises(ValueError, match="cu_lengths says 1 tokens"):
        AttentionPlan(np.array([0, 1]), np.array([17, 1]), np.array([[0, 1]]), 16)


def test_slots_are_written_where_they_are_read():
    kv = PagedKV(2, 3, 4, 2, DIM)
    k, v = torch.randn(2, 3, 2, DIM)
    slots = torch.tensor([0, 7, 9])
    kv.write(1, slots, k, v)
    got = kv.read(1, slots)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)
    assert torch.equal(kv.k[1, 1, :, 3], k[1]) and not kv.k[0].any()
    assert kv.bytes == 2 * 2 * 3 * 4 * 2 * DIM * 4
    kv.clear(torch.tensor([1]))
    assert not kv.k[1, 1].any() and kv.k[1, 2].any()
    with pytest.raises(ValueError, match="must be positive"):
        PagedKV(1, 0, 4, 2, DIM)
