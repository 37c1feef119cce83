"""Target and drafter on torch: the embedded default on CPU, the same code on CUDA."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, DrafterRunner, DrafterSpec, Proposer, Verified
from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.runner import make_runner
from trtllm_forespark.models.transformer import PackedBatch, PackedTransformer
from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.wcs.stages import Draft, Estimate

_MOST_WAITING = 2048  # committed tokens that wait for the next estimate or draft


@dataclass(frozen=True)
class _LastPass:
    """The rows of the pass that commit refers to: captured features [T, L, H], positions and slots [T]."""

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: Sequence[int]
    seats: Sequence[int]


class _Waiting(NamedTuple):
    """Room for committed tokens: features [W, L, H], positions and slots [W] on the device; seats and epochs [W] on the
    host: whose they are."""

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seats: np.ndarray
    epochs: np.ndarray

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.features, self.positions, self.slots


class TorchBackend:
    """See `Backend`. One target, at most one drafter, one page pool whose tables both share."""

    def __init__(
        self,
        target: PackedTransformer,
        drafter: tuple[BlockDrafter, Calibration] | None,
        *,
        max_batch_size: int,
        max_seq_len: int,
        num_pages: int,
        page_size: int = 64,
    ) -> None:
        config = target.config
        self.target, self.device, self.dtype = target, target.device, target.dtype
        self.max_seq_len, self.vocab_size = max_seq_len, config.vocab_size
        self.page_size, self.num_pages, self.max_batch_size = page_size, num_pages, max_batch_size
        target.rope.tabulate(max_seq_len)
        self.runner: DrafterRunner | None = None
        self.spec: DrafterSpec | None = None
        self._capture: tuple[int, ...] = ()
        if drafter is not None:
            model, calibration = drafter
            self.runner = make_runner(
                model, calibration, target.embedding_weight(), target.lm_head_weight(), page_size, self.dtype
            )
            model.rope.tabulate(max_seq_len)
            self.spec, self._capture = self.runner.spec, self.runner.spec.capture_layers
        self._begin()

    def beside(self, num_pages: int) -> TorchBackend:
        """Another one over the same weights, with a cache and a context of its own, of so many pages."""
        other = copy.copy(self)
        other.num_pages = num_pages
        other.runner = copy.copy(self.runner)
        other._begin()
        return other

    def _begin(self) -> None:
        """The state of a backend that has seen nothing."""
        self.kv = self.target.new_kv(self.num_pages, self.page_size)
        self._last: _LastPass | None = None
        if self.runner is None:
            return
        self.runner.begin(self.num_pages, self.max_batch_size, self.kv)
        hidden = self.target.config.hidden_size
        # Committed tokens that the drafter's context lacks, the first `_waits` rows. One block for good: small ones
        # kept from step to step would cut up the heap, and every step's logits would be fresh pages.
        most = _MOST_WAITING
        self._waiting = _Waiting(
            torch.empty(most, len(self._capture), hidden, dtype=self.dtype, device=self.device),
            torch.empty(most, dtype=torch.int64, device=self.device),
            torch.empty(most, dtype=torch.int64, device=self.device),
            np.zeros(most, np.int64),
            np.zeros(most, np.int64),
        )
        self._waits = 0
        self._epoch = np.zeros(self.max_batch_size, np.int64)  # how often a seat was given up

    @torch.inference_mode()
    def warm(self, most: int) -> None:
        """Meet every number of rows up to ``most`` once. oneDNN makes code for a shape at its first product: 3 to 5 ms
        for a pass, paid again and again by speculation, whose steps have ever other numbers of tokens."""
        for rows in range(1, most + 1):
            self.target.warm(rows)
            if self.runner is not None:
                self.runner.warm(rows)

    def _tensor(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int64)).to(self.device)

    @torch.inference_mode()
    def forward(self, batch: TargetBatch, capture: bool = True) -> torch.Tensor:
        packed = PackedBatch.build(
            batch.token_ids,
            batch.positions,
            np.diff(batch.cu_lengths),
            batch.page_table,
            self.page_size,
            self.device,
        )
        output = self.target.forward(packed, self.kv, self._tensor(batch.logits_at), self._capture if capture else ())
        assert output.logits is not None
        if output.features is not None:
            self._last = _LastPass(output.features, packed.positions, packed.slots, batch.cu_lengths, batch.seats)
        return output.logits

    @torch.inference_mode()
    def commit(self, kept: Sequence[int]) -> None:
        """Prompts go into the drafter's context at once, decoded tokens wait for the next estimate or draft: a load at
        which nothing is drafted pays next to nothing for them."""
        if self.runner is None:
            return
        if self._last is None:
            raise RuntimeError("commit without a captured pass to commit")
        last, self._last = self._last, None
        counts = np.asarray(kept, np.int64)
        starts = np.asarray(last.starts, np.int64)[: len(counts)]
        rows = np.repeat(starts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
        if not len(rows):
            return
        seats = np.repeat(np.asarray(last.seats, np.int64)[: len(counts)], counts)
        index, device_side = self._tensor(rows), (last.features, last.positions, last.slots)
        room, prompts = len(self._waiting.seats), counts.max() > self.runner.spec.block + 1
        if prompts or self._waits + len(rows) > room:
            self._absorb()
        if prompts or len(rows) > room:
            features, positions, slots = (t.index_select(0, index) for t in device_side)
            self._extend(features, positions, slots, seats)
            return
        new = slice(self._waits, self._waits + len(rows))
        for place, from_ in zip(self._waiting.tensors, device_side, strict=True):
            torch.index_select(from_, 0, index, out=place[new])  # type: ignore[call-overload]
        self._waiting.seats[new], self._waiting.epochs[new] = seats, self._epoch[seats]
        self._waits += len(rows)

    def _absorb(self) -> None:
        """Put what waits into the drafter's context, but for requests that are gone: their pages may be another's."""
        count, self._waits = self._waits, 0
        waiting = self._waiting
        features, positions, slots = (t[:count] for t in waiting.tensors)
        seats, epochs = waiting.seats[:count], waiting.epochs[:count]
        alive = np.flatnonzero(epochs == self._epoch[seats])
        if len(alive) < count:
            index = self._tensor(alive)
            features, positions, slots = (t.index_select(0, index) for t in (features, positions, slots))
        self._extend(features, positions, slots, seats[alive])

    def _extend(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, seats: np.ndarray) -> None:
        if self.runner is None or not len(seats):
            return
        self.runner.append(Verified(features, positions, slots, seats))

    def release(self, seat: int) -> None:
        if self.runner is not None:
            self._epoch[seat] += 1
            if not (self._waiting.epochs == self._epoch[self._waiting.seats])[: self._waits].any():
                self._waits = 0
            self.runner.free(seat)

    @torch.inference_mode()
    def clear(self, pages: Sequence[int]) -> None:
        self.kv.clear(self._tensor(pages))
        if self.runner is not None:
            self.runner.clear(self._tensor(pages))

    @torch.inference_mode()
    def estimate(self, batch: DraftBatch) -> Estimate:
        if self.runner is None:
            raise RuntimeError("no drafter is loaded; pre-draft estimates need one")
        self._absorb()
        return self.runner.estimate(DraftContext(batch.anchors, batch.positions, batch.seats))

    @torch.inference_mode()
    def draft(self, batch: DraftBatch, lengths: Sequence[int], propose: Proposer) -> Draft:
        if self.runner is None:
            raise RuntimeError("no drafter is loaded")
        self._absorb()
        context = DraftContext(batch.anchors, batch.positions, batch.seats)
        return self.runner.draft(context, lengths, batch.page_table, propose)
