"""Bias, penalties and bad words: the target's logits as its request wants them, before anything is verified.

Row j of a request sees the prompt, the output and the drafts x_1 … x_(j-1), each counted once and in order
(docs/cases.md 28): p_j is what autoregressive decoding would draw from after these tokens (docs/lossless.md, rule 3).
A rejected draft leaves no trace, since only the output is kept. Drafters propose without penalties: any q is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trtllm_forespark.runtime.bad_words import bar_words
from trtllm_forespark.runtime.history import StepRows, TokenCounts
from trtllm_forespark.runtime.request import Request
from trtllm_forespark.wcs.stages import Draft


@torch.inference_mode()
def shape_logits(logits: Tensor, requests: Sequence[Request], lengths: Sequence[int], draft: Draft) -> Tensor:
    """The step's logits [sum(b_i + 1), V] after bias, penalties and bad words, in this order.

    lengths: [n] b_i on the host. Without such a request the very tensor given; else it is written to where it is
    float32, and copied to float32 where it is not.
    """
    biased = [i for i, r in enumerate(requests) if r.params.embedding_bias is not None]
    penalised = [i for i, r in enumerate(requests) if r.params.penalises]
    worded = [i for i, r in enumerate(requests) if r.all_bad_words]
    if not biased and not penalised and not worded:
        return logits
    logits = logits.float()
    if biased:
        _add_bias(logits, requests, biased, lengths)
    if penalised:
        rows = StepRows.of(penalised, lengths, draft, logits.device)
        _penalise(logits, [requests[i] for i in penalised], rows)
    if worded:
        rows = StepRows.of(worded, lengths, draft, logits.device)
        bar_words(logits, [requests[i] for i in worded], rows)
    return logits


def _add_bias(logits: Tensor, requests: Sequence[Request], biased: Sequence[int], lengths: Sequence[int]) -> None:
    ends = np.cumsum(np.asarray(lengths, np.int64) + 1)
    for i in biased:
        mine = logits[ends[i] - lengths[i] - 1 : ends[i]]
        ids, values = requests[i].params.bias
        values = values.to(logits.device)
        if ids is None:
            mine += values
        else:
            mine.index_add_(1, ids.to(logits.device), values.expand(len(mine), -1))


def _penalise(logits: Tensor, requests: Sequence[Request], rows: StepRows) -> None:
    """Rewrite each row's logits at the tokens that stand before it: [R, W + K] entries, no pass over the vocabulary."""
    known, counts = _said(requests, logits.shape[1])
    known, counts = known.to(logits.device), counts.to(logits.device)
    tokens, counts = _with_drafts(known, counts, rows.drafts)
    drafted = (tokens[:, :, None] == rows.drafts[:, None, :]).cumsum(-1, dtype=torch.int32)
    drafted = torch.nn.functional.pad(drafted, (1, 0))
    total = counts[rows.owner] + drafted[rows.owner, :, rows.place]

    p = [r.params for r in requests]
    numbers = [(q.repetition_penalty or 1.0, q.presence_penalty or 0.0, q.frequency_penalty or 0.0) for q in p]
    reals = torch.tensor(numbers, dtype=torch.float32).to(logits.device)[rows.owner]
    repetition, presence, frequency = reals.T[:, :, None]
    at = (rows.row[:, None], tokens[rows.owner])
    old = logits[at]
    new = torch.where(old < 0, old * repetition, old / repetition) - presence - frequency * total
    logits[at] = torch.where(total > 0, new, old)


def _said(requests: Sequence[Request], vocab: int) -> tuple[Tensor, Tensor]:
    """The different tokens of each request's prompt and output [u, W], -1 past the last, and their counts."""
    each = []
    for r in requests:
        if r.token_counts is None:
            r.token_counts = TokenCounts(r.prompt_ids, vocab)
        r.token_counts.follow(r.output_ids)
        each.append(r.token_counts)
    width = max(len(c.ids) for c in each)
    tokens, counts = np.full((len(each), width), -1, np.int64), np.zeros((len(each), width), np.int32)
    for i, c in enumerate(each):
        tokens[i, : len(c.ids)], counts[i, : len(c.ids)] = c.ids, c.counts
    return torch.from_numpy(tokens), torch.from_numpy(counts)


def _with_drafts(known: Tensor, counts: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """The drafts beside the known tokens: [u, W + K] ids and how often each was said.

    An empty place repeats the first known token, so that whatever is written twice is written alike.
    """
    same = (known[:, :, None] == drafts[:, None, :]) & (drafts >= 0)[:, None, :]
    said = (same * counts[:, :, None]).sum(1, dtype=torch.int32)
    tokens, counts = torch.cat([known, drafts], 1), torch.cat([counts, said], 1)
    empty = tokens < 0
    return torch.where(empty, known[:, :1], tokens), torch.where(empty, counts[:, :1], counts)
