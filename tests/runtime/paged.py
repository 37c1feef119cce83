"""The Markov world with a memory: what a request goes by stands in its pages, and its drafter's context in its seat.

The next token depends on every token before it, read through the page table. A page that was lost, shared, not wiped,
or not computed again after a preemption shows in the text or raises here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trtllm_forespark.drafters.base import Proposer
from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.runtime.executor import Executor, ExecutorConfig
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.policies import make_policy
from trtllm_forespark.wcs.stages import Draft, Estimate

from .chain import TARGET, VOCAB
from .markov import BLOCK, TABLE, MarkovBackend

#: A prompt [POISON, k, ...] makes every value from position k + 4 on NaN.
POISON = VOCAB - 1


class PagedMarkov(MarkovBackend):
    """See the module. Slots hold token + 1; 0 is a slot that nobody wrote."""

    def __init__(self, num_pages: int = 4096, seats: int = 64) -> None:
        super().__init__()
        self.num_pages = num_pages
        self.slots = np.zeros((num_pages, self.page_size))
        self.context: list[int] = [0] * seats
        self.last: TargetBatch | None = None

    def forward(self, batch: TargetBatch, capture: bool = True) -> torch.Tensor:
        self.passes.append((len(batch.seats), len(batch.token_ids)))
        self.last = batch
        rows = np.repeat(np.arange(len(batch.seats)), np.diff(batch.cu_lengths))
        for token, position, row in zip(batch.token_ids, batch.positions, rows, strict=True):
            page, offset = divmod(position, self.page_size)
            self.slots[batch.page_table[row, page], offset] = token + 1
            first = self.slots[batch.page_table[row, 0]]
            if first[0] == POISON + 1 and position >= first[1] + 3:
                self.slots[batch.page_table[row, page], offset] = np.nan
        made = [self.logits(batch, row, rows[row]) for row in batch.logits_at]
        return torch.stack(made) if made else torch.zeros(0, VOCAB)

    def logits(self, batch: TargetBatch, row: int, request: int) -> torch.Tensor:
        position = batch.positions[row]
        pages = batch.page_table[request, : position // self.page_size + 1]
        values = self.slots[pages].reshape(-1)
        read = np.arange(len(values)) <= position
        if (values[read] == 0).any():
            raise AssertionError(f"position {position} reads a slot that nobody wrote")
        # Masked values take part with weight 0, as in attention: NaN in them shows.
        mark = float((values * read * (np.arange(len(values)) + 1)).sum())
        if np.isnan(mark):
            return torch.full((VOCAB,), torch.nan)
        return TARGET[(int(values[position]) - 1 + (int(mark) % 5 == 0)) % VOCAB]

    def commit(self, kept: Sequence[int]) -> None:
        assert self.last is not None
        for seat, start, count in zip(self.last.seats, self.last.cu_lengths, kept, strict=False):
            if self.last.positions[start] != self.context[seat]:
                raise AssertionError(
                    f"seat {seat} has {self.context[seat]} tokens, {self.last.positions[start]} follows"
                )
            self.context[seat] += count
        self.last = None

    def release(self, seat: int) -> None:
        super().release(seat)
        self.context[seat] = 0

    def clear(self, pages: Sequence[int]) -> None:
        super().clear(pages)
        self.slots[list(pages)] = 0

    def estimate(self, batch: DraftBatch) -> Estimate:
        self.check(batch)
        return super().estimate(batch)

    def draft(self, batch: DraftBatch, lengths: Sequence[int], propose: Proposer) -> Draft:
        self.check(batch)
        return super().draft(batch, lengths, propose)

    def check(self, batch: DraftBatch) -> None:
        """The drafter's context of each request is all its tokens but the anchor."""
        assert [self.context[seat] for seat in batch.seats] == list(batch.positions)


def paged_executor(
    policy: str, num_pages: int = 4096, batch: int = 8, tokens: int = 64, adapt: bool = False, **settings: object
) -> Executor:
    controller = WcsController(make_policy(policy), TABLE, BLOCK, adapt=adapt)
    config = ExecutorConfig(batch, tokens, 3, **settings)  # type: ignore[arg-type]
    return Executor(PagedMarkov(num_pages, batch), controller, config)


def request(name: object, prompt: Sequence[int] = (0,), **params: object) -> Request:
    own = {k: params.pop(k) for k in ("callback", "priority", "speculation") if k in params}
    return Request(name, list(prompt), SamplingParams(**params), **own)  # type: ignore[arg-type]


def run(executor: Executor, requests: Sequence[Request]) -> list[list[int]]:
    """Submit, run to the end with a check after every step, and see that nothing is left."""
    for r in requests:
        executor.submit(r)
    for _ in range(5000):
        if executor.idle:
            break
        executor.step()
        executor.check()
    assert_empty(executor)
    return [r.output_ids for r in requests]


def assert_empty(executor: Executor) -> None:
    executor.check()
    scheduler, backend = executor.scheduler, executor.backend
    assert executor.idle and not scheduler.running and not scheduler.waiting and not scheduler.seats
    assert scheduler.cache.used_pages == 0 and len(scheduler.cache) == 0 and not scheduler._arrivals
    assert not executor.controller.known
    assert isinstance(backend, PagedMarkov) and not any(backend.context)
    assert not np.isnan(backend.slots).any(), "NaN is wiped before its pages are free"
