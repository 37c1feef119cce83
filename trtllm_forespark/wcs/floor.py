"""A floor of draft tokens for every request (section 7, fairness): what it forces, and the curves beyond that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Lengths = npt.NDArray[np.int64]


def forced_lengths(rewards: npt.NDArray[np.float32], limits: Ints | None, floor: int | Ints) -> Lengths:
    """Lengths a floor (one for all, or [n]) forces: not past the limit, and nothing where no length has any reward."""
    block = rewards.shape[1] - 1
    forced = np.broadcast_to(np.clip(floor, 0, block), len(rewards)).astype(np.int64)
    if limits is not None:
        forced = np.minimum(forced, np.maximum(limits, 0))
    return np.where(np.isfinite(rewards).all(axis=1) & (rewards > 0).any(axis=1), forced, 0)


def beyond(rewards: npt.NDArray[np.float32], forced: Lengths) -> npt.NDArray[np.float32]:
    """Reward curves that start at the forced lengths: R_i(forced_i + d) - R_i(forced_i), 0 past K."""
    if not forced.any():
        return rewards
    block = rewards.shape[1] - 1
    ahead = np.arange(block + 1) + forced[:, None]
    shifted = np.take_along_axis(rewards, np.minimum(ahead, block), axis=1)
    shifted = shifted - np.take_along_axis(rewards, forced[:, None], axis=1)
    return np.where(ahead <= block, shifted, np.float32(0))
