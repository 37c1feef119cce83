"""Tokenizers built from GGUF metadata and from Hugging Face folders agree with transformers."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from trtllm_forespark.models.loaders import CheckpointError
from trtllm_forespark.models.tokenizer import TokenizerError, tokenizer_from_gguf, tokenizer_from_hf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = [
    "",
    " ",
    "Hello, world! It's 2026 and I'd say they've 1234567 reasons.",
    "  two spaces\n\n\ttabs\r\nand trailing   ",
    "def f(x):\n    return x**2  # 3.14\n",
    "naïve café — “quotes” … 你好，世界 🙂👩‍👩‍👧 ﷽ العربية ½ ² Ⅷ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|endoftext|>b <|im_end|> c<|im_start",
    "\u0000\u200b\u00ad x",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 5, "return self.value if value else None\n" * 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as SmolLM2's: digits one by one, byte-level BPE, special tokens first."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(CORPUS, trainer)
    made.save(str(path / "tokenizer.json"))

    import json

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def metadata(folder):
    """The same tokenizer as GGUF metadata."""
    import json

    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


@pytest.fixture(scope="module", params=["gguf", "hf"])
def tokenizer(request, folder, metadata):
    return tokenizer_from_gguf(metadata) if request.param == "gguf" else tokenizer_from_hf(folder, (0,))


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_equal_transformers(text, tokenizer, oracle):
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids) == text
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_digits_are_split_one_by_one(tokenizer):
    assert len(tokenizer.encode("1234567")) == 7


def test_chat_template_equals_transformers(tokenizer, oracle):
    chat = [{"role": "user", "content": "Hi\n  there"}, {"role": "assistant", "content": "Yes"}]
    for start in (True, False):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=start)
        assert text == oracle.apply_chat_template(chat, add_generation_prompt=start, tokenize=False)
        want = oracle.apply_chat_template(chat, add_generation_prompt=start)
        assert tokenizer.encode_chat(chat, start) == list(getattr(want, "input_ids", want))


def test_eos_ids(folder, metadata):
    assert tokenizer_from_gguf(metadata).eos_ids == (2,)
    assert tokenizer_from_gguf({**metadata, "tokenizer.ggml.eot_token_id": 0}).eos_ids == (2, 0)
    assert tokenizer_from_hf(folder, (5, 2)).eos_ids == (5, 2)


def test_a_beginning_token_is_added_where_the_model_asks_for_it(metadata):
    made = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_bos_token": True})
    assert made.encode("hi")[0] == 1 and made.encode("hi", add_special_tokens=False)[0] != 1


def test_streamed_pieces_join_to_the_whole(tokenizer):
    rng = random.Random(0)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        stream, at, pieces = tokenizer.stream(), 0, []
        while at < len(ids):
            size = rng.randint(1, 3)
            pieces.append(stream.push(ids[at : at + size]))
            at += size
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
        assert all("\ufffd" not in piece for piece in pieces)


def test_streams_of_arbitrary_tokens_join_to_the_whole(tokenizer):
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 30))]
        stream = tokenizer.stream()
        assert "".join(stream.push([token]) for token in ids) + stream.flush() == tokenizer.decode(ids)


def test_a_split_character_is_held_back(tokenizer):
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert stream.flush() == ""


def test_templates_run_in_a_sandbox(metadata):
    made = tokenizer_from_gguf({**metadata, "tokenizer.chat_template": "{{ ''.__class__.__mro__ }}"})
    with pytest.raises(TokenizerError, match="refused the messages"):
        made.apply_chat_template([])
    made = tokenizer_from_gguf({**metadata, "tokenizer.chat_template": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(TokenizerError, match="roles must alternate"):
        made.apply_chat_template([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens or tokenizer.ggml.merges is missing"),
    ],
)
def test_other_tokenizers_are_refused_by_name(changes, message, metadata):
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf({**metadata, **changes})


def test_missing_and_broken_files(tmp_path, metadata):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        tokenizer_from_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a readable tokenizer"):
        tokenizer_from_hf(tmp_path)
    made = tokenizer_from_gguf({**metadata, "tokenizer.chat_template": None})
    with pytest.raises(TokenizerError, match="no chat template"):
        made.apply_chat_template([])


def test_broken_settings(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not readable as JSON"):
        tokenizer_from_hf(tmp_path)
