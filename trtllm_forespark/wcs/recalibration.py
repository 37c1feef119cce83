"""Online recalibration: the calibration of both estimators follows what is accepted, entry by entry.

Pre-draft entry (d, j): sigmoid(a z + b) (eq. 3). Post-draft position j: sigmoid(a l + b + c s), where s is the
pre-draft logit of the same position, calibrated offline; c starts at 0. s is known before the draft and l_j reads no
token from j on, so rule 1 of docs/lossless.md holds for both.

Truncation. What is verified was chosen for its high l, so P(accepted | z, verified) > P(accepted | z): fitted on
verified positions, a pre-draft entry gets too sure of itself. But rule 1 also says that, given l_1..l_j and z, whether
j is verified tells nothing about whether it would be accepted ("missing at random"). Hence

- post-draft: a fit on verified positions that were reached has no such bias;
- pre-draft: at the truth E[reached_j (accepted_j - p_j) x_j] = 0. Where j was verified its term is known. Elsewhere its
  expectation given the post-draft logits stands for it: the label is the post-draft probability, the weight the chance
  to get there (1 or 0 as far as the verdict goes, then the product of post-draft probabilities).

That is right if z says nothing beyond what the post-draft calibration reads, so it reads s. The product holds where
l_j+1 does not tell whether x_j was right, which eq. 5 supposes too.

Few drafts inform one entry, and those never drafted none. So, as offline (training/calibrate.py), an entry is pulled to
the fit of its position over all lengths, which is pulled to the offline calibration; and after the draft a position to
the fit of all, and that to the offline one. Where labels stop, all go back to it. It depends on past steps alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.survival import FloatArray, directional_to_survival, sigmoid, triangle_size
from trtllm_forespark.wcs.survival import triangle_to_survival as triangular

#: What one draft leaves of older evidence, and what a step leaves of the pre-draft estimator's in which a look found
#: nothing worth drafting.
_KEEP, _FADE = 1 - 1 / 4000, 0.97
#: How strongly calibrations are pulled, as precisions of a and b, or a, c and b after the draft: what all share to the
#: offline one (off by 0.25 in a and c and by 0.5 in b is usual), and the single ones to what all share.
_OF_POSITION, _OF_ALL = (16.0, 4.0), (16.0, 16.0, 4.0)
_OF_ENTRY, _OF_PLACE = (30.0, 30.0), (16.0, 16.0, 8.0)
#: Least curvature of a label: near 0 and 1 a Newton step would be wild.
_CURVATURE = 0.05
#: The most that a, b or c changes in one update, and in all.
_STEP, _REACH = 0.5, 4.0
#: Logits beyond it say no more.
_LARGE = 20.0
#: What a fit is saved as.
_STATE = ("start", "change", "gathered", "evidence")


class _Fit:
    """Logistic regressions of F coefficients, start + change, by Newton steps on fading evidence: G rows of K each.

    The evidence is a quadratic, 1/2 w'Hw - r'w: each update adds that of its labels at the present w, so the minimum
    together with the pull to the start is one small solve, and without labels w goes back. F (F + 2) numbers a
    regression.
    """

    def __init__(self, start: npt.ArrayLike, pull: Sequence[float]) -> None:
        """start: [G, K, F]. pull: [F], how strongly towards the start."""
        self.start = np.asarray(start, np.float64)
        coefficients = self.start.shape[-1]
        self._pull = np.diag(pull)
        self._pairs = np.tril_indices(coefficients)
        self._rows = np.arange(len(self.start))[:, None]
        self.change = np.zeros_like(self.start)
        self.gathered = np.zeros_like(self.start)
        self.evidence = np.zeros((*self.start.shape, coefficients))
        self._use()

    def _use(self) -> None:
        self.exact = self.start + self.change
        self.weight = self.exact.astype(np.float32)  # what estimates are made with

    def learn(
        self,
        row: npt.NDArray[np.int64],
        features: Sequence[FloatArray],
        label: FloatArray,
        weight: FloatArray,
        keep: float,
    ) -> None:
        """n drafts: row [n] < G; features: F - 1 of [n, K], and 1; label: [n, K] in 0..1; weight: [n, K] >= 0, 0 for
        what tells nothing. All finite. keep: what is left of older evidence."""
        used = self.weight[row]
        *slopes, bias = (used[..., f] for f in range(used.shape[-1]))
        score: FloatArray = bias
        for slope, feature in zip(slopes, features, strict=True):
            score = score + slope * feature
        predicted = sigmoid(score)
        curvature = np.maximum(predicted * (1 - predicted), np.float32(_CURVATURE)) * weight
        error = (label - predicted) * weight
        x = [*features, None]
        terms = [error if f is None else error * f for f in x]
        weighted = [curvature if f is None else curvature * f for f in x]
        terms += [weighted[i] if x[j] is None else weighted[i] * x[j] for i, j in zip(*self._pairs, strict=True)]
        of_row = (row == self._rows).astype(np.float32)
        sums = np.moveaxis(of_row @ np.stack(terms), 0, -1)
        fresh = np.empty_like(self.evidence)
        first, second = self._pairs
        fresh[..., first, second] = fresh[..., second, first] = sums[..., len(x) :]
        self.evidence = self.evidence * keep + fresh
        self.gathered = self.gathered * keep + _times(fresh, self.exact) + sums[..., : len(x)]
        self._settle()

    def fade(self, keep: float) -> None:
        """Older evidence counts less."""
        self.evidence *= keep
        self.gathered *= keep
        self._settle()

    def pull_to(self, start: npt.NDArray[np.float64]) -> None:
        """Another start, from the next update on."""
        self.change = self.change + self.start - start
        self.start = start

    def _settle(self) -> None:
        gathered = self.gathered - _times(self.evidence, self.start)
        best = np.linalg.solve(self.evidence + self._pull, gathered[..., None])[..., 0]
        best = np.minimum(np.maximum(best, self.change - _STEP), self.change + _STEP)
        self.change = np.minimum(np.maximum(best, -_REACH), _REACH)
        self._use()

    def state(self) -> dict[str, list]:
        return {name: getattr(self, name).tolist() for name in _STATE}

    def restore(self, state: Any, where: str) -> None:
        found = {}
        for name in _STATE:
            try:
                values = np.asarray(state[name], np.float64)
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{where}.{name} is missing or holds no numbers; start without the file") from None
            wanted = getattr(self, name).shape
            if values.shape != wanted or not np.isfinite(values).all():
                raise ValueError(f"{where}.{name} needs {wanted} finite numbers, has {values.shape}")
            found[name] = values
        self.__dict__.update(found)
        self._use()


class Recalibration:
    """The calibration of one drafter, following what is accepted: starts as the offline one, is pulled back to it."""

    def __init__(
        self, block: int, scale: FloatArray, bias: FloatArray, temperature: FloatArray, drafter: str = ""
    ) -> None:
        """block: K. scale, bias: a, b, [outputs], K(K+1)/2 of them, or K of a directional drafter. temperature: [K]
        (eq. 6). drafter: whose it is; a saved state of another one, or of another calibration, is refused."""
        scale, bias, temperature = (np.asarray(x, np.float32) for x in (scale, bias, temperature))
        if scale.shape not in ((block,), (triangle_size(block),)) or bias.shape != scale.shape:
            raise ValueError(f"scale {scale.shape} and bias {bias.shape} must have K(K+1)/2 entries or K; K is {block}")
        if temperature.shape != (block,):
            raise ValueError(f"temperature has shape {temperature.shape}; a block of {block} needs ({block},)")
        self.block, self.outputs, self.drafter = block, len(scale), drafter
        self.offline = hashlib.sha256(b"".join(x.tobytes() for x in (scale, bias, temperature))).hexdigest()[:16]
        self._positions = np.arange(block)
        self._directional = self.outputs == block
        # Entries as a table [G, K]: one row, of a directional drafter, or one a length, which ends on the diagonal.
        d = np.arange(1, 2 if self._directional else block + 1)[:, None]
        self._entry = d * (d - 1) // 2 + np.minimum(self._positions, self._positions if self._directional else d - 1)
        self._offline = scale[self._entry], bias[self._entry]
        self._flat = (0, slice(None)) if self._directional else np.tril_indices(block)
        zero, one = np.zeros(block), np.ones(block)
        self.position = _Fit(np.stack([one, zero], axis=-1)[None], _OF_POSITION)  # of the entries' calibrated logits
        self.pre = _Fit(np.stack(self._offline, axis=-1), _OF_ENTRY)
        self.all = _Fit([[[1.0, 0.0, 0.0]]], _OF_ALL)  # of every position's calibrated post-draft logit
        self._inverse = 1 / temperature
        self.post = _Fit(np.stack([self._inverse, zero, zero], axis=-1)[None], _OF_PLACE)

    def before(self, logits: FloatArray) -> npt.NDArray[np.float32]:
        """Raw pre-draft logits [n, outputs] -> survival [n, K, K] (eq. 3)."""
        convert = directional_to_survival if self._directional else triangular
        return convert(logits, *self.pre.weight[self._flat].T)

    def after(
        self,
        post: FloatArray,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        pre: FloatArray | None = None,
    ) -> npt.NDArray[np.float32]:
        """Raw post-draft logits [n, K] -> survival [n, K], 0 past lengths [n].

        rows: [n], d of the pass a draft came from; lengths: [n] <= d, tokens of it. pre: [n, outputs], None: unknown.
        """
        drafted = self._positions < np.asarray(lengths)[:, None]
        post = np.where(drafted, np.asarray(post, np.float32), np.float32(0))
        row = self._row(np.asarray(rows))
        acceptance = self._acceptance(post, self._known(self._logits(pre, row, len(post)), row))
        return np.multiply.accumulate(acceptance, axis=1) * drafted

    def learn(
        self,
        pre: FloatArray | None,
        post: FloatArray,
        rows: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        verified: npt.NDArray[np.int64],
        accepted: npt.NDArray[np.int64],
    ) -> None:
        """Drafts whose verdict is known; arguments as of `after`, lengths 0 for no draft. verified, accepted: [n]."""
        who = np.flatnonzero(lengths)
        if not len(who):
            return
        lengths, verified, accepted = (np.asarray(x)[who, None] for x in (lengths, verified, accepted))
        row = self._row(np.asarray(rows)[who])
        post = np.asarray(post, np.float32)[who]
        logits = self._logits(None if pre is None else np.asarray(pre)[who], row, len(who))
        known = self._known(logits, row)
        # A logit that is no number ends what the draft tells.
        told = np.logical_and.accumulate((self._positions < lengths) & np.isfinite(post), axis=1)
        post = _bounded(post, told)
        judged = told & (self._positions < verified)
        label = np.where(judged, (self._positions < accepted).astype(np.float32), self._acceptance(post, known))
        reach = np.ones_like(label)
        np.multiply.accumulate(label[:, :-1], axis=1, out=reach[:, 1:])
        keep, all_rows = _KEEP ** len(who), np.zeros_like(row)
        if pre is not None:
            sound = np.isfinite(logits)
            weight = reach * (told & sound)
            self.position.learn(all_rows, [known], label, weight, keep)
            self._pull_entries()
            self.pre.learn(row, [_bounded(logits, sound)], label, weight, keep)
        weight = reach * judged
        flat = (x.reshape(-1, 1) for x in (post * self._inverse, known, label, weight))
        calibrated, also, labels, weights = flat
        self.all.learn(np.zeros(len(labels), np.int64), [calibrated, also], labels, weights, keep)
        a, c, b = self.all.exact[0, 0]
        start = np.stack([a * self._inverse, np.full(self.block, c), np.full(self.block, b)], axis=-1)
        self.post.pull_to(start[None])
        self.post.learn(all_rows, [post, known], label, weight, keep)

    def fade(self) -> None:
        """A look found nothing worth drafting: what was learnt counts less, or nothing would be tried again."""
        self.position.fade(_FADE)
        self._pull_entries()
        self.pre.fade(_FADE)

    def _pull_entries(self) -> None:
        (a, b), (scale, bias) = self.position.exact[0].T, self._offline
        self.pre.pull_to(np.stack([a * scale, a * bias + b], axis=-1))

    def _acceptance(self, post: npt.NDArray[np.float32], known: FloatArray) -> npt.NDArray[np.float32]:
        a, c, b = self.post.weight[0].T
        return sigmoid(post * a + known * c + b)

    def _row(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.zeros_like(rows) if self._directional else np.maximum(rows - 1, 0)

    def _logits(self, pre: FloatArray | None, row: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.float32]:
        """Raw pre-draft logit of every position, [n, K]; NaN where there is none."""
        if pre is None:
            return np.full((n, self.block), np.nan, np.float32)
        return np.asarray(pre, np.float32)[np.arange(n)[:, None], self._entry[row]]

    def _known(self, logits: npt.NDArray[np.float32], row: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """s of every position, [n, K]: calibrated offline; 0 where there is none."""
        scale, bias = self._offline
        logits = logits * scale[row] + bias[row]
        return _bounded(logits, np.isfinite(logits))

    # Kept from run to run ---------------------------------------------------------------------------------------

    def fits(self) -> dict[str, _Fit]:
        """All that is learnt, by the names it is saved under."""
        return {"position": self.position, "pre_draft": self.pre, "all": self.all, "post_draft": self.post}

    def _guard(self) -> dict[str, Any]:
        return {"drafter": self.drafter, "block": self.block, "outputs": self.outputs, "offline": self.offline}

    def save(self, path: str | Path) -> None:
        """Write what was learnt as JSON; an older file is replaced whole or not at all."""
        aside = Path(path).with_name(Path(path).name + ".tmp")
        aside.write_text(json.dumps(self.state()) + "\n", encoding="utf-8")
        os.replace(aside, path)

    def state(self) -> dict[str, Any]:
        """What `save` writes: 100 KB at most for K = 16."""
        return {**self._guard(), **{name: fit.state() for name, fit in self.fits().items()}}

    def load(self, path: str | Path) -> None:
        """Take up what `save` wrote. Raises ValueError naming the file and the field that does not fit."""
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
        for name, wanted in self._guard().items():
            found = state.get(name) if isinstance(state, dict) else None
            if found != wanted:
                raise ValueError(f"{path}: {name} is {found!r}, here it is {wanted!r}; start without the file")
        for name, fit in self.fits().items():
            fit.restore(state.get(name), f"{path}: {name}")


def _times(matrix: npt.NDArray[np.float64], vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return (matrix @ vector[..., None])[..., 0]


def _bounded(logits: npt.NDArray[np.float32], sound: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """Within what a logit can say, 0 where it is none."""
    return np.minimum(np.maximum(np.where(sound, logits, np.float32(0)), np.float32(-_LARGE)), np.float32(_LARGE))
