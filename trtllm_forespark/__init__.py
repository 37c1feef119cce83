"""Work-conserving speculative decoding for TensorRT-LLM, Triton and torch.

from trtllm_forespark import LLM, SamplingParams
outputs = LLM("smollm2-135m", policy="wcs").generate(["Hello"], SamplingParams(max_tokens=24))
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM
    from trtllm_forespark.runtime.request import RequestOutput, SamplingParams
    from trtllm_forespark.runtime.speculation import Speculation

__all__ = ["LLM", "RequestOutput", "SamplingParams", "Speculation", "__version__"]

try:
    __version__ = version("trtllm-forespark")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

_HOMES = {
    "LLM": "runtime.llm",
    "SamplingParams": "runtime.request",
    "RequestOutput": "runtime.request",
    "Speculation": "runtime.speculation",
}


def __getattr__(name: str) -> object:
    """Load the engine when it is first asked for, so that importing the package stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
