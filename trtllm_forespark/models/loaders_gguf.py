"""GGUF files: any quantisation the `gguf` package can undo, dequantised to float32 tensor by tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from .config import ModelConfig
from .gguf_file import GgufFile
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


class GgufSource(WeightSource):
    """Tensors of a GGUF file under Hugging Face names. GGUF reorders llama's q and k rows; that is undone."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.path, self._file, self._config = file.path, file, config

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._file.tensors.get(gguf_name(name))
        return None if tensor is None else tensor.shape

    def file_of(self, name: str) -> Path:
        return self.path

    def read(self, name: str) -> torch.Tensor:
        array = dequantise(self._file, gguf_name(name))
        if self._config.architecture == "LlamaForCausalLM":
            if ".q_proj." in name:
                array = unpermute(array, self._config.num_heads)
            elif ".k_proj." in name:
                array = unpermute(array, self._config.num_kv_heads)
        return torch.from_numpy(np.ascontiguousarray(array))


def dequantise(file: GgufFile, name: str) -> np.ndarray:
    """The GGUF tensor `name` as float32, rows first. Raises CheckpointError for a type gguf cannot undo."""
    import gguf

    tensor = file.tensors[name]
    kind = gguf.GGMLQuantizationType(tensor.kind)
    _, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = file.bytes_of(tensor).reshape(-1, width)
    pieces = []
    try:
        # Long runs of blocks: gguf works through 16 rows at a time, which is slow where rows are short.
        for part in np.array_split(blocks, max(1, tensor.size // 2**20)):
            pieces.append(gguf.quants.dequantize(part.reshape(1, -1), kind).reshape(-1))
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"{file.path}: tensor {name} has type {kind.name}, which cannot be read ({error})"
        ) from None
    return np.concatenate(pieces).astype(np.float32, copy=False).reshape(tensor.shape)


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's order (rotary pairs adjacent) to Hugging Face's (pairs half a head apart)."""
    rows = array.shape[0]
    return array.reshape(heads, rows // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file. Raises CheckpointError or ModelConfigError."""
    file = GgufFile(path)
    config = ModelConfig.from_gguf(file.metadata, set(file.tensors), str(path))
    if "rope_freqs.weight" in file.tensors:  # llama 3 scaling, stored as one divisor a frequency
        factors = dequantise(file, "rope_freqs.weight")
        if factors.size != config.head_dim // 2:
            raise CheckpointError(
                f"{path}: tensor rope_freqs.weight has shape {list(factors.shape)}, expected {[config.head_dim // 2]}"
            )
        scaling = {"rope_type": "factors", "factors": factors.reshape(-1).tolist()}
        config = dataclasses.replace(config, rope_scaling=scaling)
    return Checkpoint(path, config, GgufSource(file, config), file.metadata)
