"""`forespark bench forward` times a pass and the very products it is made of."""

from __future__ import annotations

import argparse

import pytest
import torch

from tests.models.tiny import reference, save
from trtllm_forespark.models.loaders import open_checkpoint
from trtllm_forespark.models.transformer import PackedTransformer
from trtllm_forespark.runtime.bench import forward


@pytest.fixture
def target(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(save(reference(), tmp_path))
    model = PackedTransformer(checkpoint.config, checkpoint.weights)
    monkeypatch.setattr(forward, "load_model", lambda *_: (model, None))
    return model


def run(*words):
    parser = argparse.ArgumentParser()
    forward.add_arguments(parser)
    return forward.main(parser.parse_args(["--model", "tiny", "--dtype", "float32", "--seconds", "0", *words]))


def test_an_entry_a_size(target):
    result = run("--tokens", "1,8", "--context", "20")
    assert [(entry["model"], entry["tokens"], entry["requests"]) for entry in result["runs"]] == [
        ("tiny", 1, 1),
        ("tiny", 8, 8),
    ]
    for entry in result["runs"]:
        assert entry["passes"] >= 5 and entry["seconds"] > 0 and entry["matmul_seconds"] > 0
        assert entry["ratio"] == pytest.approx(entry["seconds"] / entry["matmul_seconds"], abs=1e-3)


def test_tokens_may_belong_to_fewer_requests(target):
    assert [entry["requests"] for entry in run("--tokens", "7,64", "--requests", "3")["runs"]] == [3, 3]


def test_the_recorded_products_are_all_of_a_pass(target):
    layers = target.linears()
    with forward._recorded() as calls:
        for layer in layers:
            layer(torch.zeros(2, layer.in_features))
    assert [layer for layer, _ in calls] == layers and {rows for _, rows in calls} == {2}
    with forward._recorded() as again:
        pass
    layers[0](torch.zeros(2, layers[0].in_features))
    assert again == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "1,x"), "--tokens takes positive numbers"),
        (("--tokens", "4", "--requests", "5"), "--requests 5 must be between 1 and the smallest --tokens, 4"),
        (("--context", "0"), "--context must be at least 1"),
        (("--context", "512"), "--context 512 leaves no room before position 512"),
    ],
)
def test_settings_that_cannot_work(target, words, message):
    with pytest.raises(ValueError, match=message):
        run(*words)
