"""What a drafter is: a spec the scheduler may read, and a runner the executor calls.

The executor and the controller never ask which drafter runs; everything they need stands in `DrafterSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trtllm_forespark.wcs.stages import Draft, Estimate


@dataclass(frozen=True)
class DrafterSpec:
    """Facts about a drafter that scheduling depends on.

    block: K, the longest draft. length_space: "request" where every request may have its own length, "batch" where one
    depth serves the whole batch. directional: True where a shorter draft is a prefix of a longer one (causal in the
    block). anchor_slots: slots a drafting request pays beside its drafts (1 where the block starts with the anchor and
    position j is read from slot j; 0 where the anchor's slot predicts position 1). capture_layers: target layers whose
    outputs it reads (layer l = residual stream after layer l). max_position: largest position it can draft at.
    """

    name: str
    block: int
    length_space: str
    directional: bool
    anchor_slots: int
    capture_layers: tuple[int, ...]
    max_position: int

    def slots(self, drafting: int, drafted: int) -> int:
        """Tokens a draft pass computes for ``drafting`` requests that draft ``drafted`` tokens in all."""
        return drafted + drafting * self.anchor_slots


@dataclass(frozen=True)
class DraftContext:
    """What the drafter knows of each of n requests before it drafts; on the host.

    anchors: [n] newest token ids, not through the target yet. positions: [n] their positions (= context lengths).
    """

    anchors: Sequence[int] | np.ndarray
    positions: Sequence[int] | np.ndarray


class Proposer(Protocol):
    """Draws draft tokens; the runtime owns sampling, the drafter owns scores."""

    def __call__(
        self, scores: torch.Tensor, candidates: torch.Tensor, rows: torch.Tensor, position: torch.Tensor | int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """scores, candidates [m, C] of requests ``rows`` [m] at ``position`` in the draft (from 1; [m] or a number).

        A position may be asked for more than once, as with different predecessors. Returns the chosen column [m] (-1
        drops the draft from here on) and the proposal q [m, C].
        """
        ...


class DrafterRunner(Protocol):
    """A drafter at work on one device."""

    spec: DrafterSpec

    def extend(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Absorb target features [T, L, H] of tokens at ``positions`` [T] into the context; returns c [T, H]."""
        ...

    def estimate(self, anchors: torch.Tensor, features: torch.Tensor) -> Estimate:
        """Pre-draft estimate (eq. 2-3), calibrated. anchors [n]; features [n, H]: c of the last token that went
        through the target (the anchor has not, so it has no feature of its own)."""
        ...

    def draft(self, context: DraftContext, lengths: Sequence[int], page_table: np.ndarray, propose: Proposer) -> Draft:
        """One packed pass over anchor + d_i masks of the requests with d_i > 0 (§4.4)."""
        ...
