"""A request: what was asked, how far it is, and where its output ends.

Names and meaning follow TensorRT-LLM's LLM API (`SamplingParams`, `RequestOutput`, `CompletionOutput`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from trtllm_forespark.runtime.speculation import Speculation

FinishReason = Literal["stop", "length", "cancelled", "error"]

GREEDY, SEEDED, UNSEEDED = 0, 1, 2
"""The three kinds of sampling; each is lossless in its own way (docs/lossless.md, rules 3, 4 and 7)."""

# TensorRT-LLM parameters we know but do not serve yet: the values that mean "off", and what to do instead.
_NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "submit the prompt once for each sample, with different seeds"),
    "best_of": ((None, 1), "submit the prompt several times and choose"),
    "use_beam_search": ((False,), "use sampling"),
    "stop": ((None, [], ()), "give stop_token_ids, or cut the text yourself"),
    "bad": ((None, [], ()), "leave it out"),
    "bad_token_ids": ((None, [], ()), "leave it out"),
    "min_p": ((None, 0.0), "use top_p or top_k"),
    "repetition_penalty": ((None, 1.0), "leave it out"),
    "presence_penalty": ((None, 0.0), "leave it out"),
    "frequency_penalty": ((None, 0.0), "leave it out"),
    "embedding_bias": ((None,), "leave it out"),
    "logits_processor": ((None,), "leave it out"),
    "logprobs": ((None, False), "leave it out"),
    "prompt_logprobs": ((None, False), "leave it out"),
    "guided_decoding": ((None,), "leave it out"),
}


def _refuse(name: str, value: object, rule: str, mend: str) -> ValueError:
    return ValueError(f"SamplingParams.{name} = {value!r}: {rule}; {mend}")


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
    seed: 0 to 2**64 - 1. The same prompt, settings and seed give the same tokens whatever else is in the batch
        (float32; docs/lossless.md, rule 7). None: a different draw each time.
    end_id: the end-of-sequence token; None: the model's own. ignore_eos: go on past it.
    stop_token_ids: further tokens that end the output. The token that ends it is kept, as its last one.

    Raises ValueError naming the field, the value and how to mend it.
    """

    max_tokens: int | None = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    end_id: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    stop: Any = None
    bad: Any = None
    bad_token_ids: Any = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    embedding_bias: Any = None
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
        self._check_real("temperature", math.inf, "give 0 for greedy, 1 for the model's own distribution")
        self._check_real("top_p", 1.0, "give a share from 0 to 1, or None to turn it off")
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            if not isinstance(ids, (list, tuple)) or not all(_is_int(t) and t >= 0 for t in ids):
                raise _refuse("stop_token_ids", ids, "must be a list of token ids (integers >= 0)", "give such a list")
        if not isinstance(self.ignore_eos, bool):
            raise _refuse("ignore_eos", self.ignore_eos, "must be True or False", "give one of the two")
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            rule = f"must not exceed max_tokens = {self.max_tokens}"
            raise _refuse("min_tokens", self.min_tokens, rule, "lower it or raise max_tokens")

    def _check_int(self, name: str, least: int, mend: str) -> None:
        value = getattr(self, name)
        if value is not None and (not _is_int(value) or value < least):
            raise _refuse(name, value, f"must be an integer >= {least}", mend)

    def _check_real(self, name: str, most: float, mend: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not math.isfinite(value) or not 0 <= value <= most:
            upper = "" if most == math.inf else f" and <= {most:g}"
            raise _refuse(name, value, f"must be a finite number >= 0{upper}", mend)

    @cached_property
    def greedy(self) -> bool:
        """TensorRT-LLM's rule: nothing set, or temperature 0, top_k 1 or top_p 0."""
        unset = self.temperature is None and self.top_p is None and not self.top_k
        return unset or self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @cached_property
    def kind(self) -> int:
        """GREEDY, SEEDED or UNSEEDED."""
        return GREEDY if self.greedy else UNSEEDED if self.seed is None else SEEDED


class Status(str, Enum):
    """Where a request is in its life. Preemption leads back to WAITING with the next generation number."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """The state of one request.

    generation counts preemptions: a result that carries an older (id, generation) is late and discarded (case 18, 19).
    eos_ids: the model's own end tokens. num_computed_tokens: tokens whose keys and values are in the cache.
    callback(request, new token ids) is called after each step that emitted tokens.
    priority: 0 to 1, TensorRT-LLM's; the higher goes first, equals in order of arrival.
    passed_over: steps in a row that it did not draft while others did.
    """

    id: Hashable
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    callback: Callable[[Request, list[int]], None] | None = None
    prompt: str | None = None
    priority: float = 0.5
    speculation: Speculation = field(default_factory=Speculation)

    generation: int = 0
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    passed_over: int = 0

    @property
    def key(self) -> tuple[Hashable, int]:
        """What the controller and the backend know this request by."""
        return (self.id, self.generation)

    @property
    def num_tokens(self) -> int:
        """Prompt and output together, the anchor (the newest token) included."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the output: end_id (or the model's own) unless ignore_eos, and stop_token_ids."""
        p = self.params
        end = self.eos_ids if p.end_id is None else {p.end_id} - {-1}
        return frozenset(() if p.ignore_eos else end) | frozenset(p.stop_token_ids or ())

    @property
    def barred_ids(self) -> frozenset[int]:
        """Tokens that may not be drawn while fewer than min_tokens are out."""
        return self.stop_ids if self.params.min_tokens else frozenset()

    def tokens_left(self, max_seq_len: int) -> int:
        """Tokens that may still be emitted under max_tokens and the context limit, never negative."""
        left = max_seq_len - self.num_tokens
        if self.params.max_tokens is not None:
            left = min(left, self.params.max_tokens - len(self.output_ids))
        return max(left, 0)

    def check_fits(self, max_seq_len: int, vocab_size: int) -> None:
        """Raise ValueError for a request that cannot run: a wrong priority, or a prompt that is empty, too long, or
        has ids outside the vocabulary."""
        real = isinstance(self.priority, (int, float)) and not isinstance(self.priority, bool)
        if not real or not 0 <= self.priority <= 1:
            raise ValueError(
                f"request {self.id!r}: priority = {self.priority!r}: must be a number from 0 to 1; "
                "give 0.5 for the usual one, more to go before it, less to go after it"
            )
        if not isinstance(self.speculation, Speculation):
            raise ValueError(
                f"request {self.id!r}: speculation = {self.speculation!r}: must be a Speculation; give for example "
                "Speculation(max_draft_len=2)"
            )
        if not self.prompt_ids:
            raise ValueError(f"request {self.id!r}: the prompt is empty; give at least one token")
        if len(self.prompt_ids) >= max_seq_len:
            raise ValueError(
                f"request {self.id!r}: a prompt of {len(self.prompt_ids)} tokens leaves no room in a context of "
                f"{max_seq_len}; shorten it to at most {max_seq_len - 1} tokens or raise max_seq_len"
            )
        named = (("prompt", self.prompt_ids), ("end_id or stop_token_ids", self.stop_ids))
        for where, ids in named:
            bad = next((t for t in ids if not 0 <= t < vocab_size), None)
            if bad is not None:
                raise ValueError(
                    f"request {self.id!r}: token id {bad} in {where} is outside the vocabulary of {vocab_size}; "
                    "was it made with another model's tokenizer?"
                )

    def emit(self, kept: Sequence[int], *, drafted: int = 0, verified: int = 0, accepted: int = 0) -> None:
        """Take the tokens that `cut` kept and count the step; drafts accepted past the cut do not count (rule 5)."""
        self.output_ids.extend(kept)
        self.steps += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += min(accepted, len(kept))

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request. A request ends once; ending it again raises RuntimeError."""
        if self.finished:
            raise RuntimeError(f"request {self.id!r} ended twice: {self.finish_reason}, then {reason}")
        self.status, self.finish_reason, self.error = Status.FINISHED, reason, error

    def preempt(self) -> None:
        """Back to the queue: the cache is given up, the output stays, late results of this generation are void."""
        self.generation += 1
        self.status, self.num_computed_tokens = Status.WAITING, 0


def cut(emitted: Sequence[int], request: Request, max_seq_len: int) -> tuple[list[int], FinishReason | None]:
    """Keep of one step's emitted tokens what autoregressive decoding would have emitted (rule 5; case 10, 11, 14, 35).

    Returns (kept tokens, why the output ends there or None). The ending token itself is kept. "stop" goes before
    "length" where one token is both. max_seq_len bounds prompt and output together.
    """
    left = request.tokens_left(max_seq_len)
    out = len(request.output_ids)
    least = request.params.min_tokens or 0
    stops = request.stop_ids
    for i, token in enumerate(emitted[:left]):
        if token in stops and out + i >= least:
            return list(emitted[: i + 1]), "stop"
    if len(emitted) >= left:
        return list(emitted[:left]), "length"
    return list(emitted), None


@dataclass
class CompletionOutput:
    """One generated text, in TensorRT-LLM's shape."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass
class RequestOutput:
    """What `LLM.generate` returns for a prompt, in TensorRT-LLM's shape, with the counts of speculation.

    error: what went wrong where finish_reason is "error". steps: decode steps (verifications);
    drafted, verified, accepted: draft tokens.
    """

    request_id: Hashable
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None = None
    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def avg_decoded_tokens_per_iter(self) -> float | None:
        """TensorRT-LLM's name for tokens a step."""
        return self.outputs[0].length / self.steps if self.steps else None

    @classmethod
    def of(cls, request: Request, text: str = "") -> RequestOutput:
        """A snapshot of the request; text is its decoded output."""
        ended_by = request.output_ids[-1] if request.output_ids and request.finish_reason == "stop" else None
        stop_reason = ended_by if ended_by in (request.params.stop_token_ids or ()) else None
        output = CompletionOutput(0, text, list(request.output_ids), request.finish_reason, stop_reason)
        return cls(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_ids),
            outputs=[output],
            finished=request.finished,
            error=request.error,
            steps=request.steps,
            drafted=request.drafted,
            verified=request.verified,
            accepted=request.accepted,
        )
