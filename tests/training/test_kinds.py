"""Every kind of drafter learns, resumes, and its loss is what the formulas say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.config import BlockConfig
from trtllm_forespark.training.losses import Targets, draft_loss
from trtllm_forespark.training.state import save_state
from trtllm_forespark.training.trainer import Trainer, TrainSettings

from ..drafters.kinds import KINDS, random_drafter
from .test_training import HIDDEN, VOCAB, make_store


def target_kv(layer: int, state: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some function of a layer's input."""
    generator = torch.Generator().manual_seed(layer)
    weight = torch.randn(2, HIDDEN, 16, generator=generator) * HIDDEN**-0.5
    key, value = (state.float() @ weight).view(2, -1, 2, 8)
    return key, value


def make_trainer(folder, store, kind: str, **settings) -> Trainer:
    config: BlockConfig = dataclasses.replace(KINDS[kind], capture_layers=(0, 2))
    given = {"minutes": 100.0, "texts": 2, "anchors": 4, "held": 4, "warmup_steps": 2, **settings}
    torch.manual_seed(0)
    embedding, head = torch.randn(2, VOCAB, HIDDEN)
    return Trainer(
        config, TrainSettings(**given), [store], embedding, head, torch.ones(HIDDEN), folder, None, target_kv
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_and_all_it_has_is_trained(kind: str, tmp_path) -> None:
    """Each weight moves (the selector's and Markov tables where the batch has the token) but what is frozen."""
    trainer = make_trainer(tmp_path / "run", make_store(tmp_path / "features", texts=30), kind, learning_rate=1e-2)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    first, last = [], []
    for step in range(40):
        trainer.progress.seconds = 60.0 * step  # cross-entropy alone for 40 of 100 minutes, warm-up over at once
        result = trainer.step()
        trainer.progress.step += 1
        (first if step < 5 else last if step >= 35 else []).append(result.losses["draft"])
    assert np.mean(last) < np.mean(first) - 0.1
    frozen = {"d2t", "norm.weight"} if kind.startswith("longspark") else {"d2t"}
    absent = {"summary_queries"} if kind == "longspark-no-summary" else set()
    if kind == "longspark-no-boundary":  # the pre-draft estimator reads c, but trains nothing through it
        absent |= {"fc.weight", "hidden_norm.weight"}
    still = {name for name, tensor in trainer.model.state_dict().items() if torch.equal(tensor, before[name])}
    assert still - absent == frozen


@pytest.mark.parametrize("kind", ["dspark-rnn", "longspark"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(kind: str, tmp_path) -> None:
    store = make_store(tmp_path / "features")
    ends = []
    for name, stops in (("whole", [6]), ("parts", [3, 6])):
        for stop in stops:
            trainer = make_trainer(tmp_path / name, store, kind)
            while trainer.progress.step < stop:
                trainer.step()
                trainer.progress.step += 1
            save_state(tmp_path / name, trainer.model, trainer.optimizer, dataclasses.asdict(trainer.progress))
        ends.append(trainer.model)
    for (name, a), b in zip(ends[0].named_parameters(), ends[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)


def case(kind: str, m: int = 3, d: int = 4, seed: int = 0):
    model = random_drafter(KINDS[kind], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(m, d, 32, generator=generator)
    head = torch.randn(40, 32, generator=generator)
    top_ids = torch.stack([torch.randperm(40, generator=generator)[:32] for _ in range(m * d)]).view(m, d, 32)
    probs = torch.rand(m, d, 32, generator=generator)
    valid = torch.ones(m, d, dtype=torch.bool)
    valid[0, 2:] = False
    label = torch.randint(0, 40, (m, d), generator=generator)
    label[1, 1] = -1  # a token the draft vocabulary lacks
    label[~valid] = -1
    previous = torch.randint(0, 90, (m, d), generator=generator)
    return model, hidden, head, Targets(label, valid, top_ids, probs / probs.sum(-1, keepdim=True), previous)


@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-rnn", "longspark"])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_corrected_loss_and_its_gradients_are_the_plain_ones(kind: str, share: float) -> None:
    """0.1 CE + 0.9 TV (LongSpark: the L1 norm) over all corrected logits, weights exp(-(j - 1) / 4), by autograd."""
    model, hidden, head, targets = case(kind)
    weights = torch.exp(-torch.arange(4) / 4.0)[None] * targets.valid
    runs = []
    for plain in (False, True):
        model.zero_grad()
        h = hidden.clone().requires_grad_()
        if plain:
            latents = model.corrector.along(h, targets.previous)
            log_q = (h @ head.T + latents @ model.corrector.successors.T).log_softmax(-1)
            known = (targets.label >= 0) & targets.valid
            ce = -log_q.gather(2, targets.label.clamp(min=0)[..., None]).squeeze(-1)
            tv = 1 - torch.minimum(log_q.gather(2, targets.top_ids).exp(), targets.top_probs).sum(-1)
            factor = 2.0 if kind == "longspark" else 1.0
            loss = (weights * ((1 - share) * known * ce + share * factor * tv)).sum() / weights.sum()
        else:
            loss = draft_loss(model, h, head, targets, share).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.markov_head.named_parameters() if p.grad is not None}
        runs.append((loss.detach(), h.grad, grads))
    (loss, grad, grads), (wanted, wanted_grad, wanted_grads) = runs
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(grad, wanted_grad, atol=1e-6, rtol=1e-4)
    assert grads.keys() == wanted_grads.keys() and len(grads) >= 2
    for name in grads:
        torch.testing.assert_close(grads[name], wanted_grads[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dspark", "longspark"])
def test_soft_acceptance_is_of_the_candidates_that_serving_would_draw_from(kind: str) -> None:
    model, hidden, head, targets = case(kind)
    acceptance = draft_loss(model, hidden, head, targets, 0.9).acceptance
    latents = model.corrector.along(hidden, targets.previous)
    base = hidden @ head.T
    top = base.topk(4, -1)
    q = (top.values + (latents @ model.corrector.successors.T).gather(2, top.indices)).softmax(-1)
    p = torch.zeros_like(base).scatter(2, targets.top_ids, targets.top_probs).gather(2, top.indices)
    torch.testing.assert_close(acceptance, torch.minimum(p, q).sum(-1), atol=1e-5, rtol=1e-5)


def test_what_was_not_captured_is_refused_before_anything_is_trained(tmp_path) -> None:
    store = make_store(tmp_path / "features")
    torch.manual_seed(0)
    embedding, head = torch.randn(2, VOCAB, HIDDEN)

    def trainer(config: BlockConfig) -> Trainer:
        return Trainer(config, TrainSettings(), [store], embedding, head, torch.ones(HIDDEN), tmp_path / "run")

    with pytest.raises(ValueError, match="kv layer 2: training needs layer 1 captured"):
        trainer(dataclasses.replace(KINDS["longspark"], kv_layers=(1, 2)))
    with pytest.raises(ValueError, match=r"holds layers \(0, 2\), the drafter reads \(0, 1\)"):
        trainer(dataclasses.replace(KINDS["dspark"], capture_layers=(0, 1)))
