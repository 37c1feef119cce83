"""`LLM`: what users hold. Names and meaning follow TensorRT-LLM's LLM API."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from trtllm_forespark.config import EngineConfig
from trtllm_forespark.drafters.checkpoint import load_drafter
from trtllm_forespark.models.linear import packing_available
from trtllm_forespark.models.registry import drafter_name, load_model, locate_drafter
from trtllm_forespark.runtime import tables
from trtllm_forespark.runtime.backends.torch_backend import TorchBackend
from trtllm_forespark.runtime.executor import Executor, ExecutorConfig
from trtllm_forespark.runtime.machine import choose_device, choose_dtype, prepare_allocator
from trtllm_forespark.runtime.request import Request, RequestOutput, SamplingParams
from trtllm_forespark.runtime.speculation import Speculation
from trtllm_forespark.runtime.stops import StopStrings
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.policies import make_policy
from trtllm_forespark.wcs.recalibration import Recalibration
from trtllm_forespark.wcs.survival import prefix_survival

Prompt = str | Sequence[int]
Say = Callable[[str], None]


#: Row counts that a CPU meets before the first request.
WARM_ROWS = 64


class LLM:
    """A target, its drafter and an executor under one policy.

    Keywords are the fields of `EngineConfig`; ``say`` receives progress lines (a first start measures latencies).
    Raises ValueError, with what to change, for settings or files that cannot work.
    """

    def __init__(self, model: str = "smollm2-135m", *, say: Say = lambda line: None, **settings: Any) -> None:
        self.config = config = EngineConfig.of(model=model, **settings)
        self._say = say
        if config.threads:
            torch.set_num_threads(config.threads)
        prepare_allocator()
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        target, self.tokenizer = load_model(config.model, self.dtype, self.device, say)
        self.drafter_name = drafter_name(config.model, config.drafter)
        drafter = load_drafter(locate_drafter(self.drafter_name)) if self.drafter_name else None
        if drafter:
            drafter[0].config.check_target(target.config, str(self.drafter_name), config.model)
        self.max_seq_len = min(config.max_seq_len or target.config.max_position, target.config.max_position)
        page_size = 64
        tokens = config.kv_cache_tokens or max(
            config.max_batch_size * 512, tables.USUAL_REQUESTS * 512, self.max_seq_len
        )
        self.backend = TorchBackend(
            target,
            drafter,
            max_batch_size=max(config.max_batch_size, tables.USUAL_REQUESTS),
            max_seq_len=self.max_seq_len,
            num_pages=-(-tokens // page_size),
            page_size=page_size,
        )
        if self.device.type == "cpu" and packing_available(self.dtype):
            self.backend.warm(WARM_ROWS)
        self.calibration = drafter[1] if drafter else None
        self._table: LatencyTable | None = None
        self._ids = itertools.count()
        self.executor = self.new_executor(config.policy)

    # Engines ----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> LatencyTable:
        """Latencies of this machine, model and drafter: from the setting, the cache, or measured now (and cached)."""
        if self._table is None:
            self._table = tables.load_or_profile(self, self._say)
        return self._table

    @table.setter
    def table(self, table: LatencyTable) -> None:
        """Use this table from now on (simulations, tests); executors that exist keep theirs."""
        self._table = table

    def new_executor(
        self,
        policy: str,
        *,
        cache_tokens: int | None = None,
        recalibrate: bool | None = None,
        **policy_settings: Any,
    ) -> Executor:
        """Another executor over the same weights, under another policy.

        Those over the engine's cache run one at a time. cache_tokens: of a cache of its own, so that others may be in
        the middle of a batch while this one steps. recalibrate: False leaves it out, whatever the settings say.
        """
        config = self.config
        if policy != "ar" and self.backend.spec is None:
            raise ValueError(
                f"policy {policy!r} needs a drafter and none is known for {config.model}; "
                "give drafter=…, or policy='ar'"
            )
        if policy == "batchwise" and "caps" not in policy_settings:
            policy_settings["caps"] = tables.load_or_measure_caps(self, self._say)
        if policy in ("wcs", "wcs-single-curve"):
            policy_settings.setdefault("pieces", "whole" if config.whole_pieces else "paper")
            policy_settings.setdefault("floor", config.min_draft)
        needs_table = policy in ("adaptive", "wcs", "wcs-single-curve", "exhaustive")
        controller = WcsController(
            make_policy(policy, **policy_settings),
            self.table if needs_table else None,
            block=self.backend.spec.block if self.backend.spec else 1,
            prior=None if self.calibration is None else prefix_survival(self.calibration.mean_survival[None])[0],
            adapt=config.adapt,
            recalibration=None if policy == "ar" or recalibrate is False else self._recalibration(),
        )
        backend = self.backend
        if cache_tokens is not None:
            backend = backend.beside(-(-cache_tokens // backend.page_size))
        return Executor(
            backend,
            controller,
            ExecutorConfig(config.max_batch_size, config.max_num_tokens, config.seed, config.max_passed_over),
        )

    def _recalibration(self) -> Recalibration | None:
        """A fresh one, or that of the file the settings name. Raises ValueError where such a file would go unread."""
        config, own = self.config, self.calibration
        off = not (config.adapt and config.recalibrate)
        if off or own is None or self.backend.spec is None:
            if config.recalibration:
                why = "it needs recalibrate and adapt on" if off else "the drafter has no calibration to follow"
                raise ValueError(f"recalibration = {config.recalibration!r}: {why}")
            return None
        drafter = f"{self.drafter_name}: {own.source}"
        made = Recalibration(self.backend.spec.block, own.scale, own.bias, own.temperature, drafter)
        if config.recalibration:
            made.load(config.recalibration)
        return made

    def save_recalibration(self, path: str | Path) -> None:
        """Write what this engine learnt of its drafter's acceptances, for ``recalibration=path`` of another start.

        Raises ValueError where it learns nothing (recalibrate or adapt off, no drafter, policy 'ar').
        """
        learnt = self.executor.controller.recalibration
        if learnt is None:
            raise ValueError("nothing is recalibrated: recalibrate or adapt is off, or nothing is drafted")
        learnt.save(path)

    # Generation -------------------------------------------------------------------------------------------------

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        callback: Callable[[Request, list[int]], None] | None = None,
        **settings: Any,
    ) -> Request:
        """A request for this model; prompt is text (tokenised as it is) or token ids, settings are `Request`'s."""
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        return Request(
            id=next(self._ids),
            prompt_ids=ids,
            params=params,
            eos_ids=frozenset(self.tokenizer.eos_ids),
            callback=callback,
            prompt=text,
            bad_words=[self.tokenizer.encode(word, add_special_tokens=False) for word in params.bad_strings],
            stops=self._stops(params),
            **settings,
        )

    def _stops(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop_strings:
            return None
        return StopStrings(
            params.stop_strings,
            self.tokenizer.decode,
            include=params.include_stop_str_in_output,
            min_tokens=params.min_tokens or 0,
        )

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        priority: float | Sequence[float] = 0.5,
        speculation: Speculation | Sequence[Speculation] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt (text or token ids) or a list of prompts, in one continuous batch.

        sampling_params: one for all or one a prompt; with n > 1 an output holds n completions (the prompt is computed
        for each). on_tokens(index, new token ids) streams, for n = 1.
        priority: 0 to 1, one for all or one a prompt; the higher goes first, equals in their order.
        speculation: overrides of speculation, one for all or one a prompt; None: as the engine does it. Raises
        ValueError before any work for a prompt that cannot run; a request that fails while running has finish_reason
        "error".
        """
        single = isinstance(inputs, str) or (len(inputs) > 0 and isinstance(inputs[0], int))
        prompts: list[Prompt] = [inputs] if single else list(inputs)  # type: ignore[list-item, arg-type]
        given = SamplingParams() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", given, len(prompts))
        priorities = _one_each("priority", priority, len(prompts))
        overrides = _one_each("speculation", speculation or Speculation(), len(prompts))
        if on_tokens and any(own.n > 1 for own in params):
            raise ValueError("on_tokens does not say which of n outputs goes on; give n = 1, or the prompt n times")
        requests: list[Request] = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            callback = None
            if on_tokens:
                callback = lambda _, tokens, index=index: on_tokens(index, tokens)  # noqa: E731
            for i in range(own.n):
                request = self.request(
                    prompt, own.sample(i), callback, priority=priorities[index], speculation=overrides[index]
                )
                request.check_fits(self.max_seq_len, self.backend.vocab_size)
                requests.append(request)
        try:
            for request in requests:
                self.executor.submit(request)
            while any(not request.finished for request in requests):
                self.executor.step()
        except BaseException:
            for request in requests:
                self.executor.cancel(request.id)
            raise
        each = iter([RequestOutput.of(r, self.tokenizer.decode(r.output_ids)) for r in requests])
        outputs = [RequestOutput.of_samples(list(itertools.islice(each, own.n))) for own in params]
        return outputs[0] if single else outputs

    def answer(self, text: str, sampling_params: SamplingParams) -> RequestOutput:
        """Answer one user message (in the chat template)."""
        output = self.generate(self.chat_ids(text), sampling_params)
        assert isinstance(output, RequestOutput)
        return output

    def chat_ids(self, text: str) -> list[int]:
        """Token ids of a user message in the model's chat template, ready to answer."""
        return self.tokenizer.encode_chat([{"role": "user", "content": text}])

    @property
    def identity(self) -> dict[str, str]:
        """What a latency table must have been made for."""
        from trtllm_forespark.runtime.machine import device_name

        return {
            "device": device_name(self.device),
            "model": self.config.model,
            "drafter": self.drafter_name or "none",
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @property
    def table_path(self) -> Path:
        return Path(self.config.latency_table) if self.config.latency_table else tables.cached_path(self.identity)


def _one_each(name: str, given: Any, count: int) -> list[Any]:
    """One setting for all of `count` prompts, or a list with one a prompt."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} {name} for {count} prompts; give one, or one a prompt")
    return list(given)
