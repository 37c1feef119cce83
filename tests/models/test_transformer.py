"""The packed transformer computes what transformers computes, whatever the batch looks like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.tiny import ROPES, Requests, reference, save
from trtllm_forespark.models.loaders import open_checkpoint
from trtllm_forespark.models.transformer import PackedBatch, PackedTransformer

TOLERANCE = 1e-4
LENGTHS = [1, 7, 33, 16, 40]
# Prefill chunks beside single tokens, a request that pauses (0), a chunk that ends exactly on a page (16).
STEPS = [[1, 5, 20, 16, 0], [0, 1, 1, 0, 33], [0, 1, 12, 0, 7]]

VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 6}),
    "llama-linear": ("llama", {"rope_parameters": ROPES["linear"]}),
    "llama-llama3": ("llama", {"rope_parameters": ROPES["llama3"]}),
    "llama-yarn": ("llama", {"rope_parameters": ROPES["yarn"]}),
    "qwen2": ("qwen2", {"head_dim": 8}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": ROPES["yarn"]}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


def texts_of(lengths, vocabulary=97, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def expected(model, text):
    """Logits [T, V] and the output of every layer [T, L, H], the last one before the final norm."""
    states = []
    hooks = [
        layer.register_forward_hook(
            lambda _module, _inputs, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        logits = model(torch.tensor([text])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack([state[0] for state in states], 1)


def compare(model, requests, steps, capture):
    want = [expected(model, text) for text in requests.texts]
    done = [0] * len(requests.texts)
    for lengths in steps:
        out = requests.step(lengths, capture)
        row = 0
        for index, length in enumerate(lengths):
            rows, place = slice(row, row + length), slice(done[index], done[index] + length)
            torch.testing.assert_close(out.logits[rows], want[index][0][place], atol=TOLERANCE, rtol=0)
            states = want[index][1][place][:, list(capture)]
            torch.testing.assert_close(out.features[rows], states, atol=TOLERANCE, rtol=0)
            row, done[index] = row + length, done[index] + length


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_mixed_batches_equal_transformers(variant, tmp_path):
    family, changes = VARIANTS[variant]
    model = reference(family, **changes)
    checkpoint = open_checkpoint(save(model, tmp_path))
    packed = PackedTransformer(checkpoint.config, checkpoint.weights)
    compare(model, Requests(packed, texts_of(LENGTHS), 16), STEPS, (0, 2))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = reference()
    checkpoint = open_checkpoint(save(model, tmp_path_factory.mktemp("llama")))
    return model, PackedTransformer(checkpoint.config, checkpoint.weights)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_any_page_size(llama, page_size):
    model, packed = llama
    compare(model, Requests(packed, texts_of(LENGTHS), page_size, pool=256), STEPS, (1, 0))


@pytest.mark.parametrize("spread", [1, 4])
def test_scattered_pages(llama, spread):
    model, packed = llama
    pages = (np.random.default_rng(0).permutation(64) * spread).tolist()
    requests = Requests(packed, texts_of(LENGTHS), 16, pages, pool=64 * spread)
    compare(model, requests, STEPS, (2,))


@pytest.mark.parametrize("lengths", [[1], [33], [0], []])
def test_smallest_batches(llama, lengths):
    model, packed = llama
    texts = texts_of([max(length, 1) for length in lengths] or [1])
    if lengths and sum(lengths):
        compare(model, Requests(packed, texts, 16), [lengths], (0,))
    else:
        table = np.zeros((len(lengths), 1), np.int64)
        batch = PackedBatch.build([], [], lengths, table, 16)
        out = packed.forward(batch, packed.new_kv(2, 16), torch.zeros(0, dtype=torch.long), (0,))
        assert out.logits.shape == (0, 97) and out.features.shape == (0, 1, 48)


def test_a_request_gives_the_same_logits_alone_and_in_company(llama):
    _, packed = llama
    texts = texts_of(LENGTHS)
    together = Requests(packed, texts, 16)
    together.step([1, 6, 32, 15, 39])
    rows = together.step([0, 1, 1, 1, 1]).logits
    for row, index in enumerate(range(1, 5)):
        alone = Requests(packed, [texts[index]], 16)
        alone.step([LENGTHS[index] - 1])
        torch.testing.assert_close(rows[row : row + 1], alone.step([1]).logits, atol=1e-5, rtol=0)


def test_verification_runs_see_only_the_past(llama):
    model, packed = llama
    compare(model, Requests(packed, texts_of([20, 20, 20]), 8), [[12, 9, 17], [8, 1, 3], [0, 8, 0]], (0,))


def test_pages_full_of_nan_that_belong_to_nobody_change_nothing(llama):
    model, packed = llama
    requests = Requests(packed, texts_of([20, 9]), 16, pages=[0, 3, 2, 5])
    requests.kv.k[:, [1, 4]] = float("nan")
    requests.kv.v[:, [1, 4]] = float("nan")
    compare(model, requests, [[19, 8], [1, 1]], (0,))


def test_only_asked_logits_and_no_features(llama):
    _, packed = llama
    batch = PackedBatch.build([3, 4, 5], [0, 1, 2], [3], np.array([[0]]), 16)
    every = packed.forward(batch, packed.new_kv(1, 16), torch.arange(3))
    last = packed.forward(batch, packed.new_kv(1, 16), torch.tensor([2]))
    none = packed.forward(batch, packed.new_kv(1, 16))
    assert none.logits is None and none.features is None and every.features is None
    torch.testing.assert_close(last.logits, every.logits[2:], atol=1e-5, rtol=0)
    torch.testing.assert_close(packed.lm_head(last.hidden), last.logits)
    torch.testing.assert_close(last.hidden @ packed.lm_head_weight().T, last.logits, atol=1e-4, rtol=0)


def test_bfloat16_follows_float32(llama, tmp_path):
    model, _ = llama
    checkpoint = open_checkpoint(save(model, tmp_path))
    packed = PackedTransformer(checkpoint.config, checkpoint.weights, torch.bfloat16)
    text = texts_of([24])[0]
    requests = Requests(packed, [text], 16)
    got = torch.cat([requests.step([length], (1,)).logits for length in (20, 1, 3)])
    want, _ = expected(model, text)
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() / want.norm() < 0.05


def test_bad_batches_are_refused(llama):
    _, packed = llama
    with pytest.raises(ValueError, match="do not describe one batch"):
        PackedBatch.build([1, 2], [0, 1], [3], np.array([[0]]), 16)
    with pytest.raises(ValueError, match="position 16 lies past 1 pages of 16"):
        PackedBatch.build([1], [16], [1], np.array([[0]]), 16)
    batch = PackedBatch.build([1], [0], [1], np.array([[0]]), 16)
    with pytest.raises(ValueError, match=r"captured layers \[3\] do not exist"):
        packed.forward(batch, packed.new_kv(1, 16), capture=(3,))
