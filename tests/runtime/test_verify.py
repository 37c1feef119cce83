"""Verification does not change what the target would have said (docs/lossless.md)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.runtime.chain import exact, p_value, run, verify_all
from trtllm_forespark.runtime import verify as verify_module
from trtllm_forespark.runtime.noise import Streams
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.runtime.sampling import SamplingRows, propose
from trtllm_forespark.runtime.verify import Verified, verify
from trtllm_forespark.wcs.stages import Draft

TRIALS = 6000
PASS = 1e-4
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 4, "top_p": 0.8},
]


def make_draft(
    tokens: list[list[int]], candidates: list[list[int]] | None = None, q: list[list[float]] | None = None
) -> Draft:
    flat = [t for row in tokens for t in row]
    cu = torch.tensor([0, *np.cumsum([len(row) for row in tokens])])
    width = len(candidates[0]) if candidates else 2
    ids = torch.tensor(candidates or [[t, 0] for t in flat]).reshape(len(flat), width)
    proposal = torch.tensor(q or [[1.0, 0.0]] * len(flat)).reshape(len(flat), width)
    return Draft(torch.tensor(flat, dtype=torch.int32), cu, ids, proposal, None)


def rows_of(*params: SamplingParams, out: int = 0) -> SamplingRows:
    return SamplingRows.of([Request(i, [0], p, output_ids=[0] * out) for i, p in enumerate(params)])


def peaked(*tokens: int, vocab: int = 5) -> Tensor:
    """Logits whose argmax, with nearly all the mass, are these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float() * 50


GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.0)
EACH_KIND = pytest.mark.parametrize(
    "params", [GREEDY, replace(DRAWN, seed=7), DRAWN], ids=["greedy", "seeded", "unseeded"]
)


# --- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_unseeded_sequences_have_the_targets_distribution(setting: dict) -> None:
    params = SamplingParams(**setting)
    assert p_value(run([params] * TRIALS, seed=1), exact(params)) > PASS


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_seeded_sequences_have_the_targets_distribution_over_seeds(setting: dict) -> None:
    params = [SamplingParams(**setting, seed=i) for i in range(TRIALS)]
    assert p_value(run(params, seed=1), exact(params[0])) > PASS


def test_full_verification_has_the_targets_distribution_too() -> None:
    assert p_value(run([DRAWN] * TRIALS, seed=2, choose=verify_all), exact(DRAWN)) > PASS


