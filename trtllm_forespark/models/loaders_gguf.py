"""GGUF files: any quantisation the `gguf` package can undo, dequantised to float32 tensor by tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import ModelConfig
from .loaders import Checkpoint, CheckpointError, WeightSource

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{_LAYER[rest]}.{kind}"


def read_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of `path`. Raises CheckpointError for what is no whole GGUF file."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise CheckpointError(
            f"{path}: reading it needs the gguf package: pip install 'trtllm-forespark[cpu]'"
        ) from None
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader fails on bad bytes with whatever NumPy or it raises
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(
            f"{path}: not a readable GGUF file, perhaps cut short at {size} bytes ({error})"
        ) from None


def metadata_of(reader: Any) -> dict[str, Any]:
    """All metadata of a GGUF file as plain Python values."""
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


class GgufSource(WeightSource):
    """Tensors of a GGUF file under Hugging Face names. GGUF reorders llama's q and k rows; that is undone."""

    def __init__(self, path: Path, reader: Any, config: ModelConfig) -> None:
        self.path, self._config = path, config
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(gguf_name(name))
        return None if tensor is None else tuple(int(size) for size in reversed(tensor.shape))

    def file_of(self, name: str) -> Path:
        return self.path

    def read(self, name: str) -> torch.Tensor:
        stored = self._tensors[gguf_name(name)]
        array = dequantise(stored, self.path)
        if self._config.architecture == "LlamaForCausalLM":
            if ".q_proj." in name:
                array = unpermute(array, self._config.num_heads)
            elif ".k_proj." in name:
                array = unpermute(array, self._config.num_kv_heads)
        return torch.from_numpy(np.ascontiguousarray(array))


def dequantise(stored: Any, path: Path) -> np.ndarray:
    """A GGUF tensor as float32, [rows, columns] as in PyTorch. Raises CheckpointError for a type gguf cannot undo."""
    import gguf

    try:
        array = gguf.quants.dequantize(stored.data, stored.tensor_type)
    except (NotImplementedError, ValueError) as error:
        kind = getattr(stored.tensor_type, "name", stored.tensor_type)
        raise CheckpointError(f"{path}: tensor {stored.name} has type {kind}, which cannot be read ({error})") from None
    array = np.array(array, dtype=np.float32)  # a copy: the file is memory-mapped and may go
    return array.reshape([int(size) for size in reversed(stored.shape)])


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's order (rotary pairs adjacent) to Hugging Face's (pairs half a head apart)."""
    rows = array.shape[0]
    return array.reshape(heads, rows // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file. Raises CheckpointError or ModelConfigError."""
    reader = read_gguf(path)
    names = {tensor.name for tensor in reader.tensors}
    config = ModelConfig.from_gguf(metadata_of(reader), names, str(path))
    if "rope_freqs.weight" in names:  # llama 3 scaling, stored as one divisor a frequency
        factors = next(dequantise(tensor, path) for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
        if factors.size != config.head_dim // 2:
            raise CheckpointError(
                f"{path}: tensor rope_freqs.weight has shape {list(factors.shape)}, expected {[config.head_dim // 2]}"
            )
        scaling = {"rope_type": "factors", "factors": factors.reshape(-1).tolist()}
        config = dataclasses.replace(config, rope_scaling=scaling)
    return Checkpoint(path, config, GgufSource(path, reader, config))
