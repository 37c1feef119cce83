"""A target and a drafter on a vocabulary so small that every sequence can be enumerated.

Both are Markov chains: the logits of the next token depend on the token before it, so that a draft accepted at the
wrong place, or a residual of the wrong row, shows in the joint distribution of a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from trtllm_forespark.runtime.noise import Streams
from trtllm_forespark.runtime.request import Request, SamplingParams
from trtllm_forespark.runtime.sampling import SamplingRows, propose, target_probs
from trtllm_forespark.runtime.verify import Verified, verify
from trtllm_forespark.wcs.stages import Draft

VOCAB, K, LENGTH = 6, 3, 3
_tables = torch.Generator().manual_seed(5)
TARGET = torch.randn(VOCAB, VOCAB, generator=_tables) * 1.2
CANDIDATES = torch.stack([torch.randperm(VOCAB, generator=_tables)[:4] for _ in range(VOCAB)])
SCORES = TARGET.gather(1, CANDIDATES) * 0.6 + torch.randn(VOCAB, 4, generator=_tables) * 0.7

Choose = Callable[[np.random.Generator, np.ndarray, Tensor], np.ndarray]
Proposer = Callable[[Tensor, Tensor, SamplingRows, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def drop_some(rng: np.random.Generator, lengths: np.ndarray, drafts: Tensor) -> np.ndarray:
    """Verified lengths that know nothing of the drafted tokens."""
    return rng.integers(0, lengths + 1)


def verify_all(rng: np.random.Generator, lengths: np.ndarray, drafts: Tensor) -> np.ndarray:
    return lengths


def draft_batch(
    last: Tensor, lengths: np.ndarray, rows: SamplingRows, streams: Streams, proposer: Proposer = propose
) -> tuple[Tensor, Draft]:
    """Draft every request to its length; also returns the drafts as [n, K], -1 past a length."""
    n = len(lengths)
    tokens = torch.full((n, K), -1)
    qs, ids = torch.zeros(n, K, 4), torch.zeros(n, K, 4, dtype=torch.long)
    before = last
    for j in range(K):
        drafting = torch.from_numpy(lengths > j)
        choice, q, _ = proposer(SCORES[before], CANDIDATES[before], rows.shift(j), streams.draft)
        chosen = CANDIDATES[before].gather(1, choice[:, None])[:, 0]
        tokens[:, j] = torch.where(drafting, chosen, -1)
        qs[:, j], ids[:, j] = q, CANDIDATES[before]
        before = chosen
    mask = torch.arange(K) < torch.from_numpy(lengths)[:, None]
    cu = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return tokens, Draft(tokens[mask], cu, ids[mask], qs[mask], None)


def target_rows(last: Tensor, tokens: Tensor, verified: np.ndarray) -> Tensor:
    """Packed logits: row 0 of a request follows its anchor, row j its draft j."""
    context = torch.cat([last[:, None], tokens], 1)
    return TARGET[context[torch.arange(K + 1) <= torch.from_numpy(verified)[:, None]]]


def run(
    params: Sequence[SamplingParams],
    *,
    seed: int,
    choose: Choose = drop_some,
    draft: bool = True,
    proposer: Proposer = propose,
    verifier: Callable[..., Verified] = verify,
) -> np.ndarray:
    """LENGTH tokens for each of the requests, decoded speculatively from anchor 0; [n, LENGTH]."""
    rng, streams = np.random.default_rng(seed), Streams.new(seed=seed)
    requests = [Request(i, [0], p) for i, p in enumerate(params)]
    active = requests
    while active:
        last = torch.tensor([(r.prompt_ids + r.output_ids)[-1] for r in active])
        rows = SamplingRows.of(active)
        lengths = rng.integers(0, K + 1, len(active)) if draft else np.zeros(len(active), dtype=np.int64)
        tokens, drafted = draft_batch(last, lengths, rows, streams, proposer)
        verified = choose(rng, lengths, tokens)
        result = verifier(drafted, verified, target_rows(last, tokens, verified), rows, streams.verify)
        assert not result.failed.any()
        for r, emitted in zip(active, result.outcome().emitted, strict=True):
            r.output_ids.extend(emitted)
        active = [r for r in active if len(r.output_ids) < LENGTH]
    return np.array([r.output_ids[:LENGTH] for r in requests])


def exact(params: SamplingParams) -> np.ndarray:
    """Probability of every sequence of LENGTH tokens under plain autoregressive sampling; [VOCAB ** LENGTH]."""
    p = target_probs(TARGET, SamplingRows.of([Request(0, [0], params)] * VOCAB)).double().numpy()
    out = [
        np.prod([p[a, b] for a, b in itertools.pairwise((0, *sequence))])
        for sequence in itertools.product(range(VOCAB), repeat=LENGTH)
    ]
    return np.array(out)


def p_value(sequences: np.ndarray, probability: np.ndarray) -> float:
    """Chi-square of the sequences against their probabilities; 0 where an impossible one occurs."""
    index = sequences @ (VOCAB ** np.arange(LENGTH)[::-1])
    return chi_square(np.bincount(index, minlength=len(probability)), probability)


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    """p-value of counts against probabilities, cells that expect fewer than 8 pooled."""
    if counts[probability < 1e-12].sum():
        return 0.0
    expected = probability * counts.sum()
    rare = expected < 8
    seen = np.append(counts[~rare], counts[rare].sum())
    due = np.append(expected[~rare], expected[rare].sum())
    seen, due = seen[due > 0], due[due > 0]
    if len(seen) < 2:
        return 1.0
    return float(stats.chisquare(seen, due * seen.sum() / due.sum()).pvalue)
