"""What stands before each row of a step's logits: the request's text so far, then its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtllm_forespark.wcs.stages import Draft


class TokenCounts:
    """How often each token stands in one request's prompt and output. Drafts never get in: they are not said yet."""

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self._counts = np.zeros(vocab_size, np.int32)
        self._read = 0
        self.ids = np.zeros(0, np.int64)
        self._add(prompt_ids)

    def follow(self, output_ids: Sequence[int]) -> None:
        """Count what the output has gained since the last call."""
        self._add(output_ids[self._read :])
        self._read = len(output_ids)

    @property
    def counts(self) -> np.ndarray:
        """Of ``ids`` (each there once), in their order."""
        return self._counts[self.ids]

    def _add(self, new: Sequence[int]) -> None:
        tokens = np.asarray(new, np.int64)
        self.ids = np.concatenate([self.ids, np.unique(tokens[self._counts[tokens] == 0])])
        np.add.at(self._counts, tokens, 1)


@dataclass(frozen=True)
class StepRows:
    """The packed rows of logits of u requests out of a step's n, and the drafts before each.

    row: [R] row in the step's logits. owner: [R] which of the u requests. place: [R] drafts that stand before it.
    drafts: [u, K] verified drafts, -1 past the last.
    """

    row: Tensor
    owner: Tensor
    place: Tensor
    drafts: Tensor

    @classmethod
    def of(cls, chosen: Sequence[int], lengths: Sequence[int], draft: Draft, device: torch.device) -> StepRows:
        """chosen: [u] places in the batch. lengths: [n] b_i. Reads nothing back from the device."""
        b = np.asarray(lengths, np.int64)
        starts = np.concatenate([[0], np.cumsum(b + 1)])[:-1]
        mine = np.asarray(chosen, np.int64)
        count = b[mine] + 1
        owner = np.repeat(np.arange(len(mine)), count)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        index = torch.from_numpy(np.stack([starts[mine][owner] + place, owner, place])).to(device)
        if not len(draft.token_ids) or not (count > 1).any():
            return cls(index[0], index[1], index[2], torch.zeros(len(mine), 0, dtype=torch.int64, device=device))
        offset = torch.arange(int(count.max()) - 1, device=device)
        first = torch.as_tensor(draft.cu_lengths, device=device)[torch.from_numpy(mine).to(device)]
        there = offset < torch.from_numpy(b[mine]).to(device)[:, None]
        tokens = torch.as_tensor(draft.token_ids, device=device).long()
        drafts = tokens[(first[:, None] + offset).masked_fill(~there, 0)].masked_fill(~there, -1)
        return cls(index[0], index[1], index[2], drafts)
