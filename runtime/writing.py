"""The engine as training sees it: a writer of texts, and a reader that returns the target's features."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
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
        asked = ((index, llm.chat_ids(text)) for index, text in prompts)
        return _continuations(llm, asked, max_tokens, temperature, top_p, seed)

    return write


def invented_prompts(llm: LLM, count: int, seed: int, report: Callable[[int, int], None]) -> list[str]:
    """Up to ``count`` different prompts that the target itself writes where its chat template expects the user's
    (as MAGPIE does, arXiv 2406.08464): text of the kinds it was tuned on, for targets whose data is not at hand."""
    start = _before_the_user(llm)
    found: dict[str, None] = {}
    done: dict[int, str] = {}  # taken in the order they were begun: which ends first is the machine's affair
    tries = _continuations(llm, ((i, start) for i in range(2 * count)), 96, 1.0, 0.95, seed)
    looked_at = 0
    for number, _, ids, ended in tries:
        text = llm.tokenizer.decode(ids).strip()
        done[number] = text if ended and len(text.split()) >= 4 else ""  # a ramble; no task
        while looked_at in done and len(found) < count:
            text, looked_at = done.pop(looked_at), looked_at + 1
            if text and text not in found:
                found[text] = None
                report(len(found), count)
        if len(found) == count:
            tries.close()
            break
    return list(found)


def _before_the_user(llm: LLM) -> list[int]:
    """Token ids of the chat template up to where the user's first words stand."""
    mark = "\ue000"
    text = llm.tokenizer.apply_chat_template([{"role": "user", "content": mark}])
    return llm.tokenizer.encode(text[: text.index(mark)], add_special_tokens=False)


def _continuations(
    llm: LLM, prompts: Iterable[tuple[int, list[int]]], max_tokens: int, temperature: float, top_p: float, seed: int
) -> Generator[tuple[int, list[int], list[int], bool]]:
    """(number, prompt, continuation, ended by itself) of each, in the order they finish."""
    open_requests: dict[Hashable, tuple[int, Request]] = {}
    executor, todo, more = llm.executor, iter(prompts), True
    try:
        while more or open_requests:
            while more and len(open_requests) < executor.config.max_batch_size:
                index, ids = next(todo, (-1, []))
                if index < 0:
                    more = False
                    break
                if len(ids) >= llm.max_seq_len:
                    yield index, ids, [], False
                    continue
                own = seed + index if temperature else None
                params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=own)
                request = llm.request(ids, params)
                executor.submit(request)
                open_requests[request.id] = (index, request)
            executor.step()
            for key in [k for k, (_, r) in open_requests.items() if r.finished]:
                index, request = open_requests.pop(key)
                yield index, request.prompt_ids, request.output_ids, request.finish_reason == "stop"
    finally:
        for key in open_requests:  # whoever read this needs no more
            executor.cancel(key)


def target_features(llm: LLM, capture: Sequence[int]) -> Features:
    """One target pass a text, on a cache of its own."""
    read = target_views(llm, capture, ())

    def features(tokens: np.ndarray, responses: int) -> tuple[torch.Tensor, torch.Tensor]:
        return read(tokens, responses)[:2]

    return features


def target_views(
    llm: LLM, capture: Sequence[int], kv_layers: Sequence[int]
) -> Callable[[np.ndarray, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """`Features`, and the target's keys and values [layers, 2, T, kv_heads, d] at ``kv_layers`` (None for none)."""
    target = llm.backend.target
    pages = -(-llm.max_seq_len // 64)
    kv = target.new_kv(pages, 64)
    table = np.arange(pages)[None, :]

    @torch.inference_mode()
    def read(tokens: np.ndarray, responses: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if len(tokens) > llm.max_seq_len:
            raise ValueError(f"a text of {len(tokens)} tokens exceeds the context of {llm.max_seq_len}")
        length = len(tokens)
        batch = PackedBatch.build(tokens, np.arange(length), [length], table[:, : -(-length // 64)], 64, target.device)
        rows = torch.arange(length - 1 - responses, length - 1, device=target.device)
        output = target.forward(batch, kv, rows, capture)
        assert output.features is not None and output.logits is not None
        views = None
        if kv_layers:
            views = torch.stack([torch.stack(kv.read(layer, batch.slots)) for layer in kv_layers]).cpu()
        return output.features.cpu(), output.logits.cpu(), views

    return read
