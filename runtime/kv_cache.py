"""Who owns which page of the KV cache. The pages themselves belong to the backend; this is their account."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class _Account:
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class KVCacheManager:
    """Exact accounting of `num_pages` pages of `page_size` tokens each (TensorRT-LLM's "blocks").

    Free pages are given out lowest number first, so that a run repeats and a nearly empty cache stays dense. A
    request's tokens fill its pages in order: token t lives in page t // page_size of its list, slot t % page_size.
    """

    def __init__(self, num_pages: int, page_size: int, bytes_per_page: int = 0) -> None:
        if num_pages < 1 or page_size < 1 or bytes_per_page < 0:
            raise ValueError(
                f"KVCacheManager(num_pages={num_pages}, page_size={page_size}, bytes_per_page={bytes_per_page}): "
                "give at least one page of at least one token"
            )
        self.num_pages, self.page_size, self.bytes_per_page = num_pages, page_size, bytes_per_page
        self._free = list(range(num_pages))
        self._accounts: dict[Hashable, _Account] = {}

    def __contains__(self, request: Hashable) -> bool:
        return request in self._accounts

    def __len__(self) -> int:
        """Requests that hold an account."""
        return len(self._accounts)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def used_bytes(self) -> int:
        return self.used_pages * self.bytes_per_page

    def pages_for(self, num_tokens: int) -> int:
        """Pages that num_tokens tokens take."""
        return -(-num_tokens // self.page_size)

    def pages_short(self, request: Hashable, num_tokens: int) -> int:
        """How many free pages are missing for `reserve(request, num_tokens)`; 0 where it would succeed."""
        account = self._accounts.get(request)
        more = self.pages_for(num_tokens) - (len(account.pages) if account else 0)
        return max(0, more - len(self._free))

    def reserve(self, request: Hashable, num_tokens: int) -> bool:
        """Make room for num_tokens tokens of the request in all, opening its account if it has none.

        All or nothing: where pages are short it changes nothing and returns False. Never gives pages back
        (`truncate` does).
        """
        if num_tokens < 0:
            raise ValueError(f"reserve({request!r}, {num_tokens}): a number of tokens cannot be negative")
        if self.pages_short(request, num_tokens):
            return False
        account = self._accounts.setdefault(request, _Account())
        while len(account.pages) * self.page_size < num_tokens:
            account.pages.append(heapq.heappop(self._free))
        account.num_tokens = max(account.num_tokens, num_tokens)
        return True

    def truncate(self, request: Hashable, num_tokens: int) -> int:
        """Keep the first num_tokens tokens (the accepted ones) and free the pages past them; returns how many."""
        account = self._account(request)
        if not 0 <= num_tokens <= account.num_tokens:
            raise ValueError(f"truncate({request!r}, {num_tokens}): the request holds {account.num_tokens} tokens")
        keep = self.pages_for(num_tokens)
        tail = account.pages[keep:]
        del account.pages[keep:]
        account.num_tokens = num_tokens
        for page in tail:
            heapq.heappush(self._free, page)
        return len(tail)

    def free(self, request: Hashable) -> int:
        """Close the request's account and free its pages; returns how many. A second time is a KeyError (case 19)."""
        freed = self.truncate(request, 0)
        del self._accounts[request]
        return freed

    def num_tokens(self, request: Hashable) -> int:
        return self._account(request).num_tokens

    def pages(self, request: Hashable) -> list[int]:
        """The request's pages in token order (a copy)."""
        return list(self._account(request).pages)

    def page_table(self, requests: Sequence[Hashable]) -> NDArray[np.int32]:
        """[n, most pages of any] int32, one row a request, -1 past its last page."""
        lists = [self._account(r).pages for r in requests]
        table = np.full((len(lists), max(map(len, lists), default=0)), -1, dtype=np.int32)
        for row, pages in zip(table, lists, strict=True):
            row[: len(pages)] = pages
        return table

    def check(self) -> None:
        """Raise RuntimeError unless each page is free or owned, once, and each request has just what it needs."""
        owned = [page for account in self._accounts.values() for page in account.pages]
        if sorted(owned + self._free) != list(range(self.num_pages)):
            raise RuntimeError(f"KV pages lost or owned twice: {sorted(owned)} owned, {sorted(self._free)} free")
        for request, account in self._accounts.items():
            if len(account.pages) != self.pages_for(account.num_tokens):
                raise RuntimeError(
                    f"request {request!r} holds {len(account.pages)} pages for {account.num_tokens} tokens"
                )

    def _account(self, request: Hashable) -> _Account:
        try:
            return self._accounts[request]
        except KeyError:
            raise KeyError(f"request {request!r} holds no KV pages: never reserved, or freed before") from None
