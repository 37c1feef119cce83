"""Which tokens a step computes: admission, chunked prefill and the packed order of a step's requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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
class StepWork:
    """One step: requests that decode, then prompt chunks (those that end in a drawn token first)."""

    decoding: list[Request]
    chunks: list[PrefillChunk]

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
    """First come, first served, under three limits: requests, tokens a step, and pages.

    A request is admitted when the pages of its whole possible length are there, so a running request never runs short.
    max_num_tokens bounds N + B of a step. seats: free rows of the drafter's state, one for every running request.
    """

    cache: KVCacheManager
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    seats: dict[Request, int] = field(default_factory=dict)
    _free_seats: list[int] = field(default_factory=list)
    _promised: dict[Request, int] = field(default_factory=dict)

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

    def next_step(self, decode: bool = True) -> StepWork:
        """Decoding requests always run; what is left of the token limit goes to prompts, oldest first."""
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
        return StepWork(decoding, chunks)

    def _admit(self) -> None:
        while self.waiting and self._free_seats:
            need = self.pages_needed(self.waiting[0])
            if need > self.cache.num_pages - sum(self._promised.values()):
                return
            request = self.waiting.popleft()
            self._promised[request] = need
            self.seats[request] = self._free_seats.pop()
            request.status = Status.PREFILL
            self.running.append(request)

    def release(self, request: Request) -> None:
        """Give back everything a request holds; it may be waiting or running."""
        if request in self.seats:
            self.running.remove(request)
            self._free_seats.append(self.seats.pop(request))
            del self._promised[request]
            if request.id in self.cache:
                self.cache.free(request.id)
        else:
            self.waiting.remove(request)

    def check(self) -> None:
        """Integrity when idle or at any step's end: pages, seats and promises add up. Raises AssertionError."""
        self.cache.check()
        held = set(self.seats.values())
        if len(held) + len(self._free_seats) != self.max_batch_size or held & set(self._free_seats):
            raise AssertionError(f"seats: {len(held)} held and {len(self._free_seats)} free of {self.max_batch_size}")
        if set(self._promised) != set(self.seats) or len(self.running) != len(self.seats):
            raise AssertionError("a request runs without a seat or holds one without running")
