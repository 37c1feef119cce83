"""Training blocks: anchors sampled from texts, and the attention of their packed blocks over their own prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.longspark import LongSpark
from trtllm_forespark.training.features import Sequence


@dataclass(frozen=True)
class AnchorBatch:
    """m anchors of a few texts. Text s has tokens ``text_offsets[s]:text_offsets[s + 1]``, anchors likewise.

    hidden [T, L, H] float32; tokens, positions [T]; anchor_tokens, anchor_positions [m]; labels [m, K] target ids (-1
    past the end); top_ids, top_probs [m, K, 32] of the target at each drafted position; previous [m, K] teacher-forced
    predecessors.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    text_offsets: list[int]
    anchor_offsets: list[int]
    anchor_tokens: torch.Tensor
    anchor_positions: torch.Tensor
    labels: torch.Tensor
    previous: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor

    @property
    def boundary_rows(self) -> torch.Tensor:
        """[m] rows of ``hidden`` of the token before each anchor: the last that has been through the target."""
        text = np.repeat(self.text_offsets[:-1], np.diff(self.anchor_offsets))
        return torch.from_numpy(text) + self.anchor_positions - 1


def sample_anchors(texts: list[Sequence], per_text: int, block: int, rng: np.random.Generator) -> AnchorBatch:
    """Pick up to ``per_text`` anchors in every response, without replacement, sorted. A text too short gives fewer."""
    hidden, positions, text_offsets, anchor_offsets = [], [], [0], [0]
    anchored, where, labels, previous, ids, probs = [], [], [], [], [], []
    tokens = []
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
        anchored.append(text.tokens[anchors])
        where.append(anchors)
        hidden.append(text.hidden)
        tokens.append(text.tokens)
        positions.append(np.arange(len(text.tokens)))
        text_offsets.append(text_offsets[-1] + len(text.tokens))
        anchor_offsets.append(anchor_offsets[-1] + count)
    if not labels:
        raise ValueError("no text in the batch has room for an anchor and one draft token after its prompt")
    as_tensor = lambda parts: torch.from_numpy(np.concatenate(parts))  # noqa: E731
    return AnchorBatch(
        hidden=as_tensor(hidden).float(),
        tokens=as_tensor(tokens),
        positions=as_tensor(positions),
        text_offsets=text_offsets,
        anchor_offsets=anchor_offsets,
        anchor_tokens=as_tensor(anchored),
        anchor_positions=as_tensor(where),
        labels=as_tensor(labels),
        previous=as_tensor(previous),
        top_ids=as_tensor(ids),
        top_probs=as_tensor(probs).float(),
    )


#: Keys and values [T, kv_heads, d] of a target layer from its input, the residual stream [T, H], at positions [T].
TargetKV = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Views:
    """What a drafter sees of the texts of a batch, at its anchors.

    boundary [m, H]: c of the token before each anchor. keys, values: per draft layer [T, kv_heads, d]. window: how many
    of the newest a block sees, None for all. summary: None, or per draft layer the queries [heads, R, d] and what they
    found at every anchor, [m, heads, R, d].
    """

    boundary: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    window: int | None = None
    summary: list[tuple[torch.Tensor, torch.Tensor]] | None = None


def views(model: BlockDrafter, batch: AnchorBatch, target_kv: TargetKV | None, embedding: torch.Tensor) -> Views:
    """A batch as the drafter sees it; embedding [V, H] is the input of the target's layer 0."""
    if not isinstance(model, LongSpark):
        context = model.fuse(batch.hidden)
        pairs = model.context_keys_values(context, model.rotary(batch.positions))
        return Views(context[batch.boundary_rows], [k for k, _ in pairs], [v for _, v in pairs])
    if target_kv is None:
        raise ValueError("this drafter reads the target's keys and values; give target_kv")
    config = model.config
    boundary = model.fuse(batch.hidden[batch.boundary_rows])
    keys, values = [], []
    with torch.no_grad():
        for layer in config.kv_layers:
            state = batch.hidden[:, config.capture_layers.index(layer - 1)] if layer else embedding[batch.tokens]
            key, value = target_kv(layer, state, batch.positions)
            keys.append(key.float())
            values.append(value.float())
    summary = None
    if "summary" in config.views:
        summary = [
            (queries, prefix_summaries(queries, k, v, batch))
            for queries, k, v in zip(model.summary_queries, keys, values, strict=True)
        ]
    return Views(boundary, keys, values, config.window if "window" in config.views else 0, summary)


