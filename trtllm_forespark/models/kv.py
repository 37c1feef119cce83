"""Storage of keys and values in pages. It only stores: who owns which page is decided in `runtime/kv_cache.py`."""

from __future__ import annotations

import torch


class PagedKV:
    """Keys and values [layers, pages, kv_heads, page_size, 2, head_dim], zero at the start.

    A slot is `page * page_size + offset`. A token's key and value lie together, so that one gather reads both. Drafters
    keep their context keys and values in one of these too, under the same page tables as the target's.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
        if min(shape) <= 0:
            raise ValueError(f"PagedKV: every size must be positive, found layers, pages, heads, page, dim = {shape}")
        self.num_layers, self.num_pages, self.num_kv_heads, self.page_size, self.head_dim = shape
        # Zeros, not empty: masked keys are multiplied by weight 0, and 0 * NaN would be NaN.
        self._data = torch.zeros(*shape[:4], 2, head_dim, dtype=dtype, device=device)
        self._head_rows = page_size * torch.arange(num_kv_heads, device=device)
        self._flat = [layer.view(-1, 2 * head_dim) for layer in self._data]

    @property
    def k(self) -> torch.Tensor:
        """Keys [layers, pages, kv_heads, page_size, head_dim], a view."""
        return self._data[..., 0, :]

    @property
    def v(self) -> torch.Tensor:
        """Values, as `k`."""
        return self._data[..., 1, :]

    @property
    def dtype(self) -> torch.dtype:
        return self._data.dtype

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def bytes(self) -> int:
        """Bytes of all pages, keys and values, over all layers."""
        return self._data.numel() * self._data.element_size()

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [T * kv_heads] of a layer's flat storage that `slots` [T] occupy, slot by slot.

        The same for every layer: compute it once a step and pass it to `write_rows`.
        """
        return self._rows(slots).reshape(-1)

    def rows_by_head(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [m * kv_heads * S] of slots [m, S], head by head within each of the m (for `gather`)."""
        return self._rows(slots).transpose(-1, -2).reshape(-1)

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        # (page * heads + head) * page_size + offset, where a slot is page * page_size + offset
        page = slots // self.page_size
        first = torch.add(slots, page, alpha=(self.num_kv_heads - 1) * self.page_size)
        return first.unsqueeze(-1) + self._head_rows

    def write_rows(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at `rows` (from `rows()`)."""
        self._flat[layer].index_copy_(0, rows, torch.cat((k, v), -1).view(-1, 2 * self.head_dim))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] of one layer at slots [T] (int64)."""
        self.write_rows(layer, self.rows(slots), k.to(self.dtype), v.to(self.dtype))

    def gather(self, layer: int, rows: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [*shape, head_dim] at `rows`: views of one copy."""
        both = self._flat[layer].index_select(0, rows).view(*shape, 2 * self.head_dim)
        return both[..., : self.head_dim], both[..., self.head_dim :]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, kv_heads, head_dim] at slots [T]."""
        return self.gather(layer, self.rows(slots), (slots.numel(), self.num_kv_heads))

    def clear(self, pages: torch.Tensor) -> None:
        """Zero whole pages [P]. Needed when a request failed with non-finite values, before its pages serve another."""
        self._data[:, pages] = 0
