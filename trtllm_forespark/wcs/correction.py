"""Estimates corrected while serving: text unlike what they were calibrated on must not cost throughput for long."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.survival import FloatArray

#: How much a fresh correction trusts the calibration, in accepted tokens; what one draft leaves of older evidence, and
#: what a step that tries nothing leaves of log c.
_PRIOR, _KEEP, _FADE = 40.0, 1 - 1 / 400, 0.97
#: Limits of log c.
_LOWEST, _HIGHEST = -0.7, 0.3


class Correction:
    """One factor c on every conditional acceptance: survival S_j of position j becomes S_j c^j where c <= 1.

    log c follows the accepted tokens by Newton steps on (accepted - expected), older evidence fading. It depends on
    past steps alone, so it cannot break non-anticipation (docs/lossless.md, rule 1).
    """

    def __init__(self, block: int) -> None:
        self._positions = np.arange(1, block + 1, dtype=np.float32)
        self._log = 0.0
        self._information = _PRIOR

    @property
    def factor(self) -> float:
        """c."""
        return float(np.exp(self._log))

    def apply(self, survival: FloatArray) -> npt.NDArray[np.float32]:
        """survival [..., K] -> corrected; conditional acceptance stays within 1."""
        survival = np.asarray(survival, dtype=np.float32)
        if self._log == 0.0:
            return survival
        if self._log < 0.0:
            return survival * np.exp(self._log * self._positions).astype(np.float32)
        conditional = survival.copy()
        conditional[..., 1:] /= np.maximum(survival[..., :-1], np.float32(1e-12))
        conditional *= np.float32(self.factor)
        return np.multiply.accumulate(np.minimum(conditional, np.float32(1)), axis=-1)

    def fade(self) -> None:
        """A step in which nothing was tried: what was learnt counts a little less, or nothing would be tried again."""
        self._log *= _FADE

    def learn(self, expected: FloatArray, accepted: float) -> None:
        """expected: [m, K], corrected survival of the positions of m drafts, 0 elsewhere; accepted: tokens in all."""
        expected = np.asarray(expected, dtype=np.float32)
        expected = np.where(expected > 0, expected, np.float32(0))  # NaN goes too
        slope = float((expected * self._positions).sum())
        self._information = max(self._information * _KEEP ** len(expected) + slope, _PRIOR)
        step = (accepted - float(expected.sum())) / self._information
        self._log = float(np.clip(self._log + step, _LOWEST, _HIGHEST))
