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
            self._context = torch.zeros(max_batch_size, model.config.hidden_size, dtype=self.dtype, device=self.device)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int64)).to(self.device)

    @torch.inference_mode()
    def forward(self, batch: TargetBatch) -> torch.Tensor:
        packed = PackedBatch.build(
            batch.token_ids,
            batch.positions,
            np.diff(batch.cu_lengths),
            batch.page_table,
            self.page_size,
            self.device,
        )
        output = self.target.forward(packed, self.kv, self._tensor(batch.logits_at), self._capture)
        assert output.logits is not None
        if output.features is not None:
            self._last = _LastPass(output.features, packed.positions, packed.slots, batch.cu_lengths, batch.seats)
        return output.logits

    @torch.inference_mode()
    def commit(self, kept: Sequence[int]) -> None:
        if self.runner is None:
            return
        if self._last is None:
            raise RuntimeError("commit without a pass to commit")
        last, self._last = self._last, None
        rows: list[int] = []
        seats: list[int] = []
        ends: list[int] = []
        for start, count, seat in zip(last.starts, kept, last.seats, strict=False):
            if count:
                rows.extend(range(start, start + count))
                ends.append(len(rows) - 1)
                seats.append(seat)
        if not rows:
            return
        index = self._tensor(rows)
        context = self.runner.extend(last.features[index], last.positions[index], last.slots[index])
        self._context[self._tensor(seats)] = context[self._tensor(ends)]

    @torch.inference_mode()
    def clear(self, pages: Sequence[int]) -> None:
        for kv in (self.kv, self.runner.kv if self.runner else None):
            if kv is not None:
                kv.clear(self._tensor(pages))

    def _draft_context(self, batch: DraftBatch) -> DraftContext:
        return DraftContext(
            anchors=self._tensor(batch.anchors),
            positions=self._tensor(batch.positions),
            features=self._context[self._tensor(batch.seats)],
        )

    @torch.inference_mode()
    def estimate(self, batch: DraftBatch) -> Estimate:
        if self.runner is None:
            raise RuntimeError("no drafter is loaded; pre-draft estimates need one")
        return self.runner.estimate(self._draft_context(batch))

    @torch.inference_mode()
    def draft(self, batch: DraftBatch, lengths: Sequence[int], propose: Proposer) -> Draft:
        if self.runner is None:
            raise RuntimeError("no drafter is loaded")
        return self.runner.draft(self._draft_context(batch), self._tensor(lengths), batch.page_table, propose)
