"""SmolLM2 with its shipped drafters: every policy writes what autoregressive decoding writes (rule 4)."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_forespark import LLM, SamplingParams
from trtllm_forespark.models.registry import RegistryError, locate_model
from trtllm_forespark.runtime.bench.prompts import load_prompts
from trtllm_forespark.runtime.calibration import greedy_texts
from trtllm_forespark.runtime.executor import Executor
from trtllm_forespark.runtime.writing import invented_prompts
from trtllm_forespark.training.replay import Replay
from trtllm_forespark.wcs.latency import LatencyTable

POLICIES = ["full", "batchwise", "adaptive", "wcs", "wcs-single-curve", "exhaustive"]
SETTINGS: dict[str, dict] = {"batchwise": {"caps": {1: 3, 4: 2, 12: 1}}}

pytestmark = pytest.mark.model


def make_llm(**settings) -> LLM:
    try:
        locate_model("smollm2-135m")
    except RegistryError as error:
        pytest.skip(str(error))
    llm = LLM("smollm2-135m", policy="ar", dtype="float32", device="cpu", max_batch_size=16, **settings)
    # A table of its own, so that what is drafted does not depend on this machine: drafts pay, less so under load.
    llm.table = LatencyTable.from_functions(
        verify=lambda n, t: 0.030 + 0.0006 * max(0, t - 4),
        draft=lambda n, t: 0.001 + 0.0001 * t,
        requests=[1, 16],
        verify_tokens=[1, 4, 8, 16, 32, 64, 128, 256, 1024],
        draft_tokens=[2, 8, 32, 128, 512],
        interpolation="linear",
        **llm.identity,
    )
    return llm


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


@pytest.fixture(scope="module", params=["dflash2", "dspark", "longspark"])
def each(request, llm: LLM) -> LLM:
    """With every shipped drafter in turn."""
    return llm if request.param == "dflash2" else make_llm(drafter=request.param)


def write(llm: LLM, executor: Executor, prompts: list[str], tokens: int, every: int = 0) -> list[list[int]]:
    """Answers of prompts submitted together, or one at each ``every`` steps while the others decode."""
    requests = [llm.request(llm.chat_ids(p), SamplingParams(max_tokens=tokens + i % 5)) for i, p in enumerate(prompts)]
    for request in requests:
        executor.submit(request)
        for _ in range(every):
            executor.step()
    executor.run()
    executor.scheduler.check()
    assert all(r.finish_reason in ("length", "stop") for r in requests)
    return [r.output_ids for r in requests]


def own_prompts(count: int) -> list[str]:
    return [p["prompt"] for p in load_prompts()][:count]


def check(llm: LLM, count: int, tokens: int, batches: tuple[int, ...]) -> None:
    prompts = own_prompts(count)
    ar = llm.new_executor("ar")
    expected = [answer for p in prompts for answer in write(llm, ar, [p], tokens + prompts.index(p) % 5)]
    for batch in batches:
        for policy in POLICIES:
            if policy == "exhaustive" and batch > 5:
                continue
            executor = llm.new_executor(policy, **SETTINGS.get(policy, {}))
            got: list[list[int]] = []
            for start in range(0, count, batch):
                group = prompts[start : start + batch]
                # Lengths cycle by the place in the group; cut to the reference's own length below.
                got += write(llm, executor, group, tokens, every=1 if batch > 1 else 0)
            for prompt, mine, reference in zip(prompts, got, expected, strict=True):
                shared = min(len(mine), len(reference))
                assert mine[:shared] == reference[:shared], (policy, batch, prompt)
                assert shared >= min(tokens, len(reference))
            assert executor.metrics.accepted > 0, f"{policy} must really speculate for this test to mean anything"


def test_every_policy_writes_what_autoregressive_decoding_writes(each: LLM) -> None:
    check(each, count=5, tokens=20, batches=(5,))


@pytest.mark.full
def test_every_policy_writes_the_same_on_32_prompts(each: LLM) -> None:
    check(each, count=32, tokens=64, batches=(1, 5, 16))


def test_draft_lengths_differ_within_a_step(llm: LLM) -> None:
    executor = llm.new_executor("wcs")
    write(llm, executor, own_prompts(8), 16)
    assert executor.metrics.varied / executor.metrics.steps > 0.5
    assert executor.metrics.drafted > executor.metrics.verified > executor.metrics.accepted > 0


def test_a_seeded_answer_repeats_in_any_batch(llm: LLM) -> None:
    prompts = own_prompts(4)
    params = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=7)
    texts = []
    for neighbours in (0, 3):
        llm.executor = llm.new_executor("wcs")
        others = [SamplingParams(max_tokens=20, temperature=1.0)] * neighbours
        outputs = llm.generate([llm.chat_ids(p) for p in prompts[: neighbours + 1]], [params, *others])
        texts.append(outputs[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_generate_takes_text_ids_and_lists_and_streams(llm: LLM) -> None:
    llm.executor = llm.new_executor("wcs")
    streamed: list[int] = []
    eight = SamplingParams(max_tokens=8)
    one = llm.generate("The capital of France is", eight, on_tokens=lambda _, t: streamed.extend(t))
    same = llm.generate(llm.tokenizer.encode("The capital of France is"), eight)
    assert one.outputs[0].token_ids == same.outputs[0].token_ids == streamed
    assert one.outputs[0].text == llm.tokenizer.decode(streamed) and "Paris" in one.outputs[0].text
    assert one.finished and one.outputs[0].finish_reason == "length"
    assert llm.generate([]) == []
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], [SamplingParams(), SamplingParams()])
    with pytest.raises(ValueError, match="empty"):
        llm.generate([[]])
    assert llm.executor.idle


@pytest.mark.parametrize("length", [2, 7])
def test_calibrations_replay_visits_the_anchors_of_a_real_run(each: LLM, length: int) -> None:
    """The labels of calibration (appendix B) are those of a run at exactly that length and full verification."""
    llm, prompt = each, own_prompts(1)[0]
    text = greedy_texts(llm, [prompt], 24, lambda line: None)[0]
    trace = Replay(llm.backend.runner, [text], llm.backend.kv).run(length)
    executor = llm.new_executor("batchwise", caps={1: length})
    request = llm.request(llm.chat_ids(prompt), SamplingParams(max_tokens=24))
    executor.submit(request)
    accepted = []
    while not request.finished:
        before = request.accepted
        if executor.step().decoding:
            accepted.append(request.accepted - before)
    assert text.tokens[text.prompt_length :].tolist() == request.output_ids
    # The last steps differ: there a real run drafts no more than it may still emit.
    shared = [a for a, end in zip(accepted, np.cumsum(np.array(accepted) + 1), strict=True) if end < 24 - length]
    assert len(shared) > 2 and trace.accepted[: len(shared)].tolist() == shared


def test_the_target_invents_prompts_the_same_ones_again_and_leaves_no_request_open(llm) -> None:
    seen: list[tuple[int, int]] = []
    first = invented_prompts(llm, 5, 3, lambda done, total: seen.append((done, total)))
    assert len(first) == len(set(first)) == 5 and seen == [(i, 5) for i in range(1, 6)]
    assert all(len(p.split()) >= 4 and "<|im" not in p for p in first)
    assert llm.executor.idle
    assert invented_prompts(llm, 5, 3, lambda done, total: None) == first
    assert invented_prompts(llm, 5, 4, lambda done, total: None) != first
