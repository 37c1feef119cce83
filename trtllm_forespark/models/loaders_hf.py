"""Hugging Face folders: config.json beside one safetensors file, or several with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .config import ModelConfig
from .loaders import Checkpoint, CheckpointError, WeightSource

INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> Any:
    """The JSON in `path`. Raises CheckpointError where it is missing or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None


class SafetensorsSource(WeightSource):
    """Tensors of the safetensors files in `path` (a folder, or one file). Headers are read at once, data when taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: dict[str, Path] = {}
        self._shape: dict[str, tuple[int, ...]] = {}
        self._handles: dict[Path, Any] = {}
        for file in self._files(path):
            handle = self._open(file)
            for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
                self._file[name] = file
                self._shape[name] = tuple(handle.get_slice(name).get_shape())

    @staticmethod
    def _files(path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        index = path / INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: has no weight_map")
            files = [path / name for name in sorted(set(weight_map.values()))]
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise CheckpointError(f"{index}: names files that are not there: {', '.join(missing)}")
            return files
        files = sorted(path.glob("*.safetensors"))
        if not files and any(path.glob("*.bin")):
            raise CheckpointError(
                f"{path}: holds only pickled weights (*.bin), which are never loaded; convert them to safetensors first"
            )
        if not files:
            raise CheckpointError(f"{path}: no *.safetensors file found")
        return files

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                from safetensors import SafetensorError, safe_open
            except ModuleNotFoundError:
                raise CheckpointError(
                    f"{file}: reading it needs safetensors: pip install 'trtllm-forespark[cpu]'"
                ) from None
            try:
                self._handles[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not a readable safetensors file, perhaps cut short ({error})") from None
        return self._handles[file]

    def names(self) -> list[str]:
        return list(self._shape)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shape.get(name)

    def file_of(self, name: str) -> Path:
        return self._file.get(name, self.path)

    def read(self, name: str) -> torch.Tensor:
        return self._open(self._file[name]).get_tensor(name)


def open_hf(folder: Path) -> Checkpoint:
    """Open a Hugging Face folder. EOS ids come from generation_config.json too where it exists."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'}: expected an object")
    generation = folder / "generation_config.json"
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            config = {**config, "eos_token_id": eos}
    weights = SafetensorsSource(folder)
    model = ModelConfig.from_hf(config, str(folder / "config.json"))
    return Checkpoint(folder, model, weights)
