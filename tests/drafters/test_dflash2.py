"""The DFlash 2 drafter serves packed blocks of any lengths as it would each alone, and as it was trained."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.base import DraftContext, Verified
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.checkpoint import load_drafter, save_drafter
from trtllm_forespark.drafters.config import DFlash2Config
from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.drafters.packing import Blocks
from trtllm_forespark.drafters.paged_context import PagedRunner
from trtllm_forespark.training.replay import greedy_choice

CONFIG = DFlash2Config(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=90,
    draft_vocab_size=40,
    block=5,
    capture_layers=(0, 2),
    target_layers=3,
    conv_group_size=8,
    selector_rank=8,
    selector_top_k=4,
    estimator_rank=16,
    max_position=256,
)
PAGE = 16


def random_drafter(config: DFlash2Config, std: float = 0.3, seed: int = 0) -> DFlash2:
    torch.manual_seed(seed)
    model = DFlash2(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
        model.d2t.copy_(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return model


def make_runner(config: DFlash2Config = CONFIG, seed: int = 0) -> PagedRunner:
    model = random_drafter(config, seed=seed)
    embedding, head = torch.randn(config.vocab_size, 32), torch.randn(config.vocab_size, 32)
    calibration = Calibration.identity(config.block, config.estimator_outputs)
    runner = PagedRunner(model, calibration, embedding, head, page_size=PAGE, dtype=torch.float32)
    runner.begin(num_pages=24, seats=8)
    return runner


def fill(runner: PagedRunner, lengths: list[int], seed: int = 1) -> tuple[DraftContext, np.ndarray]:
    """Contexts of the given lengths, on pages handed out in turns so that no request's pages lie together."""
    generator = torch.Generator().manual_seed(seed)
    n, most = len(lengths), max(-(-length // PAGE) for length in lengths)
    table = np.ascontiguousarray(np.arange(n * most).reshape(most, n).T)
    for i, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = torch.from_numpy(table[i])[positions // PAGE] * PAGE + positions % PAGE
        captured = torch.randn(length, 2, 32, generator=generator)
        runner.append(Verified(captured, positions, slots, np.full(length, i)))
    anchors = torch.randint(0, 90, (n,), generator=generator)
    return DraftContext(anchors, torch.tensor(lengths), torch.arange(n)), table


def hidden_of(runner: PagedRunner, context: DraftContext, lengths, table) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of packed blocks and each slot's in-block index."""
    at = Blocks.of(np.asarray(lengths), runner.spec.anchor_slots)
    return runner.hidden(context, at, table), torch.from_numpy(at.index)


def rows(context: DraftContext, which: list[int]) -> DraftContext:
    return DraftContext(context.anchors[which], context.positions[which], context.seats[which])


@pytest.mark.parametrize("causal", [False, True])
def test_a_packed_request_drafts_as_if_alone(causal: bool) -> None:
    runner = make_runner(dataclasses.replace(CONFIG, causal=causal))
    lengths = [3, 17, 40, 16, 1]
    drafts = torch.tensor([5, 0, 2, 1, 4])
    context, table = fill(runner, lengths)
    who = drafts.nonzero()[:, 0]
    hidden, index = hidden_of(runner, context, drafts, table)
    start = 0
    for i in who.tolist():
        slots = int(drafts[i]) + 1
        alone, alone_index = hidden_of(runner, rows(context, [i]), drafts[i : i + 1], table[i : i + 1])
        assert torch.equal(index[start : start + slots], alone_index)
        torch.testing.assert_close(hidden[start : start + slots], alone, atol=1e-5, rtol=1e-5)
        start += slots
    together, post = runner.draft_with_logits(context, drafts, table, greedy_choice)
    for i in range(5):
        single, single_post = runner.draft_with_logits(
            rows(context, [i]), drafts[i : i + 1], table[i : i + 1], greedy_choice
        )
        mine = slice(int(together.cu_lengths[i]), int(together.cu_lengths[i + 1]))
        assert torch.equal(together.token_ids[mine], single.token_ids)
        np.testing.assert_allclose(post[i], single_post[0], atol=1e-5, rtol=1e-5)


def test_requests_of_length_zero_take_no_part() -> None:
    runner = make_runner()
    context, table = fill(runner, [20, 20, 20])
    draft = runner.draft(context, torch.tensor([0, 3, 0]), table, greedy_choice)
    assert draft.cu_lengths.tolist() == [0, 0, 3, 3]
    assert draft.survival[0].eq(0).all() and draft.survival[1, 3:].eq(0).all()
    nothing = runner.draft(context, torch.zeros(3, dtype=torch.int64), table, greedy_choice)
    assert len(nothing.token_ids) == 0 and nothing.cu_lengths.tolist() == [0] * 4


def test_a_causal_short_draft_is_a_prefix_and_a_bidirectional_one_need_not_be() -> None:
    same = {}
    for causal in (True, False):
        runner = make_runner(dataclasses.replace(CONFIG, causal=causal))
        context, table = fill(runner, [9] * 6)
        long, _ = hidden_of(runner, context, [5] * 6, table)
        short, _ = hidden_of(runner, context, [2] * 6, table)
        same[causal] = torch.allclose(long.view(6, 6, -1)[:, :3], short.view(6, 3, -1), atol=1e-5)
    assert same == {True: True, False: False}


def test_convolution_never_reads_across_a_blocks_start() -> None:
    runner = make_runner()
    context, table = fill(runner, [5, 5])
    lengths = torch.tensor([2, 2])
    first = runner.draft_with_logits(context, lengths, table, greedy_choice)[1][1]
    changed = dataclasses.replace(context, anchors=(context.anchors + torch.tensor([7, 0])) % 90)
    second = runner.draft_with_logits(changed, lengths, table, greedy_choice)[1]
    np.testing.assert_allclose(first, second[1], atol=1e-6, rtol=1e-6)


def test_slot_j_gives_position_j() -> None:
    """Golden test of the layout (case 26): with the context and the mixing off, slot j sees only its own input."""
    runner = make_runner()
    model = runner.model
    context, table = fill(runner, [4])
    lengths = torch.tensor([3])
    hidden, index = hidden_of(runner, context, lengths, table)
    assert index.tolist() == [0, 1, 2, 3]
    expected = model.norm(hidden)  # shape only: h of slot j is row j of the block, the anchor's row drafts nothing
    draft, _ = runner.draft_with_logits(context, lengths, table, greedy_choice)
    logits = runner.head(hidden[1:2])
    best = logits.topk(CONFIG.selector_top_k, -1)
    selector = model.candidate_selector
    latents = selector.latents(hidden[1:2], context.anchors[:, None])[0]
    scores = selector.scores(best.values, latents, best.indices)
    assert draft.token_ids[0] == runner.d2t[best.indices[0, scores.argmax()]]
    assert expected.shape == (4, 32)


def test_the_walk_over_all_predecessors_is_the_walk_from_left_to_right() -> None:
    runner = make_runner()
    selector = runner.model.candidate_selector
    context, table = fill(runner, [12, 30, 7])
    lengths = torch.tensor([5, 2, 4])
    draft = runner.draft(context, lengths, table, greedy_choice)
    hidden, index = hidden_of(runner, context, lengths, table)
    expected: list[int] = []
    for h, slot in zip(hidden, index.tolist(), strict=True):
        if slot == 0:
            request = sum(1 for s in index[: len(expected)].tolist() if s == 0)
            last = context.anchors[request]
            expected.append(-1)
            continue
        best = runner.head(h[None]).topk(selector.top_k, -1)
        scores = selector.scores(best.values, selector.latents(h[None], last.view(1, 1))[0], best.indices)
        last = runner.d2t[best.indices[0, scores.argmax()]]
        expected.append(int(last))
    assert draft.token_ids.tolist() == [token for token in expected if token >= 0]


def test_a_nan_row_ends_that_draft_and_no_other() -> None:
    """docs/cases.md 21."""
    runner = make_runner()
    context, table = fill(runner, [12, 12])

    def choose(scores, candidates, who, position):
        choice, q = greedy_choice(scores, candidates, who, position)
        return torch.where((who == 0) & (position == 2), -1, choice), q

    draft = runner.draft(context, torch.tensor([4, 4]), table, choose)
    assert draft.cu_lengths.tolist() == [0, 1, 5]
    assert draft.survival[0, 1:].eq(0).all() and draft.survival[1, :4].gt(0).all()


def test_survival_never_reads_the_token_it_scores() -> None:
    """Lossless rule 1: the score of position j is the same whatever is drawn at j or later."""
    runner = make_runner()
    context, table = fill(runner, [12, 30])
    lengths = torch.tensor([5, 5])

    def choose_at(column: int, position_from: int):
        def choose(scores, candidates, who, position):
            choice, q = greedy_choice(scores, candidates, who, position)
            return torch.where(position >= position_from, column, choice), q

        return choose

    reference = runner.draft(context, lengths, table, choose_at(0, 9)).survival
    for j in range(1, 6):
        for column in range(4):
            other = runner.draft(context, lengths, table, choose_at(column, j)).survival
            torch.testing.assert_close(other[:, :j], reference[:, :j], atol=1e-6, rtol=1e-6)


def test_a_draft_is_made_of_draft_vocabulary_tokens() -> None:
    runner = make_runner()
    context, table = fill(runner, [8, 25])
    draft = runner.draft(context, torch.tensor([5, 5]), table, greedy_choice)
    assert set(draft.token_ids.tolist()) <= set(runner.d2t.tolist())
    assert draft.candidates.shape == (10, 4)
    torch.testing.assert_close(draft.proposal.sum(1), torch.ones(10))


def test_checkpoints_round_trip_and_wrong_ones_say_what_is_wrong(tmp_path) -> None:
    model = DFlash2(CONFIG)
    save_drafter(tmp_path, model, torch.float32)
    loaded, calibration = load_drafter(tmp_path)
    assert loaded.config == CONFIG and len(calibration.scale) == 15
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "selector_rank": 16}))
    with pytest.raises(
        ValueError,
        match=r"model.safetensors: tensor candidate_selector.predecessor_codebook has shape \(90, 8\).*\(90, 16\)",
    ):
        load_drafter(tmp_path)
    del config["conv_kernel_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: .* lack 'conv_kernel_size'"):
        load_drafter(tmp_path)
    save_drafter(tmp_path, model, torch.float32)
    blob = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load_drafter(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load_drafter(tmp_path)
