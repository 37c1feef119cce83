"""Stage 4: which drafted positions are verified (section 4.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.survival import FloatArray


def distribute(survival: FloatArray, lengths: npt.NDArray[np.integer], budget: int) -> npt.NDArray[np.int64]:
    """Verify the `budget` drafted positions of the batch with the highest post-draft survival.

    survival: [n, K], S^_i,j; made non-increasing in j. lengths: [n], d_i. Returns b_i [n], 0 <= b_i <= d_i, a prefix of
    each draft. Ties go to the earlier position, then to the earlier request, so no later position of a request pushes
    out an earlier one (docs/lossless.md, rule 1). The sum is ``min(budget, positions present)``; a position whose
    survival is NaN, and what follows it in that draft, is not present: its logits were broken.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    survival = np.asarray(survival, dtype=np.float32)
    n, block = survival.shape
    present = np.arange(block) < lengths[:, None]
    missing = np.isnan(survival)
    if missing.any():
        present &= ~np.logical_or.accumulate(missing, axis=1)
    usable: Any = np.add.reduce(present, axis=1)
    if budget >= int(usable.sum()):
        return usable.astype(np.int64)
    if budget <= 0:
        return np.zeros(n, dtype=np.int64)
    value = np.where(present, np.minimum.accumulate(np.where(present, survival, 0), axis=1), -1)
    cut = np.partition(value.ravel(), value.size - budget)[value.size - budget]
    verified: Any = np.add.reduce(value > cut, axis=1)
    tied = value == cut
    # Ties, counted position by position and within one position request by request.
    order = np.add.accumulate(tied.T.ravel()).reshape(block, n).T
    verified = verified + np.add.reduce(tied & (order <= budget - verified.sum()), axis=1)
    return verified.astype(np.int64)
