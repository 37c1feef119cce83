"""Target and drafter on torch: the embedded default on CPU, the same code on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, DrafterSpec, Proposer
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.drafters.runner import DFlash2Runner
from trtllm_forespark.models.transformer import PackedBatch, PackedTransformer
from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.wcs.stages import Draft, Estimate

_MOST_WAITING = 64  # tokens of a request that wait for its next draft


@dataclass(frozen=True)
class _LastPass:
    """The rows of the pass that commit refers to: captured features [T, L, H], positions and slots [T]."""

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: Sequence[int]
    seats: Sequence[int]


class TorchBackend:
    """See `Backend`. One target, at most one drafter, one page pool whose tables both share."""

    def __init__(
        self,
        target: PackedTransformer,
        drafter: tuple[DFlash2, Calibration] | None,
        *,
        max_batch_size: int,
        max_seq_len: int,
        num_pages: int,
        page_size: int = 64,
    ) -> None:
        config = target.config
        self.target, self.device, self.dtype = target, target.device, target.dtype
        self.max_seq_len, self.vocab_size = max_seq_len, config.vocab_size
        self.page_size, self.num_pages = page_size, num_pages
        self.kv = target.new_kv(num_pages, page_size)
        self.runner: DFlash2Runner | None = None
        self.spec: DrafterSpec | None = None
        self._capture: tuple[int, ...] = ()
        self._last: _LastPass | None = None
        if drafter is not None:
            model, calibration = drafter
            self.runner = DFlash2Runner(
                model, calibration, target.embedding_weight(), target.lm_head_weight(), num_pages, page_size, self.dtype
            )
            self.spec, self._capture = self.runner.spec, self.runner.spec.capture_layers
            shape = (max_batch_size, len(self._capture), config.hidden_size)
            self._newest = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self._waiting: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [
                [] for _ in range(max_batch_size)
            ]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
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
        """Long runs (prompts) enter the drafter's context now; the few tokens of a decode step wait until their request
        drafts, so that a load at which nothing is drafted pays next to nothing for it."""
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
        index = torch.from_numpy(rows).to(self.device)
        parts = counts.tolist()
        columns = [t[index].split(parts) for t in (last.features, last.positions, last.slots)]
        for seat, features, positions, slots in zip(last.seats, *columns, strict=False):
            if len(features):
                self._newest[seat] = features[-1]
                waiting = self._waiting[seat]
                waiting.append((features, positions, slots))
                if sum(len(f) for f, _, _ in waiting) > _MOST_WAITING:
                    self._absorb([seat])

    def _absorb(self, seats: Sequence[int]) -> None:
        """Put what waits of these requests into the drafter's context, all in one pass."""
        parts = [part for seat in seats for part in self._waiting[seat]]
        for seat in seats:
            self._waiting[seat] = []
        if parts and self.runner is not None:
            self.runner.extend(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def release(self, seat: int) -> None:
        if self.runner is not None:
            self._waiting[seat] = []

    @torch.inference_mode()
    def clear(self, pages: Sequence[int]) -> None:
        for kv in (self.kv, self.runner.kv if self.runner else None):
            if kv is not None:
                kv.clear(self._tensor(pages))

    @torch.inference_mode()
    def estimate(self, batch: DraftBatch) -> Estimate:
        if self.runner is None:
            raise RuntimeError("no drafter is loaded; pre-draft estimates need one")
        features = self.runner.model.fuse(self._newest[self._tensor(batch.seats)])
        return self.runner.estimate(self._tensor(batch.anchors), features)

    @torch.inference_mode()
    def draft(self, batch: DraftBatch, lengths: Sequence[int], propose: Proposer) -> Draft:
        if self.runner is None:
            raise RuntimeError("no drafter is loaded")
        self._absorb([seat for seat, length in zip(batch.seats, lengths, strict=True) if length])
        context = DraftContext(self._tensor(batch.anchors), self._tensor(batch.positions))
        return self.runner.draft(context, self._tensor(lengths), batch.page_table, propose)
