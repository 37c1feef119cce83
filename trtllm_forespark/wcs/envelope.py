"""Upper concave envelopes of reward curves, and survival scores (section 4.3).

The slopes of the smallest concave function above R on {0..K} are

    g_d = min_{s < d} max_{t >= d} (R(t) - R(s)) / (t - s).

They are found for all requests at once by divide and conquer: where the envelopes of two neighbouring halves are known,
the envelope of the whole has one more straight piece, the bridge over their junction, of slope
mu = min_s max_t (R(t) - R(s)) / (t - s), s left and t right of it; slopes left of the junction become max(g, mu), those
right of it min(g, mu). All those difference quotients are linear in R, so one small matrix product makes them, laid out
so that the maxima and minima are a few operations on long contiguous rows. For one curve the work is a fixed
K^2 / 2 multiply-adds, for a batch what counts is some thirty NumPy calls.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.survival import FloatArray

#: Scores up to this are 0: float32 cannot tell them from the rounding of a reward of some 15 tokens.
SCORE_FLOOR = 4e-6
#: Relative step by which `scores` keeps two pieces of one slope apart; see `separate_pieces`.
_STEP = 2.0**-21
#: A point this close to its envelope lies on it.
_TOUCH = 2e-5
_FLOOR = np.float32(SCORE_FLOOR)
_local = threading.local()


class _Tree(NamedTuple):
    """The matrix that makes difference quotients of R(1..K), and where they stand in its product.

    Rows of `matrix`: for each level the quotients of its junctions, then the increments R(d) - R(d-1) in bit-reversed
    order of d - 1 (`position[row]` = d - 1), which makes left and right halves contiguous at every level.
    """

    matrix: npt.NDArray[np.float32]
    width: int  # K rounded up to a power of two
    position: npt.NDArray[np.intp]
    inverse: npt.NDArray[np.intp]


def scores(rewards: FloatArray, limits: npt.NDArray[np.integer] | None = None) -> npt.NDArray[np.float32]:
    """Survival scores g_i,d = F_i(d) - F_i(d-1), F_i the smallest concave, non-decreasing function above R_i.

    rewards: [n, K + 1], R_i(0) = 0. limits: [n], no length past ``limits[i]`` is available to request i.
    Returns [n, K] float32, >= 0 and non-increasing along d; 0 past the limit, on flat and falling tails and for a
    request whose curve holds a NaN. Runs of bitwise equal scores are pieces: a draft that stops inside one has a reward
    below the envelope, one that stops between two has not (within 1e-5 a token).
    """
    rewards = limited(np.asarray(rewards, dtype=np.float32), limits)
    block = rewards.shape[1] - 1
    if block == 0 or len(rewards) == 0:
        return np.zeros((len(rewards), block), dtype=np.float32)
    slope = np.ascontiguousarray(slopes(rewards).slope[tree(block).inverse[:block]].T)
    slope[~(slope > SCORE_FLOOR)] = 0  # not "<=", so that NaN goes too
    return separate_pieces(slope, rewards)


def envelope(rewards: FloatArray, limits: npt.NDArray[np.integer] | None = None) -> npt.NDArray[np.float32]:
    """F_i(d), [n, K + 1]: the running sum of `scores`."""
    score = scores(rewards, limits)
    out = np.zeros((score.shape[0], score.shape[1] + 1), dtype=np.float32)
    np.add.accumulate(score, axis=1, out=out[:, 1:])
    return out


def vertices(score: FloatArray) -> npt.NDArray[np.bool_]:
    """[n, K + 1]: True where a draft of d tokens ends a piece (d = 0 always, nothing inside or past the last piece)."""
    following = np.concatenate([score[:, 1:], np.zeros_like(score[:, :1])], axis=1)
    return np.concatenate([np.ones((len(score), 1), dtype=bool), score > following], axis=1)


def limited(rewards: npt.NDArray[np.float32], limits: npt.NDArray[np.integer] | None) -> npt.NDArray[np.float32]:
    """Rewards with 0 past each request's limit, which no envelope reaches up to."""
    if limits is None or len(rewards) == 0:
        return rewards
    block = rewards.shape[1] - 1
    if int(limits.min()) >= block:
        return rewards
    return np.where(np.arange(block + 1) <= limits[:, None], rewards, np.float32(0))


