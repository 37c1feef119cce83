"""Every kind of drafter in the executor, under every policy: the text is the target's, the context what was kept."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.config import BlockConfig
from trtllm_forespark.models.loaders import open_checkpoint
from trtllm_forespark.models.transformer import PackedTransformer
from trtllm_forespark.runtime.backends.torch_backend import TorchBackend
from trtllm_forespark.runtime.executor import Executor, ExecutorConfig
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.policies import make_policy

from ..drafters.kinds import KINDS, random_drafter
from ..models.tiny import BASE, reference, save

PAGE = 16
POLICIES = ["full", "batchwise", "adaptive", "wcs", "wcs-single-curve", "exhaustive"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> PackedTransformer:
    source = open_checkpoint(save(reference(), tmp_path_factory.mktemp("tiny")))
    return PackedTransformer(source.config, source.weights)


def tiny_config(kind: str) -> BlockConfig:
    """A kind of drafter for the tiny target."""
    changes = {
        "hidden_size": BASE["hidden_size"],
        "num_heads": BASE["num_attention_heads"],
        "num_kv_heads": BASE["num_key_value_heads"],
        "head_dim": BASE["head_dim"],
        "vocab_size": BASE["vocab_size"],
        "target_layers": 3,
        **({"kv_layers": (0, 2)} if kind.startswith("longspark") else {}),
    }
    return dataclasses.replace(KINDS[kind], **changes)


def make_backend(target: PackedTransformer, kind: str) -> TorchBackend:
    config = tiny_config(kind)
    calibration = Calibration.identity(config.block, config.estimator_outputs)
    drafter = random_drafter(config, std=0.2), calibration
    return TorchBackend(target, drafter, max_batch_size=4, max_seq_len=128, num_pages=32, page_size=PAGE)


def make_executor(backend: TorchBackend, policy: str, tokens: int = 40) -> Executor:
    table = LatencyTable.from_functions(
        verify=lambda n, t: 0.03 + 0.0004 * t,
        draft=lambda n, t: 0.001 + 0.0001 * t,
        requests=[1, 4],
        verify_tokens=[1, 4, 8, 32, 64],
        draft_tokens=[2, 8, 24],
        interpolation="linear",
    )
    settings = {"caps": {1: 3, 4: 2}} if policy == "batchwise" else {}
    block = backend.spec.block if backend.spec else 0
    prior = np.tril(np.full((block, block), 0.5, np.float32))
    controller = WcsController(make_policy(policy, **settings), table, block, prior=prior, adapt=False)
    return Executor(backend, controller, ExecutorConfig(max_batch_size=4, max_num_tokens=tokens, seed=0))


def make_requests(count: int) -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        Request(i, rng.integers(3, 97, 9 + 7 * i).tolist(), SamplingParams(max_tokens=30 + 3 * i, ignore_eos=True))
        for i in range(count)
    ]


def run(executor: Executor, requests: list[Request], at_step=lambda step: None) -> list[list[int]]:
    for request in requests:
        executor.submit(request)
    step = 0
    while not executor.idle:
        executor.step()
        step += 1
        at_step(step)
        assert step < 500, "it hangs"
    executor.scheduler.check()
    return [r.output_ids for r in requests]


def with_good_drafts(executor: Executor, expected: dict[object, list[int]], seed: int = 0) -> None:
    """Seven of ten drafted tokens become what the target will say, so that drafts are accepted in part."""
    backend, rng = executor.backend, np.random.default_rng(seed)
    draft_of = backend.draft

    def draft(batch, lengths, propose):
        made = draft_of(batch, lengths, propose)
        owner = {seat: request for request, seat in executor.scheduler.seats.items()}
        tokens, candidates, proposal = (t.clone() for t in (made.token_ids, made.candidates, made.proposal))
        for i, seat in enumerate(batch.seats):
            request = owner[seat]
            known = request.prompt_ids + expected[request.id]
            for row in range(int(made.cu_lengths[i]), int(made.cu_lengths[i + 1])):
                place = batch.positions[i] + 1 + row - int(made.cu_lengths[i])
                if rng.random() < 0.7 and place < len(known):
                    tokens[row] = candidates[row, 0] = known[place]
                    proposal[row] = torch.eye(proposal.shape[1])[0]
        return dataclasses.replace(made, token_ids=tokens, candidates=candidates, proposal=proposal)

    backend.draft = draft  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def expected(target: PackedTransformer) -> list[list[int]]:
    """What autoregressive decoding writes."""
    return run(make_executor(make_backend(target, "dflash2"), "ar"), make_requests(4))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_autoregressive_decodings_own(target: PackedTransformer, expected, kind: str, policy: str) -> None:
    executor = make_executor(make_backend(target, kind), policy)
    with_good_drafts(executor, dict(enumerate(expected)))
    assert run(executor, make_requests(4)) == expected
    assert executor.metrics.accepted > 20 and executor.metrics.verified > executor.metrics.accepted


@pytest.mark.parametrize("kind", ["longspark", "longspark-causal"])
def test_the_summary_in_a_run_is_attention_over_what_was_kept(target: PackedTransformer, expected, kind: str) -> None:
    """Prefill in chunks beside decoding, drafts accepted in part: the summary equals one made anew from the pages."""
    backend = make_backend(target, kind)
    executor = make_executor(backend, "full", tokens=24)
    with_good_drafts(executor, dict(enumerate(expected)))
    compared = 0

    def compare(step: int) -> None:
        nonlocal compared
        if step % 5:
            return
        with torch.inference_mode():
            backend._absorb()
        for request, seat in executor.scheduler.seats.items():
            if request.num_computed_tokens == 0:
                continue
            positions = np.arange(request.num_computed_tokens)
            pages = np.array(executor.scheduler.cache.pages(request.id))
            slots = torch.from_numpy(pages[positions // PAGE] * PAGE + positions % PAGE)
            summary, boundary = backend.runner.summary, backend.runner.boundary[seat].clone()
            grown = summary.value[:, seat].clone(), summary.log[:, seat].clone()
            with torch.inference_mode():
                backend.runner.truncate(seat, slots, len(positions))
            torch.testing.assert_close(summary.value[:, seat], grown[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(summary.log[:, seat], grown[1], atol=1e-5, rtol=1e-5)
            backend.runner.boundary[seat] = boundary
            compared += 1

    assert run(executor, make_requests(4), compare) == expected
    assert compared > 10


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "longspark"])
def test_the_end_of_the_context_and_of_the_drafters_positions(target: PackedTransformer, kind: str) -> None:
    """A request may run into the context limit (docs/cases.md 35) and past where the drafter can go (29)."""
    for limit in (128, 40):
        backend = make_backend(target, kind)
        object.__setattr__(backend.runner.spec, "max_position", limit)
        executor = make_executor(backend, "full")
        request = Request("long", list(range(3, 33)), SamplingParams(max_tokens=200, ignore_eos=True))
        plain = Request("long", list(range(3, 33)), SamplingParams(max_tokens=200, ignore_eos=True))
        assert run(executor, [request]) == run(make_executor(make_backend(target, kind), "ar"), [plain])
        assert request.finish_reason == "length" and len(request.output_ids) == 128 - 30


@pytest.mark.parametrize("kind", ["dflash2", "longspark"])
def test_a_preempted_request_goes_on_with_the_same_text(target: PackedTransformer, expected, kind: str) -> None:
    """docs/cases.md 18: its context is made anew from its prompt and its output, seat and pages may be others."""
    executor = make_executor(make_backend(target, kind), "full")
    with_good_drafts(executor, dict(enumerate(expected)))
    requests = make_requests(4)
    assert run(executor, requests, lambda step: step % 3 == 0 and executor.preempt(step // 3 % 4)) == expected
    assert sum(r.generation for r in requests) >= 3
    executor.check()
