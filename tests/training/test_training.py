"""Training: what the losses say on cases done by hand, a run that resumes as if never stopped, data that is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.dflash2 import DFlash2
from trtllm_forespark.runtime.bench.prompts import load_prompts
from trtllm_forespark.training.answers import Answer, AnswerLog
from trtllm_forespark.training.blocks import draft_hidden, sample_anchors, views
from trtllm_forespark.training.distill import distill, load_texts, save_texts, without_overlap, write_features
from trtllm_forespark.training.features import TOP, FeatureStore, FeatureStores, Sequence, draft_vocabulary
from trtllm_forespark.training.losses import (
    Targets,
    binary_cross_entropy,
    candidate_probability,
    draft_loss,
    position_weights,
)
from trtllm_forespark.training.trainer import Trainer, TrainSettings, lengths_of

from ..drafters.kinds import KINDS

CONFIG = KINDS["dflash2"]
LAYERS, HIDDEN, VOCAB = 2, 32, 90
CAPTURED = (0, 2)


def fake_features(tokens: np.ndarray, responses: int):
    """A target whose features and next tokens are functions of the text."""
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    logits = torch.randn(responses, VOCAB, generator=generator)
    logits[torch.arange(responses), torch.from_numpy(tokens[-responses:])] += 6.0
    return torch.randn(len(tokens), LAYERS, HIDDEN, generator=generator), logits


def make_store(folder, texts: int = 14, seed: int = 0) -> FeatureStore:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(texts):
        prompt, response = rng.integers(0, 45, rng.integers(3, 8)), rng.integers(0, 45, rng.integers(6, 20))
        made.append((np.concatenate([prompt, response]), len(prompt)))
    write_features(made, fake_features, folder, CAPTURED, HIDDEN)
    return FeatureStore(folder, CAPTURED, HIDDEN)


@pytest.fixture
def fake_clock(monkeypatch) -> None:
    """A second passes between one look at the clock and the next, so that minutes are steps."""
    seconds = itertools.count()
    monkeypatch.setattr("trtllm_forespark.training.trainer.time.monotonic", lambda: float(next(seconds)))


def make_trainer(folder, stores, start: DFlash2 | None = None, **settings) -> Trainer:
    torch.manual_seed(0)
    given = {"minutes": 100.0, "texts": 2, "anchors": 4, "held": 4, "warmup_steps": 2, **settings}
    return Trainer(
        CONFIG,
        TrainSettings(**given),
        stores if isinstance(stores, list) else [stores],
        torch.randn(VOCAB, HIDDEN),
        torch.randn(VOCAB, HIDDEN),
        torch.ones(HIDDEN),
        folder,
        start,
    )


def test_anchors_labels_and_predecessors_line_up() -> None:
    tokens = np.arange(100, 112)
    text = Sequence(
        tokens,
        np.zeros((12, LAYERS, HIDDEN), np.float16),
        4,
        np.tile(np.arange(8)[:, None], (1, TOP)),
        np.zeros((8, TOP), np.float16),
    )
    batch = sample_anchors([text], 50, 5, np.random.default_rng(0))
    assert batch.anchor_positions.tolist() == list(range(4, 11)), "every response token but the last can be an anchor"
    assert batch.anchor_tokens[0] == 104 and batch.labels[0].tolist() == [105, 106, 107, 108, 109]
    assert batch.previous[0].tolist() == [104, 105, 106, 107, 108]
    assert batch.labels[-1].tolist() == [111, -1, -1, -1, -1], "past the end there is no label"
    assert batch.top_ids[0, :, 0].tolist() == [1, 2, 3, 4, 5], "the target's word at a position, not the one before"


def test_a_text_without_room_is_left_out_and_a_batch_of_them_is_an_error() -> None:
    short = Sequence(
        np.arange(5),
        np.zeros((5, LAYERS, HIDDEN), np.float16),
        4,
        np.zeros((1, TOP), np.int64),
        np.zeros((1, TOP), np.float16),
    )
    with pytest.raises(ValueError, match="no text in the batch has room"):
        sample_anchors([short], 4, 5, np.random.default_rng(0))


def test_weights_fall_as_the_paper_says() -> None:
    assert position_weights(3).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_candidate_probability_finds_the_targets_mass() -> None:
    p = candidate_probability(torch.tensor([[5, 9, -1]]), torch.tensor([[0.5, 0.2, 0.3]]), torch.tensor([[9, 4, 5]]))
    assert p.tolist() == [[pytest.approx(0.2), 0.0, 0.5]]


def test_losses_equal_plain_formulas() -> None:
    """CE, TV, soft acceptance against a direct computation, and the hand-written gradient against autograd's."""
    torch.manual_seed(3)
    model = DFlash2(CONFIG)
    head = torch.randn(CONFIG.draft_vocab_size, HIDDEN) * 0.5
    hidden = torch.randn(3, 2, HIDDEN, requires_grad=True)
    top_ids = torch.stack([torch.randperm(CONFIG.draft_vocab_size)[:TOP] for _ in range(6)]).view(3, 2, TOP)
    top_probs = torch.rand(3, 2, TOP).softmax(-1)
    top_ids[0, 0, 3] = -1
    label = top_ids[..., 0].clone()
    label[1, 1], valid = -1, torch.ones(3, 2, dtype=torch.bool)
    valid[2, 1] = False
    targets = Targets(label, valid, top_ids, top_probs, torch.randint(0, VOCAB, (3, 2)))
    result = draft_loss(model, hidden, head, targets, 0.9)
    result.loss.backward()
    got = hidden.grad.clone()

    plain = hidden.detach().clone().requires_grad_(True)
    logits = plain @ head.T
    q = logits.softmax(-1)
    total, weights = torch.zeros(()), torch.zeros(())
    for i in range(3):
        for j in range(2):
            if not valid[i, j]:
                continue
            w = math.exp(-j / 4)
            p = torch.zeros(CONFIG.draft_vocab_size)
            for v, mass in zip(top_ids[i, j].tolist(), top_probs[i, j].tolist(), strict=True):
                if v >= 0:
                    p[v] = mass
            tv = 1 - torch.minimum(p, q[i, j]).sum()
            candidates = logits[i, j].topk(CONFIG.selector_top_k).indices.tolist()
            if label[i, j] >= 0 and int(label[i, j]) not in candidates:
                candidates.append(int(label[i, j]))
            s = model.candidate_selector
            context = s.predecessor_codebook[targets.previous[i, j]] * s.hidden_projection(plain[i, j])
            score = torch.stack([logits[i, j, v] + context @ s.successor_codebook[v] for v in candidates]).softmax(-1)
            total = total + w * 0.9 * (tv + 1 - torch.minimum(score, p[candidates]).sum())
            if label[i, j] >= 0:
                total = total + w * 0.1 * (
                    -q[i, j, label[i, j]].log() - score[candidates.index(int(label[i, j]))].log()
                )
            weights = weights + w
    loss = total / weights
    loss.backward()
    torch.testing.assert_close(result.loss, loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, plain.grad, atol=1e-5, rtol=1e-4)
    assert result.acceptance.shape == (3, 2) and result.acceptance.max() <= 1 and not result.matched[2, 1]


