"""The array operations of a step, as an interface a backend may replace by its own on the device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs import distribute as distribution
from trtllm_forespark.wcs import envelope, schedule, survival
from trtllm_forespark.wcs.schedule import Pieces

Array = Any


class Ops(Protocol):
    """Arrays are NumPy's in `NumpyOps`, device tensors in a backend's; shapes are the same."""

    def rewards(self, survival: Array) -> Array:
        """R_i(d) [n, K + 1] from survival [n, K, K]."""

    def scores(self, rewards: Array, limits: Array) -> Array:
        """Pre-draft scores g [n, K], non-increasing, 0 past each limit; runs of equal scores are pieces."""

    def split(self, scores: Array, total: int, pieces: Pieces) -> Array:
        """Draft lengths d_i [n]: the top scores, ties by request order."""

    def distribute(self, survival: Array, lengths: Array, budget: int) -> Array:
        """Verified lengths b_i [n]: the top post-draft survival, ties to the earlier position, then request."""

    def verify(self, tokens: Array, proposal: Array, target: Array, random: Any) -> tuple[int, list[int]]:
        """Speculative sampling of one request; see `verify`."""


class NumpyOps:
    """The plain form: the reference of every other."""

    def rewards(self, survival_: Array) -> Array:
        return survival.rewards(survival_)

    def scores(self, rewards: Array, limits: Array) -> Array:
        return envelope.scores(rewards, limits)

    def split(self, scores: Array, total: int, pieces: Pieces) -> Array:
        return schedule.split(scores, total, pieces)

    def distribute(self, survival_: Array, lengths: Array, budget: int) -> Array:
        return distribution.distribute(survival_, lengths, budget)

    def verify(self, tokens: Array, proposal: Array, target: Array, random: Any) -> tuple[int, list[int]]:
        return verify(tokens, proposal, target, random)


def verify(
    tokens: npt.NDArray[np.integer],
    proposal: npt.NDArray[np.floating],
    target: npt.NDArray[np.floating],
    random: np.random.Generator,
) -> tuple[int, list[int]]:
    """Speculative sampling of one request (Leviathan et al., 2023): (drafts accepted, tokens emitted).

    tokens: [b] drafted. proposal: [b, V], q they were sampled from. target: [b + 1, V], p given the drafts before.
    Token j is accepted with probability min(1, p/q); the first rejection samples the residual [p - q]+ (p itself where
    that has no mass) and ends the step; where all are accepted a bonus token is sampled from the last row.
    """
    emitted: list[int] = []
    for j, token in enumerate(int(t) for t in tokens):
        p, q = target[j].astype(np.float64), proposal[j].astype(np.float64)
        if random.random() * q[token] < p[token]:
            emitted.append(token)
            continue
        residual = np.maximum(p - q, 0)
        residual = residual if residual.sum() > 0 else p
        emitted.append(int(random.choice(len(p), p=residual / residual.sum())))
        return j, emitted
    bonus = target[len(tokens)].astype(np.float64)
    emitted.append(int(random.choice(len(bonus), p=bonus / bonus.sum())))
    return len(tokens), emitted
