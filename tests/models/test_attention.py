"""The attention plan equals naive attention over each query's visible keys, whichever way it goes through the pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_forespark.models.attention import AttentionPlan, merge
from trtllm_forespark.models.kv import PagedKV

DIM = 8


def naive(query, keys, values, visible, scale):
    """query [T, heads, dim], keys and values [S, kv_heads, dim] of one request."""
    group = query.shape[1] // keys.shape[1]
    out, lse = torch.zeros_like(query), torch.full(query.shape[:2], float("-inf"))
    for token, seen in enumerate(visible):
        if seen == 0:
            continue
        k, v = (x[:seen].repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("hd,shd->hs", query[token], k) * scale
        lse[token] = scores.logsumexp(-1)
        out[token] = torch.einsum("hs,shd->hd", scores.softmax(-1), v)
    return out, lse


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
            out, lse = plan.attend(self.query, self.kv.k[0], self.kv.v[0], DIM**-0.5)
        for i, (keys, values) in enumerate(self.keys):
            rows = slice(int(self.cu[i]), int(self.cu[i + 1]))
            want = naive(self.query[rows], keys, values, self.visible[rows], DIM**-0.5)
            torch.testing.assert_close(out[rows], want[0], atol=tolerance, rtol=0)
            torch.testing.assert_close(lse[rows], want[1], atol=tolerance, rtol=0)
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
    plan = Case([40, 1, 0, 25, 3, 1], [40, 17, 5, 60, 32, 16], 16).check()
    assert plan.short and plan._long


def test_only_prefill():
    plan = Case([40, 33], [40, 64], 16).check()
    assert not plan.short


def test_one_long_request_among_short_ones():
    plan = Case([1] * 9, [160, *range(1, 9)], 4).check()
    assert plan.short == 9 and not plan._even


def test_stale_nan_in_free_pages_is_never_read():
    for contexts in ([33, 20], [160, *[3] * 9]):
        case = Case([1] * len(contexts), contexts, 16, pages=range(1, 60))
        case.kv.k[0, 0] = case.kv.v[0, 0] = float("nan")
        case.check()


def test_one_page_a_request_in_order_needs_no_merge():
    plan = Case([1, 1, 1], [4, 16, 9], 16).check()
    assert plan.dense and plan._in_order


def test_dense_pages_out_of_order_are_read_in_place():
    rng = np.random.default_rng(0)
    plan = Case([1] * 7, [33] * 7, 16, pages=rng.permutation(21)).check()
    assert plan.dense


def test_sparse_pages_are_gathered():
    rng = np.random.default_rng(0)
    plan = Case([1, 2, 1], [33, 20, 16], 16, pages=rng.permutation(400)[:6]).check()
    assert not plan.dense


def test_a_page_shared_by_two_requests_is_gathered():
    case = Case([1, 1], [16, 16], 16)
    case.table[1] = case.table[0]
    case.keys[1] = case.keys[0]
    assert not case.check().dense


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


@pytest.mark.parametrize("split", [0, 1, 10, 20])
def test_merge_of_two_halves_is_the_whole(split):
    torch.manual_seed(0)
    query, keys, values = torch.randn(5, 6, DIM), torch.randn(20, 2, DIM), torch.randn(20, 2, DIM)
    whole = naive(query, keys, values, [20] * 5, 0.5)
    halves = naive(query, keys[:split], values[:split], [split] * 5, 0.5)
    rest = naive(query, keys[split:], values[split:], [20 - split] * 5, 0.5)
    out, lse = merge(*halves, *rest)
    torch.testing.assert_close(out, whole[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, whole[1], atol=1e-5, rtol=0)


def test_merge_of_nothing_with_nothing():
    nothing = torch.zeros(2, 3, DIM), torch.full((2, 3), float("-inf"))
    out, lse = merge(*nothing, *nothing)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_slots_are_written_where_they_are_read():
    kv = PagedKV(2, 3, 4, 2, DIM)
    k, v = torch.randn(2, 3, 2, DIM)
    slots = torch.tensor([0, 7, 9])
    kv.write(1, slots, k, v)
    got = kv.read(1, slots)
    assert torch.equal(got[0], k) and torch.equal(got[1], v)
    assert torch.equal(kv.k[1, 1, :, 3], k[1]) and not kv.k[0].any()
    assert kv.bytes == 2 * 2 * 3 * 4 * 2 * DIM * 4 and kv.page_bytes * 3 == kv.bytes
    kv.clear(torch.tensor([1]))
    assert not kv.k[1, 1].any() and kv.k[1, 2].any()
    with pytest.raises(ValueError, match="must be positive"):
        PagedKV(1, 0, 4, 2, DIM)
