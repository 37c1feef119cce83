"""A backend on a vocabulary so small that every sequence can be enumerated: target and drafter are Markov chains.

It answers `Backend`, so the executor, the controller and every policy run over it as over a real model, thousands of
times a second. The next token's logits depend on the token before, so a draft accepted at the wrong place, or a
residual of the wrong row, shows in the joint distribution of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trtllm_forespark.drafters.base import DrafterSpec, Proposer
from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.runtime.executor import Executor, ExecutorConfig
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.policies import make_policy
from trtllm_forespark.wcs.recalibration import Recalibration
from trtllm_forespark.wcs.stages import Draft, Estimate
from trtllm_forespark.wcs.survival import triangle_to_survival

from .chain import CANDIDATES, SCORES, TARGET, VOCAB

BLOCK = 4
_tables = torch.Generator().manual_seed(11)
TRIANGLES = torch.randn(VOCAB, BLOCK * (BLOCK + 1) // 2, generator=_tables).numpy() * 1.5 + 1.0
CONFIDENCE = torch.sigmoid(torch.randn(VOCAB, generator=_tables) + 0.5)

# Drafting is cheap and comes in buckets (so WCS over-drafts), verification costs by the token (so it drops).
TABLE = LatencyTable.from_functions(
    verify=lambda n, t: 0.01 + 0.0003 * t,
    draft=lambda n, t: 0.001 + 0.00001 * t,
    requests=[1, 256],
    verify_tokens=list(range(1, 1400, 3)),
    draft_tokens=[16, 64, 128, 256, 512, 1400],
)


class MarkovBackend:
    """See `Backend`. Keeps no cache: the newest token says everything."""

    max_seq_len, vocab_size, page_size, num_pages = 64, VOCAB, 4, 4096
    device = torch.device("cpu")

    def __init__(self, perfect: bool = False) -> None:
        """perfect: the drafter's scores are the target's own logits."""
        self.candidates, self.draft_scores = CANDIDATES, SCORES
        if perfect:
            top = TARGET.topk(4, dim=-1)
            self.candidates, self.draft_scores = top.indices, top.values
        self.spec = DrafterSpec("markov", BLOCK, "request", False, 1, (), 64)
        self.passes: list[tuple[int, int]] = []
        self.kept: list[Sequence[int]] = []
        self.cleared: list[int] = []
        self.released: list[int] = []

    def forward(self, batch: TargetBatch, capture: bool = True) -> torch.Tensor:
        self.passes.append((len(batch.seats), len(batch.token_ids)))
        return TARGET[torch.tensor(batch.token_ids)[torch.tensor(batch.logits_at, dtype=torch.int64)]]

    def commit(self, kept: Sequence[int]) -> None:
        self.kept.append(kept)

    def release(self, seat: int) -> None:
        self.released.append(seat)

    def clear(self, pages: Sequence[int]) -> None:
        self.cleared += pages

    def estimate(self, batch: DraftBatch) -> Estimate:
        anchors = np.asarray(batch.anchors)
        return Estimate(triangle_to_survival(TRIANGLES[anchors]), np.ones(len(anchors), bool), TRIANGLES[anchors])

    def draft(self, batch: DraftBatch, lengths: Sequence[int], propose: Proposer) -> Draft:
        d = torch.as_tensor(np.asarray(lengths))
        n = len(d)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), d.cumsum(0)])
        last = torch.tensor(list(batch.anchors))
        total = int(cu[-1])
        tokens, ids = torch.zeros(total, dtype=torch.int64), torch.zeros(total, 4, dtype=torch.int64)
        qs = torch.zeros(total, 4)
        survival, logits = torch.zeros(n, BLOCK), torch.full((n, BLOCK), -torch.inf)
        running = torch.ones(n)
        for j in range(1, int(d.max()) + 1):
            who = (d >= j).nonzero()[:, 0]
            rows = cu[who] + j - 1
            running[who] = running[who] * CONFIDENCE[last[who]]
            survival[who, j - 1] = running[who]
            logits[who, j - 1] = CONFIDENCE[last[who]].logit()
            candidates = self.candidates[last[who]]
            choice, qs[rows] = propose(self.draft_scores[last[who]], candidates, who, j)
            last[who] = candidates.gather(1, choice[:, None])[:, 0]
            tokens[rows], ids[rows] = last[who], candidates
        return Draft(tokens, cu, ids, qs, survival, logits)


def make_executor(
    policy: str,
    max_batch_size: int = 64,
    max_num_tokens: int = 1024,
    seed: int = 3,
    perfect: bool = False,
    adapt: bool = False,
    recalibrate: bool = False,
    **settings,
) -> Executor:
    outputs = TRIANGLES.shape[1]
    offline = Recalibration(BLOCK, np.ones(outputs), np.zeros(outputs), np.ones(BLOCK)) if recalibrate else None
    controller = WcsController(make_policy(policy, **settings), TABLE, BLOCK, adapt=adapt, recalibration=offline)
    return Executor(MarkovBackend(perfect), controller, ExecutorConfig(max_batch_size, max_num_tokens, seed))
