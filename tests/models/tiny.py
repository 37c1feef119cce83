"""Small random checkpoints of each family, and the packed runs that the tests compare with transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trtllm_forespark.models.kv import PagedKV
from trtllm_forespark.models.transformer import PackedBatch, PackedTransformer

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
}


def reference(family: str = "llama", seed: int = 0, **changes):
    """A random transformers model in float32, norms and biases included (their defaults would hide mistakes)."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    settings = {**BASE, "rope_parameters": ROPES["default"], **changes}
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model


def save(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


class Requests:
    """Requests with their own pages; feeds chunks of their texts as packed batches and collects what comes out."""

    def __init__(self, model: PackedTransformer, texts: list[list[int]], page_size: int, pages=None, pool: int = 64):
        self.model, self.texts, self.page_size = model, texts, page_size
        self.done = [0] * len(texts)
        need = [-(-len(text) // page_size) for text in texts]
        order = iter(range(pool) if pages is None else pages)
        self.table = np.full((len(texts), max(need)), -1, np.int64)
        for row, count in zip(self.table, need, strict=True):
            row[:count] = [next(order) for _ in range(count)]
        self.kv: PagedKV = model.new_kv(pool, page_size)

    def step(self, lengths: list[int], capture=()):
        """Feed the next `lengths[i]` tokens of each request; logits of every row."""
        tokens, positions = [], []
        for index, length in enumerate(lengths):
            start = self.done[index]
            tokens += self.texts[index][start : start + length]
            positions += range(start, start + length)
            self.done[index] += length
        batch = PackedBatch.build(tokens, positions, lengths, self.table, self.page_size)
        with torch.inference_mode():
            return self.model.forward(batch, self.kv, torch.arange(len(tokens)), capture)