def test_weighted_bce_drops_entries() -> None:
    logits, target = torch.tensor([0.0, 9.0]), torch.tensor([0.5, 0.0])
    assert binary_cross_entropy(logits, target, torch.tensor([1.0, 0.0])).item() == pytest.approx(math.log(2))


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path) -> None:
    store = make_store(tmp_path / "features")
    whole = make_trainer(tmp_path / "whole", store)
    for _ in range(6):
        whole.step()
        whole.progress.step += 1
    from trtllm_forespark.training.state import save_state

    first = make_trainer(tmp_path / "parts", store)
    for _ in range(3):
        first.step()
        first.progress.step += 1
    save_state(tmp_path / "parts", first.model, first.optimizer, dataclasses.asdict(first.progress))
    second = make_trainer(tmp_path / "parts", store)
    assert second.progress.step == 3
    for _ in range(3):
        second.step()
        second.progress.step += 1
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)


def test_training_learns_and_logs(tmp_path, fake_clock) -> None:
    store = make_store(tmp_path / "features")
    trainer = make_trainer(tmp_path / "run", store, minutes=0.5, log_every=5, save_every=1000, learning_rate=1e-2)
    final = trainer.run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert lines[-2]["draft"] < lines[0]["draft"] and lines[-1]["held"] == final["held"]
    assert {"step", "seconds", "anchors", "anchors_per_second", "pre", "post", "matched"} <= lines[0].keys()
    assert len(final["held"]["conditional"]) == CONFIG.block


