"""Which tokens a step computes: admission, preemption, chunked prefill and the packed order of a step's requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trtllm_forespark.runtime.kv_cache import KVCacheManager
from trtllm_forespark.runtime.request import Request, Status


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, start + count) of a request's known tokens; ``last`` where its next token is drawn from it."""

    request: Request
    start: int
    count: int
    last: bool


@dataclass(frozen=True)
class Preempted:
    """What a preempted request held: its key of before, its seat, and pages whose values no logits have vouched for
    (it was in the middle of its prompt), to be wiped before they serve another."""

    key: tuple[object, int]
    seat: int
    unproven: list[int]


@dataclass(frozen=True)
class StepWork:
    """One step: requests that decode, then prompt chunks (those that end in a drawn token first).

    preempted: who gave up seat and pages for it.
    """

    decoding: list[Request]
    chunks: list[PrefillChunk]
    preempted: list[Preempted] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """N: non-speculative tokens of the step, one anchor a decoding request plus the prefill tokens."""
        return len(self.decoding) + sum(chunk.count for chunk in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.chunks)


def known_tokens(request: Request) -> list[int]:
    return request.prompt_ids + request.output_ids


def prefill_goal(request: Request) -> int:
    """Tokens to compute before decoding: the prompt, or all but the newest token of a request that goes on."""
    return request.num_tokens - 1 if request.output_ids else request.num_tokens


