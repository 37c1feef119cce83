"""Where weights come from: `WeightSource`, and `open_checkpoint` for a folder or a file. Nothing is ever unpickled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import ModelConfig


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, the tensor, what was expected and found."""


class WeightSource(ABC):
    """Tensors of one checkpoint under Hugging Face names, read when taken."""

    path: Path

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...] | None:
        """Stored shape of `name`, or None where it is missing."""

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """The file that holds (or should hold) `name`, for messages."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor, in its stored precision (float32 where it had to be dequantised)."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, which must have `shape`. Raises CheckpointError where it is missing or misshaped."""
        found = self.shape(name)
        if found is None:
            raise CheckpointError(f"{self.file_of(name)}: tensor {name} is missing (expected shape {list(shape)})")
        if found != tuple(shape):
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} has shape {list(found)}, expected {list(shape)}"
            )
        tensor = self.read(name)
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.file_of(name)}: tensor {name} has type {tensor.dtype}, expected floating point"
            )
        return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and weights, opened but not yet read."""

    path: Path
    config: ModelConfig
    weights: WeightSource
    metadata: Mapping[str, Any] | None = None  # a GGUF's, which holds its tokenizer too


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder (config.json, *.safetensors) or a .gguf file.

    Raises CheckpointError (what is wrong with which file) or ModelConfigError (a model this package cannot run).
    """
    path = Path(path)
    if path.is_dir():
        from .loaders_hf import open_hf

        return open_hf(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        from .loaders_gguf import open_gguf

        return open_gguf(path)
    raise CheckpointError(f"{path}: expected a folder with config.json and safetensors, or a .gguf file")
