"""Pre-draft logits to survival and rewards (eq. 3)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]


def triangle_size(block: int) -> int:
    """Number of logits in a triangle for drafts of up to `block` tokens: K(K+1)/2."""
    return block * (block + 1) // 2


@lru_cache(maxsize=64)
def _triangle(block: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    return np.tril_indices(block)


def triangle_to_survival(
    logits: FloatArray, scale: FloatArray | float = 1.0, bias: FloatArray | float = 0.0
) -> npt.NDArray[np.float32]:
    """Survival of every candidate length: S_i,d,j = prod_{t<=j} sigmoid(a_d,t z_i,t^(d) + b_d,t) (eq. 3).

    logits: [n, K(K+1)/2], packed row by row; row d has d entries, rows d = 1..K in order.
    scale, bias: the calibration a, b of every entry, [K(K+1)/2] in the same order, or a number for all.
    Returns [n, K, K] float32; ``[i, d - 1, j - 1]`` is about Pr(A_i,d >= j), 0 where j > d. NaN logits stay NaN (the
    envelope drafts nothing for such a request). Raises ValueError where the last axis is no triangle.
    """
    logits = np.asarray(logits, dtype=np.float32)
    size = logits.shape[-1]
    block = int((np.sqrt(8 * size + 1) - 1) / 2)
    if logits.ndim != 2 or size == 0 or triangle_size(block) != size:
        raise ValueError(f"logits of shape {logits.shape} are not [n, K(K+1)/2] for any K >= 1")
    rows, columns = _triangle(block)
    acceptance = np.zeros((len(logits), block, block), dtype=np.float32)
    acceptance[:, rows, columns] = sigmoid(logits * np.asarray(scale, np.float32) + np.asarray(bias, np.float32))
    # Entries past the diagonal are 0, so the running product of row d is 0 after its d-th entry.
    return np.multiply.accumulate(acceptance, axis=2)


def directional_to_survival(
    logits: FloatArray, scale: FloatArray | float = 1.0, bias: FloatArray | float = 0.0
) -> npt.NDArray[np.float32]:
    """Survival for a directional (causal) drafter, whose row d is a prefix of row K, from K logits (section 4.2).

    logits: [n, K]; scale, bias: [K] or a number. Returns [n, K, K] as `triangle_to_survival` does.
    """
    logits = np.asarray(logits, dtype=np.float32)
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits of shape {logits.shape} are not [n, K] with K >= 1")
    acceptance = sigmoid(logits * np.asarray(scale, np.float32) + np.asarray(bias, np.float32))
    return prefix_survival(np.multiply.accumulate(acceptance, axis=1))


def prefix_survival(row: FloatArray) -> npt.NDArray[np.float32]:
    """One survival curve a request, [n, K], as a triangle whose rows are its prefixes, [n, K, K]."""
    row = np.asarray(row, dtype=np.float32)
    block = row.shape[1]
    return np.where(np.tri(block, dtype=bool), row[:, None, :], np.float32(0))


def rewards(survival: FloatArray) -> npt.NDArray[np.float32]:
    """R_i(d) = sum_{j<=d} S_i,d,j, accepted tokens to expect of a draft of d fully verified tokens; R_i(0) = 0.

    survival: [n, K, K]. Returns [n, K + 1] float32, in Fortran order (the schedule works across the batch).
    """
    n, block, _ = survival.shape
    out = np.zeros((n, block + 1), dtype=np.float32, order="F")
    np.add.reduce(survival, axis=2, out=out[:, 1:])
    return out


def sigmoid(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Logistic function; tanh neither overflows nor warns, whatever the logit."""
    return np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1))
