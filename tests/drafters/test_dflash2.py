"""What only DFlash 2 has: its in-block convolution, and the layout with a slot of the anchor's own."""

from __future__ import annotations

import dataclasses

import torch

from trtllm_forespark.training.replay import greedy_choice

from .kinds import KINDS, World


def test_requests_of_length_zero_take_no_part() -> None:
    world = World(KINDS["dflash2"])
    context, table = world.fill([20, 20, 20])
    draft = world.runner.draft(context, torch.tensor([0, 3, 0]), table, greedy_choice)
    assert draft.cu_lengths.tolist() == [0, 0, 3, 3]
    assert draft.survival[0].eq(0).all() and draft.survival[1, 3:].eq(0).all()


def test_convolution_never_reads_across_a_blocks_start() -> None:
    world = World(KINDS["dflash2"])
    context, table = world.fill([5, 5])
    lengths = torch.tensor([2, 2])
    first = world.runner.draft(context, lengths, table, greedy_choice).logits[1]
    changed = dataclasses.replace(context, anchors=(context.anchors + torch.tensor([7, 0])) % 90)
    second = world.runner.draft(changed, lengths, table, greedy_choice).logits
    torch.testing.assert_close(torch.from_numpy(first), torch.from_numpy(second[1]), atol=1e-6, rtol=1e-6)


def test_slot_j_gives_position_j() -> None:
    """Golden test of the layout (docs/cases.md 26): the first token is drawn from slot 1, after the anchor."""
    world = World(KINDS["dflash2"])
    runner, selector = world.runner, world.runner.model.corrector
    context, table = world.fill([4])
    hidden, index = world.hidden(context, [3], table)
    assert index.tolist() == [0, 1, 2, 3]
    draft = runner.draft(context, [3], table, greedy_choice)
    tokens = []
    for slot in (0, 1):
        best = runner.head(hidden[slot : slot + 1]).topk(selector.top_k, -1)
        latents = selector.latents(hidden[slot : slot + 1], context.anchors[:, None])[0]
        scores = selector.scores(best.values, latents, best.indices)
        tokens.append(int(runner.d2t[best.indices[0, scores.argmax()]]))
    assert draft.token_ids[0] == tokens[1] != tokens[0]
