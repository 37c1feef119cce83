"""Attention over paged keys and values for a packed batch: planned once a step, run once a layer.

Requests are put into a few groups of similar size. A group's keys and values are gathered from their pages in one
operation, its queries are padded to the longest run, and torch's fused attention does the rest. Measured on CPU this
beats reading the pages in place, which needs some twenty small operators a layer to merge what the pages give.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .kv import PagedKV
from .linear import packing_available

_MASKED = -1e30  # finite: a padded query that sees nothing must not give NaN
# Costs in units of gathering one key (about 0.13 us): a call, and scoring a key for one query. Measured on CPU.
_CALL, _SCORE = 1000, 0.14


@dataclass
class _Group:
    """m requests attended in one call, padded to `width` queries and `keys` keys each.

    queries: [m * width] token rows, None where they are all tokens in order. real: rows of the padded result that
    belong to a token, None where all do. targets: the token rows they go to, None where those are all in order.
    slots: [m, keys] where the keys lie. hidden: [m, width, keys] keys a query must not see.
    """

    m: int
    width: int
    keys: int
    queries: torch.Tensor | None
    real: torch.Tensor | None
    targets: torch.Tensor | None
    slots: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor | None = None  # made at the first layer, as the mask
    mask: torch.Tensor | None = None


class AttentionPlan:
    """Who sees which keys, for one packed batch; for all layers of one model in a step.

    cu_lengths: [n + 1] query tokens a request, cumulated. visible: [T] how many key positions of its request, from
    position 0, a query token sees (position + 1 for a causal target, the context length for a drafter, 0 for none).
    page_table: [n, max_pages] page ids in order of position; entries past a request's need are not read. own: [T] slots
    of the tokens' own keys, which their request's tokens see besides (with causal: those up to themselves); None where
    a token's key lies in its pages. All on the host.
    """

    def __init__(
        self,
        cu_lengths: np.ndarray,
        visible: np.ndarray,
        page_table: np.ndarray,
        page_size: int,
        device: torch.device | str = "cpu",
        own: np.ndarray | None = None,
        causal: bool = False,
    ) -> None:
        cu, seen, table = cu_lengths, visible, page_table
        self.page_size, self.device = page_size, torch.device(device)
        self.tokens = int(cu[-1])
        if seen.shape != (self.tokens,):
            raise ValueError(f"AttentionPlan: visible has shape {seen.shape}, cu_lengths says {self.tokens} tokens")
        lengths = np.diff(cu)
        longest = np.zeros(len(lengths), np.int64)  # keys the most far-sighted query of a request sees
        np.maximum.at(longest, np.repeat(np.arange(len(lengths)), lengths), seen)
        if longest.max(initial=0) > table.shape[1] * page_size:
            raise ValueError(
                f"AttentionPlan: a query sees {longest.max()} keys, the page table holds {table.shape[1] * page_size}"
            )
        active = np.flatnonzero((lengths > 0) & ((longest > 0) | (own is not None)))
        self.groups = [
            self._group(who, cu, seen, table, lengths, longest, own, causal)
            for who in _partition(active, lengths, longest)
        ]
        unseeing = np.flatnonzero(seen == 0) if own is None else np.zeros(0, np.int64)
        self._unseeing = self._to(unseeing) if len(unseeing) else None

    def _group(
        self,
        who: np.ndarray,
        cu: np.ndarray,
        seen: np.ndarray,
        table: np.ndarray,
        lengths: np.ndarray,
        longest: np.ndarray,
        own: np.ndarray | None,
        causal: bool,
    ) -> _Group:
        m, width, keys = len(who), int(lengths[who].max()), int(longest[who].max())
        column = np.arange(width)
        real = column < lengths[who, None]
        rows = cu[who, None] + np.minimum(column, lengths[who, None] - 1)
        # Keys past a request's own last are read from its last slot again and hidden: never another request's values.
        where = np.minimum(np.arange(keys), np.maximum(longest[who, None] - 1, 0))
        slots = table[who[:, None], where // self.page_size] * self.page_size + where % self.page_size
        hidden = np.arange(keys) >= seen[rows][:, :, None]
        if own is not None:
            slots = np.where(longest[who, None] > 0, slots, own[rows][:, :1])
            slots = np.concatenate([slots, own[rows]], 1)
            unseen = np.broadcast_to(~real[:, None, :], (m, width, width))
            if causal:
                unseen = unseen | (column[None, :] > column[:, None])
            hidden = np.concatenate([hidden, unseen], 2)
        flat, targets = real.reshape(-1), rows[real]
        in_order = np.array_equal(rows.reshape(-1), np.arange(self.tokens))
        return _Group(
            m=m,
            width=width,
            keys=slots.shape[1],
            queries=None if in_order else self._to(rows.reshape(-1)),
            real=None if flat.all() else self._to(np.flatnonzero(flat)),
            targets=None if np.array_equal(targets, np.arange(self.tokens)) else self._to(targets),
            slots=self._to(slots),
            hidden=torch.from_numpy(hidden).to(self.device),
        )

    def _to(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    def attend(self, query: torch.Tensor, kv: PagedKV, layer: int, scale: float) -> torch.Tensor:
        """query [T, heads, dim] over what `kv` holds in a layer; scores times `scale` -> [T, heads, dim].

        A token that sees nothing has out 0.
        """
        if len(self.groups) == 1 and self.groups[0].targets is None:
            out = self._attend_group(self.groups[0], query, kv, layer, scale)
        else:
            out = torch.zeros_like(query, memory_format=torch.contiguous_format)
            for group in self.groups:
                assert group.targets is not None  # only a group of all tokens has none
                out.index_copy_(0, group.targets, self._attend_group(group, query, kv, layer, scale))
        return out if self._unseeing is None else out.index_fill_(0, self._unseeing, 0.0)

    def _attend_group(self, group: _Group, query: torch.Tensor, kv: PagedKV, layer: int, scale: float) -> torch.Tensor:
        heads, dim, kv_heads = query.shape[1], query.shape[2], kv.num_kv_heads
        m, width, shared = group.m, group.width, heads // kv_heads
        dtype = compute_dtype(query)
        if group.rows is None or group.mask is None:
            group.rows = kv.rows_by_head(group.slots)
            mask = torch.zeros(group.hidden.shape, dtype=dtype, device=self.device)
            mask = mask.masked_fill_(group.hidden, max(_MASKED, torch.finfo(dtype).min))[:, None, :, None, :]
            group.mask = mask.expand(m, 1, width, shared, group.keys).reshape(m, 1, width * shared, group.keys)
        k, v = kv.gather(layer, group.rows, (m, kv_heads, group.keys))
        q = query if group.queries is None else query.index_select(0, group.queries)
        # The query heads that share a key head lie one after the other in its rows.
        q = q.view(m, width, kv_heads, shared, dim).transpose(1, 2).reshape(m, kv_heads, width * shared, dim)
        out = F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), group.mask, scale=scale)
        out = out.view(m, kv_heads, width, shared, dim).transpose(1, 2).reshape(m * width, heads, dim)
        return (out if group.real is None else out.index_select(0, group.real)).to(query.dtype)


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """The products' dtype: the query's, or float32 on a CPU without native support for it (20x slower there)."""
    return query.dtype if query.device.type != "cpu" or packing_available(query.dtype) else torch.float32


def _partition(active: np.ndarray, lengths: np.ndarray, longest: np.ndarray) -> list[np.ndarray]:
    """Groups of requests: as few calls as possible, unless padding to the group's largest costs more than a call."""
    if len(active) < 2:
        return [active] if len(active) else []
    # Classes of similar requests: keys and queries each within a factor of two. Neighbours join where that is cheaper.
    wide, far = np.frexp(lengths[active] - 1)[1], np.frexp(longest[active])[1]
    groups: list[tuple[np.ndarray, float]] = []
    for kind in np.unique(wide * 64 + far):
        part = active[wide * 64 + far == kind]
        cost = _cost(part, lengths, longest)
        while groups:
            both = np.concatenate([groups[-1][0], part])
            together = _cost(both, lengths, longest)
            if together > groups[-1][1] + cost:
                break
            part, cost = both, together
            groups.pop()
        groups.append((part, cost))
    return [np.sort(who) for who, _ in groups]


def _cost(who: np.ndarray, lengths: np.ndarray, longest: np.ndarray) -> float:
    return float(_CALL + len(who) * longest[who].max() * (1 + _SCORE * lengths[who].max()))
