"""Measuring this machine: drafting and verification latencies (ForeSpark appendix B)."""

from __future__ import annotations

import time

import numpy as np
import torch

from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.runtime.backends.torch_backend import TorchBackend
from trtllm_forespark.runtime.request import Request
from trtllm_forespark.runtime.sampling import Proposing, SamplingRows


def uneven(total: int, requests: int, most: int) -> np.ndarray:
    """Divide ``total`` tokens among requests as a schedule would: from none or few to many, ``most`` at most -> [n].

    The i-th gets about i times as many as the first; then they are shuffled, in the same way every time.
    """
    turn = (np.arange(most) + 1) / (np.arange(requests)[:, None] + 1)
    owner = np.argsort(turn, axis=None, kind="stable")[:total] // most
    return np.random.default_rng(requests).permutation(np.bincount(owner, minlength=requests))


class Probe:
    """Passes of chosen shapes over a backend whose requests have ``context`` tokens on average, half of it to one and a
    half times it; times are seconds. Draft lengths are as `uneven` as schedules are: attention pads them.

    The cache holds whatever was there (zeros at the start): latency does not depend on values.
    """

    def __init__(self, backend: TorchBackend, context: int = 160, max_requests: int = 64) -> None:
        self.backend, self.context = backend, context
        assert backend.spec is not None
        self.block = backend.spec.block
        self.spread = min(context // 2, backend.max_seq_len - self.block - 1 - context)
        if self.spread < 0:
            raise ValueError(f"a context of {context} tokens leaves no room to decode within {backend.max_seq_len}")
        page = backend.page_size
        self.pages = -(-(context + self.spread + self.block + 1) // page)
        self.max_requests = min(max_requests, backend.num_pages // self.pages)
        if self.max_requests < 1:
            raise ValueError(f"the KV cache of {backend.num_pages} pages cannot hold one request of {context} tokens")
        self.rng = np.random.default_rng(0)
        self.generator = torch.Generator(device=backend.device)
        self._last: tuple[str, int] | None = None  # kind and requests of the pass before

    def _tables(self, n: int) -> np.ndarray:
        return np.arange(n * self.pages).reshape(n, self.pages)

    def _contexts(self, n: int) -> np.ndarray:
        ramp = np.linspace(-self.spread, self.spread, n) if n > 1 else np.zeros(1)
        return np.maximum(self.rng.permutation(self.context + ramp.astype(np.int64)), 2)

    def verify(self, requests: int, tokens: int) -> float:
        """One target pass over ``tokens`` tokens of ``requests`` requests as a step runs it, with commit."""
        counts = 1 + uneven(tokens - requests, requests, self.block)
        cu = np.concatenate([[0], np.cumsum(counts)])
        starts = self._contexts(requests)
        positions = np.repeat(starts - cu[:-1], counts) + np.arange(tokens)
        ids = self.rng.integers(0, self.backend.vocab_size, tokens)
        batch = TargetBatch(
            ids.tolist(),
            positions.tolist(),
            cu.tolist(),
            self._tables(requests),
            list(range(tokens)),
            list(range(requests)),
        )
        # As in a run: a step that verifies drafts comes after a draft, one without comes after others without.
        if tokens > requests and self._last != ("draft", requests):
            self.draft(requests, 2 * requests)
        for _ in range(1 if tokens > requests else 3):
            self._wait()
            started = time.perf_counter()
            self.backend.forward(batch).max(-1).indices.tolist()  # as verification does
            self.backend.commit((1 + (counts - 1) // 2).tolist())
            self._wait()
            spent = time.perf_counter() - started
        self._last = "verify", requests
        return spent

    def draft(self, requests: int, tokens: int) -> float:
        """What drafting adds to a step whose estimates are there: one pass of ``requests`` requests whose blocks hold
        ``tokens`` slots, anchors included."""
        lengths = 1 + uneven(tokens - 2 * requests, requests, self.block - 1)
        contexts = self._contexts(requests)
        ids = self.rng.integers(0, self.backend.vocab_size, requests)
        batch = DraftBatch(ids.tolist(), contexts.tolist(), self._tables(requests), list(range(requests)))
        # Each has the tokens of a step waiting for the drafter's context, as it would.
        if self._last != ("verify", requests):
            self.verify(requests, requests)
        asking = [Request(id=i, prompt_ids=[0]) for i in range(requests)]
        propose = Proposing(SamplingRows.of(asking, self.backend.device), self.generator)
        self.backend.estimate(batch)  # paid before it is decided whether to draft
        self._wait()
        started = time.perf_counter()
        self.backend.draft(batch, lengths.tolist(), propose)
        self._wait()
        self._last = "draft", requests
        return time.perf_counter() - started

    def close(self) -> None:
        """Leave nothing of these requests for those that get their seats next."""
        for seat in range(self.max_requests):
            self.backend.release(seat)

    def _wait(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)
