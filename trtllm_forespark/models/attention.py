"""Attention over paged keys and values for a packed batch: planned once a step, run once a layer.

Reading keys is what costs, so they are not gathered. Short runs of queries (decode and verification) are processed page
by page: one batched product over a view of the pool gives every page's scores for its owner's queries, and the partial
results of a request's pages are merged by their log-sum-exp. Pages handed out low numbers first form a dense prefix of
the pool; where they do not (`dense` is False), pages are gathered first. Long runs (prefill chunks) go one request at a
time over contiguous keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .linear import packing_available

_MASKED = -1e30  # finite: a page none of whose keys are visible must give weight 0, not NaN
_NEVER = float("-inf")


@dataclass(frozen=True)
class _Long:
    """One request whose run is processed alone: token rows [start, stop), its page ids, visible keys a row."""

    start: int
    stop: int
    pages: torch.Tensor  # [p]
    visible: torch.Tensor  # [stop - start]


class AttentionPlan:
    """Who sees which page, for one packed batch. Shared by all layers of a step (and by target and drafter alike).

    cu_lengths: [n + 1] query tokens a request, cumulated. visible: [T] how many key positions of its request, from
    position 0, a query token sees (position + 1 for a causal target, the context length for a drafter, 0 for none).
    page_table: [n, max_pages] page ids in order of position; entries past a request's need are not read. All three on
    the host (NumPy, or tensors, which are copied to the host).
    """

    def __init__(
        self,
        cu_lengths: np.ndarray | torch.Tensor,
        visible: np.ndarray | torch.Tensor,
        page_table: np.ndarray | torch.Tensor,
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        cu, seen, table = _host(cu_lengths), _host(visible), _host(page_table)
        self.page_size, self.device = page_size, torch.device(device)
        self.tokens = int(cu[-1])
        if seen.shape != (self.tokens,):
            raise ValueError(f"AttentionPlan: visible has shape {seen.shape}, cu_lengths says {self.tokens} tokens")
        lengths = np.diff(cu)
        longest = np.zeros(len(lengths), np.int64)  # keys the most far-sighted query of a request sees
        np.maximum.at(longest, np.repeat(np.arange(len(lengths)), lengths), seen)
        pages = -(-longest // page_size)
        if len(pages) and pages.max(initial=0) > table.shape[1]:
            raise ValueError(
                f"AttentionPlan: a query sees {longest.max()} keys, the page table holds {table.shape[1] * page_size}"
            )
        active = (lengths > 0) & (longest > 0)
        limit = _short_limit(lengths[active], pages[active])
        short = np.flatnonzero(active & (lengths <= limit))
        self.unseeing = self._to(np.flatnonzero(seen == 0)) if (seen == 0).any() else None
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._long = [
            _Long(int(cu[i]), int(cu[i + 1]), self._to(table[i, : pages[i]]), self._to(seen[cu[i] : cu[i + 1]]))
            for i in np.flatnonzero(active & (lengths > limit))
        ]
        self._long_masks: dict[int, torch.Tensor] = {}
        self.short = len(short)
        if self.short:
            self._plan_short(cu, seen, table, lengths, pages, short)

    def _plan_short(
        self,
        cu: np.ndarray,
        seen: np.ndarray,
        table: np.ndarray,
        lengths: np.ndarray,
        pages: np.ndarray,
        short: np.ndarray,
    ) -> None:
        count, need = len(short), pages[short]
        width = int(lengths[short].max())
        entries = int(need.sum())
        owner = np.repeat(np.arange(count), need)
        ordinal = np.arange(entries) - np.repeat(np.cumsum(need) - need, need)
        physical = table[short[owner], ordinal].astype(np.int64)
        prefix = int(physical.max()) + 1
        # A view needs each page to have one owner (shared prefixes have several) and little waste in between.
        self.dense = prefix <= 2 * entries and len(np.unique(physical)) == entries
        if self.dense:
            slot, total = physical, prefix
        else:
            slot, total = np.arange(entries), entries
        self.pages, self.width = total, width
        self._gather = self._to(physical)
        owner_of, first_key = np.zeros(total, np.int64), np.full(total, np.iinfo(np.int32).max, np.int64)
        owner_of[slot], first_key[slot] = owner, ordinal * self.page_size
        self._owner = self._to(owner_of)
        # Query rows of each short request, padded to `width` with its first row.
        column = np.arange(width)
        real = column < lengths[short][:, None]
        rows = cu[short][:, None] + np.where(real, column, 0)
        self._rows = self._to(rows[owner_of, 0] if width == 1 else rows.reshape(-1))
        self._first_key, self._visible = self._to(first_key), self._to(np.where(real, seen[rows], 0))
        # Merging a request's pages: its entries as a table, rows padded with the last of them.
        self._in_order = np.array_equal(owner_of, np.arange(count))  # page i is request i's only one: nothing to merge
        most = int(need.max())
        padded = np.arange(most) >= need[:, None]
        starts = np.cumsum(need) - need
        self._table = self._to(slot[starts[:, None] + np.minimum(np.arange(most), need[:, None] - 1)])
        self._even = count * most <= 2 * entries + 8
        self._padding = None
        if padded.any():
            self._padding = torch.zeros(count, most, 1).masked_fill_(torch.from_numpy(padded)[..., None], _MASKED)
            self._padding = self._padding.to(self.device)
        # Pages in the prefix that belong to nobody here add to a row of their own, whatever they hold (even NaN).
        sink = np.full(total, count, np.int64)
        sink[slot] = owner
        self._sink = self._to(sink)
        # Where the results go: padded row -> token row.
        self._source = None if real.all() else self._to(np.flatnonzero(real.reshape(-1)))
        target = rows[real]
        self._complete = len(target) == self.tokens  # every row of the batch is computed here, in order
        self._target = self._to(target)

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def attend(
        self, query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [T, heads, dim]; k_pages, v_pages [pages, kv_heads, page_size, dim] of one layer; scores times `scale`.

        Returns (out [T, heads, dim] in the query's dtype, lse [T, heads] float32: log of the sum of exponentiated
        scores). A token that sees nothing has out 0 and lse -inf.
        """
        tokens, heads, dim = query.shape
        complete = bool(self.short) and self._complete
        if complete:
            out, lse = self._attend_short(query, k_pages, v_pages, scale)
        else:
            out = query.new_zeros(tokens, heads, dim)
            lse = torch.full((tokens, heads), _NEVER, dtype=torch.float32, device=query.device)
            if self.short:
                part, part_lse = self._attend_short(query, k_pages, v_pages, scale)
                out.index_copy_(0, self._target, part)
                lse.index_copy_(0, self._target, part_lse)
            for number, run in enumerate(self._long):
                part, part_lse = self._attend_long(number, run, query, k_pages, v_pages, scale)
                out[run.start : run.stop] = part
                lse[run.start : run.stop] = part_lse
        if self.unseeing is not None:
            out.index_fill_(0, self.unseeing, 0.0)
            lse.index_fill_(0, self.unseeing, _NEVER)
        return out, lse

    def _attend_short(
        self, query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, heads, dim = query.shape
        kv_heads = k_pages.shape[1]
        group, width, total = heads // kv_heads, self.width, self.pages
        dtype = compute_dtype(query)
        k, v = (pool[:total] if self.dense else pool.index_select(0, self._gather) for pool in (k_pages, v_pages))
        k, v = k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)  # [pages * kv_heads, page_size, dim]
        rows = query.to(dtype).index_select(0, self._rows)
        if width > 1:
            rows = (
                rows.view(-1, width, kv_heads, group * dim).transpose(1, 2).reshape(-1, kv_heads * width * group * dim)
            )
            rows = rows.index_select(0, self._owner)
        rows = rows.view(total * kv_heads, width * group, dim)

        mask = self._mask(kv_heads, group)
        if dtype == torch.float32:
            scores = torch.baddbmm(mask, rows, k.transpose(1, 2), alpha=scale)
        else:
            scores = torch.bmm(rows, k.transpose(1, 2)).float().mul_(scale).add_(mask)
        # scores: [pages * kv_heads, width * group, page_size]. The largest weight is 1 / sum exp(score - top), so the
        # log-sum-exp costs no second exponential (which is slow on CPU where scores are masked).
        weights = scores.softmax(-1)
        lse = (scores.amax(-1) - weights.amax(-1).log_()).view(total, -1)
        out = torch.bmm(weights.to(dtype), v).float().view(total, -1, dim)
        if not self._in_order:
            out, lse = self._merge_even(out, lse) if self._even else self._merge_uneven(out, lse)
        if width > 1:
            out = out.view(-1, kv_heads, width, group, dim).transpose(1, 2).reshape(-1, heads, dim)
            lse = lse.view(-1, kv_heads, width, group).transpose(1, 2).reshape(-1, heads)
        if self._source is not None:
            out, lse = out.index_select(0, self._source), lse.index_select(0, self._source)
        return out.to(query.dtype), lse

    def _merge_even(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge out [pages, lanes, dim] and lse [pages, lanes] over each request's pages, through the padded table."""
        most = self._table.shape[1]
        entries = self._table.view(-1)
        each = lse.index_select(0, entries).view(self.short, most, -1)
        out = out.index_select(0, entries).view(self.short, most, *out.shape[1:])
        if most == 1:
            return out[:, 0], each[:, 0]
        if self._padding is not None:
            each = each + self._padding
        share = each.softmax(1)
        return out.mul_(share.unsqueeze(-1)).sum(1), each.amax(1) - share.amax(1).log_()

    def _merge_uneven(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same where one long request would make the table mostly padding: sums by owner."""
        peak = lse[self._table].amax(1)
        share = (lse - peak.index_select(0, self._owner)).exp_()
        out = _segment_sum(out.mul_(share.unsqueeze(-1)), self._sink, self.short)
        whole = _segment_sum(share, self._sink, self.short)
        return out.div_(whole.unsqueeze(-1)), whole.log_().add_(peak)

    def _mask(self, kv_heads: int, group: int) -> torch.Tensor:
        """Additive mask [pages * kv_heads, width * group, page_size], made at the first layer and kept."""
        key = (kv_heads, group)
        if key not in self._masks:
            keys = self._first_key[:, None] + torch.arange(self.page_size, device=self.device)
            hidden = keys[:, None, :] >= self._visible.index_select(0, self._owner)[:, :, None]  # [pages, width, page]
            mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, _MASKED)
            shape = (self.pages, kv_heads, self.width, group, self.page_size)
            self._masks[key] = mask[:, None, :, None, :].expand(shape).reshape(-1, self.width * group, self.page_size)
        return self._masks[key]

    def _attend_long(
        self, number: int, run: _Long, query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, heads, dim = query.shape
        kv_heads, dtype, length = k_pages.shape[1], compute_dtype(query), run.stop - run.start
        group = heads // kv_heads
        # [pages, kv_heads, page, dim] -> [kv_heads, keys, dim]
        k, v = (
            pool.index_select(0, run.pages).to(dtype).transpose(0, 1).reshape(kv_heads, -1, dim)
            for pool in (k_pages, v_pages)
        )
        q = query[run.start : run.stop].to(dtype).view(length, kv_heads, group, dim)
        q = q.permute(1, 2, 0, 3).reshape(kv_heads, group * length, dim)
        if number not in self._long_masks:
            hidden = torch.arange(k.shape[1], device=self.device) >= run.visible[:, None]
            mask = torch.zeros(hidden.shape, dtype=torch.float32, device=self.device).masked_fill_(hidden, _MASKED)
            self._long_masks[number] = mask.repeat(group, 1)
        out, lse = _dense_attention(q, k, v, self._long_masks[number], scale)
        out = out.view(kv_heads, group, length, dim).permute(2, 0, 1, 3).reshape(length, heads, dim)
        lse = lse.view(kv_heads, group, length).permute(2, 0, 1).reshape(length, heads)
        return out.to(query.dtype), lse


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    out_*: [T, heads, dim], lse_*: [T, heads] float32. Where both saw nothing, out is 0 and lse -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == _NEVER, 0.0)
    weight_a, weight_b = (lse_a - base).exp(), (lse_b - base).exp()
    out = out_a.float() * weight_a.unsqueeze(-1) + out_b.float() * weight_b.unsqueeze(-1)
    return out.to(out_a.dtype), lse


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """The products' dtype: the query's, or float32 on a CPU without native support for it (20x slower there)."""
    return query.dtype if query.device.type != "cpu" or packing_available(query.dtype) else torch.float32


def _segment_sum(values: torch.Tensor, segment: torch.Tensor, count: int) -> torch.Tensor:
    """Sums of the rows of each segment [count, ...]; rows of segment `count` are dropped."""
    return values.new_zeros(count + 1, *values.shape[1:]).index_add_(0, segment, values)[:count]


def _dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [kv_heads, R, dim], k and v [kv_heads, S, dim], mask [R, S] added -> out as q, lse [kv_heads, R]."""
    if q.device.type == "cpu" and q.dtype == torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q[None], k[None], v[None], 0.0, False, attn_mask=mask[None, None], scale=scale)
        return out[0], lse[0]
    outs, lses = [], []
    for start in range(0, q.shape[1], 1024):  # bounds the scores held at once
        rows = slice(start, start + 1024)
        scores = (q[:, rows] @ k.transpose(1, 2)).float() * scale + mask[rows]
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp().to(q.dtype) @ v)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def _short_limit(lengths: np.ndarray, pages: np.ndarray) -> int:
    """The longest run still processed page by page: all short runs are padded to the longest of them.

    Costs in units of one page's scores for one query, from timings on CPU: a page costs 1 + 0.3 a query row of padding,
    a run processed alone a constant of 10 and, a page, 2.2 + 0.3 a row.
    """
    best, limit = float("inf"), 0
    for candidate in (0, *np.unique(lengths[lengths <= 16]).tolist()):
        inside = lengths <= candidate
        alone = (10 + pages * (2.2 + 0.3 * lengths))[~inside].sum()
        cost = float(alone + pages[inside].sum() * (1 + 0.3 * candidate))
        if cost < best:
            best, limit = cost, candidate
    return limit


def _host(array: np.ndarray | torch.Tensor) -> np.ndarray:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
