"""Settings of an engine, as a user writes them: keyword arguments, or a YAML file with the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

PolicyName = Literal["ar", "full", "batchwise", "adaptive", "wcs", "wcs-single-curve", "exhaustive"]


_ADAPT = (
    "correct estimates by what is accepted and latencies by what steps take, rest where no draft pays; off: what is "
    "drafted does not depend on times (texts of seeded and greedy requests never do)"
)
_RECALIBRATE = (
    "follow observed acceptances in the calibration of every estimate; off, or adapt off: it stays the drafter's own"
)


class EngineConfig(BaseModel):
    """What `LLM` is built from. Unknown names and values outside their range are errors that name the field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("smollm2-135m", description="embedded name, Hugging Face id, folder or .gguf file")
    drafter: str | None = Field(None, description="drafter name or folder; None: the one shipped for the model")
    policy: PolicyName = Field("wcs", description="how draft and verification lengths are decided")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: cuda where there is one")
    max_batch_size: int = Field(32, ge=1, le=65536, description="requests that run at once")
    max_num_tokens: int = Field(1024, ge=1, description="tokens of one step, prompts and drafts together")
    max_seq_len: int | None = Field(None, ge=2, description="prompt and output; None: the model's context")
    kv_cache_tokens: int | None = Field(None, ge=1, description="None: room for max_batch_size requests of 512 tokens")
    min_draft: int = Field(0, ge=0, description="draft tokens every request gets at least (the paper's fairness floor)")
    max_passed_over: int = Field(
        0, ge=0, description="steps in a row that a request may not draft while others do; 0: no bound"
    )
    whole_pieces: bool = Field(True, description="never stop a draft inside a flat piece of its envelope")
    adapt: bool = Field(True, description=_ADAPT)
    recalibrate: bool = Field(True, description=_RECALIBRATE)
    recalibration: str | None = Field(
        None, description="JSON of `LLM.save_recalibration` to start from; None: the drafter's own calibration"
    )
    latency_table: str | None = Field(None, description="JSON of `forespark profile`; None: the cached one, or measure")
    seed: int | None = Field(
        None, ge=0, description="of requests that set none (a run repeats with adapt off); None: entropy"
    )
    threads: int | None = Field(None, ge=1, description="torch CPU threads; None: torch's own choice")

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Build from keywords; raises ValueError with one line for each wrong field."""
        try:
            return cls(**settings)
        except ValidationError as error:
            raise ValueError(explain(error, cls)) from None

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> EngineConfig:
        """Read a YAML file; overrides win. Raises ValueError naming the file and the field."""
        try:
            data = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: cannot be read as YAML: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected names and values, found {type(data).__name__}")
        try:
            return cls(**{**data, **overrides})
        except ValidationError as error:
            raise ValueError(f"{path}: {explain(error, cls)}") from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """A pydantic error as sentences: field, value, what is wrong, and the names there are for an unknown one."""
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown setting {name!r}; known: {', '.join(model.model_fields)}")
        else:
            lines.append(f"{name} = {item['input']!r}: {item['msg'][:1].lower()}{item['msg'][1:]}")
    return "; ".join(lines)
