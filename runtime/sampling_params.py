"""What may be asked of one request: names and meaning follow TensorRT-LLM's `SamplingParams`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TINY = 5e-324  # the least number above 0

GREEDY, SEEDED, UNSEEDED = 0, 1, 2
"""The three kinds of sampling; each is lossless in its own way (docs/lossless.md, rules 3, 4 and 7)."""

# TensorRT-LLM parameters we know but do not serve yet: the values that mean "off", and what to do instead.
_NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "give n and choose among the outputs"),
    "use_beam_search": ((False,), "use sampling"),
    "logits_processor": ((None,), "leave it out"),
    "logprobs": ((None, False), "leave it out"),
    "prompt_logprobs": ((None, False), "leave it out"),
    "guided_decoding": ((None,), "leave it out"),
}


def _refuse(name: str, value: object, rule: str, mend: str) -> ValueError:
    return ValueError(f"SamplingParams.{name} = {value!r}: {rule}; {mend}")


def _short(value: object) -> str:
    """One line of a value that may be as long as the vocabulary."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn and when they end; names and meaning as in TensorRT-LLM.

    max_tokens: tokens to generate at most; None: up to the context limit.
    min_tokens: end and stop tokens cannot be drawn before this many tokens are out.
    temperature: 0 is greedy. None is greedy when top_k and top_p are unset too, else 1.
    top_k: draw from the k most likely tokens (ties with the k-th stay in); None or 0 is off, 1 is greedy.
    top_p: draw from the fewest most likely tokens that hold this much probability; None or 1 is off, 0 is greedy.
    min_p: drop tokens less likely than this share of the likeliest one, after temperature, top_k and top_p; None or 0
        is off.
    repetition_penalty, presence_penalty, frequency_penalty: a token that stands c > 0 times in the prompt and the
        output before has its logit divided by repetition_penalty (multiplied where it is below 0), then lowered by
        presence_penalty + c * frequency_penalty. The prompt counts, as in TensorRT-LLM. Before temperature. 1, 0 and
        0 are off.
    embedding_bias: added to the logits before everything else: a tensor or list with a number for each token of the
        vocabulary, or a mapping from token id to number (OpenAI's logit_bias); -inf bars a token. Not compared by ==.
    seed: 0 to 2**64 - 1. The same prompt, settings and seed give the same tokens whatever else is in the batch
        (float32; docs/lossless.md, rule 7). None: a different draw each time.
    n: outputs of each prompt, drawn independently; with a seed, the first takes it and the others take seeds derived
        from it. Not for greedy sampling, which has but one.
    end_id: the end-of-sequence token; None: the model's own. ignore_eos: go on past it.
    stop_token_ids: further tokens that end the output. The token that ends it is kept, as its last one.
    stop: a string or several. The output ends with the token with which its text first contains one; the text is cut
        before it (after it with include_stop_str_in_output). The tokens of the stop string stay and count.
    bad: a string or several that are not to be said, each as the tokens it is encoded to (another spelling, as with a
        space before, is another word): the last one is barred where the others stand before it, in the prompt or the
        output. bad_token_ids: tokens that are never drawn.

    Raises ValueError naming the field, the value and how to mend it.
    """

    max_tokens: int | None = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    embedding_bias: torch.Tensor | Sequence[float] | Mapping[int, float] | None = field(default=None, compare=False)
    seed: int | None = None
    end_id: int | None = None
    stop_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    bad: str | Sequence[str] | None = None
    bad_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    logits_processor: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    guided_decoding: Any = None

    def __post_init__(self) -> None:
        for name, (off, mend) in _NOT_YET.items():
            value = getattr(self, name)
            if not any(value is v or (type(value) in (int, float, list, tuple) and value == v) for v in off):
                raise _refuse(name, value, "not supported yet", mend)
        self._check_int("max_tokens", 1, "give a positive number, or None for the rest of the context")
        self._check_int("min_tokens", 0, "give 0 or more")
        self._check_int("top_k", 0, "give a positive number, or None to turn it off")
        self._check_int("end_id", -1, "give a token id, or leave it out for the model's own")
        self._check_int("seed", 0, "give a number from 0 to 2**64 - 1, or None for a fresh draw each time")
        if self.seed is not None and self.seed >= 2**64:
            raise _refuse("seed", self.seed, "must be below 2**64", "give a number from 0 to 2**64 - 1")
        self._check_real("temperature", "give 0 for greedy, 1 for the model's own distribution")
        self._check_real("top_p", "give a share from 0 to 1, or None to turn it off", most=1.0)
        self._check_real("min_p", "give a share from 0 to 1, or None to turn it off", most=1.0)
        self._check_real("repetition_penalty", "give 1 for none, more to discourage repetition", least=_TINY)
        self._check_real("presence_penalty", "give 0 for none, more to discourage repetition", least=-math.inf)
        self._check_real("frequency_penalty", "give 0 for none, more to discourage repetition", least=-math.inf)
        if self.embedding_bias is not None:
            _ = self.bias
        self._check_int("n", 1, "give the number of outputs")
        if self.n is None:
            raise _refuse("n", self.n, "must be an integer >= 1", "give the number of outputs")
        if self.n > 1 and self.greedy:
            raise _refuse("n", self.n, "greedy sampling has one output", "set temperature, top_k or top_p, or n = 1")
        for name in ("stop_token_ids", "bad_token_ids"):
            ids = getattr(self, name)
            if ids is not None and not (isinstance(ids, (list, tuple)) and all(_is_int(t) and t >= 0 for t in ids)):
                raise _refuse(name, ids, "must be a list of token ids (integers >= 0)", "give such a list")
        for name in ("stop", "bad"):
            given = getattr(self, name)
            strings = [given] if isinstance(given, str) else given
            if given is not None and not (
                isinstance(strings, (list, tuple)) and all(isinstance(s, str) and s for s in strings)
            ):
                raise _refuse(name, given, "must be a string or a list of strings, none empty", "leave out empty ones")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "must be True or False", "give one of the two")
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            rule = f"must not exceed max_tokens = {self.max_tokens}"
            raise _refuse("min_tokens", self.min_tokens, rule, "lower it or raise max_tokens")

    def _check_int(self, name: str, least: int, mend: str) -> None:
        value = getattr(self, name)
        if value is not None and (not _is_int(value) or value < least):
            raise _refuse(name, value, f"must be an integer >= {least}", mend)

    def _check_real(self, name: str, mend: str, *, least: float = 0.0, most: float = math.inf) -> None:
        value = getattr(self, name)
        if value is None:
            return
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not math.isfinite(value) or not least <= value <= most:
            lower = "" if least == -math.inf else " > 0" if least == _TINY else " >= 0"
            upper = "" if most == math.inf else f" and <= {most:g}"
            raise _refuse(name, value, f"must be a finite number{lower}{upper}", mend)

    @cached_property
    def bias(self) -> tuple[Tensor | None, Tensor]:
        """embedding_bias as (token ids, or None for the whole vocabulary; float32 values)."""
        import torch

        given = self.embedding_bias
        ids: Tensor | None = None
        try:
            if isinstance(given, Mapping):
                if not all(_is_int(t) and t >= 0 for t in given):
                    raise ValueError
                ids = torch.tensor(list(given), dtype=torch.int64)
                given = list(given.values())
            values = torch.as_tensor(given, dtype=torch.float32).detach()
        except (TypeError, ValueError, RuntimeError):
            values = torch.full((1,), torch.nan)
        if values.ndim != 1 or not bool((values < torch.inf).all()):
            raise ValueError(
                f"SamplingParams.embedding_bias = {_short(self.embedding_bias)}: must hold a number below infinity for "
                "each token id; give a tensor of the vocabulary's size or a mapping from token id to number"
            )
        return ids, values

    def sample(self, index: int) -> SamplingParams:
        """Of the output ``index`` < n alone, as a request of its own: n = 1 and a seed of its own where one is set."""
        seed = self.seed
        if seed is not None and index:
            digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return self if self.n == 1 else replace(self, n=1, seed=seed)

    @cached_property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @cached_property
    def bad_strings(self) -> list[str]:
        return [self.bad] if isinstance(self.bad, str) else list(self.bad or ())

    @cached_property
    def penalises(self) -> bool:
        """Does what was said before change the next token's logits?"""
        off = (self.repetition_penalty in (None, 1), not self.presence_penalty, not self.frequency_penalty)
        return not all(off)

    @cached_property
    def greedy(self) -> bool:
        """TensorRT-LLM's rule: nothing set, or temperature 0, top_k 1 or top_p 0."""
        unset = self.temperature is None and self.top_p is None and not self.top_k
        return unset or self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @cached_property
    def row(self) -> tuple[tuple[float, float, float], tuple[int, int, int, int]]:
        """(temperature, top_p, min_p), (kind, top_k, seed, min_tokens): what a row of logits is sampled with. 1, 1, 0
        and, of top_k, 0 are off, as they are in greedy rows. seed: the int64 with the same bits."""
        seed = self.seed or 0
        fixed = (seed - ((seed >> 63) << 64), self.min_tokens or 0)
        if self.greedy:
            return (1.0, 1.0, 0.0), (GREEDY, 0, *fixed)
        temperature, top_p = (1.0 if x is None else float(x) for x in (self.temperature, self.top_p))
        return (temperature, top_p, self.min_p or 0.0), (self.kind, self.top_k or 0, *fixed)

    @cached_property
    def kind(self) -> int:
        """GREEDY, SEEDED or UNSEEDED."""
        return GREEDY if self.greedy else UNSEEDED if self.seed is None else SEEDED