@dataclass
class BatchScheduler:
    """The highest priority first, within one first come, first served, under three limits: requests, tokens a step, and
    pages.

    A request is admitted on what it needs now: the pages of its prompt (and of what it had written before it was
    preempted), and a page to decode into for it and for each that runs and may still grow. It is never overtaken by
    one of lower rank that needs less, and takes nothing from those that run already. Where a page for a next token is
    missing, the last of the running gives up its seat and its pages and goes back to its place in the queue; the first
    never does, so some request always ends. Drafts make nobody give up anything: `draft_room` says how long they may
    be.

    max_num_tokens bounds N + B of a step. seats: free rows of the drafter's state, one for every running request.
    waiting and running are in order of `rank`.
    """

    cache: KVCacheManager
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    seats: dict[Request, int] = field(default_factory=dict)
    _free_seats: list[int] = field(default_factory=list)
    _arrivals: dict[Request, int] = field(default_factory=dict)
    _arrived: int = 0

    def __post_init__(self) -> None:
        if self.max_num_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_tokens {self.max_num_tokens} is below max_batch_size {self.max_batch_size}: a step could not "
                "hold one token of every request; raise it or lower max_batch_size"
            )
        self._free_seats = list(range(self.max_batch_size))[::-1]

    def pages_needed(self, request: Request) -> int:
        """Pages of the longest this request can become."""
        longest = request.num_tokens + request.tokens_left(self.max_seq_len)
        return self.cache.pages_for(longest)

    def rank(self, request: Request) -> tuple[float, int]:
        """Who goes first: the lowest of (-priority, arrival)."""
        return (-request.priority, self._arrivals[request])

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._arrivals[request] = self._arrived
        self._arrived += 1
        insort(self.waiting, request, key=self.rank)

    def next_step(self, decode: bool = True) -> StepWork:
        """Decoding requests always run; what is left of the token limit goes to prompts, by rank.

        Every page that a step's N tokens need is reserved here.
        """
        preempted = self._reserve_anchors() if decode else []
        if not preempted:
            self._admit()
        decoding = [r for r in self.running if r.status is Status.DECODE] if decode else []
        room = self.max_num_tokens - len(decoding)
        chunks = []
        for request in self.running:
            if request.status is not Status.PREFILL or room <= 0:
                continue
            goal = prefill_goal(request)
            count = min(room, goal - request.num_computed_tokens)
            ends = request.num_computed_tokens + count == goal
            chunks.append(PrefillChunk(request, request.num_computed_tokens, count, ends and not request.output_ids))
            room -= count
        chunks.sort(key=lambda chunk: not chunk.last)
        return StepWork(decoding, chunks, preempted)

    def draft_room(self, decoding: Sequence[Request], most: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[n], draft lengths up to `most` [n] that free pages hold, those of the first requests first.

        By lengths alone, known before anything is drafted (docs/lossless.md, rule 1). Reserves nothing.
        """
        room, free = most.copy(), self.cache.free_pages
        for i, request in enumerate(decoding):
            held = self.cache.pages_for(request.num_computed_tokens + 1)
            wanted = self.cache.pages_for(request.num_computed_tokens + 1 + int(most[i])) - held
            given = min(wanted, free)
            free -= given
            if given < wanted:
                room[i] = (held + given) * self.cache.page_size - request.num_computed_tokens - 1
        return room

    def preempt(self, request: Request) -> Preempted:
        """A running request goes back to its place in the queue, without seat and pages, with its output."""
        unproven = self.unproven_pages(request)
        gone = Preempted(request.key, self.seats[request], unproven)
        self._leave(request)
        request.preempt()
        insort(self.waiting, request, key=self.rank)
        return gone

    def unproven_pages(self, request: Request) -> list[int]:
        """Pages of a request in the middle of its prompt: nobody has seen yet whether its values are finite."""
        begun = request.status is Status.PREFILL and request.num_computed_tokens > 0
        return self.cache.pages(request.id) if begun else []

    def release(self, request: Request) -> None:
        """Give back everything a request holds; it may be waiting or running."""
        if request in self.seats:
            self._leave(request)
        else:
            self.waiting.remove(request)
        del self._arrivals[request]

    def check(self) -> None:
        """Integrity when idle or at any step's end: pages, seats and queues add up. Raises AssertionError."""
        self.cache.check()
        held = sorted(self.seats.values())
        if sorted(held + self._free_seats) != list(range(self.max_batch_size)):
            raise AssertionError(f"seats {held} held, {self._free_seats} free, of {self.max_batch_size}")
        if set(self.running) != set(self.seats) or len(self.running) != len(self.seats):
            raise AssertionError("a request runs without a seat or holds one without running")
        if len(self.cache) != len(self.running) or any(r.id not in self.cache for r in self.running):
            raise AssertionError(f"{len(self.cache)} requests hold pages, {len(self.running)} run")
        if set(self._arrivals) != {*self.waiting, *self.running} or set(self.waiting) & set(self.running):
            raise AssertionError("a request is in no queue or in two")
        for queue in (self.waiting, self.running):
            if [*map(self.rank, queue)] != sorted(map(self.rank, queue)):
                raise AssertionError("a queue is out of order")
        for request in self.running:
            if request.num_computed_tokens > self.cache.num_tokens(request.id):
                raise AssertionError(f"request {request.id!r} computed more tokens than it holds pages for")

    # Small parts -------------------------------------------------------------------------------------------------

    def _reserve_anchors(self) -> list[Preempted]:
        """A page for the next token of all that decode; who is preempted for it."""
        preempted = []
        at = 0
        while at < len(self.running):
            request = self.running[at]
            if request.status is Status.DECODE and not self.cache.reserve(request.id, request.num_computed_tokens + 1):
                preempted.append(self.preempt(self.running[-1]))  # itself, where it is the last
            else:
                at += 1
        return preempted

    def _admit(self) -> None:
        spare = self.cache.free_pages - sum(self._to_grow(r, len(self.cache.pages(r.id))) for r in self.running)
        while self.waiting and self._free_seats:
            request = self.waiting[0]
            goal = prefill_goal(request)
            now = self.cache.pages_for(goal)
            need = now + self._to_grow(request, now)
            if need > spare:
                return
            spare -= need
            del self.waiting[0]
            self.cache.reserve(request.id, goal)
            self.seats[request] = self._free_seats.pop()
            request.status = Status.PREFILL
            insort(self.running, request, key=self.rank)

    def _to_grow(self, request: Request, held: int) -> int:
        """1 for a request that may come to need more pages than it holds, else 0."""
        return int(held < self.pages_needed(request))

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._free_seats.append(self.seats.pop(request))
        self.cache.free(request.id)