def test_lengths_cover_every_row_of_the_triangle() -> None:
    full = [lengths_of(step, 4, "full") for step in range(4)]
    assert full == [(4, 4), (1, 4), (2, 4), (3, 4)]
    assert [lengths_of(step, 4, "varied") for step in range(6)] == [(4, 4), (1, 1), (4, 4), (2, 2), (4, 4), (3, 3)]
    assert lengths_of(3, 1, "varied") == (1, 1)
    with pytest.raises(ValueError, match="'full' or 'varied', not 'short'"):
        lengths_of(0, 4, "short")


def test_training_goes_on_from_another_drafter_with_drafts_of_varied_lengths(tmp_path, fake_clock) -> None:
    store = make_store(tmp_path / "features")
    first = make_trainer(tmp_path / "first", store)
    first.step()
    second = make_trainer(tmp_path / "second", store, start=first.model, lengths="varied", log_every=4, minutes=0.1)
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, msg=name)
    second.run()
    line = json.loads((tmp_path / "second" / "log.jsonl").read_text().splitlines()[0])
    assert line["step"] == 4 and len(line["matched"]) == CONFIG.block
    other = DFlash2(dataclasses.replace(CONFIG, block=CONFIG.block + 1))
    with pytest.raises(ValueError, match="differs in block"):
        make_trainer(tmp_path / "third", store, start=other)


def test_estimator_losses_leave_the_drafter_alone(tmp_path) -> None:
    """Gradients of the pre-draft loss stop at c and e (§4.5)."""
    trainer = make_trainer(tmp_path / "run", make_store(tmp_path / "features"), lambda_post=0.0)
    rng = np.random.default_rng(0)
    batch = sample_anchors([trainer.store[5], trainer.store[6]], 4, CONFIG.block, rng)
    grads = []
    for weight in (0.0, 5.0):
        object.__setattr__(trainer.settings, "lambda_pre", weight)
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.forward(batch, CONFIG.block, 0.9)[0].backward()
        grads.append({n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None})
    for name in grads[0]:
        if name.startswith("pre_draft"):
            continue
        torch.testing.assert_close(grads[0][name], grads[1][name], msg=name)
    assert any(n.startswith("pre_draft") and g.abs().sum() > 0 for n, g in grads[1].items())


def test_stores_and_texts_that_are_wrong_say_so(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokens\.npy is missing"):
        FeatureStore(tmp_path, CAPTURED, HIDDEN)
    store = make_store(tmp_path / "f")
    assert len(store) == store.finished() == 14
    with pytest.raises(ValueError, match=r"hidden\.f16: .* expected"):
        FeatureStore(tmp_path / "f", CAPTURED, HIDDEN + 1)
    with pytest.raises(ValueError, match=r"features of layers \(0, 2\), wanted are \(0, 1\)"):
        FeatureStore(tmp_path / "f", (0, 1), HIDDEN)
    with pytest.raises(ValueError, match="other texts"):
        write_features([(np.arange(9), 3)], fake_features, tmp_path / "f", CAPTURED, HIDDEN)
    texts = [(np.arange(9), 3)]
    write_features(texts, fake_features, tmp_path / "g", CAPTURED, HIDDEN, source="one layer set")
    with pytest.raises(ValueError, match=r"another target \(one layer set\)"):
        write_features(texts, fake_features, tmp_path / "g", CAPTURED, HIDDEN, source="another layer set")
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"bad\.npz is not a file of"):
        load_texts(tmp_path / "bad.npz", VOCAB)
    save_texts(tmp_path / "t.npz", [Answer([1, 2], [3, 95], True)], [{"source": "x"}])
    assert load_texts(tmp_path / "t.npz", 100)[0][1] == 2
    with pytest.raises(ValueError, match="past the target's vocabulary of 90"):
        load_texts(tmp_path / "t.npz", 90)
    with pytest.raises(ValueError, match="f: 14 finished texts; training needs at least 14"):
        make_trainer(tmp_path / "run", store, held=14).step()
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2: needs an object"):
        load_prompts(tmp_path / "p.jsonl")