def test_requests_of_all_kinds_and_settings_in_one_batch_keep_their_own_distributions() -> None:
    kinds = [SamplingParams(**s) for s in SETTINGS]
    params: list[SamplingParams] = []
    for i in range(TRIALS // 3):
        params += [*kinds, replace(DRAWN, seed=i), GREEDY]
    sequences = run(params, seed=3)
    for k, kind in enumerate(kinds):
        assert p_value(sequences[k :: len(kinds) + 2], exact(kind)) > PASS
    assert p_value(sequences[len(kinds) :: len(kinds) + 2], exact(DRAWN)) > PASS
    assert len(np.unique(sequences[len(kinds) + 1 :: len(kinds) + 2], axis=0)) == 1


# --- the tests above can fail -----------------------------------------------------------------------------------------


def test_a_selection_that_peeks_at_the_drawn_token_fails() -> None:
    """Rule 1: verify only while the drawn token looks likely."""

    def peek(rng: np.random.Generator, lengths: np.ndarray, drafts: Tensor) -> np.ndarray:
        return np.cumprod((drafts.numpy() >= 0) & (drafts.numpy() % 2 == 0), axis=1).sum(1)

    assert p_value(run([DRAWN] * TRIALS, seed=1, choose=peek), exact(DRAWN)) < PASS
    seeded = [replace(DRAWN, seed=i) for i in range(TRIALS)]
    assert p_value(run(seeded, seed=1, choose=peek), exact(DRAWN)) > PASS, "an exact match cannot be broken by peeking"


def test_a_rejection_that_samples_p_instead_of_the_residual_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_residual", lambda p, *_: p)
    assert p_value(run([DRAWN] * TRIALS, seed=1), exact(DRAWN)) < PASS


def test_a_q_from_before_temperature_and_top_k_fails() -> None:
    """docs/cases.md 24."""
    params = SamplingParams(temperature=0.7, top_k=3)

    def untruncated(
        scores: Tensor, ids: Tensor, rows: SamplingRows, g: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        made = propose(scores, ids, rows, g)
        return made.choice, scores.softmax(-1), made.bad

    assert p_value(run([params] * TRIALS, seed=1, proposer=untruncated), exact(params)) < PASS


def test_a_residual_drawn_where_a_draft_was_only_dropped_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 3: a position that was dropped before verification is no rejection."""
    real = verify_module._residual

    def always(p: Tensor, draft: Draft, draft_row: Tensor, rejected: Tensor) -> Tensor:
        return real(p, draft, draft_row, torch.ones_like(rejected))

    monkeypatch.setattr(verify_module, "_residual", always)
    assert p_value(run([DRAWN] * TRIALS, seed=1), exact(DRAWN)) < PASS


def test_noise_shared_by_draft_and_verification_fails() -> None:
    """Rule 2: with one stream restarted for both, the uniform that accepts is the one that drew."""

    def same_noise(*args: object) -> Verified:
        *front, _ = args
        return verify(*front, torch.Generator().manual_seed(9))  # type: ignore[arg-type]

    def proposer(scores: Tensor, ids: Tensor, rows: SamplingRows, _: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return propose(scores, ids, rows, torch.Generator().manual_seed(9))

    assert p_value(run([DRAWN] * TRIALS, seed=1, proposer=proposer, verifier=same_noise), exact(DRAWN)) < PASS


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_a_seeded_request_says_the_same_whatever_was_drafted_dropped_or_batched() -> None:
    params = [SamplingParams(**SETTINGS[i % 4], seed=i) for i in range(400)]
    alone = run(params, seed=1, draft=False)
    assert (run(params, seed=2) == alone).all()
    assert (run(params, seed=3, choose=verify_all) == alone).all()
    mixed = [p for pair in zip(params, [DRAWN, GREEDY] * 200, strict=True) for p in pair]
    assert (run(mixed, seed=4)[::2] == alone).all()


def test_unseeded_requests_in_one_batch_differ() -> None:
    assert len(np.unique(run([DRAWN] * 50, seed=1), axis=0)) > 10


def test_greedy_requests_follow_the_argmax_whatever_was_drafted() -> None:
    alone = run([GREEDY] * 8, seed=1, draft=False)
    assert (run([GREEDY] * 8, seed=2) == alone).all()
    assert (run([GREEDY, DRAWN] * 8, seed=3)[::2] == alone).all()


def test_drafting_with_the_targets_noise_raises_seeded_acceptance() -> None:
    """A drafter equal to the target has every draft accepted when it uses the request's own noise."""
    vocab, n = 16, 200
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(0))
    rows = rows_of(*(replace(DRAWN, seed=i) for i in range(n)))
    ids = torch.arange(vocab).expand(n, vocab)
    made = propose(logits, ids, rows, Streams.new(seed=0).draft)
    draft = Draft(made.choice, torch.arange(n + 1), ids, made.q, None)
    result = verify(draft, torch.ones(n), logits.repeat_interleave(2, 0), rows, Streams.new(seed=0).verify)
    assert result.accepted.tolist() == [1] * n


# --- by hand ----------------------------------------------------------------------------------------------------------


@EACH_KIND
@pytest.mark.parametrize(
    ("drafts", "verified", "target", "accepted", "emitted"),
    [
        ([1, 2, 3], 3, [1, 2, 3, 4], 3, [1, 2, 3, 4]),
        ([1, 2, 3], 3, [1, 4, 3, 4], 1, [1, 4]),
        ([1, 2, 3], 3, [2, 2, 3, 4], 0, [2]),
        ([1, 2, 3], 1, [1, 2], 1, [1, 2]),
        ([1, 2, 3], 0, [3], 0, [3]),
        ([], 0, [2], 0, [2]),
    ],
)
def test_case_by_case(
    params: SamplingParams, drafts: list[int], verified: int, target: list[int], accepted: int, emitted: list[int]
) -> None:
    result = verify(
        make_draft([drafts]), torch.tensor([verified]), peaked(*target), rows_of(params), Streams.new(seed=0).verify
    )
    outcome = result.outcome()
    assert outcome.accepted.tolist() == [accepted]
    assert outcome.emitted == [emitted]
    assert not result.failed.any()


def test_a_draft_the_target_forbids_is_never_accepted_and_never_resampled() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]] * 2).repeat(500, 1)
    draft = make_draft([[1]] * 500, [[1, 2]] * 500, [[0.9, 0.1]] * 500)
    result = verify(draft, torch.ones(500), logits, rows_of(*[DRAWN] * 500), Streams.new(seed=0).verify)
    assert result.accepted.sum() == 0
    assert {t for e in result.outcome().emitted for t in e} == {0, 2}


