"""Target features of training text on disk: written once by the target, read by every epoch.

A store is a folder: ``tokens.npy`` (all sequences, prompt then response), ``index.npz`` (``tok_off``, ``resp_off``,
``layers``), ``hidden.f16`` [tokens, L, H] (outputs of the captured layers), ``topi.u32`` and ``topp.f16`` [response
tokens, 32] (the target's most likely next tokens and their probabilities at the position before each response token),
and ``progress`` (sequences finished). It may be read while it is being written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TOP = 32


@dataclass(frozen=True)
class Sequence:
    """One text: tokens [T], hidden [T, L, H] float16, and for response token r the target's top ids/probs [R, 32]."""

    tokens: np.ndarray
    hidden: np.ndarray
    prompt_length: int
    top_ids: np.ndarray
    top_probs: np.ndarray


class FeatureStore:
    """Read side of a store (see the module's text)."""

    def __init__(self, folder: Path, layers: Iterable[int], hidden_size: int) -> None:
        """layers: the captured target layers that are wanted. Raises ValueError where the store holds others."""
        self.folder, self.layers = Path(folder), tuple(layers)
        for name in ("tokens.npy", "index.npz", "hidden.f16", "topi.u32", "topp.f16"):
            if not (self.folder / name).exists():
                raise FileNotFoundError(
                    f"feature store {self.folder}: {name} is missing; run `forespark train` to make it"
                )
        index = np.load(self.folder / "index.npz")
        found = tuple(index["layers"].tolist()) if "layers" in index else None
        if found != self.layers:
            raise ValueError(f"{self.folder} holds features of layers {found}, wanted are {self.layers}")
        self.token_offsets, self.response_offsets = index["tok_off"], index["resp_off"]
        self.tokens = np.load(self.folder / "tokens.npy", mmap_mode="r")
        tokens, responses = int(self.token_offsets[-1]), int(self.response_offsets[-1])
        self.hidden = self._map("hidden.f16", np.float16, (tokens, len(self.layers), hidden_size))
        self.top_ids = self._map("topi.u32", np.uint32, (responses, TOP))
        self.top_probs = self._map("topp.f16", np.float16, (responses, TOP))

    def _map(self, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        path, expected = self.folder / name, int(np.prod(shape)) * np.dtype(dtype).itemsize
        if path.stat().st_size != expected:
            raise ValueError(f"{path}: {path.stat().st_size} bytes, expected {expected} for shape {shape}")
        return np.memmap(path, dtype, "r", shape=shape)

    def __len__(self) -> int:
        return len(self.token_offsets) - 1

    def finished(self) -> int:
        """Sequences whose features stand on disk."""
        progress = self.folder / "progress"
        return min(len(self), int(progress.read_text() or 0)) if progress.exists() else 0

    def __getitem__(self, i: int) -> Sequence:
        t0, t1 = self.token_offsets[i], self.token_offsets[i + 1]
        r0, r1 = self.response_offsets[i], self.response_offsets[i + 1]
        return Sequence(
            tokens=np.asarray(self.tokens[t0:t1]).astype(np.int64),
            hidden=np.asarray(self.hidden[t0:t1]),
            prompt_length=int((t1 - t0) - (r1 - r0)),
            top_ids=np.asarray(self.top_ids[r0:r1]).astype(np.int64),
            top_probs=np.asarray(self.top_probs[r0:r1]),
        )


class FeatureStores:
    """Several stores read as one, the finished sequences of the first before those of the next."""

    def __init__(self, stores: list[FeatureStore]) -> None:
        self.stores = stores

    def finished(self) -> int:
        return sum(store.finished() for store in self.stores)

    def __getitem__(self, i: int) -> Sequence:
        for store in self.stores:
            if i < store.finished():
                return store[i]
            i -= store.finished()
        raise IndexError("no such sequence is finished")


def draft_vocabulary(stores: Iterable[FeatureStore], size: int, vocab_size: int) -> np.ndarray:
    """The ``size`` most frequent response tokens (prompt tokens break ties), ascending target ids: ``d2t``."""
    counts = np.zeros(vocab_size)
    for store in stores:
        for i in range(len(store)):
            tokens = store.tokens[store.token_offsets[i] : store.token_offsets[i + 1]]
            response = int(store.response_offsets[i + 1] - store.response_offsets[i])
            counts += np.bincount(tokens[-response:], minlength=vocab_size)
            counts += 1e-3 * np.bincount(tokens[:-response], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size])