def separate_pieces(score: npt.NDArray[np.float32], rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Lower each score by 2^-21 of itself for every earlier point of its curve that lies on the envelope.

    Scores of one slope on both sides of such a point (survival 1, 1, 1; or 0.5, 0.5) would otherwise read as one
    piece, and drafts could not stop there although they lose nothing by it.
    """
    above = np.add.accumulate(score, axis=1) - rewards[:, 1:]
    touches = np.add.accumulate(above <= _TOUCH, axis=1, dtype=np.float32)
    out = score.copy()
    out[:, 1:] *= 1 - np.float32(_STEP) * touches[:, :-1]
    return out


def slopes(rewards: npt.NDArray[np.float32]) -> _Workspace:
    """Envelope slopes of R [n, K + 1] before clipping, in the ``slope`` [rows, n] of the workspace returned.

    Row `r` is position ``tree(K).position[r]``, column i request i. Slopes of falling tails are negative, those up to
    `SCORE_FLOOR` are rounding; a curve with a NaN has NaN in its column. The workspace is this thread's: it is
    overwritten by the next call. Fastest where R is in Fortran order, as `survival.rewards` makes it.
    """
    work = _workspace(rewards.shape[1] - 1, rewards.shape[0])
    points = rewards.T[1:] if rewards.flags.f_contiguous else np.ascontiguousarray(rewards.T[1:])
    np.dot(work.matrix, points, out=work.quotients)
    for operation, first, second, out in work.steps:
        operation(first, second, out=out)
    return work


def pooled_scores(rewards: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The hot half of the schedule: all scores of the batch, sorted.

    Returns (bits, rising): bits [rows, n] int32 are the slopes of `slopes` read as integers (which order as the
    positive floats do). rising [R] float32 are the scores above `SCORE_FLOOR`, rising, with the lowest bit 1 where a
    score is the first of its request and 0 elsewhere: a running sum over it counts the requests that draft. A curve
    with a NaN has no score. Both belong to this thread's workspace.
    """
    work = slopes(rewards)
    np.bitwise_and(work.bits, -2, out=work.key_bits)
    np.bitwise_or(work.first, 1, out=work.first)
    keys = work.keys
    keys.sort()
    last = float(keys[-1])
    if last != last:  # NaN sorts to the end
        return pooled_scores(np.where(np.isfinite(rewards).all(axis=1, keepdims=True), rewards, np.float32(0)))
    return work.bits, keys[keys.searchsorted(_FLOOR, side="right") :]


class _Workspace:
    """Buffers and operations for curves of one shape; views are made once, since they cost as much as the work."""

    def __init__(self, block: int, columns: int) -> None:
        self.matrix, width, _, _ = tree(block)
        self.quotients = np.zeros((len(self.matrix), columns), dtype=np.float32)
        self.slope = self.quotients[-width:]
        #: Without the row that is padding, where there is only one: it is the last.
        used = self.slope[:block] if block == width - 1 else self.slope
        self.bits = used.view(np.int32)
        self.keys = np.zeros(used.size, dtype=np.float32)
        self.key_bits = self.keys.view(np.int32).reshape(used.shape)
        self.first = self.key_bits[0]
        self.steps: list[tuple[np.ufunc, Any, Any, Any]] = []
        half = width // 2
        if half:
            self._plan(half, width, columns)

    def _plan(self, half: int, width: int, columns: int) -> None:
        flat = self.quotients.reshape(-1)
        slice_ = half * columns
        # Maximum over t: one call halves the t of every level that has more than one left, and leaves its result before
        # the level that is done; so in the end the levels stand one after another, the widest first.
        start, slices = 0, width - 1
        while slices > 1:
            first = flat[start * slice_ : (start + slices // 2) * slice_]
            second = flat[(start + slices // 2) * slice_ : (start + 2 * (slices // 2)) * slice_]
            self.steps.append((np.maximum, first, second, second))
            start, slices = start + slices // 2, slices // 2
        count = width.bit_length() - 1
        levels = flat[(width - 1 - count) * slice_ : (width - 1) * slice_].reshape(count, slice_)
        # Minimum over s, likewise.
        size = slice_
        for left in range(count - 1, 0, -1):
            size //= 2
            self.steps.append((np.minimum, levels[:left, :size], levels[:left, size : 2 * size], levels[:left, :size]))
        # The bridges, from the narrowest junctions to the widest.
        for level in range(count - 1, -1, -1):
            junctions = 1 << level
            bridge = levels[level, : junctions * columns]
            pairs = self.slope.reshape(half // junctions, 2, junctions * columns)
            low, high = pairs[:, 0], pairs[:, 1]
            if junctions == half:  # one long row is cheaper than a table of one row
                low, high = low[0], high[0]
            self.steps.append((np.maximum, low, bridge, low))
            self.steps.append((np.minimum, high, bridge, high))


def _workspace(block: int, columns: int) -> _Workspace:
    cache = _local.__dict__.setdefault("cache", {})
    work = cache.get((block, columns))
    if work is None:
        while len(cache) >= 128:
            cache.pop(next(iter(cache)))
        work = cache[block, columns] = _Workspace(block, columns)
    return work


@lru_cache(maxsize=64)
def tree(block: int) -> _Tree:
    """Lay out the divide and conquer for curves of K = `block` tokens."""
    width = 1 << (block - 1).bit_length()
    bits = width.bit_length() - 1

    def reverse(value: int, count: int) -> int:
        return int(format(value, f"0{count}b")[::-1], 2) if count else 0

    def quotient(s: int, t: int) -> npt.NDArray[np.float32]:
        # Past K the curve goes on level, so R(t) = R(K); R(0) = 0 needs no column.
        s, t = min(s, block), min(t, block)
        row = np.zeros(block + 1, dtype=np.float32)
        if t > s:
            row[t], row[s] = 1 / (t - s), -1 / (t - s)
        return row[1:]

    def order(levels: list[list[list[int]]]) -> list[list[int]]:
        # First halves of every level that can be halved, their second halves, then the level with one t left.
        if not levels:
            return []
        wide = levels[:-1]
        firsts = order([level[: len(level) // 2] for level in wide])
        seconds = order([level[len(level) // 2 :] for level in wide])
        return firsts + seconds + [levels[-1][0]]

    pairs: list[tuple[int, int]] = []
    levels: list[list[list[int]]] = []
    for level in reversed(range(bits)):
        half = 1 << level
        level_slices = []
        for t in range(half + 1, 2 * half + 1):
            indices = []
            for s in range(half):
                for junction in range(width // (2 * half)):
                    start = 2 * half * reverse(junction, bits - 1 - level)
                    indices.append(len(pairs))
                    pairs.append((start + s, start + t))
            level_slices.append(indices)
        levels.append(level_slices)
    rows = [quotient(*pairs[index]) for indices in order(levels) for index in indices]
    position = np.array([reverse(row, bits) for row in range(width)], dtype=np.intp)
    rows += [quotient(int(d), int(d) + 1) for d in position]
    return _Tree(np.array(rows, dtype=np.float32), width, position, np.argsort(position))
