"""A latency table read out for steps of one batch size, in the form the schedule's inner loops need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Prices:
    """A table read out for steps of one batch size, as the schedule needs it.

    draft: [n + 1, T] seconds by requests that draft (row 0 is 0) at `draft_tokens`; verify: seconds at `verify_tokens`.
    Both token axes reach past every step they are asked for.
    """

    linear: bool
    draft_tokens: Array
    draft: Array
    verify_tokens: Array
    verify: Array
    verify_each: Array  # seconds at every token count from 0; linear tables only
    draft_borders: Array  # draft_tokens from the last to the first, then 0: draft nothing
    draft_at_borders: Array  # draft, its columns in that order
    each_border: Array
    ranks: Array  # 0, 1, ..., n K
    _budgets: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def budgets(self, num_tokens: int) -> tuple[Array, Array]:
        """Budgets worth a look beside N = `num_tokens` others, rising, and T_verify(N + B) of each.

        The largest of each bucket, from the one that holds N; every one where costs are linear.
        """
        found = self._budgets.get(num_tokens)
        if found is None:
            if len(self._budgets) >= 64:
                self._budgets.clear()
            if self.linear:
                found = np.arange(len(self.verify_each) - num_tokens), self.verify_each[num_tokens:]
            else:
                low = int(self.verify_tokens.searchsorted(num_tokens))
                found = self.verify_tokens[low:] - num_tokens, self.verify[low:]
            self._budgets[num_tokens] = found
        return found

    def draft_at(self, requests: Any, tokens: Any) -> Any:
        """T_draft at (requests that draft, tokens with anchors), numbers or arrays."""
        index = self.draft_tokens.searchsorted(tokens)
        high = self.draft[requests, index]
        if not self.linear:
            return high
        low_index = np.maximum(index, 1) - 1
        low_tokens, high_tokens = self.draft_tokens[low_index], self.draft_tokens[np.maximum(index, 1)]
        part = (tokens - low_tokens) / (high_tokens - low_tokens)
        low = self.draft[requests, low_index]
        return np.maximum(low + part * (self.draft[requests, np.maximum(index, 1)] - low), 0)

    def verify_at(self, tokens: Any) -> Any:
        """T_verify at token counts."""
        if not self.linear:
            return self.verify[self.verify_tokens.searchsorted(tokens)]
        return self.verify_each[tokens]
