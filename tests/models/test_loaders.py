"""Checkpoints: what is read is what was written, and what is wrong with a file is said in one line."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_transformer import compare, texts_of
from tests.models.tiny import ROPES, Requests, reference, save
from trtllm_forespark.models.config import ModelConfig, ModelConfigError
from trtllm_forespark.models.loaders import CheckpointError, open_checkpoint
from trtllm_forespark.models.loaders_gguf import gguf_name
from trtllm_forespark.models.transformer import PackedTransformer

ARCH = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter stores q and k of llama models."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(model, path, family="llama", quant=None, skip=(), edit=lambda name, array: array, extra=lambda w: None):
    """A transformers model as GGUF. quant: GGML type of the big matrices."""
    c = model.config
    writer = gguf.GGUFWriter(path, ARCH[family])
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_vocab_size(c.vocab_size)
    writer.add_eos_token_id(2)
    extra(writer)
    for name, tensor in model.state_dict().items():
        if name in skip or (name == "lm_head.weight" and c.tie_word_embeddings):
            continue
        array = tensor.numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = permute(array, c.num_attention_heads if ".q_" in name else c.num_key_value_heads)
        array = np.ascontiguousarray(edit(name, array))
        if quant is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, quant), raw_dtype=quant)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_equals_transformers(family, tied, tmp_path):
    model = reference(family, tie_word_embeddings=tied, **({"head_dim": 8} if family == "qwen2" else {}))
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "m.gguf", family))
    assert checkpoint.config.tie_word_embeddings is tied and checkpoint.config.eos_token_ids == (2,)
    packed = PackedTransformer(checkpoint.config, checkpoint.weights)
    compare(model, Requests(packed, texts_of([9, 20]), 16), [[8, 20], [1, 0]], (0,))


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_quantised_types(quant, tmp_path):
    """The quantised matrices, dequantised by gguf and put back into transformers, give the same logits."""
    kind = gguf.GGMLQuantizationType[quant]
    model = reference(hidden_size=96, intermediate_size=64)
    path = write_gguf(model, tmp_path / "m.gguf", quant=kind)
    checkpoint = open_checkpoint(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = checkpoint.weights.read(name)
            assert (stored - parameter).abs().max() < 0.1
            parameter.copy_(stored)
    packed = PackedTransformer(checkpoint.config, checkpoint.weights)
    compare(model, Requests(packed, texts_of([9]), 16), [[9]], (0,))


def test_gguf_rope_scaling(tmp_path):
    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    model = reference(rope_parameters=ROPES["linear"])
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "linear.gguf", extra=linear))
    packed = PackedTransformer(checkpoint.config, checkpoint.weights)
    compare(model, Requests(packed, texts_of([40]), 16), [[40]], (0,))

    def llama3(writer):
        plain = 500000.0 ** -(np.arange(0, 16, 2, dtype=np.float32) / 16)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    model = reference(rope_parameters=ROPES["llama3"])
    checkpoint = open_checkpoint(write_gguf(model, tmp_path / "llama3.gguf", extra=llama3))
    packed = PackedTransformer(checkpoint.config, checkpoint.weights)
    compare(model, Requests(packed, texts_of([40]), 16), [[40]], (0,))


def test_sharded_safetensors(tmp_path):
    model = reference()
    save(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    compare(model, Requests(PackedTransformer(checkpoint.config, checkpoint.weights), texts_of([9]), 16), [[9]], (0,))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names files that are not there: {shard.name}"):
        open_checkpoint(tmp_path)


def build(path):
    checkpoint = open_checkpoint(path)
    return PackedTransformer(checkpoint.config, checkpoint.weights)


def test_missing_and_misshaped_tensors(tmp_path):
    save(reference(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing \(expected shape \[80, 48\]\)"):
        build(tmp_path)
    save_file({**tensors, name: tensors[name][:, :40].contiguous()}, file)
    with pytest.raises(CheckpointError, match=rf"{file}: tensor {name} has shape \[80, 40\], expected \[80, 48\]"):
        build(tmp_path)
    save_file({**tensors, name: torch.zeros(80, 48, dtype=torch.int32)}, file)
    with pytest.raises(CheckpointError, match="expected floating point"):
        build(tmp_path)


def test_missing_and_misshaped_gguf_tensors(tmp_path):
    model, name = reference(), "model.layers.1.mlp.up_proj.weight"
    path = write_gguf(model, tmp_path / "a.gguf", skip=(name,))
    with pytest.raises(CheckpointError, match=rf"{path}: tensor {name} is missing \(expected shape \[80, 48\]\)"):
        build(path)
    path = write_gguf(model, tmp_path / "b.gguf", edit=lambda n, a: a[:, :40] if n == name else a)
    with pytest.raises(CheckpointError, match=rf"{path}: tensor {name} has shape \[80, 40\], expected \[80, 48\]"):
        build(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 400, 0.5, 0.999])
def test_truncated_files(keep, tmp_path):
    model = reference()
    whole = write_gguf(model, tmp_path / "m.gguf").read_bytes()
    cut = keep if isinstance(keep, int) else int(len(whole) * keep)
    (tmp_path / "m.gguf").write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"m\.gguf: "):
        build(tmp_path / "m.gguf")
    save(model, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        build(tmp_path / "hf")


def test_other_bytes_are_no_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(b"GGUF" + np.array([99], "<u4").tobytes() + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 99 is not supported"):
        open_checkpoint(path)


def test_pickled_weights_are_never_loaded(tmp_path):
    save(reference(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(\*\.bin\), which are never loaded"):
        open_checkpoint(tmp_path)


def test_folders_without_what_is_needed(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        open_checkpoint(tmp_path)
    save(reference(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file found"):
        open_checkpoint(tmp_path)


def settings(**changes):
    config = json.loads(reference().config.to_json_string(use_diff=False))
    return {**config, "architectures": ["LlamaForCausalLM"], **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture 'MixtralForCausalLM' is not supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor, high_freq_factor"),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"num_key_value_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_hf(settings(**changes))


def test_old_and_new_rope_keys_mean_the_same():
    new = ModelConfig.from_hf(settings(rope_parameters=ROPES["llama3"]))
    scaling = {key: value for key, value in ROPES["llama3"].items() if key not in ("rope_theta", "rope_type")}
    old = settings(rope_theta=500000.0, rope_scaling={**scaling, "type": "llama3"})
    del old["rope_parameters"]
    assert ModelConfig.from_hf(old) == new and new.rope_theta == 500000.0


def test_generation_config_gives_the_eos_ids(tmp_path):
    save(reference(), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert open_checkpoint(tmp_path).config.eos_token_ids == (2, 5)
