"""Storage of keys and values in pages. It only stores: who owns which page is decided in `runtime/kv_cache.py`."""

from __future__ import annotations

import torch

DEFAULT_PAGE_SIZE = 64  # measured on CPU: 32 doubles the number of small products, 128 wastes half a page a request


class PagedKV:
    """Keys and values [layers, pages, kv_heads, page_size, head_dim], zero at the start.

    A slot is `page * page_size + offset`. Within a page a head's keys lie together, so that a batched product can read
    a whole prefix of the pool without a gather. Drafters keep their context keys and values in one of these too, under
    the same page tables as the target's.
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
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self._k_rows = [layer.view(-1, head_dim) for layer in self.k]
        self._v_rows = [layer.view(-1, head_dim) for layer in self.v]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def bytes(self) -> int:
        """Bytes of all pages, keys and values, over all layers."""
        return 2 * self.k.numel() * self.k.element_size()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values, over all layers."""
        return self.bytes // self.num_pages

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers [T * kv_heads] that `slots` [T] occupy in a layer's storage seen as [-1, head_dim].

        The same for every layer: compute it once a step and pass it to `write_rows`.
        """
        page, offset = slots // self.page_size, slots % self.page_size
        heads = torch.arange(self.num_kv_heads, device=slots.device)
        return ((page[:, None] * self.num_kv_heads + heads) * self.page_size + offset[:, None]).reshape(-1)

    def write_rows(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at `rows` (from `rows()`)."""
        self._k_rows[layer].index_copy_(0, rows, k.reshape(-1, self.head_dim))
        self._v_rows[layer].index_copy_(0, rows, v.reshape(-1, self.head_dim))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] of one layer at slots [T] (int64)."""
        self.write_rows(layer, self.rows(slots), k.to(self.dtype), v.to(self.dtype))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, kv_heads, head_dim] at slots [T] (copies)."""
        rows = self.rows(slots)
        shape = (slots.numel(), self.num_kv_heads, self.head_dim)
        return (
            self._k_rows[layer].index_select(0, rows).view(shape),
            self._v_rows[layer].index_select(0, rows).view(shape),
        )

    def clear(self, pages: torch.Tensor) -> None:
        """Zero whole pages [P]. Needed when a request failed with non-finite values, before its pages serve another."""
        self.k[:, pages] = 0
        self.v[:, pages] = 0
