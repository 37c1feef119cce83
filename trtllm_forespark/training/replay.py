"""Replay of drafting over texts the target has already written, without running the target again.

Greedy decoding is deterministic, so a run at draft length d with full verification visits exactly the anchors that
this replay visits: draft, count the tokens that equal the text, step past them and the target's own next one. It is
how calibration gets its labels (appendix B) and how acceptance by position is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext
from trtllm_forespark.drafters.runner import DFlash2Runner


@dataclass(frozen=True)
class Text:
    """tokens [T] (prompt, then what the target wrote greedily) and the captured features [T, L, H] of all of them."""

    tokens: np.ndarray
    features: torch.Tensor
    prompt_length: int


@dataclass(frozen=True)
class Trace:
    """m drafts of one length d. pre_logits [m, outputs], post_logits [m, K] (raw), accepted [m] <= d.

    labelled [m]: positions that lie inside the text; beyond them nothing is known. previous [m]: accepted count of the
    same request's draft before, -1 for its first.
    """

    length: int
    pre_logits: np.ndarray
    post_logits: np.ndarray
    accepted: np.ndarray
    labelled: np.ndarray
    previous: np.ndarray

    def joined(self, other: Trace | None) -> Trace:
        """Both traces of one length as one."""
        if other is None:
            return self
        names = ("pre_logits", "post_logits", "accepted", "labelled", "previous")
        return Trace(self.length, *(np.concatenate([getattr(other, n), getattr(self, n)]) for n in names))


def greedy_choice(
    scores: torch.Tensor, candidates: torch.Tensor, rows: torch.Tensor, position: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Proposer` of temperature 0."""
    best = scores.argmax(-1)
    return best, torch.nn.functional.one_hot(best, scores.shape[1]).float()


class Replay:
    """Texts put into a runner's context once, then drafted over at any length."""

    def __init__(self, runner: DFlash2Runner, texts: list[Text]) -> None:
        """Raises ValueError where the runner's page pool is too small for the texts."""
        self.runner, self.texts = runner, texts
        page = runner.kv.page_size
        counts = [-(-len(t.tokens) // page) for t in texts]
        if sum(counts) > runner.num_pages:
            raise ValueError(f"the replay needs {sum(counts)} pages, the runner has {runner.num_pages}")
        self.page_table = np.zeros((len(texts), max(counts)), np.int64)
        self.context: list[torch.Tensor] = []
        first = 0
        with torch.inference_mode():
            for i, (text, count) in enumerate(zip(texts, counts, strict=True)):
                self.page_table[i, :count] = np.arange(first, first + count)
                positions = torch.arange(len(text.tokens))
                slots = torch.from_numpy(self.page_table[i])[positions // page] * page + positions % page
                device = runner.embedding.device
                moved = (t.to(device) for t in (text.features, positions, slots))
                self.context.append(runner.extend(*moved))
                first += count

    @torch.inference_mode()
    def run(self, length: int, report: Callable[[int], None] = lambda done: None) -> Trace:
        """Draft ``length`` tokens at every anchor a greedy run at that length would visit."""
        anchors = np.array([t.prompt_length for t in self.texts])
        previous = np.full(len(self.texts), -1)
        parts: list[tuple] = []
        while True:
            active = np.array([i for i, t in enumerate(self.texts) if anchors[i] < len(t.tokens) - 1], np.int64)
            if len(active) == 0:
                break
            at = anchors[active]
            newest = np.array([int(self.texts[i].tokens[a]) for i, a in zip(active, at, strict=True)])
            context = DraftContext(newest, at)
            features = torch.stack([self.context[i][a - 1] for i, a in zip(active, at, strict=True)])
            lengths = np.full(len(active), length)
            draft, post = self.runner.draft_with_logits(context, lengths, self.page_table[active], greedy_choice)
            pre = self.runner.estimate_logits(torch.from_numpy(newest).to(features.device), features)
            tokens = draft.token_ids.view(len(active), length).cpu().numpy()
            labelled = np.array(
                [min(length, len(self.texts[i].tokens) - 1 - a) for i, a in zip(active, at, strict=True)]
            )
            truth = np.stack(
                [
                    np.resize(np.append(self.texts[i].tokens[a + 1 : a + 1 + length], [-1] * length), length)
                    for i, a in zip(active, at, strict=True)
                ]
            )
            accepted = (tokens == truth).cumprod(1).sum(1)
            parts.append((pre.cpu().numpy(), post.numpy(), accepted, labelled, previous[active].copy()))
            previous[active] = accepted
            anchors[active] = at + accepted + 1
            report(int(sum(len(p[2]) for p in parts)))
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        all_pre, all_post, accepted, labelled, before = columns
        return Trace(length, all_pre.astype(np.float32), all_post.astype(np.float32), accepted, labelled, before)
