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

from trtllm_forespark.drafters.base import DraftContext, DrafterRunner, Verified
from trtllm_forespark.models.kv import PagedKV


@dataclass(frozen=True)
class Text:
    """tokens [T] (prompt, then what the target wrote greedily) and the captured features [T, L, H] of all of them.

    kv: [layers, 2, T, kv_heads, d], the target's keys and values at the layers whose a drafter reads; None for none.
    """

    tokens: np.ndarray
    features: torch.Tensor
    prompt_length: int
    kv: torch.Tensor | None = None


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
    """Texts drafted over at any length; the drafter's context grows with the anchors, as it does in a run."""

    def __init__(self, runner: DrafterRunner, texts: list[Text], target_kv: PagedKV | None = None) -> None:
        """target_kv: where the runner reads the target's keys and values; the texts' are put there.

        Raises ValueError where the runner's page pool or seats are too few for the texts.
        """
        self.runner, self.texts = runner, texts
        page = runner.page_size
        counts = [-(-len(t.tokens) // page) for t in texts]
        if sum(counts) > runner.num_pages or len(texts) > runner.seats:
            raise ValueError(
                f"the replay needs {sum(counts)} pages and {len(texts)} seats, "
                f"the runner has {runner.num_pages} and {runner.seats}"
            )
        self.page_table = np.zeros((len(texts), max(counts)), np.int64)
        self.slots: list[np.ndarray] = []
        first = 0
        for i, (text, count) in enumerate(zip(texts, counts, strict=True)):
            self.page_table[i, :count] = np.arange(first, first + count)
            positions = np.arange(len(text.tokens))
            self.slots.append(self.page_table[i][positions // page] * page + positions % page)
            first += count
            if target_kv is not None and text.kv is not None:
                slots = torch.from_numpy(self.slots[-1]).to(target_kv.device)
                for source, (key, value) in zip(runner.spec.kv_layers, text.kv, strict=True):
                    target_kv.write(source, slots, key.to(target_kv.device), value.to(target_kv.device))

    def _append(self, which: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Tokens [start, end) of some texts enter the context."""
        device = self.runner.device
        parts = list(zip(which.tolist(), start.tolist(), end.tolist(), strict=True))
        features = torch.cat([self.texts[i].features[a:b] for i, a, b in parts])
        positions = np.concatenate([np.arange(a, b) for _, a, b in parts])
        slots = np.concatenate([self.slots[i][a:b] for i, a, b in parts])
        self.runner.append(
            Verified(
                features.to(device),
                torch.from_numpy(positions).to(device),
                torch.from_numpy(slots).to(device),
                np.repeat(which, end - start),
            )
        )

    @torch.inference_mode()
    def run(self, length: int, report: Callable[[int], None] = lambda done: None) -> Trace:
        """Draft ``length`` tokens at every anchor a greedy run at that length would visit."""
        anchors = np.array([t.prompt_length for t in self.texts])
        previous = np.full(len(self.texts), -1)
        in_context = np.zeros(len(self.texts), np.int64)
        parts: list[tuple] = []
        while True:
            active = np.array([i for i, t in enumerate(self.texts) if anchors[i] < len(t.tokens) - 1], np.int64)
            if len(active) == 0:
                break
            at = anchors[active]
            newest = np.array([int(self.texts[i].tokens[a]) for i, a in zip(active, at, strict=True)])
            self._append(active, in_context[active], at)
            in_context[active] = at
            context = DraftContext(newest, at, active)
            lengths = [length] * len(active)
            draft = self.runner.draft(context, lengths, self.page_table[active], greedy_choice)
            pre = self.runner.estimate(context).logits
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
            parts.append((pre, draft.logits, accepted, labelled, previous[active].copy()))
            previous[active] = accepted
            anchors[active] = at + accepted + 1
            report(int(sum(len(p[2]) for p in parts)))
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        all_pre, all_post, accepted, labelled, before = columns
        return Trace(length, all_pre.astype(np.float32), all_post.astype(np.float32), accepted, labelled, before)
