"""Training blocks: anchors sampled from texts, and the attention of their packed blocks over their own prefix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.training.features import Sequence


@dataclass(frozen=True)
class AnchorBatch:
    """m anchors of a few texts. Text s has tokens ``text_offsets[s]:text_offsets[s + 1]``, anchors likewise.

    hidden [T, L, H] float32; positions [T]; anchor_tokens, anchor_positions [m]; labels [m, K] target ids (-1 past the
    end); top_ids, top_probs [m, K, 32] of the target at each drafted position; previous [m, K] teacher-forced
    predecessors.
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    text_offsets: list[int]
    anchor_offsets: list[int]
    anchor_tokens: torch.Tensor
    anchor_positions: torch.Tensor
    labels: torch.Tensor
    previous: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor


def sample_anchors(texts: list[Sequence], per_text: int, block: int, rng: np.random.Generator) -> AnchorBatch:
    """Pick up to ``per_text`` anchors in every response, without replacement, sorted. A text too short gives fewer."""
    hidden, positions, text_offsets, anchor_offsets = [], [], [0], [0]
    tokens, where, labels, previous, ids, probs = [], [], [], [], [], []
    steps = np.arange(1, block + 1)
    for text in texts:
        first, last = text.prompt_length, len(text.tokens) - 2
        if last < first:
            continue
        count = min(per_text, last - first + 1)
        anchors = np.sort(rng.choice(np.arange(first, last + 1), count, replace=False))
        at = anchors[:, None] + steps
        inside = at < len(text.tokens)
        clipped = np.minimum(at, len(text.tokens) - 1)
        labels.append(np.where(inside, text.tokens[clipped], -1))
        previous.append(text.tokens[np.minimum(at - 1, len(text.tokens) - 1)])
        ids.append(text.top_ids[clipped - text.prompt_length])
        probs.append(text.top_probs[clipped - text.prompt_length])
        tokens.append(text.tokens[anchors])
        where.append(anchors)
        hidden.append(text.hidden)
        positions.append(np.arange(len(text.tokens)))
        text_offsets.append(text_offsets[-1] + len(text.tokens))
        anchor_offsets.append(anchor_offsets[-1] + count)
    if not labels:
        raise ValueError("no text in the batch has room for an anchor and one draft token after its prompt")
    as_tensor = lambda parts: torch.from_numpy(np.concatenate(parts))  # noqa: E731
    return AnchorBatch(
        hidden=as_tensor(hidden).float(),
        positions=as_tensor(positions),
        text_offsets=text_offsets,
        anchor_offsets=anchor_offsets,
        anchor_tokens=as_tensor(tokens),
        anchor_positions=as_tensor(where),
        labels=as_tensor(labels),
        previous=as_tensor(previous),
        top_ids=as_tensor(ids),
        top_probs=as_tensor(probs).float(),
    )


class TextAttention:
    """`Attend` for blocks of one length: each block sees its text up to the token before its anchor, and itself.

    Blocks are packed text by text, block_slots slots each. keys, values: per layer [T, kv_heads, d] of the context.
    """

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        text_offsets: list[int],
        anchor_offsets: list[int],
        anchor_positions: torch.Tensor,
        block_slots: int,
        causal: bool,
    ) -> None:
        self.keys, self.values = keys, values
        self.texts = list(zip(text_offsets, text_offsets[1:], anchor_offsets, anchor_offsets[1:], strict=False))
        self.slots = block_slots
        self.masks = []
        for t0, t1, a0, a1 in self.texts:
            prefix = torch.arange(t1 - t0)[None, :] < anchor_positions[a0:a1, None]
            prefix = prefix.repeat_interleave(block_slots, 0)
            own = torch.arange(a1 - a0).repeat_interleave(block_slots)
            own = own[:, None] == own[None, :]
            if causal:
                index = torch.arange(block_slots).repeat(a1 - a0)
                own &= index[None, :] <= index[:, None]
            seen = torch.cat([prefix, own], 1)
            self.masks.append(torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf))

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Two products a text and no fused attention: its backward pass takes twice as long on a CPU.
        out = []
        heads, size = query.shape[1:]
        kv_heads = key.shape[1]
        query = query * size**-0.5
        for (t0, t1, a0, a1), mask in zip(self.texts, self.masks, strict=True):
            rows = slice(a0 * self.slots, a1 * self.slots)
            k = torch.cat([self.keys[layer][t0:t1], key[rows]]).permute(1, 2, 0)
            v = torch.cat([self.values[layer][t0:t1], value[rows]]).transpose(0, 1)
            q = query[rows].transpose(0, 1).reshape(kv_heads, -1, size)  # a group's heads one after another
            scores = torch.bmm(q, k).view(heads, len(mask), -1) + mask
            attended = torch.bmm(scores.softmax(-1).view(kv_heads, -1, v.shape[1]), v)
            out.append(attended.view(heads, -1, size).transpose(0, 1))
        return torch.cat(out)


def draft_hidden(
    model: DFlash2,
    batch: AnchorBatch,
    context: torch.Tensor,
    keys_values: list[tuple[torch.Tensor, torch.Tensor]],
    embeddings: torch.Tensor,
    length: int,
    every: int = 1,
) -> torch.Tensor:
    """Hidden states [anchors[::every], length, H] of blocks of ``length`` drafts; context [T, H] as fused."""
    positions = batch.anchor_positions[::every]
    offsets = [-(-a // every) for a in batch.anchor_offsets]
    slots = length + 1
    slot_index = torch.arange(slots).repeat(len(positions))
    true_position = positions.repeat_interleave(slots) + slot_index
    attend = TextAttention(
        [k for k, _ in keys_values],
        [v for _, v in keys_values],
        batch.text_offsets,
        offsets,
        positions,
        slots,
        model.config.causal,
    )
    starts = torch.arange(0, len(slot_index), slots)
    blocks = model.embed_blocks(embeddings[::every], starts, len(slot_index))
    hidden = model(blocks, slot_index, true_position, attend)
    return hidden.view(len(positions), slots, -1)[:, 1:]
