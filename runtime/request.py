"""A request: what was asked, how far it is, and where its output ends.

Names and meaning follow TensorRT-LLM's LLM API (`SamplingParams`, `RequestOutput`, `CompletionOutput`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from trtllm_forespark.runtime.sampling_params import GREEDY, SEEDED, UNSEEDED, SamplingParams

__all__ = ["GREEDY", "SEEDED", "UNSEEDED", "CompletionOutput", "Request", "RequestOutput", "SamplingParams"]

if TYPE_CHECKING:
    from trtllm_forespark.runtime.history import TokenCounts
    from trtllm_forespark.runtime.stops import StopMatch, StopStrings

from trtllm_forespark.runtime.speculation import Speculation

FinishReason = Literal["stop", "length", "cancelled", "error"]


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
    bad_words: the strings of params.bad as token ids. stops: what watches for the strings of params.stop; stopped_by:
    the one that ended the output. (`LLM.request` makes both: they need a tokenizer.)
    token_counts: how often it said what, kept for requests with penalties alone.
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
    bad_words: Sequence[Sequence[int]] = ()
    stops: StopStrings | None = None
    speculation: Speculation = field(default_factory=Speculation)

    generation: int = 0
    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    token_counts: TokenCounts | None = field(default=None, repr=False)
    stopped_by: StopMatch | None = None

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

    @cached_property
    def all_bad_words(self) -> list[Sequence[int]]:
        """bad_words and, one token each, bad_token_ids."""
        return [*self.bad_words, *([t] for t in self.params.bad_token_ids or ())]

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
        """Raise ValueError for a request that cannot run: a wrong priority, an empty or too long prompt, ids
        outside the vocabulary, strings that nobody turned into tokens."""
        real = isinstance(self.priority, (int, float)) and not isinstance(self.priority, bool)
        if not real or not 0 <= self.priority <= 1:
            raise ValueError(
                f"request {self.id!r}: priority = {self.priority!r}: must be a number from 0 to 1; "
                "give 0.5 for the usual one, more to go before it, less to go after it"
            )
        if self.params.n != 1:
            raise ValueError(
                f"request {self.id!r}: n = {self.params.n} are as many requests; use LLM.generate, or params.sample(i)"
            )
        for name, given, made in (
            ("stop", self.params.stop_strings, self.stops is not None),
            ("bad", self.params.bad_strings, len(self.bad_words) == len(self.params.bad_strings)),
        ):
            if given and not made:
                raise ValueError(f"request {self.id!r}: {name} = {given!r} needs a tokenizer; make it with LLM.request")
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
        named: list[tuple[str, Iterable[int]]] = [
            ("prompt", self.prompt_ids),
            ("end_id or stop_token_ids", self.stop_ids),
            ("bad or bad_token_ids", [t for word in self.all_bad_words for t in word]),
        ]
        if self.params.embedding_bias is not None:
            biased, values = self.params.bias
            named.append(("embedding_bias", () if biased is None else biased.tolist()))
            if biased is None and len(values) != vocab_size:
                raise ValueError(
                    f"request {self.id!r}: embedding_bias has {len(values)} values for a vocabulary of {vocab_size}; "
                    "give one for each token, or a mapping from token id to number"
                )
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
    "length" where one token is both. max_seq_len bounds prompt and output together. Notes the stop string in
    ``request.stopped_by`` where one ends the output.
    """
    kept, reason = _cut_tokens(emitted, request, max_seq_len)
    if request.stops is not None and kept:
        request.stopped_by = request.stops.find(request.output_ids, kept)
        if request.stopped_by is not None:
            return kept[: request.stopped_by.count], "stop"
    return kept, reason


def _cut_tokens(emitted: Sequence[int], request: Request, max_seq_len: int) -> tuple[list[int], FinishReason | None]:
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
    stop_reason: int | str | None = None

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
        return sum(output.length for output in self.outputs) / self.steps if self.steps else None

    @classmethod
    def of_samples(cls, samples: Sequence[RequestOutput]) -> RequestOutput:
        """One output of several requests for the same prompt; counts are added up, the first error stands for all."""
        outputs = [replace(sample.outputs[0], index=i) for i, sample in enumerate(samples)]
        return replace(
            samples[0],
            outputs=outputs,
            finished=all(sample.finished for sample in samples),
            error=next((sample.error for sample in samples if sample.error), None),
            **{name: sum(getattr(s, name) for s in samples) for name in ("steps", "drafted", "verified", "accepted")},
        )

    @classmethod
    def of(cls, request: Request, text: str = "") -> RequestOutput:
        """A snapshot of the request; text is its decoded output, cut here at a stop string."""
        ended_by = request.output_ids[-1] if request.output_ids and request.finish_reason == "stop" else None
        stop_reason: int | str | None = ended_by if ended_by in (request.params.stop_token_ids or ()) else None
        if request.stopped_by is not None:
            stop_reason, text = request.stopped_by.stop, request.stopped_by.text
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
