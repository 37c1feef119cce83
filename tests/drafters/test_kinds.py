"""What every block drafter keeps, whatever its kind: packed as alone, trained as served, scores before tokens."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.base import DraftContext
from trtllm_forespark.drafters.checkpoint import load_drafter, save_drafter
from trtllm_forespark.training.blocks import AnchorBatch, draft_hidden, views
from trtllm_forespark.training.replay import greedy_choice

from .kinds import KINDS, World, random_drafter, rows

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_a_packed_request_drafts_as_if_alone(kind: str) -> None:
    world = World(KINDS[kind])
    runner = world.runner
    drafts = torch.tensor([5, 0, 2, 1, 4])
    context, table = world.fill([3, 17, 40, 16, 1])
    hidden, index = world.hidden(context, drafts, table)
    together = runner.draft(context, drafts, table, greedy_choice)
    start = 0
    for i in range(5):
        one, pages = rows(context, [i]), table[i : i + 1]
        if drafts[i]:
            slots = int(drafts[i]) + runner.spec.anchor_slots
            alone, alone_index = world.hidden(one, drafts[i : i + 1], pages)
            assert torch.equal(index[start : start + slots], alone_index)
            torch.testing.assert_close(hidden[start : start + slots], alone, atol=1e-5, rtol=1e-5)
            start += slots
        single = runner.draft(one, drafts[i : i + 1], pages, greedy_choice)
        mine = slice(int(together.cu_lengths[i]), int(together.cu_lengths[i + 1]))
        assert torch.equal(together.token_ids[mine], single.token_ids)
        np.testing.assert_allclose(together.logits[i], single.logits[0], atol=1e-5, rtol=1e-5)
        if drafts[i]:
            torch.testing.assert_close(together.hidden[mine], single.hidden, atol=1e-5, rtol=1e-5)
    assert start == len(index) == runner.spec.slots(4, int(drafts.sum()))


@every_kind
def test_a_short_draft_is_a_prefix_of_a_long_one_only_where_the_spec_says_so(kind: str) -> None:
    world = World(KINDS[kind])
    context, table = world.fill([9] * 6)
    extra = world.runner.spec.anchor_slots
    long, _ = world.hidden(context, [5] * 6, table)
    short, _ = world.hidden(context, [2] * 6, table)
    same = torch.allclose(long.view(6, 5 + extra, -1)[:, : 2 + extra], short.view(6, 2 + extra, -1), atol=1e-5)
    assert same == world.runner.spec.directional == kind.endswith("causal")
    assert world.runner.spec.estimator_outputs == (5 if same else 15)


@every_kind
def test_the_draft_is_the_walk_from_left_to_right(kind: str) -> None:
    """By hand: head, correction by the token before, best candidate, one position after the other."""
    world = World(KINDS[kind])
    runner, corrector = world.runner, world.runner.model.corrector
    context, table = world.fill([12, 30, 7])
    lengths = torch.tensor([5, 2, 4])
    draft = runner.draft(context, lengths, table, greedy_choice)
    hidden, index = world.hidden(context, lengths, table)
    extra, expected, scored = runner.spec.anchor_slots, [], []
    starts = (index == 0).nonzero()[:, 0].tolist()
    for i, start in enumerate(starts):
        last, state = context.anchors[i], None
        for h in hidden[start + extra : start + extra + int(lengths[i])]:
            best = runner.head(h[None]).topk(corrector.top_k, -1)
            latents, state = corrector.latents(h[None], last.view(1, 1), state)
            scores = corrector.scores(best.values, latents, best.indices)
            scored.append(float(runner.model.post_logits(h[None], last.view(1))))
            last = runner.d2t[best.indices[0, scores.argmax()]]
            expected.append(int(last))
    assert draft.token_ids.tolist() == expected
    np.testing.assert_allclose(draft.logits[np.isfinite(draft.logits)], scored, atol=1e-5)
    assert set(expected) <= set(runner.d2t.tolist()) and draft.candidates.shape == (11, 4)
    torch.testing.assert_close(draft.proposal.sum(1), torch.ones(11))


@every_kind
def test_survival_never_reads_the_token_it_scores(kind: str) -> None:
    """Lossless rule 1: the score of position j is the same whatever is drawn at j or later."""
    world = World(KINDS[kind])
    context, table = world.fill([12, 30])
    lengths = torch.tensor([5, 5])

    def choose_at(column: int, position_from: int):
        def choose(scores, candidates, who, position):
            choice, q = greedy_choice(scores, candidates, who, position)
            return torch.where(torch.as_tensor(position) >= position_from, column, choice), q

        return choose

    reference = world.runner.draft(context, lengths, table, choose_at(0, 9)).survival
    for j in range(1, 6):
        for column in range(4):
            other = world.runner.draft(context, lengths, table, choose_at(column, j)).survival
            torch.testing.assert_close(other[:, :j], reference[:, :j], atol=1e-6, rtol=1e-6)


@every_kind
def test_a_nan_row_ends_that_draft_and_no_other(kind: str) -> None:
    """docs/cases.md 21."""
    world = World(KINDS[kind])
    context, table = world.fill([12, 12])

    def choose(scores, candidates, who, position):
        choice, q = greedy_choice(scores, candidates, who, position)
        return torch.where((who == 0) & (torch.as_tensor(position) == 2), -1, choice), q

    draft = world.runner.draft(context, torch.tensor([4, 4]), table, choose)
    assert draft.cu_lengths.tolist() == [0, 1, 5] and len(draft.hidden) == 5
    assert draft.survival[0, 1:].eq(0).all() and draft.survival[1, :4].gt(0).all()
    none = world.runner.draft(context, [0, 0], table, choose)
    assert none.cu_lengths.tolist() == [0, 0, 0] and none.candidates.shape[0] == 0


@every_kind
def test_chunks_and_neighbours_do_not_change_a_context(kind: str) -> None:
    """Prefill in chunks, decode in ones and twos, other seats in between, a seat used before: all as at once."""
    lengths = [41, 23]
    whole, pieces = World(KINDS[kind]), World(KINDS[kind])
    context, table = whole.fill(lengths)
    texts, old = pieces.texts(lengths), pieces.texts([30], seed=7)[0]
    pieces.append(0, old, np.array([4, 5]), 0, 30)
    pieces.runner.free(0)
    cuts = {0: [0, 17, 18, 20, 33, 41], 1: [0, 1, 2, 20, 22, 23]}
    for step in range(5):
        for seat in (0, 1):
            a, b = cuts[seat][step : step + 2]
            pieces.append(seat, texts[seat], table[seat], a, b)
    drafts = torch.tensor([5, 3])
    one, two = (w.runner.draft(context, drafts, table, greedy_choice) for w in (whole, pieces))
    assert torch.equal(one.token_ids, two.token_ids)
    torch.testing.assert_close(one.hidden, two.hidden, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        whole.runner.estimate(context).survival, pieces.runner.estimate(context).survival, atol=1e-5
    )


@every_kind
def test_a_context_that_was_cut_is_as_one_that_never_went_further(kind: str) -> None:
    lengths = [41]
    long, short = World(KINDS[kind]), World(KINDS[kind])
    table, text = long.table(lengths), long.texts(lengths)[0]
    long.append(0, text, table[0], 0, 41)
    positions = torch.arange(41)
    slots = torch.from_numpy(table[0])[positions // 16] * 16 + positions % 16
    long.runner.truncate(0, slots, 30)
    assert not long.runner.boundary[0].any(), "the feature of the token before is gone"
    long.append(0, text, table[0], 30, 33)
    for a, b in ((0, 30), (30, 33)):
        short.append(0, text, table[0], a, b)
    context = DraftContext(torch.tensor([7]), torch.tensor([33]), torch.tensor([0]))
    one, two = (w.runner.draft(context, [4], table, greedy_choice) for w in (long, short))
    torch.testing.assert_close(one.hidden, two.hidden, atol=1e-5, rtol=1e-5)


@every_kind
def test_state_bytes_grow_with_the_context_or_do_not(kind: str) -> None:
    runner = World(KINDS[kind]).runner
    few, many = runner.state_bytes(10), runner.state_bytes(1000)
    if runner.spec.kv_layers:
        assert few == many < 10_000
    else:
        assert many - few == 990 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, size, bytes


@every_kind
@pytest.mark.parametrize("every", [1, 2])
def test_training_and_serving_compute_the_same_hidden_states(kind: str, every: int) -> None:
    """The masked attention of training, several anchors of two texts at once, against serving at each anchor."""
    config = KINDS[kind]
    world = World(config)
    model = random_drafter(config)
    lengths, anchors = [37, 25], [[9, 20, 36], [4, 24]]
    texts, table = world.texts(lengths), world.table(lengths)

    def target_kv(layer: int, state: torch.Tensor, positions: torch.Tensor):
        return tuple(torch.cat([kv[layer, part] for _, kv in texts]) for part in (0, 1))

    tokens = torch.randint(0, 90, (5,))
    empty = torch.zeros(5, 5)
    batch = AnchorBatch(
        torch.cat([f for f, _ in texts]), torch.zeros(62, dtype=torch.int64),
        torch.cat([torch.arange(n) for n in lengths]), [0, 37, 62], [0, 3, 5], tokens,
        torch.tensor([a for part in anchors for a in part]), empty, empty, empty, empty,
    )  # fmt: skip
    with torch.no_grad():
        seen = views(model, batch, target_kv, world.embedding)
        for length in (1, 3, 5):
            trained = draft_hidden(model, batch, seen, world.embedding[tokens], length, every)
            served = []
            for i, positions in enumerate(anchors):
                done = 0
                for j, position in enumerate(positions):
                    world.append(i, texts[i], table[i], done, position)
                    done = position
                    number = 3 * i + j
                    if number % every:
                        continue
                    context = DraftContext(tokens[number : number + 1], torch.tensor([position]), torch.tensor([i]))
                    hidden, _ = world.hidden(context, [length], table[i : i + 1])
                    served.append(hidden[config.anchor_slots :])
            torch.testing.assert_close(trained, torch.stack(served), atol=2e-5, rtol=1e-4)


@every_kind
def test_checkpoints_round_trip_and_wrong_ones_say_what_is_wrong(kind: str, tmp_path) -> None:
    model = random_drafter(KINDS[kind])
    save_drafter(tmp_path, model, torch.float32)
    loaded, calibration = load_drafter(tmp_path)
    assert loaded.config == KINDS[kind] and len(calibration.scale) == KINDS[kind].estimator_outputs
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(ValueError, match=r"model.safetensors: tensor layers.0.mlp.gate_proj.weight .*\(48, 32\).*50"):
        load_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    blob = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(blob[: len(blob) // 2])
    with pytest.raises(ValueError, match="damaged or truncated"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    "kind,change,says",
    [
        ("dspark", {"markov_head_type": "lstm"}, "markov_head_type 'lstm': give one of vanilla, gated, rnn"),
        ("dspark", {"markov_rank": 0}, "markov_rank must be at least 1"),
        ("longspark", {"kv_layers": (1,)}, "2 draft layers need as many target layers"),
        ("longspark", {"kv_layers": (1, 4)}, "the target has 4 layers"),
        ("longspark", {"views": ("windows",)}, "give some of boundary, window, summary"),
        ("dflash2", {"capture_layers": (0, 9)}, "the target has 4 layers"),
        ("dflash2", {"capture_layers": (1, 1)}, "give some, each once"),
        ("dflash2", {"block": 0}, "at least one token"),
        ("dflash2", {"draft_vocab_size": 91}, "draft_vocab_size 91 must be 1 to vocab_size 90"),
    ],
)
def test_settings_that_cannot_be_are_refused(kind: str, change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(KINDS[kind], **change)