def test_equal_p_and_q_accept_everything() -> None:
    p = torch.tensor([0.5, 0.3, 0.2])
    draft = make_draft([[2]] * 2000, [[0, 1, 2]] * 2000, [p.tolist()] * 2000)
    result = verify(
        draft, torch.ones(2000), p.log().repeat(4000, 1), rows_of(*[DRAWN] * 2000), Streams.new(seed=0).verify
    )
    assert result.accepted.sum() == 2000


def test_a_residual_without_mass_falls_back_to_p() -> None:
    p = torch.tensor([[0.25, 0.75]])
    draft = make_draft([[0]], [[0, 1]], [[0.25, 0.75]])
    rest = verify_module._residual(p, draft, torch.tensor([0]), torch.tensor([True]))
    assert torch.equal(rest, p)


@EACH_KIND
@pytest.mark.parametrize("fault", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_a_faulty_target_row_fails_its_request_and_no_other(params: SamplingParams, fault: float) -> None:
    """The faulty row comes after one accepted draft, which is kept; a faulty row behind a rejection does not matter."""
    logits = torch.cat([peaked(1, 2, 3), peaked(1, 2, 3), peaked(4, 2, 3)])
    logits[4, 0] = fault
    logits[8, 2] = fault
    result = verify(
        make_draft([[1, 2]] * 3), torch.tensor([2, 2, 2]), logits, rows_of(*[params] * 3), Streams.new(seed=0).verify
    )
    assert result.failed.tolist() == [False, True, False]
    assert result.outcome().emitted == [[1, 2, 3], [1], [4]]


def test_a_row_that_allows_no_token_fails() -> None:
    for params in (GREEDY, DRAWN, replace(DRAWN, seed=1)):
        result = verify(
            make_draft([[]]), [0], torch.full((1, 4), -torch.inf), rows_of(params), Streams.new(seed=0).verify
        )
        assert result.failed.tolist() == [True] and result.outcome().emitted == [[]]


def test_a_proposal_with_a_nan_is_rejected_and_p_is_drawn() -> None:
    draft = make_draft([[1]], [[1, 2]], [[torch.nan, 0.5]])
    result = verify(draft, torch.ones(1), peaked(1, 3), rows_of(DRAWN), Streams.new(seed=0).verify)
    assert result.outcome().emitted == [[1]] and result.accepted.tolist() == [0]


def test_an_empty_batch_is_fine() -> None:
    result = verify(make_draft([]), torch.zeros(0), torch.zeros(0, 5), rows_of(), Streams.new().verify)
    assert result.outcome().emitted == [] and result.accepted.shape == (0,)


def test_lengths_that_do_not_match_the_logits_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for verified lengths that need 3"):
        verify(make_draft([[1, 2]]), [2], peaked(1, 2), rows_of(GREEDY), Streams.new().verify)


@EACH_KIND
def test_min_tokens_bars_the_stop_token_until_enough_are_out(params: SamplingParams) -> None:
    """With one token out and min_tokens = 3, rows 0 and 1 may not stop; row 2 may."""
    barred = replace(params, min_tokens=3, stop_token_ids=[1])
    logits = peaked(1, 1, 1) + torch.nn.functional.one_hot(torch.tensor([2, 2, 2]), 5) * 25.0
    result = verify(make_draft([[2, 2]]), [2], logits, rows_of(barred, out=1), Streams.new(seed=0).verify)
    assert result.outcome().emitted == [[2, 2, 1]]


def test_half_precision_logits_are_accepted() -> None:
    for params in (GREEDY, DRAWN, replace(DRAWN, seed=1)):
        logits = peaked(1, 2).bfloat16()
        assert verify(make_draft([[1]]), [1], logits, rows_of(params), Streams.new().verify).outcome().emitted == [
            [1, 2]
        ]
