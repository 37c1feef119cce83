"""Settings of a block drafter checkpoint, in the published DFlash 2 keys plus a ``forespark_config`` section."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class DFlash2Config:
    """Shape of a DFlash 2 drafter (config.json keys of the published checkpoints where they exist).

    block: K. draft_vocab_size: rows of the head; smaller than the target's vocabulary where ``t2d``/``d2t`` map it.
    capture_layers: target layers counted from 0, read after the layer. causal: directional variant.
    """

    hidden_size: int = 576
    num_layers: int = 2
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    rms_norm_eps: float = 1e-5
    rope_theta: float = 100000.0
    max_position: int = 8192
    vocab_size: int = 49152
    draft_vocab_size: int = 12288
    block: int = 7
    capture_layers: tuple[int, ...] = (1, 8, 15, 22, 28)
    target_layers: int = 30
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16
    estimator_rank: int = 256
    causal: bool = False
    target: str = "smollm2-135m"

    def __post_init__(self) -> None:
        if self.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size {self.conv_group_size} must divide hidden_size {self.hidden_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.block < 1:
            raise ValueError(f"block_size must be at least 2 (one anchor and one draft), got {self.block + 1}")
        if self.selector_top_k > self.draft_vocab_size:
            raise ValueError(f"selector_top_k {self.selector_top_k} exceeds draft_vocab_size {self.draft_vocab_size}")

    @property
    def estimator_outputs(self) -> int:
        """Logits of the pre-draft estimator: a triangle, or one row where shorter drafts are prefixes (§4.2)."""
        return self.block if self.causal else self.block * (self.block + 1) // 2

    def to_json(self) -> dict[str, Any]:
        """config.json: block_size = K + 1 and DFlash's own keys on top, ours under ``forespark_config``."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": self.block + 1,
            "num_target_layers": self.target_layers,
            "dflash_config": {"mask_token_id": None, "target_layer_ids": list(self.capture_layers)},
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.selector_top_k,
            "forespark_config": {
                "estimator_rank": self.estimator_rank,
                "causal": self.causal,
                "target": self.target,
                "own_mask_embedding": True,
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DFlash2Config:
        """Read config.json; raises KeyError's sentence as ValueError naming the missing key."""
        ours = data.get("forespark_config", {})
        dflash = data.get("dflash_config", {})
        try:
            return cls(
                hidden_size=data["hidden_size"],
                num_layers=data["num_hidden_layers"],
                num_heads=data["num_attention_heads"],
                num_kv_heads=data["num_key_value_heads"],
                head_dim=data["head_dim"],
                intermediate_size=data["intermediate_size"],
                rms_norm_eps=data["rms_norm_eps"],
                rope_theta=data["rope_theta"],
                max_position=data["max_position_embeddings"],
                vocab_size=data["vocab_size"],
                draft_vocab_size=data.get("draft_vocab_size", data["vocab_size"]),
                block=data.get("block_size", dflash.get("block_size", 0)) - 1,
                capture_layers=tuple(dflash["target_layer_ids"]),
                target_layers=data["num_target_layers"],
                conv_kernel_size=data["conv_kernel_size"],
                conv_group_size=data["conv_group_size"],
                selector_rank=data["selector_rank"],
                selector_top_k=data["selector_top_k"],
                estimator_rank=ours.get("estimator_rank", 256),
                causal=ours.get("causal", False),
                target=ours.get("target", ""),
            )
        except KeyError as missing:
            raise ValueError(f"the drafter's settings lack {missing}") from None

    def asdict(self) -> dict[str, Any]:
        return asdict(self)
