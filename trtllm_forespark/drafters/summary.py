"""LongSpark's global summary: attention of frozen queries over a growing prefix, kept as values and log-normalisers."""

from __future__ import annotations

import torch

#: Rows up to which the new tokens of several requests are merged in one padded product.
_FEW = 16


def partial_summary(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of frozen queries over sets of rows, with its log-normaliser (LongSpark eq. 10).

    queries [heads, R, d]; keys, values [m, kv_heads, T, d] of m requests; seen [m, T], False for padding. Returns
    values [m, heads, R, d] and log-normalisers [m, heads, R], float32. A request that sees nothing gets 0 and -inf.
    """
    heads, rows, dim = queries.shape
    m, kv_heads = keys.shape[:2]
    grouped = queries.float().view(kv_heads, -1, dim)
    scores = torch.matmul(grouped, keys.float().transpose(-1, -2)) * dim**-0.5  # [m, kv_heads, shared * R, T]
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    log = scores.logsumexp(-1)
    weights = torch.exp(scores - log.masked_fill(log == -torch.inf, 0.0).unsqueeze(-1))
    value = torch.matmul(weights, values.float())
    return value.view(m, heads, rows, dim), log.view(m, heads, rows)


def merge(
    value: torch.Tensor, log: torch.Tensor, new_value: torch.Tensor, new_log: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets from that over each (eq. 11); nothing new leaves all as it is.

    value [..., R, d], log [..., R].
    """
    most = torch.maximum(log, new_log)
    most = most.masked_fill(most == -torch.inf, 0.0)
    old_weight, new_weight = torch.exp(log - most), torch.exp(new_log - most)
    total = old_weight + new_weight
    some = total.clamp(min=torch.finfo(total.dtype).tiny)
    merged = value * (old_weight / some).unsqueeze(-1) + new_value * (new_weight / some).unsqueeze(-1)
    return merged, most + total.log()


class SummaryState:
    """The summaries of all seats: value [layers, seats, heads, R, d] and log [layers, seats, heads, R], float32.

    Its size a seat does not depend on the prefix. Rows enter once, in any chunks; rejected tokens must never.
    """

    def __init__(self, queries: torch.Tensor, seats: int) -> None:
        """queries [layers, heads, R, d], frozen."""
        layers, heads, rows, dim = queries.shape
        self.queries = queries.float()
        self.value = torch.zeros(layers, seats, heads, rows, dim, device=queries.device)
        self.log = torch.full((layers, seats, heads, rows), -torch.inf, device=queries.device)

    @property
    def bytes_a_seat(self) -> int:
        seats = self.value.shape[1]
        return (self.value.numel() + self.log.numel()) * 4 // seats

    def reset(self, seat: int) -> None:
        """Nothing seen."""
        self.value[:, seat] = 0.0
        self.log[:, seat] = -torch.inf

    def absorb(
        self, layer: int, seats: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Merge new rows: seats [m], all different; keys, values [T, kv_heads, d] packed, counts [m] rows of each."""
        starts = torch.cumsum(counts, 0) - counts
        few = counts <= _FEW
        if bool(few.any()):
            who, width = few.nonzero()[:, 0], int(counts[few].max())
            column = torch.arange(width, device=keys.device)
            seen = column < counts[who, None]
            # Padding repeats a request's own last row: what is not finite there stays its own.
            rows = starts[who, None] + torch.minimum(column, counts[who, None] - 1)
            self._merge(layer, seats[who], keys[rows].transpose(1, 2), values[rows].transpose(1, 2), seen)
        for i in (~few).nonzero()[:, 0].tolist():
            own = slice(int(starts[i]), int(starts[i] + counts[i]))
            k, v = keys[None, own].transpose(1, 2), values[None, own].transpose(1, 2)
            self._merge(layer, seats[i : i + 1], k, v, None)

    def _merge(
        self, layer: int, seats: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None
    ) -> None:
        new = partial_summary(self.queries[layer], keys, values, seen)
        value, log = merge(self.value[layer, seats], self.log[layer, seats], *new)
        self.value[layer].index_copy_(0, seats, value)
        self.log[layer].index_copy_(0, seats, log)
