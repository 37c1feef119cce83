"""Measuring this machine: drafting and verification latencies (ForeSpark appendix B)."""

from __future__ import annotations

import time

import numpy as np
import torch

from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.runtime.backends.torch_backend import TorchBackend
from trtllm_forespark.runtime.request import Request
from trtllm_forespark.runtime.sampling import Proposing, SamplingRows


class Probe:
    """Passes of chosen shapes over a backend whose requests all have ``context`` tokens; times are seconds.

    The cache holds whatever was there (zeros at the start): latency does not depend on values.
    """

    def __init__(self, backend: TorchBackend, context: int = 160, max_requests: int = 64) -> None:
        self.backend, self.context = backend, context
        assert backend.spec is not None
        longest = context + backend.spec.block + 1
        if longest > backend.max_seq_len:
            raise ValueError(f"a context of {context} tokens leaves no room to decode within {backend.max_seq_len}")
        page = backend.page_size
        self.pages = -(-longest // page)
        self.max_requests = min(max_requests, backend.num_pages // self.pages)
        if self.max_requests < 1:
            raise ValueError(f"the KV cache of {backend.num_pages} pages cannot hold one request of {context} tokens")
        self.rng = np.random.default_rng(0)
        self.generator = torch.Generator(device=backend.device)

    def _tables(self, n: int) -> np.ndarray:
        return np.arange(n * self.pages).reshape(n, self.pages)

    def verify(self, requests: int, tokens: int) -> float:
        """One target pass over ``tokens`` tokens of ``requests`` requests as a step runs it, with commit."""
        counts = [tokens // requests + (i < tokens % requests) for i in range(requests)]
        cu = np.concatenate([[0], np.cumsum(counts)])
        positions = np.concatenate([self.context + np.arange(c) for c in counts])
        ids = self.rng.integers(0, self.backend.vocab_size, tokens)
        batch = TargetBatch(
            ids.tolist(),
            positions.tolist(),
            cu.tolist(),
            self._tables(requests),
            list(range(tokens)),
            list(range(requests)),
        )
        self._wait()
        started = time.perf_counter()
        self.backend.forward(batch).max(-1).indices.tolist()  # as verification does
        self.backend.commit([1 + (c - 1) // 2 for c in counts])
        self._wait()
        spent = time.perf_counter() - started
        for seat in range(requests):
            self.backend.release(seat)
        return spent

    def draft(self, requests: int, tokens: int) -> float:
        """What drafting adds to a step: the estimate, and one draft pass of ``requests`` requests whose blocks hold
        ``tokens`` slots, anchors included."""
        drafted = tokens - requests
        lengths = [drafted // requests + (i < drafted % requests) for i in range(requests)]
        ids = self.rng.integers(0, self.backend.vocab_size, requests)
        batch = DraftBatch(ids.tolist(), [self.context] * requests, self._tables(requests), list(range(requests)))
        # Each has the tokens of one step waiting for the drafter's context, as it would.
        cu = list(range(0, 2 * requests + 1, 2))
        newest = [self.context - 2 + i % 2 for i in range(2 * requests)]
        seats = list(range(requests))
        for seat in seats:
            self.backend.release(seat)
        self.backend.forward(TargetBatch([0] * (2 * requests), newest, cu, self._tables(requests), [], seats))
        self.backend.commit([2] * requests)
        asking = [Request(id=i, prompt_ids=[0]) for i in range(requests)]
        self._wait()
        started = time.perf_counter()
        self.backend.estimate(batch)
        self.backend.draft(batch, lengths, Proposing(SamplingRows.of(asking, self.backend.device), self.generator))
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)