def prefix_summaries(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: AnchorBatch
) -> torch.Tensor:
    """Attention of queries [heads, R, d] over the tokens before every anchor (LongSpark eq. 5) -> [m, heads, R, d]."""
    heads, rows, dim = queries.shape
    kv_heads = keys.shape[1]
    out = []
    grouped = queries.reshape(kv_heads, -1, dim) * dim**-0.5
    for t0, t1, a0, a1 in batch_texts(batch):
        scores = grouped @ keys[t0:t1].permute(1, 2, 0)  # [kv_heads, shared * R, T]
        unseen = torch.arange(t1 - t0)[None, :] >= batch.anchor_positions[a0:a1, None]
        weights = scores[:, None].masked_fill(unseen[None, :, None, :], -torch.inf).softmax(-1)
        found = weights.flatten(1, 2) @ values[t0:t1].transpose(0, 1)  # [kv_heads, anchors * shared * R, d]
        out.append(found.view(kv_heads, a1 - a0, -1, dim).transpose(0, 1).reshape(a1 - a0, heads, rows, dim))
    return torch.cat(out)


def batch_texts(batch: AnchorBatch) -> list[tuple[int, int, int, int]]:
    """(first token, end, first anchor, end) of every text."""
    text, anchor = batch.text_offsets, batch.anchor_offsets
    return list(zip(text, text[1:], anchor, anchor[1:], strict=False))


class TextAttention:
    """`Attend` for blocks of one length: each block sees its text up to the token before its anchor, and itself.

    Blocks are packed text by text, block_slots slots each.
    """

    def __init__(
        self,
        seen: Views,
        text_offsets: list[int],
        anchor_offsets: list[int],
        anchor_positions: torch.Tensor,
        block_slots: int,
        causal: bool,
    ) -> None:
        """anchor_offsets, anchor_positions: of the anchors that draft, whose summaries ``seen`` holds."""
        self.seen = seen
        self.texts = list(zip(text_offsets, text_offsets[1:], anchor_offsets, anchor_offsets[1:], strict=False))
        self.slots = block_slots
        self.masks = []
        for t0, t1, a0, a1 in self.texts:
            where = anchor_positions[a0:a1, None]
            position = torch.arange(t1 - t0)[None, :]
            prefix = position < where
            if seen.window is not None:
                prefix &= position >= where - seen.window
            prefix = prefix.repeat_interleave(block_slots, 0)
            own = torch.arange(a1 - a0).repeat_interleave(block_slots)
            own = own[:, None] == own[None, :]
            if causal:
                index = torch.arange(block_slots).repeat(a1 - a0)
                own &= index[None, :] <= index[:, None]
            visible = torch.cat([prefix, own], 1)
            self.masks.append(torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf))

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Two products a text and no fused attention: its backward pass takes twice as long on a CPU.
        out = []
        heads, size = query.shape[1:]
        kv_heads = key.shape[1]
        query = query * size**-0.5
        for (t0, t1, a0, a1), mask in zip(self.texts, self.masks, strict=True):
            rows = slice(a0 * self.slots, a1 * self.slots)
            k = torch.cat([self.seen.keys[layer][t0:t1], key[rows]]).permute(1, 2, 0)
            keys = k.shape[-1]
            v = torch.cat([self.seen.values[layer][t0:t1], value[rows]]).transpose(0, 1)
            q = query[rows].transpose(0, 1).reshape(kv_heads, -1, size)  # a group's heads one after another
            scores = torch.bmm(q, k).view(heads, len(mask), -1) + mask
            if self.seen.summary is None:
                attended = torch.bmm(scores.softmax(-1).view(kv_heads, -1, keys), v).view(heads, -1, size)
            else:
                queries, found = self.seen.summary[layer]
                q = query[rows].transpose(0, 1)
                weights = torch.cat([scores, q @ queries.transpose(1, 2)], -1).softmax(-1)
                attended = torch.bmm(weights[..., :keys].reshape(kv_heads, -1, keys), v)
                of_summary = weights[..., keys:].view(heads, a1 - a0, self.slots, -1)
                found = found[a0:a1].transpose(0, 1)  # [heads, anchors, R, d]
                attended = attended.view(heads, -1, size) + (of_summary @ found).flatten(1, 2)
            out.append(attended.transpose(0, 1))
        return torch.cat(out)


def draft_hidden(
    model: BlockDrafter, batch: AnchorBatch, seen: Views, embeddings: torch.Tensor, length: int, every: int = 1
) -> torch.Tensor:
    """Hidden states [anchors[::every], length, H] of blocks of ``length`` drafts; embeddings [m, H] of the anchors."""
    positions = batch.anchor_positions[::every]
    offsets = [-(-a // every) for a in batch.anchor_offsets]
    slots = length + model.config.anchor_slots
    slot_index = torch.arange(slots).repeat(len(positions))
    true_position = positions.repeat_interleave(slots) + slot_index
    if every > 1:
        summary = seen.summary and [(queries, found[::every]) for queries, found in seen.summary]
        seen = Views(seen.boundary[::every], seen.keys, seen.values, seen.window, summary)
    attend = TextAttention(seen, batch.text_offsets, offsets, positions, slots, model.config.causal)
    starts = torch.arange(0, len(slot_index), slots)
    boundary = seen.boundary.repeat_interleave(slots, 0)
    blocks = model.embed_blocks(embeddings[::every], starts, slot_index, boundary)
    hidden = model(blocks, slot_index, true_position, attend)
    return hidden.view(len(positions), slots, -1)[:, model.config.anchor_slots :]