def test_distillation_goes_on_where_it_stopped(tmp_path) -> None:
    prompts = [{"prompt": f"p{i}", "source": "s", "row": i} for i in range(5)]
    asked: list[list[str]] = []

    def engine(fail_after: int):
        def generate(texts):
            asked.append(list(texts))
            for done, (number, text) in enumerate(texts):
                if done == fail_after:
                    raise KeyboardInterrupt
                yield number, [1, int(text[1:])], [2, 3], True

        return generate

    out = tmp_path / "texts.npz"
    with pytest.raises(KeyboardInterrupt):
        distill(prompts, engine(2), out, lambda done, total: None)
    assert distill(prompts, engine(99), out, lambda done, total: None) == 5
    assert [[text for _, text in texts] for texts in asked] == [["p0", "p1", "p2", "p3", "p4"], ["p2", "p3", "p4"]]
    assert [t.tolist() for t, _ in load_texts(out, 10)] == [[1, i, 2, 3] for i in range(5)]


def test_several_stores_read_as_one(tmp_path) -> None:
    stores = [make_store(tmp_path / "a", 5), make_store(tmp_path / "b", 3, seed=1)]
    both = FeatureStores(stores)
    assert both.finished() == 8
    for i, (store, own) in enumerate([(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2)]):
        np.testing.assert_array_equal(both[i].tokens, stores[store][own].tokens)
    with pytest.raises(IndexError):
        both[8]
    together = make_trainer(tmp_path / "run", stores)
    together.step()
    with pytest.raises(ValueError, match=r"a, .*b: 8 finished texts"):
        make_trainer(tmp_path / "few", stores, held=7).step()


def test_prompts_that_share_ten_words_are_left_out() -> None:
    known = ["One two three four five six seven eight nine ten eleven."]
    near, far = (
        "So: two, three four FIVE six seven eight nine ten eleven!",
        "one two three four five six seven eight nine",
    )
    assert without_overlap([near, far], known) == [far]
    assert without_overlap([near], []) == [near]


def test_the_draft_vocabulary_holds_the_most_frequent_tokens(tmp_path) -> None:
    store = make_store(tmp_path / "f")
    ids = draft_vocabulary([store], 20, VOCAB)
    assert len(ids) == 20 and (np.diff(ids) > 0).all() and ids.max() < 45


def test_draft_hidden_of_every_fourth_anchor_is_the_same_as_among_all(tmp_path) -> None:
    trainer = make_trainer(tmp_path / "run", make_store(tmp_path / "features"))
    model = trainer.model
    batch = sample_anchors(
        [trainer.store[5], trainer.store[6], trainer.store[7]], 6, CONFIG.block, np.random.default_rng(0)
    )
    seen = views(model, batch, None, trainer.embedding)
    embeddings = trainer.embedding[batch.anchor_tokens]
    everyone = draft_hidden(model, batch, seen, embeddings, 3)
    some = draft_hidden(model, batch, seen, embeddings, 3, every=4)
    torch.testing.assert_close(everyone[::4], some, atol=1e-5, rtol=1e-5)


def test_answers_made_with_something_else_or_cut_short_do_not_count(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    first = AnswerLog(path, ["a", "b", "c"], "model, greedy")
    first.add(0, Answer([1], [2, 3], True))
    first.add(2, Answer([4], [5], False))
    with path.open("a") as file:
        file.write('{"index": 1, "key"')
    again = AnswerLog(path, ["a", "b", "c"], "model, greedy")
    assert again.todo() == [(1, "b")] and again.done[2] == Answer([4], [5], False)
    assert len(AnswerLog(path, ["a", "b", "c"], "model, temperature 1").done) == 0
    assert list(AnswerLog(path, ["a", "b", "other"], "model, greedy").done) == [0]
    again.add(1, Answer([6], [7], True))
    assert len(AnswerLog(path, ["a", "b", "c"], "model, greedy").done) == 3, "the half line took no other with it"
    again.remove()
    assert AnswerLog(path, ["a"], "model, greedy").done == {}


def test_a_run_may_go_by_anchors(tmp_path) -> None:
    store = make_store(tmp_path / "features")
    trainer = make_trainer(tmp_path / "run", store, total_anchors=30, minutes=0.0)
    final = trainer.run()
    assert 30 <= final["anchors"] < 30 + 8 and trainer.share >= 1.0 and not final["interrupted"]
    again = make_trainer(tmp_path / "run", store, total_anchors=60, minutes=0.0)
    assert again.progress.anchors == final["anchors"] and 0.5 <= again.share < 1.0
    with pytest.raises(ValueError, match="total_anchors 0: give 1 or more"):
        make_trainer(tmp_path / "none", store, total_anchors=0).run()
