"""The embedded model itself: against transformers, with weights dequantised here from the file by another route."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.test_transformer import expected
from tests.models.tiny import Requests
from trtllm_forespark.models import registry
from trtllm_forespark.models.loaders import open_checkpoint
from trtllm_forespark.models.registry import RegistryError, load_model

pytestmark = pytest.mark.model
NAME = "smollm2-135m"
CHAT = [
    {"role": "user", "content": "Natalia sold clips to 48 friends in April, and half as many in May. How many in all?"}
]


@pytest.fixture(scope="module")
def path():
    try:
        return registry.locate_model(NAME)
    except RegistryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded(path):
    return load_model(NAME)


@pytest.fixture(scope="module")
def oracle(path):
    """transformers' Llama with the file's tensors: gguf's own reader, and the rows of q and k sorted here."""
    import gguf
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in names:
            state[names[tensor.name]] = torch.from_numpy(array.copy())
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            heads = 9 if part == "attn_q" else 3
            array = np.concatenate([np.concatenate((head[0::2], head[1::2])) for head in np.split(array, heads)])
        state[f"model.layers.{layer}.{parts[part]}.weight"] = torch.from_numpy(array.copy())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


def test_logits_and_features_equal_transformers(loaded, oracle):
    model, tokenizer = loaded
    ids = tokenizer.encode_chat(CHAT)
    logits, states = expected(oracle, ids)
    requests = Requests(model, [ids, ids[:20]], 64)
    parts = [requests.step([len(ids) - 9, 19], (1, 28)), requests.step([8, 1], (1, 28)), requests.step([1, 0], (1, 28))]
    got = torch.cat([parts[0].logits[: len(ids) - 9], parts[1].logits[:8], parts[2].logits])
    # Logits reach 30 and hidden states 1,000: the tolerance is float32's over 30 layers of that.
    torch.testing.assert_close(got, logits, atol=2e-3, rtol=1e-4)
    assert torch.equal(got.argmax(-1), logits.argmax(-1))
    features = torch.cat([parts[0].features[: len(ids) - 9], parts[1].features[:8], parts[2].features])
    torch.testing.assert_close(features, states[:, [1, 28]], atol=5e-3, rtol=1e-3)


def test_it_answers(loaded):
    model, tokenizer = loaded
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    requests = Requests(model, [ids + [0] * 12], 64)
    answer = [int(requests.step([len(ids)]).logits[-1].argmax())]
    for _ in range(10):
        requests.texts[0][requests.done[0]] = answer[-1]
        answer.append(int(requests.step([1]).logits[-1].argmax()))
    assert "Paris" in tokenizer.decode(answer)
    assert tokenizer.eos_ids == (2,)


def test_config_and_size(path, loaded):
    config = open_checkpoint(path).config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert config.max_position == 8192 and config.tie_word_embeddings and config.rope_theta == 100000.0
    assert config.kv_bytes_per_token(4) == 46080
    assert loaded[0].bytes < 700e6
