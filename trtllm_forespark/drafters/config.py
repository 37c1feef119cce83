"""Settings of block drafter checkpoints: the published keys of each format, plus a ``forespark_config`` section."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from trtllm_forespark.models.config import ModelConfig

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class BlockConfig:
    """What every block drafter has.

    block: K. draft_vocab_size: rows of the head; smaller than the target's vocabulary where ``d2t`` maps it.
    capture_layers: target layers counted from 0, read after the layer. anchor_slots: 1 where a block of d drafts has an
    anchor's slot besides and position j is read from slot j, 0 where the anchor's own slot predicts position 1. causal:
    directional, so that a shorter draft is a prefix of a longer one.
    """

    architecture: ClassVar[str]
    kind: ClassVar[str]

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
    estimator_rank: int = 256
    causal: bool = False
    target: str = "smollm2-135m"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.block < 1:
            raise ValueError(f"a block must draft at least one token, got {self.block}")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} must be 1 to vocab_size {self.vocab_size}")
        bad = [layer for layer in self.capture_layers if not 0 <= layer < self.target_layers]
        if bad or not self.capture_layers or len(set(self.capture_layers)) < len(self.capture_layers):
            raise ValueError(
                f"target_layer_ids {list(self.capture_layers)}: the target has {self.target_layers} layers; "
                "give some, each once"
            )
        if self.top_k > self.draft_vocab_size:
            raise ValueError(f"{self.top_k_key} {self.top_k} exceeds draft_vocab_size {self.draft_vocab_size}")

    def check_target(self, target: ModelConfig, name: str, model: str) -> None:
        """Raises ValueError where the drafter ``name`` was made for another target than ``model``."""
        for what, wanted, found in (
            ("layers", self.target_layers, target.num_layers),
            ("hidden size", self.hidden_size, target.hidden_size),
            ("vocabulary", self.vocab_size, target.vocab_size),
        ):
            if wanted != found:
                raise ValueError(
                    f"drafter {name} was made for a target with {what} {wanted}, {model} has {found}; "
                    "name a drafter made for it, or policy='ar'"
                )

    @property
    def anchor_slots(self) -> int:
        raise NotImplementedError

    @property
    def top_k(self) -> int:
        """Candidates a position keeps; the proposal is restricted to them."""
        raise NotImplementedError

    top_k_key: ClassVar[str] = "top_k"

    @property
    def estimator_outputs(self) -> int:
        """Logits of the pre-draft estimator: a triangle, or one row where shorter drafts are prefixes (§4.2)."""
        return self.block if self.causal else self.block * (self.block + 1) // 2

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> dict[str, Any]:
        """config.json: published keys on top, ours under ``forespark_config``."""
        return {
            "architectures": [self.architecture],
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
            "num_target_layers": self.target_layers,
            **self._own_json(),
            "forespark_config": {
                "drafter": self.kind,
                "estimator_rank": self.estimator_rank,
                "causal": self.causal,
                "target": self.target,
                "own_mask_embedding": True,
                **self._section_json(),
            },
        }

    def _own_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def _section_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _own_fields(cls, data: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BlockConfig:
        """Read config.json of whichever kind it is. Raises ValueError naming a missing or wrong key."""
        ours = data.get("forespark_config", {})
        kind = _kind_of(data)
        try:
            return kind(
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
                target_layers=data["num_target_layers"],
                estimator_rank=ours.get("estimator_rank", 256),
                causal=ours.get("causal", False),
                target=ours.get("target", ""),
                **kind._own_fields(data, ours),
            )
        except KeyError as missing:
            raise ValueError(f"the drafter's settings lack {missing}") from None


@dataclass(frozen=True)
class DFlash2Config(BlockConfig):
    """DFlash 2: in-block convolutions and a path selector."""

    architecture = "DFlash2DraftModel"
    kind = "dflash2"
    top_k_key = "selector_top_k"

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size {self.conv_group_size} must divide hidden_size {self.hidden_size}")

    @property
    def anchor_slots(self) -> int:
        return 1

    @property
    def top_k(self) -> int:
        return self.selector_top_k

    def _own_json(self) -> dict[str, Any]:
        return {
            "block_size": self.block + 1,
            "dflash_config": {"mask_token_id": None, "target_layer_ids": list(self.capture_layers)},
            "conv_kernel_size": self.conv_kernel_size,
            "conv_group_size": self.conv_group_size,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.selector_top_k,
        }

    @classmethod
    def _own_fields(cls, data: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        dflash = data.get("dflash_config", {})
        return {
            "block": data.get("block_size", dflash.get("block_size", 0)) - 1,
            "capture_layers": tuple(dflash["target_layer_ids"]),
            "conv_kernel_size": data["conv_kernel_size"],
            "conv_group_size": data["conv_group_size"],
            "selector_rank": data["selector_rank"],
            "selector_top_k": data["selector_top_k"],
        }


@dataclass(frozen=True)
class MarkovConfig(BlockConfig):
    """Drafters whose base logits are corrected by the token before (DSpark, LongSpark).

    markov_head_type: vanilla, gated or rnn. candidates: most likely base logits a position keeps.
    """

    top_k_key = "candidates"

    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    candidates: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(f"markov_head_type {self.markov_head_type!r}: give one of {', '.join(MARKOV_HEADS)}")
        if self.markov_rank < 1:
            raise ValueError(f"markov_rank must be at least 1, got {self.markov_rank}")

    @property
    def top_k(self) -> int:
        return self.candidates

    def _section_json(self) -> dict[str, Any]:
        return {"candidates": self.candidates}

    @classmethod
    def _markov_fields(cls, data: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        return {
            "capture_layers": tuple(data["target_layer_ids"]),
            "markov_rank": data["markov_rank"],
            "markov_head_type": data["markov_head_type"],
            "candidates": ours.get("candidates", 16),
        }


@dataclass(frozen=True)
class DSparkConfig(MarkovConfig):
    """DSpark. sample_from_anchor: DeepSpec's layout, the anchor's slot predicts position 1; else the speculators one,
    with a slot more and the anchor's unused."""

    architecture = "Qwen3DSparkModel"
    kind = "dspark"

    sample_from_anchor: bool = True

    @property
    def anchor_slots(self) -> int:
        return 0 if self.sample_from_anchor else 1

    def _own_json(self) -> dict[str, Any]:
        return {
            "block_size": self.block + self.anchor_slots,
            "mask_token_id": None,
            "target_layer_ids": list(self.capture_layers),
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": self.sample_from_anchor,
        }

    @classmethod
    def _own_fields(cls, data: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        from_anchor = data.get("sample_from_anchor", True)
        return {
            **cls._markov_fields(data, ours),
            "block": data["block_size"] - (0 if from_anchor else 1),
            "sample_from_anchor": from_anchor,
        }


@dataclass(frozen=True)
class LongSparkConfig(MarkovConfig):
    """LongSpark. Draft layer l reads the keys and values of target layer kv_layers[l].

    window: newest tokens it sees one by one. summary_rows: frozen queries a layer and query head (16 in the paper).
    views: which of the three views it has, a subset of (boundary, window, summary); less than all is an ablation.
    """

    architecture = "LongSparkDraftModel"
    kind = "longspark"

    num_layers: int = 3
    kv_layers: tuple[int, ...] = (2, 16, 29)
    window: int = 256
    summary_rows: int = 16
    views: tuple[str, ...] = ("boundary", "window", "summary")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.kv_layers) != self.num_layers:
            raise ValueError(
                f"kv_layers {list(self.kv_layers)}: {self.num_layers} draft layers need as many target layers"
            )
        bad = [layer for layer in self.kv_layers if not 0 <= layer < self.target_layers]
        if bad:
            raise ValueError(f"kv_layers {list(self.kv_layers)}: the target has {self.target_layers} layers")
        if self.window < 1 or self.summary_rows < 1:
            raise ValueError(f"window {self.window} and summary_rows {self.summary_rows} must be at least 1")
        if not set(self.views) <= {"boundary", "window", "summary"}:
            raise ValueError(f"views {list(self.views)}: give some of boundary, window, summary")

    @property
    def anchor_slots(self) -> int:
        return 0

    def _own_json(self) -> dict[str, Any]:
        return {
            "block_size": self.block,
            "target_layer_ids": list(self.capture_layers),
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "kv_layer_ids": list(self.kv_layers),
            "raw_target_rows": self.window,
            "global_memory_slots": self.summary_rows,
        }

    def _section_json(self) -> dict[str, Any]:
        return {**super()._section_json(), "views": list(self.views)}

    @classmethod
    def _own_fields(cls, data: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
        return {
            **cls._markov_fields(data, ours),
            "block": data["block_size"],
            "kv_layers": tuple(data["kv_layer_ids"]),
            "window": data["raw_target_rows"],
            "summary_rows": data["global_memory_slots"],
            "views": tuple(ours.get("views", ("boundary", "window", "summary"))),
        }


KINDS: dict[str, type[BlockConfig]] = {c.kind: c for c in (DFlash2Config, DSparkConfig, LongSparkConfig)}


def _kind_of(data: dict[str, Any]) -> type[BlockConfig]:
    """By what only that kind has."""
    if "global_memory_slots" in data:
        return LongSparkConfig
    if "markov_rank" in data:
        return DSparkConfig
    return DFlash2Config
