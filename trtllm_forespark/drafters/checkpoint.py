"""Drafter checkpoints: config.json, model.safetensors and, where calibrated, calibration.json in one folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.config import BlockConfig
from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.drafters.dspark import DSpark
from trtllm_forespark.drafters.longspark import LongSpark

MODELS: dict[str, type[BlockDrafter]] = {"dflash2": DFlash2, "dspark": DSpark, "longspark": LongSpark}


def new_drafter(config: BlockConfig) -> BlockDrafter:
    """An untrained drafter of the configuration's kind."""
    return MODELS[config.kind](config)


def save_drafter(folder: Path, model: BlockDrafter, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors; floating tensors as ``dtype``, the calibration is left alone."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_json(), indent=1) + "\n")
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor.to(torch.int32)).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private to the user


def load_drafter(folder: Path) -> tuple[BlockDrafter, Calibration]:
    """Read a drafter in float32. Raises ValueError that names file, tensor, expected and found shape."""
    folder = Path(folder)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"drafter {folder}: {name} is missing")
    try:
        data = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{folder / 'config.json'} holds no object")
    try:
        config = BlockConfig.from_json(data)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / 'config.json'}: a setting is wrong: {error}") from None
    model = new_drafter(config)
    wanted = model.state_dict()
    path = folder / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            found = set(file.keys())
            for name, tensor in wanted.items():
                if name not in found:
                    raise ValueError(f"{path}: tensor {name} {tuple(tensor.shape)} is missing")
                shape = tuple(file.get_slice(name).get_shape())
                if shape != tuple(tensor.shape):
                    raise ValueError(
                        f"{path}: tensor {name} has shape {shape}, config.json asks for {tuple(tensor.shape)}"
                    )
                tensor.copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from None
    if int(model.d2t.min()) < 0 or int(model.d2t.max()) >= config.vocab_size:
        raise ValueError(f"{path}: d2t points outside the target's vocabulary of {config.vocab_size}")
    calibration = folder / "calibration.json"
    if calibration.exists():
        return model, Calibration.load(calibration, config.block, config.estimator_outputs)
    return model, Calibration.identity(config.block, config.estimator_outputs)
