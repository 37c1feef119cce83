"""Training state on disk: safetensors for tensors, JSON for the rest; written aside and renamed, so never half."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def save_state(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Model, Adam moments and progress of one run; replaces the previous state atomically."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for index, state in optimizer.state_dict()["state"].items():
        for key, tensor in state.items():
            tensors[f"adam.{key}.{names[index]}"] = tensor.detach()
    temporary = folder / "state.tmp"
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        temporary,
        {"progress": json.dumps(progress)},
    )
    os.replace(temporary, folder / "state.safetensors")


def load_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put a saved run back; None where the folder holds none. Raises ValueError for a state of another shape."""
    path = folder / "state.safetensors"
    if not path.exists():
        return None
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        progress = json.loads(file.metadata()["progress"])
    tensors = load_file(path)
    try:
        model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    except RuntimeError as error:
        raise ValueError(
            f"{path} belongs to another drafter: {str(error).splitlines()[1].strip()}; choose another --output"
        ) from None
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    saved = optimizer.state_dict()
    saved["state"] = {
        index: {key: tensors[f"adam.{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        for index, name in enumerate(names)
        if f"adam.step.{name}" in tensors
    }
    optimizer.load_state_dict(saved)
    return progress
