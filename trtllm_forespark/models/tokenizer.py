"""Text to token ids and back, with the model's chat template; from a GGUF's metadata or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .loaders import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# GGUF names of pre-tokenisers -> (split every digit first, regular expression).
_PRE_TOKENIZERS = {
    "smollm": (True, _GPT2),
    "starcoder": (True, _GPT2),
    "refact": (True, _GPT2),
    "command-r": (True, _GPT2),
    "gpt-2": (False, _GPT2),
    "llama-bpe": (False, _CONTRACTIONS + r"\p{N}{1,3}" + _REST),
    "qwen2": (False, _CONTRACTIONS + r"\p{N}" + _REST),
}
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched as a whole before anything is split


class TokenizerError(ValueError):
    """A tokenizer that cannot be built or a chat that its template refuses; the message says which file and what."""


class Tokenizer:
    """encode, decode, chat template and end-of-sequence ids of one model."""

    def __init__(
        self,
        backend: Any,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        specials: Mapping[str, str] = {},
    ) -> None:
        """backend: a `tokenizers.Tokenizer`; specials: bos_token, eos_token, … as the template sees them."""
        self.backend = backend
        self.eos_ids = tuple(dict.fromkeys(int(token) for token in eos_ids))
        self.chat_template = chat_template
        self._specials = {name: text for name, text in specials.items() if isinstance(text, str)}
        self._compiled: Any = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's table may be padded beyond it)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it count as such (as in transformers)."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no whole character become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The chat as the model was trained to read it. messages: [{"role": …, "content": …}, …].

        Raises TokenizerError where the model has no template or the template refuses the chat.
        """
        if self.chat_template is None:
            raise TokenizerError("this model has no chat template; give the whole prompt as text (--raw) or token ids")
        import jinja2

        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.chat_template)
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._specials,
            )
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the model's chat template refused the messages: {error}") from None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the chat in the model's template."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """An incremental decoder for one request."""
        return TokenStream(self, skip_special_tokens)


class TokenStream:
    """Decodes tokens as they come; the pieces joined are exactly `decode` of all of them.

    A character whose last bytes have not come yet is held back: what is decodable ends with at most one U+FFFD for it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []  # since the last but one boundary between whole characters
        self._context = 0  # of them, those before the last boundary (decoders that look back need some)
        self._emitted = 0  # characters after the boundary that were handed out already

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that `token_ids` complete; may be empty."""
        return "".join(self._push_one(token) for token in token_ids)

    def _push_one(self, token: int) -> str:
        self._ids.append(int(token))
        fresh = self._fresh()
        if fresh.endswith("\ufffd"):
            piece = fresh[self._emitted : -1]
            self._emitted += len(piece)
            return piece
        piece = fresh[self._emitted :]
        self._ids = self._ids[self._context :]
        self._context, self._emitted = len(self._ids), 0
        return piece

    def flush(self) -> str:
        """What is held back, at the end of the request."""
        piece = self._fresh()[self._emitted :]
        self._emitted += len(piece)
        return piece

    def _fresh(self) -> str:
        whole = self._tokenizer.decode(self._ids, self._skip)
        before = self._tokenizer.decode(self._ids[: self._context], self._skip)
        return whole[len(before) :]


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str = "gguf") -> Tokenizer:
    """Build the byte-level BPE tokenizer that a GGUF's metadata describes. Raises TokenizerError for other kinds."""
    backend_module = _tokenizers(source)
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise TokenizerError(f"{source}: tokenizer model {kind!r} is not supported (only gpt2, byte-level BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"{source}: pre-tokenizer {pre!r} is not supported (supported: {', '.join(_PRE_TOKENIZERS)})"
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise TokenizerError(f"{source}: metadata tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = backend_module.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    digits, pattern = _PRE_TOKENIZERS[pre]
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), *steps] if digits else steps
    )
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    types = metadata.get("tokenizer.ggml.token_type") or ()
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    added = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])

    def text(name: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[index] if index is not None and 0 <= index < len(tokens) else None

    bos = text("bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    names = {"bos_token": bos, "eos_token": text("eos"), "unk_token": text("unknown"), "pad_token": text("padding")}
    eos = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    return Tokenizer(
        backend,
        [token for token in eos if token is not None],
        metadata.get("tokenizer.chat_template"),
        {name: value for name, value in names.items() if value is not None},
    )


def tokenizer_from_hf(folder: Path, eos_ids: Iterable[int] = ()) -> Tokenizer:
    """From tokenizer.json and tokenizer_config.json (or chat_template.jinja) of a folder.

    eos_ids: ids that the model's config ends on, beside the tokenizer's own.
    """
    from .loaders_hf import read_json

    file = folder / "tokenizer.json"
    if not file.exists():
        raise TokenizerError(
            f"{folder}: tokenizer.json is missing (slow tokenizers are not supported; convert it first)"
        )
    try:
        backend = _tokenizers(str(file)).Tokenizer.from_file(str(file))
    except TokenizerError:
        raise
    except Exception as error:  # the Rust parser raises plain Exception
        raise TokenizerError(f"{file}: not a readable tokenizer ({error})") from None
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    names = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    specials = {key: text for key, text in names.items() if text is not None}
    ids = list(eos_ids)
    own = backend.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    if own is not None:
        ids.append(own)
    return Tokenizer(backend, ids, template, specials)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value


def _tokenizers(source: str) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise CheckpointError(f"{source}: needs the tokenizers package: pip install 'trtllm-forespark[cpu]'") from None
    return tokenizers


def _environment() -> Any:
    """Templates come with checkpoints, so they run sandboxed; settings and helpers as in transformers."""
    import datetime

    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
