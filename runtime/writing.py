"""The engine as training sees it: a writer of texts, and a reader that returns the target's features."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from trtllm_forespark.models.transformer import PackedBatch
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.training.distill import Features, Generate

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM


def answers(llm: LLM, max_tokens: int, temperature: float, top_p: float, seed: int) -> Generate:
    """Answer prompts (chat template) with a seed of their own each; yields them as they finish."""

    def write(prompts: Sequence[tuple[int, str]]) -> Iterator[tuple[int, list[int], list[int], bool]]:
        open_requests: dict[Hashable, tuple[int, Request]] = {}
        executor = llm.executor
        todo = list(prompts)[::-1]
        while todo or open_requests:
            while todo and len(open_requests) < executor.config.max_batch_size:
                index, text = todo.pop()
                params = SamplingParams(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed + index if temperature else None,
                )
                ids = llm.chat_ids(text)
                if len(ids) >= llm.max_seq_len:
                    yield index, ids, [], False
                    continue
                request = llm.request(ids, params)
                executor.submit(request)
                open_requests[request.id] = (index, request)
            executor.step()
            for key in [k for k, (_, r) in open_requests.items() if r.finished]:
                index, request = open_requests.pop(key)
                yield index, request.prompt_ids, request.output_ids, request.finish_reason == "stop"

    return write


def target_features(llm: LLM, capture: Sequence[int]) -> Features:
    """One target pass a text, on a cache of its own."""
    target = llm.backend.target
    pages = -(-llm.max_seq_len // 64)
    kv = target.new_kv(pages, 64)
    table = np.arange(pages)[None, :]

    @torch.inference_mode()
    def read(tokens: np.ndarray, responses: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(tokens) > llm.max_seq_len:
            raise ValueError(f"a text of {len(tokens)} tokens exceeds the context of {llm.max_seq_len}")
        length = len(tokens)
        batch = PackedBatch.build(tokens, np.arange(length), [length], table[:, : -(-length // 64)], 64, target.device)
        rows = torch.arange(length - 1 - responses, length - 1, device=target.device)
        output = target.forward(batch, kv, rows, capture)
        assert output.features is not None and output.logits is not None
        return output.features.cpu(), output.logits.cpu()

    return read
