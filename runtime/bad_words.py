"""Bad words: the last token of a word is barred wherever the tokens before it stand, drafts included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trtllm_forespark.runtime.history import StepRows
from trtllm_forespark.runtime.request import Request

_NOTHING, _ANYTHING = -1, -2  # no token stands here; any token, or none, may stand here


def bar_words(logits: Tensor, requests: Sequence[Request], rows: StepRows) -> None:
    """Write -inf into ``logits`` where the next token would end a bad word of one of the u requests.

    The prompt counts as text before: a word that began there is barred too, as in TensorRT-LLM.
    """
    words = [r.all_bad_words for r in requests]
    most, longest = max(map(len, words)), max(len(word) for each in words for word in each)
    before = longest - 1
    starts = np.full((len(words), most, before), _ANYTHING, np.int64)
    ends = np.full((len(words), most), -1, np.int64)
    tail = np.full((len(words), before), _NOTHING, np.int64)
    for i, each in enumerate(words):
        for k, word in enumerate(each):
            starts[i, k, longest - len(word) :], ends[i, k] = word[:-1], word[-1]
        if before:
            said = [*requests[i].prompt_ids[-before:], *requests[i].output_ids[-before:]][-before:]
            tail[i, before - len(said) :] = said
    start, end, said_before = (torch.from_numpy(a).to(logits.device) for a in (starts, ends, tail))
    barred = (end >= 0)[rows.owner]
    if before:
        context = torch.cat([said_before, rows.drafts], 1).unfold(1, before, 1)[rows.owner, rows.place]
        wanted = start[rows.owner]
        barred &= ((wanted == context[:, None, :]) | (wanted == _ANYTHING)).all(-1)
    minus = torch.zeros(barred.shape, device=logits.device).masked_fill_(barred, -torch.inf)
    # Added, not set: a token that two words end with is barred where either of them matches.
    logits.index_put_((rows.row[:, None], end.clamp(min=0)[rows.owner]), minus, accumulate=True)
