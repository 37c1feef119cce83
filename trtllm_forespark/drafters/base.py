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

    from trtllm_forespark.models.kv import PagedKV
    from trtllm_forespark.wcs.stages import Draft, Estimate


@dataclass(frozen=True)
class DrafterSpec:
    """Facts about a drafter that scheduling and the backend depend on.

    block: K, the longest draft. length_space: "request" where every request may have its own length, "batch" where one
    depth serves the whole batch. parallel: one pass drafts a block; else one pass a position. directional: True where
    a shorter draft is a prefix of a longer one (causal in the block), so the pre-draft estimator has K outputs and not
    K(K+1)/2. anchor_slots: slots a drafting request pays beside its drafts (1 where the block starts with the anchor
    and position j is read from slot j; 0 where the anchor's slot predicts position 1). capture_layers: target layers
    whose outputs it reads (layer l = residual stream after layer l). kv_layers: target layers whose keys and values it
    reads in place. max_position: largest position it can draft at.
    """

    name: str
    block: int
    length_space: str
    directional: bool
    anchor_slots: int
    capture_layers: tuple[int, ...]
    max_position: int
    kv_layers: tuple[int, ...] = ()
    parallel: bool = True

    @property
    def estimator_outputs(self) -> int:
        return self.block if self.directional else self.block * (self.block + 1) // 2

    def slots(self, drafting: int, drafted: int) -> int:
        """Tokens a draft pass computes for ``drafting`` requests that draft ``drafted`` tokens in all."""
        return drafted + drafting * self.anchor_slots


@dataclass(frozen=True)
class DraftContext:
    """n requests that are about to draft; on the host.

    anchors: [n] newest token ids, not through the target yet. positions: [n] their positions (= context lengths).
    seats: [n] where each one's state lives.
    """

    anchors: Sequence[int] | np.ndarray
    positions: Sequence[int] | np.ndarray
    seats: Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Verified:
    """T tokens that the target has read and the request has kept, packed, a request's in order of position.

    On the device: features [T, L, H] of the captured layers, positions [T], slots [T] of their pages, where the
    target's keys and values stand and the drafter's may. On the host: seats [T], whose each is.
    """

    features: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seats: np.ndarray


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
    """A drafter at work on one device.

    It keeps a context for each seat, of verified tokens alone: what was rejected never enters it.
    """

    spec: DrafterSpec
    device: torch.device
    seats: int
    num_pages: int
    page_size: int

    def begin(self, num_pages: int, seats: int, target_kv: PagedKV | None) -> None:
        """Create the contexts of so many seats, all empty, over so many pages. target_kv: the target's keys and values,
        which a drafter with ``kv_layers`` reads."""
        ...

    def append(self, tokens: Verified) -> None:
        """Put verified tokens into their seats' contexts. A token at position 0 begins its seat's context anew."""
        ...

    def truncate(self, seat: int, slots: torch.Tensor, length: int) -> None:
        """Keep the first ``length`` tokens of a seat's context; slots [>= length] of its tokens' pages, whose contents
        must still stand. The feature `estimate` reads is gone until a token is appended."""
        ...

    def free(self, seat: int) -> None:
        """The request at ``seat`` ended."""
        ...

    def clear(self, pages: torch.Tensor) -> None:
        """Wipe pages that may hold non-finite values, before another request gets them."""
        ...

    def state_bytes(self, tokens: int) -> int:
        """Bytes that the context of a request of so many tokens takes, beside what the target keeps anyway."""
        ...

    def estimate(self, context: DraftContext) -> Estimate:
        """Pre-draft estimate (eq. 2-3), calibrated. It reads c of the last token that went through the target (the
        anchor has not, so it has no feature of its own) and the anchor's embedding."""
        ...

    def draft(self, context: DraftContext, lengths: Sequence[int], page_table: np.ndarray, propose: Proposer) -> Draft:
        """One packed pass over the blocks of the requests with lengths[i] > 0 (§4.4).

        page_table [n, P] on the host: pages of each request's context. The result has tokens, proposals q, hidden
        states and, for every position, a score known before its token.
        """
        ...

    def warm(self, rows: int) -> None:
        """Every kind of product a pass over ``rows`` slots makes, once (see `TorchBackend.warm`)."""
        ...
