"""Shaping logits, proposing drafts, and the noise they use."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.runtime.chain import chi_square
from trtllm_forespark.runtime import sampling
from trtllm_forespark.runtime.noise import Streams, draw, draw_seeded, gumbel
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.runtime.sampling import SamplingRows, propose, target_logits, target_probs


def rows_of(*params: SamplingParams) -> SamplingRows:
    return SamplingRows.of([Request(i, [0], p) for i, p in enumerate(params)])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sorted_oracle(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """One row of p by a full sort."""
    x = (logits.double() / temperature).sort(descending=True)
    p = x.values.softmax(-1)
    if top_k:
        p[top_k:] = 0
    p = p / p.sum()
    p[(p.cumsum(-1) - p) >= top_p] = 0
    return torch.zeros_like(p).scatter(0, x.indices, p / p.sum())


# --- shaping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 300, 6000])
def test_probabilities_equal_those_of_a_full_sort(vocab: int) -> None:
    cases = [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (1.5, 7, 1.0),
        (1.0, 0, 0.3),
        (2.0, 0, 0.97),
        (0.8, 3, 0.5),
        (1.0, 900, 0.999),
    ]
    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in cases]
    logits = noise(len(cases), vocab, seed=vocab) * 2
    p = target_probs(logits, rows_of(*params))
    for i, case in enumerate(cases):
        assert torch.allclose(p[i].double(), sorted_oracle(logits[i], *case), atol=1e-6), case


def test_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    logits = noise(1, 6000) * 1e-3
    p = target_probs(logits, rows_of(SamplingParams(top_p=0.9)))
    assert (p > 0).sum().item() == pytest.approx(5400, abs=2)


def test_a_row_is_shaped_the_same_in_any_batch() -> None:
    params = [SamplingParams(temperature=0.7 + 0.1 * i, top_k=40 * i, top_p=1 - 0.1 * i, seed=i) for i in range(5)]
    logits = noise(5, 1000)
    together = target_logits(logits, rows_of(*params))[0]
    for i, p in enumerate(params):
        assert torch.equal(together[i], target_logits(logits[i : i + 1], rows_of(p))[0][0])


def test_ties_at_the_edge_of_top_k_and_top_p_stay_together() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.4)):
        assert torch.allclose(target_probs(logits, rows_of(params)), torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0]]))


def test_tiny_temperatures_are_finite() -> None:
    p = target_probs(torch.tensor([[1e4, 1e4 - 1, -1e4]]), rows_of(SamplingParams(temperature=1e-30)))
    assert p.tolist() == [[1.0, 0.0, 0.0]]


def test_the_logits_given_are_not_changed() -> None:
    logits = noise(2, 50)
    before = logits.clone()
    target_probs(
        logits, rows_of(SamplingParams(top_k=3, top_p=0.5, min_tokens=2, stop_token_ids=[1]), SamplingParams())
    )
    assert torch.equal(logits, before)


def test_bad_rows_are_flagged() -> None:
    inf = math.inf
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [inf, 1.0], [-inf, -inf], [-inf, 1.0]])
    params = [SamplingParams(temperature=1.0, top_k=2, top_p=0.9)] * 5
    assert target_logits(logits, rows_of(*params))[1].tolist() == [False, True, True, True, False]


def test_min_tokens_bars_end_and_stop_tokens_of_their_own_request_only() -> None:
    requests = [
        Request(0, [0], SamplingParams(min_tokens=2, stop_token_ids=[3]), eos_ids=frozenset([1])),
        Request(1, [0], SamplingParams(min_tokens=2, ignore_eos=True), eos_ids=frozenset([1])),
        Request(2, [0], SamplingParams(), eos_ids=frozenset([0, 1])),
    ]
    rows = SamplingRows.of(requests)
    logits = torch.zeros(3, 5)
    ninf = -torch.inf
    assert sampling.bar(logits, rows).tolist() == [[0, ninf, 0, ninf, 0], [0] * 5, [0] * 5]
    assert sampling.bar(logits, rows.shift(2)).tolist() == [[0] * 5] * 3


# --- proposals --------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[7, 3, 9, 4]])
SCORES = torch.tensor([[0.5, 1.5, -0.3, 0.9]])


@pytest.mark.parametrize("setting", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.6}], ids=str)
@pytest.mark.parametrize("seeded", [False, True])
def test_drafts_are_drawn_from_q_as_reported(setting: dict, seeded: bool) -> None:
    n = 8000
    params = [SamplingParams(**setting, seed=i if seeded else None) for i in range(n)]
    made = propose(SCORES.repeat(n, 1), IDS.repeat(n, 1), rows_of(*params), Streams.new(seed=3).draft)
    oracle = sorted_oracle(
        SCORES[0], setting.get("temperature", 1.0), setting.get("top_k", 0), setting.get("top_p", 1.0)
    )
    assert torch.allclose(made.q[0].double(), oracle, atol=1e-6)
    assert chi_square(torch.bincount(made.choice, minlength=4).numpy(), oracle.numpy()) > 1e-4


def test_greedy_drafts_take_the_best_candidate_with_certainty() -> None:
    greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0)
    for params in ([greedy], [greedy, drawn]):
        n = len(params)
        made = propose(SCORES.repeat(n, 1), IDS.repeat(n, 1), rows_of(*params), Streams.new().draft)
        assert made.choice[0] == 1 and made.q[0].tolist() == [0, 1, 0, 0]


def test_a_nan_row_is_dropped_and_its_neighbours_go_on() -> None:
    """docs/cases.md 21."""
    scores = SCORES.repeat(4, 1)
    scores[1, 2] = math.nan
    scores[3] = -math.inf
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=1)):
        made = propose(scores, IDS.repeat(4, 1), rows_of(*[params] * 4), Streams.new().draft)
        assert made.bad.tolist() == [False, True, False, True]
        assert made.q.sum(-1).tolist() == pytest.approx([1, 0, 1, 0])


def test_padded_candidates_are_never_drafted() -> None:
    scores = torch.tensor([[0.0, -math.inf, -math.inf]]).repeat(500, 1)
    params = [SamplingParams(temperature=1.0, seed=i if i % 2 else None) for i in range(500)]
    made = propose(scores, torch.zeros(500, 3, dtype=torch.long), rows_of(*params), Streams.new().draft)
    assert made.choice.sum() == 0 and (made.q[:, 0] == 1).all()


def test_an_empty_batch_proposes_nothing() -> None:
    made = propose(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.long), rows_of(), Streams.new().draft)
    assert made.choice.shape == (0,) and made.q.shape == (0, 4)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_for_a_token_is_the_same_alone_and_in_the_vocabulary() -> None:
    seed, position = torch.tensor([5, -1, 2**62]), torch.tensor([0, 3, 100])
    everything = gumbel(seed, position, torch.arange(50000))
    ids = torch.tensor([[0, 1], [49999, 17], [4096, 4095]])
    assert torch.allclose(gumbel(seed, position, ids), everything.gather(1, ids), rtol=1e-6, atol=1e-6)
    assert torch.allclose(gumbel(seed[1:2], position[1:2], torch.arange(50000)), everything[1:2], rtol=1e-6, atol=1e-6)


def test_noise_is_gumbel_along_tokens_positions_and_seeds() -> None:
    n = 20000
    one, many = torch.tensor([3]), torch.arange(n)
    along = {
        "tokens": gumbel(one, one, many)[0],
        "positions": gumbel(one.expand(n), many, torch.tensor([11]))[:, 0],
        "seeds": gumbel(many, one.expand(n), torch.tensor([11]))[:, 0],
    }
    for name, sample in along.items():
        uniform = torch.exp(-torch.exp(-sample.double())).numpy()
        assert stats.kstest(uniform, "uniform").pvalue > 1e-3, name
        pairs = torch.from_numpy(uniform[: n // 2 * 2].reshape(-1, 2) * 8).long()
        joint = torch.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64)
        assert stats.chisquare(joint.numpy()).pvalue > 1e-3, f"neighbours along {name} depend on each other"


def test_noise_of_neighbouring_seeds_and_positions_is_uncorrelated() -> None:
    ids = torch.arange(20000)
    base = gumbel(torch.tensor([8]), torch.tensor([4]), ids)[0]
    for seed, position in ((9, 4), (8, 5), (4, 8), (12, 0), (-8, 4), (8 + 2**32, 4), (8, 4 + 2**31)):
        other = gumbel(torch.tensor([seed]), torch.tensor([position]), ids)[0]
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1].item()) < 0.03, (seed, position)


def test_seeded_draws_match_softmax_over_a_large_vocabulary() -> None:
    logits = noise(1, 3000) * 2
    n = 20000
    tokens = draw_seeded(logits.expand(n, -1), torch.arange(n), torch.zeros(n, dtype=torch.long))
    assert chi_square(torch.bincount(tokens, minlength=3000).numpy(), logits[0].double().softmax(-1).numpy()) > 1e-4


@pytest.mark.parametrize("vocab", [1, 5, 256, 257, 3000])
def test_draws_match_their_weights_and_never_take_a_zero(vocab: int) -> None:
    weights = noise(1, vocab).abs()
    weights[0, 1::3] = 0
    tokens = draw(weights.expand(20000, -1), Streams.new(seed=vocab).verify)
    p = (weights[0].double() / weights.double().sum()).numpy()
    assert chi_square(torch.bincount(tokens, minlength=vocab).numpy(), p) > 1e-4


def test_the_two_streams_differ_and_repeat_with_the_engines_seed() -> None:
    def numbers(streams: Streams) -> list[Tensor]:
        return [torch.rand(4, generator=g) for g in (streams.draft, streams.verify)]

    a, b, c = numbers(Streams.new(seed=1)), numbers(Streams.new(seed=1)), numbers(Streams.new())
    assert not torch.equal(a[0], a[1])
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not torch.equal(a[0], c[0])
