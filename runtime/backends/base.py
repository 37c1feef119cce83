"""What the executor asks of a backend; torch and TensorRT answer the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trtllm_forespark.drafters.base import DrafterSpec, Proposer
    from trtllm_forespark.wcs.stages import Draft, Estimate


@dataclass(frozen=True)
class TargetBatch:
    """One packed target pass over the tokens of several requests, request r in rows cu_lengths[r]:cu_lengths[r + 1].

    token_ids, positions: [T]. page_table: [R, P] pages of each request. logits_at: [m] rows whose logits are wanted.
    seats: [R] where each request's drafter state lives.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    cu_lengths: Sequence[int]
    page_table: np.ndarray
    logits_at: Sequence[int]
    seats: Sequence[int]


@dataclass(frozen=True)
class DraftBatch:
    """n requests that are about to draft: anchors and their positions [n], pages and seats as in `TargetBatch`."""

    anchors: Sequence[int]
    positions: Sequence[int]
    page_table: np.ndarray
    seats: Sequence[int]


class Backend(Protocol):
    """Owns the weights, the KV storage and the drafter's context; knows nothing of requests or policies."""

    spec: DrafterSpec | None
    device: torch.device
    max_seq_len: int
    vocab_size: int
    page_size: int
    num_pages: int

    def forward(self, batch: TargetBatch, capture: bool = True) -> torch.Tensor:
        """Logits [m, V] at ``logits_at``; keys and values of all T tokens go into the cache.

        capture: keep what the drafter reads for `commit`; a policy that never drafts does without.
        """
        ...

    def commit(self, kept: Sequence[int]) -> None:
        """Of the batch just run, keep the first kept[r] tokens of each request r in the drafter's context."""
        ...

    def release(self, seat: int) -> None:
        """The request at ``seat`` ended; its drafter state may go."""
        ...

    def clear(self, pages: Sequence[int]) -> None:
        """Wipe pages that may hold non-finite values, before another request gets them."""
        ...

    def estimate(self, batch: DraftBatch) -> Estimate:
        """Stage 1 for n requests."""
        ...

    def draft(self, batch: DraftBatch, lengths: Sequence[int], propose: Proposer) -> Draft:
        """Stage 3 for n requests."""
        ...
