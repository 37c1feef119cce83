"""The packed layout of a draft pass: blocks of different lengths one after another, no padding (§4.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """Where everything lies in a packed pass of m blocks; known on the host.

    A block of d drafts has d slots, the anchor's predicting position 1, or (anchor_slots 1) the anchor's besides.
    who: [m] requests that draft. d: [m]. starts: [m] slot of each anchor. index: [S] in-block index of each slot,
    block: [S] whose it is. drafts: [D] slots that are drafts, owner: [D] their block, position: [D] from 1.
    """

    who: np.ndarray
    d: np.ndarray
    starts: np.ndarray
    index: np.ndarray
    block: np.ndarray
    drafts: np.ndarray
    owner: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, anchor_slots: int) -> Blocks:
        """lengths: [n] draft lengths, some 0."""
        who = np.flatnonzero(lengths)
        d = lengths[who]
        slots = d + anchor_slots
        starts = np.cumsum(slots) - slots
        block = np.repeat(np.arange(len(who)), slots)
        index = np.arange(len(block)) - starts[block]
        drafts = np.flatnonzero(index >= anchor_slots)
        return cls(who, d, starts, index, block, drafts, block[drafts], index[drafts] + 1 - anchor_slots)

    @property
    def cu_slots(self) -> np.ndarray:
        """[m + 1]."""
        return np.append(self.starts, len(self.index))

    def walk(self, choice: np.ndarray) -> np.ndarray:
        """Follow choices [D, P] (where each predecessor column leads, -1 for nowhere) -> columns taken [m, longest],
        a shorter block's last row read again. On the host: some thousand integers, and a step a position."""
        first = np.cumsum(self.d) - self.d
        column = np.zeros(len(self.d), np.int64)
        steps = []
        for position in range(self.d.max()):
            steps.append(choice[first + np.minimum(position, self.d - 1), column])
            column = np.maximum(steps[-1], 0)
        return np.stack(steps, 1)
