"""No page is lost, shared or freed twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trtllm_forespark.runtime.kv_cache import KVCacheManager


def test_the_lowest_pages_are_given_first() -> None:
    cache = KVCacheManager(6, 4)
    assert cache.reserve("a", 5) and cache.reserve("b", 4)
    assert (cache.pages("a"), cache.pages("b")) == ([0, 1], [2])
    cache.free("a")
    assert cache.reserve("b", 9)
    assert cache.pages("b") == [2, 0, 1]
    assert cache.page_table(["b"]).tolist() == [[2, 0, 1]]


def test_a_reservation_is_all_or_nothing() -> None:
    cache = KVCacheManager(3, 4, bytes_per_page=10)
    assert cache.reserve("a", 8)
    assert cache.pages_short("b", 8) == 1
    assert not cache.reserve("b", 8) and "b" not in cache
    assert not cache.reserve("a", 16) and cache.pages("a") == [0, 1]
    assert (cache.free_pages, cache.used_bytes) == (1, 20)


def test_what_was_not_accepted_goes_back() -> None:
    cache = KVCacheManager(8, 4)
    cache.reserve("a", 17)
    assert cache.truncate("a", 8) == 3
    assert cache.pages("a") == [0, 1] and cache.num_tokens("a") == 8
    with pytest.raises(ValueError, match="holds 8 tokens"):
        cache.truncate("a", 9)


def test_an_account_is_closed_once() -> None:
    cache = KVCacheManager(2, 4)
    cache.reserve("a", 1)
    assert cache.free("a") == 1
    for again in (cache.free, cache.pages):
        with pytest.raises(KeyError, match="freed before"):
            again("a")


def test_the_table_is_padded() -> None:
    cache = KVCacheManager(5, 2)
    cache.reserve("a", 3)
    cache.reserve("b", 0)
    assert cache.page_table(["a", "b"]).tolist() == [[0, 1], [-1, -1]]
    assert cache.page_table([]).shape == (0, 0)


def test_check_finds_what_is_wrong() -> None:
    cache = KVCacheManager(4, 2)
    cache.reserve("a", 3)
    cache.check()
    cache._free.append(0)
    with pytest.raises(RuntimeError, match="owned twice"):
        cache.check()


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (4, 4, -1)])
def test_an_impossible_cache_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        KVCacheManager(*sizes)


class Cache(RuleBasedStateMachine):
    """Any order of reserving, truncating and freeing, against a dictionary of token counts."""

    requests = st.integers(0, 4)

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.cache = KVCacheManager(num_pages, page_size)
        self.tokens: dict[int, int] = {}

    @rule(request=requests, num_tokens=st.integers(0, 40))
    def reserve(self, request: int, num_tokens: int) -> None:
        before = dict(self.tokens)
        size = self.cache.page_size
        wanted = {**before, request: max(num_tokens, before.get(request, 0))}
        fits = sum(-(-t // size) for t in wanted.values()) <= self.cache.num_pages
        assert self.cache.reserve(request, num_tokens) is fits
        self.tokens = wanted if fits else before

    @rule(request=requests, share=st.floats(0, 1))
    def truncate(self, request: int, share: float) -> None:
        if request in self.tokens:
            kept = int(self.tokens[request] * share)
            before = self.cache.pages(request)
            self.cache.truncate(request, kept)
            assert self.cache.pages(request) == before[: len(self.cache.pages(request))]
            self.tokens[request] = kept

    @rule(request=requests)
    def free(self, request: int) -> None:
        if request in self.tokens:
            self.cache.free(request)
            del self.tokens[request]
        else:
            with pytest.raises(KeyError):
                self.cache.free(request)

    @invariant()
    def is_exact(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert len(self.cache) == len(self.tokens)
            used = sum(self.cache.pages_for(t) for t in self.tokens.values())
            assert (self.cache.used_pages, self.cache.free_pages) == (used, self.cache.num_pages - used)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
