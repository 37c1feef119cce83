"""What a dense Llama or Qwen model is made of: `ModelConfig`, read from a Hugging Face config or GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HF_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Keys each kind of position scaling needs ("factors" is GGUF's own: one divisor a frequency, from `rope_freqs.weight`).
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "factors": ("factors",),
}


class ModelConfigError(ValueError):
    """A model this package cannot run, or a config that contradicts itself; the message names source, key and value."""


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one dense decoder. `rope_scaling` holds at least `rope_type` when it is not empty."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    max_position: int = 2048
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_position"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ModelConfigError(f"model config: {name} must be a positive integer, found {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"model config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"model config: head_dim must be even for rotary positions, found {self.head_dim}")
        kind = self.rope_type
        if kind not in ROPE_KEYS:
            raise ModelConfigError(
                f"model config: rope scaling {kind!r} is not supported (supported: {_names(ROPE_KEYS)})"
            )
        missing = [key for key in ROPE_KEYS[kind] if self.rope_scaling.get(key) is None]
        if missing:
            raise ModelConfigError(f"model config: rope scaling {kind!r} lacks {', '.join(missing)}")

    @property
    def rope_type(self) -> str:
        return str(self.rope_scaling.get("rope_type", "default"))

    @property
    def group(self) -> int:
        """Query heads a key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token occupies over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """From a Hugging Face config dictionary. Raises ModelConfigError for other than dense Llama, Qwen2, Qwen3."""
        architecture = next(iter(config.get("architectures") or ()), None)
        if architecture not in HF_ARCHITECTURES:
            raise ModelConfigError(
                f"{source}: architecture {architecture!r} is not supported (supported: {_names(HF_ARCHITECTURES)})"
            )

        def need(key: str) -> Any:
            if config.get(key) is None:
                raise ModelConfigError(f"{source}: key {key!r} is missing")
            return config[key]

        def refuse(key: str, allowed: tuple[Any, ...]) -> None:
            if config.get(key) not in (None, *allowed):
                raise ModelConfigError(
                    f"{source}: {key} = {config[key]!r} is not supported (supported: {_names(allowed)})"
                )

        refuse("hidden_act", ("silu", "swish"))
        refuse("partial_rotary_factor", (1, 1.0))
        refuse("use_sliding_window", (False,))
        layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
        if layer_types:
            raise ModelConfigError(
                f"{source}: layer_types {sorted(layer_types)} are not supported (only full_attention)"
            )
        quantised = config.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
            raise ModelConfigError(
                f"{source}: weights quantised with {method!r} are not supported here; use the plain checkpoint"
            )

        # transformers 5 writes `rope_parameters`; before, `rope_scaling` beside `rope_theta`, its kind named `type`.
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        kind = rope.pop("type", None)
        rope.setdefault("rope_type", kind or "default")
        if rope.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise ModelConfigError(f"{source}: partial_rotary_factor other than 1 is not supported")
        max_position = int(config.get("max_position_embeddings") or 2048)
        if rope["rope_type"] in ("yarn", "llama3") and rope.get("original_max_position_embeddings") is None:
            rope["original_max_position_embeddings"] = max_position
        if rope["rope_type"] == "default":
            rope = {}

        heads, hidden = int(need("num_attention_heads")), int(need("hidden_size"))
        eos = config.get("eos_token_id")
        llama, qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=str(architecture),
            vocab_size=int(need("vocab_size")),
            hidden_size=hidden,
            num_layers=int(need("num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate_size=int(need("intermediate_size")),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            rope_scaling=rope,
            max_position=max_position,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            attention_bias=qwen2 or bias,
            attention_output_bias=bias and not qwen2,
            mlp_bias=llama and bool(config.get("mlp_bias", False)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_ids(eos),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_names: set[str], source: str = "gguf") -> ModelConfig:
        """From GGUF metadata (plain Python values by key) and the names of its tensors.

        The tensors decide what metadata does not say: an absent `output.weight` ties the head, biases exist where
        they are stored. Per-frequency factors (`rope_freqs.weight`) are added by the loader, which holds the tensor.
        """
        arch = metadata.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            raise ModelConfigError(
                f"{source}: architecture {arch!r} is not supported (supported: {_names(GGUF_ARCHITECTURES)})"
            )

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{arch}.{key}", default)
            if value is None:
                raise ModelConfigError(f"{source}: metadata {arch}.{key} is missing")
            return value

        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        head_dim = int(get("attention.key_length", hidden // heads))
        if int(get("rope.dimension_count", head_dim)) != head_dim:
            raise ModelConfigError(
                f"{source}: {arch}.rope.dimension_count other than the head size {head_dim} is not supported"
            )
        if int(get("expert_count", 0)):
            raise ModelConfigError(f"{source}: mixture-of-experts models ({arch}.expert_count) are not supported")
        max_position = int(get("context_length"))
        rope: dict[str, Any] = {}
        kind = str(get("rope.scaling.type", "none"))
        factor = float(get("rope.scaling.factor", 0.0)) or 1.0
        if kind == "linear" and factor != 1.0:
            rope = {"rope_type": "linear", "factor": factor}
        elif kind == "yarn":
            rope = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": int(get("rope.scaling.original_context_length", max_position)),
            }
        elif kind not in ("none", "linear"):
            raise ModelConfigError(
                f"{source}: {arch}.rope.scaling.type = {kind!r} is not supported (none, linear, yarn)"
            )
        tokens = metadata.get("tokenizer.ggml.tokens") or ()
        eos = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
        return cls(
            architecture=GGUF_ARCHITECTURES[str(arch)],
            vocab_size=int(metadata.get(f"{arch}.vocab_size") or len(tokens)),
            hidden_size=hidden,
            num_layers=int(get("block_count")),
            num_heads=heads,
            num_kv_heads=int(get("attention.head_count_kv", heads)),
            head_dim=head_dim,
            intermediate_size=int(get("feed_forward_length")),
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            rope_theta=float(get("rope.freq_base", 10000.0)),
            rope_scaling=rope,
            max_position=max_position,
            tie_word_embeddings="output.weight" not in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            attention_output_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
        )


def rope_frequencies(config: ModelConfig) -> tuple[list[float], float]:
    """Inverse frequencies [head_dim / 2] (radians a position) and the factor on cos and sin, for any supported scaling.

    Formulas as in transformers' `modeling_rope_utils` (linear, llama3, YaRN), so that checkpoints mean the same.
    """
    dim, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    frequencies = [theta ** -(index / dim) for index in range(0, dim, 2)]
    if config.rope_type == "linear":
        return [value / scaling["factor"] for value in frequencies], 1.0
    if config.rope_type == "factors":
        return [value / factor for value, factor in zip(frequencies, scaling["factors"], strict=True)], 1.0
    if config.rope_type == "llama3":
        return [_llama3(value, scaling) for value in frequencies], 1.0
    if config.rope_type == "yarn":
        return _yarn(frequencies, config)
    return frequencies, 1.0


def _llama3(frequency: float, scaling: Mapping[str, Any]) -> float:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)  # rotations over the old context
    if turns < low:
        return frequency / factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(frequencies: list[float], config: ModelConfig) -> tuple[list[float], float]:
    scaling, dim, theta = config.rope_scaling, config.head_dim, config.rope_theta
    factor, original = float(scaling["factor"]), scaling["original_max_position_embeddings"]

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    attention = scaling.get("attention_factor")
    if attention is None:
        weight, weight_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = [min(max((index - low) / width, 0.0), 1.0) for index in range(dim // 2)]
    return [value / factor * r + value * (1 - r) for value, r in zip(frequencies, ramp, strict=True)], float(attention)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, (list, tuple)) else (int(value),)


def _names(values: Any) -> str:
    return ", ".join(str(value) for value in values)
