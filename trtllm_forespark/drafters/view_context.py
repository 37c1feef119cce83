"""A drafter that keeps views of fixed size of the target's state (LongSpark §2.2)."""

from __future__ import annotations

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, Verified
from trtllm_forespark.drafters.layers import Attend
from trtllm_forespark.drafters.longspark import LongSpark
from trtllm_forespark.drafters.packing import Blocks
from trtllm_forespark.drafters.runner import BlockRunner
from trtllm_forespark.drafters.summary import SummaryState
from trtllm_forespark.models.attention import compute_dtype
from trtllm_forespark.models.kv import PagedKV


class ViewAttention:
    """`Attend` while serving: one softmax over [block; recent window of the target's keys; summary] (LongSpark eq. 6).

    m blocks are padded to the longest; the window is read in place from the target's pages.
    """

    def __init__(
        self,
        runner: ViewRunner,
        at: Blocks,
        seats: np.ndarray,
        lengths: np.ndarray,
        page_table: np.ndarray,
    ) -> None:
        """seats, lengths (tokens of context) [m] and page_table [m, P] of the blocks."""
        self.runner = runner
        config, kv = runner.model.config, runner.target_kv
        m, slots = len(at.d), np.bincount(at.block, minlength=len(at.d))
        width = int(slots.max())
        column = np.arange(width)
        real = column < slots[:, None]
        rows = at.starts[:, None] + np.minimum(column, slots[:, None] - 1)
        window = min(config.window, int(lengths.max())) if "window" in config.views else 0
        first = np.maximum(lengths - window, 0)
        where = np.minimum(first[:, None] + np.arange(window), np.maximum(lengths[:, None] - 1, 0))
        slot = page_table[np.arange(m)[:, None], where // kv.page_size] * kv.page_size + where % kv.page_size
        hidden = np.concatenate(
            [
                np.broadcast_to((np.arange(window) >= (lengths - first)[:, None])[:, None], (m, width, window)),
                np.broadcast_to(~real[:, None, :], (m, width, width))
                | (config.causal & (column[None, :] > column[:, None])),
            ],
            2,
        )
        to = runner._to
        self.rows = None if real.all() else to(rows.reshape(-1))
        self.real = None if real.all() else to(np.flatnonzero(real))
        self.window = kv.rows_by_head(to(slot)) if window else None
        self.shape = (m, width, window)
        mask = torch.zeros(hidden.shape, device=runner.device)
        self.mask = mask.masked_fill_(torch.from_numpy(hidden).to(runner.device), -1e30)[:, None, None]
        self.seats = to(seats)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        m, width, window = self.shape
        runner, dtype = self.runner, compute_dtype(query)
        heads, dim, kv_heads = query.shape[1], query.shape[2], key.shape[1]
        shared = heads // kv_heads
        if self.rows is not None:
            query, key, value = (x.index_select(0, self.rows) for x in (query, key, value))
        # The query heads that share a key head lie one after the other: [m, kv_heads, shared * width, d].
        q = query.view(m, width, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).to(dtype)
        q = (q * dim**-0.5).reshape(m, kv_heads, shared * width, dim)
        k, v = (x.view(m, width, kv_heads, dim).transpose(1, 2).to(dtype) for x in (key, value))
        if self.window is not None:
            recent = runner.target_kv.gather(runner.spec.kv_layers[layer], self.window, (m, kv_heads, window))
            k, v = torch.cat([recent[0].to(dtype), k], 2), torch.cat([recent[1].to(dtype), v], 2)
        scores = torch.matmul(q, k.transpose(-1, -2)).float().view(m, kv_heads, shared, width, -1)
        scores = (scores + self.mask).view(m, heads, width, -1)
        if runner.summary is not None:
            queries = runner.summary.queries[layer].to(dtype)
            of_summary = torch.matmul(q.view(m, heads, width, dim), queries.transpose(-1, -2)).float()
            scores = torch.cat([scores, of_summary], -1)
        weights = scores.softmax(-1).to(dtype)
        rest = weights[..., : window + width].reshape(m, kv_heads, shared * width, window + width)
        out = torch.matmul(rest, v).view(m, heads, width, dim)
        if runner.summary is not None:
            values = runner.summary.value[layer].index_select(0, self.seats).to(dtype)
            out = out + torch.matmul(weights[..., window + width :], values)
        out = out.transpose(1, 2).reshape(m * width, heads, dim).to(query.dtype)
        return out if self.real is None else out.index_select(0, self.real)


class ViewRunner(BlockRunner):
    """LongSpark. A seat's state: the boundary state and the summary; the window is the target's own."""

    model: LongSpark

    def begin(self, num_pages: int, seats: int, target_kv: PagedKV | None = None) -> None:
        super().begin(num_pages, seats, target_kv)
        if target_kv is None:
            raise ValueError("this drafter reads the target's keys and values; give target_kv")
        config = self.model.config
        for what, wanted, found in (
            ("key/value heads", config.num_kv_heads, target_kv.num_kv_heads),
            ("head size", config.head_dim, target_kv.head_dim),
        ):
            if wanted != found:
                raise ValueError(f"drafter {self.spec.name} reads {what} of {wanted}, the target has {found}")
        self.target_kv = target_kv
        with_summary = "summary" in config.views
        self.summary = SummaryState(self.model.summary_queries, seats) if with_summary else None

    def append(self, tokens: Verified) -> None:
        order, whose, each, newest = self.by_seat(tokens.seats)
        seats, last = self._to(whose), self._to(newest)
        self.boundary.index_copy_(0, seats, self.model.fuse(tokens.features.index_select(0, last)))
        if self.summary is None:
            return
        beginning = tokens.seats[tokens.positions.cpu().numpy() == 0]
        for seat in beginning.tolist():
            self.summary.reset(seat)
        rows = self.target_kv.rows(tokens.slots.index_select(0, self._to(order)))
        counts = self._to(each)
        shape = (len(order), self.target_kv.num_kv_heads)
        for layer, source in enumerate(self.spec.kv_layers):
            self.summary.absorb(layer, seats, *self.target_kv.gather(source, rows, shape), counts)

    def truncate(self, seat: int, slots: torch.Tensor, length: int) -> None:
        """A sum of exponentials cannot be cut: the summary is made anew from the target's pages."""
        super().truncate(seat, slots, length)
        if self.summary is None:
            return
        self.summary.reset(seat)
        if length:
            rows, count = self.target_kv.rows(slots[:length]), self._to(np.array([length]))
            for layer, source in enumerate(self.spec.kv_layers):
                keys, values = self.target_kv.gather(source, rows, (length, self.target_kv.num_kv_heads))
                self.summary.absorb(layer, self._to(np.array([seat])), keys, values, count)

    def free(self, seat: int) -> None:
        super().free(seat)
        if self.summary is not None:
            self.summary.reset(seat)

    def state_bytes(self, tokens: int) -> int:
        summary = self.summary.bytes_a_seat if self.summary is not None else 0
        return self.model.config.hidden_size * self.boundary.element_size() + summary

    def attention(self, context: DraftContext, at: Blocks, page_table: np.ndarray) -> Attend:
        seats, lengths = (np.asarray(x, np.int64)[at.who] for x in (context.seats, context.positions))
        return ViewAttention(self, at, seats, lengths, page_table[at.who])
