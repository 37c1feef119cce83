"""What waits outside the drafter's context arrives there as if it had never waited, and only for who is still there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.models.loaders import open_checkpoint
from trtllm_forespark.models.transformer import PackedTransformer
from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.runtime.backends.torch_backend import TorchBackend
from trtllm_forespark.runtime.profile import Probe
from trtllm_forespark.training.replay import greedy_choice

from ..drafters.kinds import KINDS, random_drafter
from ..models.tiny import BASE, reference, save

PAGE = 16
SHAPE = dataclasses.replace(
    KINDS["dflash2"],
    hidden_size=BASE["hidden_size"],
    num_heads=BASE["num_attention_heads"],
    num_kv_heads=BASE["num_key_value_heads"],
    head_dim=BASE["head_dim"],
    vocab_size=BASE["vocab_size"],
    capture_layers=(0, 2),
    target_layers=3,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> PackedTransformer:
    source = open_checkpoint(save(reference(), tmp_path_factory.mktemp("tiny")))
    return PackedTransformer(source.config, source.weights)


def make(target: PackedTransformer) -> TorchBackend:
    model = random_drafter(SHAPE, std=0.2)
    calibration = Calibration.identity(SHAPE.block, SHAPE.estimator_outputs)
    return TorchBackend(target, (model, calibration), max_batch_size=4, max_seq_len=64, num_pages=8, page_size=PAGE)


def feed(backend: TorchBackend, seats: list[int], pages: list[list[int]], texts: list[list[int]], start: int) -> None:
    """One pass over the next tokens of requests that all stand at position ``start``; all of them are kept."""
    counts = [len(text) for text in texts]
    cu = np.concatenate([[0], np.cumsum(counts)]).tolist()
    positions = [start + i for count in counts for i in range(count)]
    ids = [token for text in texts for token in text]
    backend.forward(TargetBatch(ids, positions, cu, np.array(pages), [len(ids) - 1], seats))
    backend.commit(counts)


def draft(backend: TorchBackend, seat: int, pages: list[int], anchor: int, position: int):
    batch = DraftBatch([anchor], [position], np.array([pages]), [seat])
    estimate = backend.estimate(batch)
    return backend.draft(batch, [5], greedy_choice), estimate


def test_a_seat_and_its_pages_may_be_reused_while_tokens_wait(target: PackedTransformer) -> None:
    rng = np.random.default_rng(0)
    old, new, other = (rng.integers(3, 97, 20).tolist() for _ in range(3))
    used, fresh = make(target), make(target)
    feed(used, [0, 1], [[2, 3], [4, 5]], [old, other], 0)
    used.release(0)  # its 20 tokens still wait
    feed(used, [0], [[2, 3]], [new[:7]], 0)
    feed(used, [0], [[2, 3]], [new[7:]], 7)
    feed(fresh, [0], [[2, 3]], [new], 0)
    mine, estimate = draft(used, 0, [2, 3], new[-1], 20)
    wanted, expected = draft(fresh, 0, [2, 3], new[-1], 20)
    assert torch.equal(mine.token_ids, wanted.token_ids)
    torch.testing.assert_close(mine.survival, wanted.survival, atol=1e-5, rtol=0)
    np.testing.assert_allclose(estimate.survival, expected.survival, atol=1e-5)
    # The neighbour's tokens were absorbed by the same pass.
    alone = make(target)
    feed(alone, [1], [[4, 5]], [other], 0)
    np.testing.assert_allclose(
        draft(used, 1, [4, 5], 9, 20)[1].survival, draft(alone, 1, [4, 5], 9, 20)[1].survival, atol=1e-5
    )


def test_waiting_long_is_bounded_and_changes_nothing(target: PackedTransformer, monkeypatch) -> None:
    from trtllm_forespark.runtime.backends import torch_backend

    text = np.random.default_rng(1).integers(3, 97, 30).tolist()
    survival = {}
    for most, left in ((1000, 30), (7, 6), (0, 0)):
        monkeypatch.setattr(torch_backend, "_MOST_WAITING", most)
        backend = make(target)
        for i in range(0, 30, 3):
            feed(backend, [2], [[0, 1]], [text[i : i + 3]], i)
        assert backend._waits == left
        survival[most] = draft(backend, 2, [0, 1], 5, 30)[0].survival
    for most in (7, 0):
        torch.testing.assert_close(survival[most], survival[1000], atol=1e-5, rtol=0)


def test_a_prompt_is_absorbed_when_it_is_read(target: PackedTransformer) -> None:
    at_once, waiting = make(target), make(target)
    text = np.random.default_rng(2).integers(3, 97, 20).tolist()
    feed(at_once, [0], [[0, 1]], [text], 0)
    assert at_once._waits == 0
    for i in range(20):
        feed(waiting, [0], [[0, 1]], [text[i : i + 1]], i)
    assert waiting._waits == 20
    torch.testing.assert_close(
        draft(at_once, 0, [0, 1], 9, 20)[0].survival, draft(waiting, 0, [0, 1], 9, 20)[0].survival, atol=1e-5, rtol=0
    )


def test_nothing_committed_and_nothing_drafted(target: PackedTransformer) -> None:
    backend = make(target)
    feed(backend, [0], [[0, 1]], [[5, 6, 7]], 0)
    backend.release(0)
    batch = DraftBatch([5], [3], np.array([[0, 1]]), [0])
    assert backend.draft(batch, [0], greedy_choice).cu_lengths.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="without a captured pass"):
        backend.commit([1])


def test_warming_up_leaves_nothing_behind(target: PackedTransformer) -> None:
    drafts = []
    for warmed in (False, True):
        backend = make(target)
        if warmed:
            backend.warm(5)
            assert not backend.kv.k.any() and not backend.kv.v.any() and backend.runner is not None
            assert not backend.runner.kv.k.any()
        feed(backend, [0], [[0, 1]], [[5, 6, 7, 8]], 0)
        drafts.append(draft(backend, 0, [0, 1], 9, 4)[0])
    torch.testing.assert_close(drafts[0].token_ids, drafts[1].token_ids)
    np.testing.assert_allclose(drafts[0].survival, drafts[1].survival)


def test_profiling_takes_turns_and_leaves_nothing_behind(target: PackedTransformer, monkeypatch) -> None:
    used, fresh = make(target), make(target)
    passes: list[int] = []
    forward = used.forward
    monkeypatch.setattr(used, "forward", lambda batch: passes.append(len(batch.token_ids)) or forward(batch))
    probe = Probe(used, context=16, max_requests=2)
    times = [probe.verify(2, 2), probe.draft(2, 4), probe.verify(2, 3), probe.draft(2, 6), probe.verify(1, 2)]
    assert min(times) > 0
    # A draft goes on from the verification before it; one request's first verification needs its own draft before.
    assert passes == [2, 2, 2, 3, 1, 1, 1, 2]
    assert used._waits > 0
    probe.close()
    assert used._waits == 0
    text = np.random.default_rng(3).integers(3, 97, 20).tolist()
    for backend in (used, fresh):
        feed(backend, [0], [[0, 1]], [text], 0)
    np.testing.assert_allclose(
        draft(used, 0, [0, 1], text[-1], 20)[1].survival, draft(fresh, 0, [0, 1], text[-1], 20)[1].survival, atol=1e-5
    )


def test_a_backend_beside_another_shares_its_weights_and_nothing_else(target: PackedTransformer) -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(3, 97, 20).tolist() for _ in range(2)]
    first = make(target)
    feed(first, [0], [[0, 1]], [texts[0][:18]], 0)
    second = first.beside(2)
    feed(second, [0], [[0, 1]], [texts[1][:18]], 0)
    for backend, text in ((first, texts[0]), (second, texts[1])):
        feed(backend, [0], [[0, 1]], [text[18:]], 18)  # waits
    assert second.runner.model is first.runner.model and second.runner.head is first.runner.head
    for backend, text in ((second, texts[1]), (first, texts[0])):
        alone = make(target)
        feed(alone, [0], [[0, 1]], [text], 0)
        mine, wanted = (draft(b, 0, [0, 1], text[-1], 20) for b in (backend, alone))
        torch.testing.assert_close(mine[0].survival, wanted[0].survival, atol=1e-5, rtol=0)
        np.testing.assert_allclose(mine[1].survival, wanted[1].survival, atol=1e-5)
