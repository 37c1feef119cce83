"""DSpark: a parallel backbone over the prefix's features, a sequential Markov correction and a confidence head."""

from __future__ import annotations

import torch

from trtllm_forespark.drafters.block import BlockDrafter, Corrector
from trtllm_forespark.drafters.config import MarkovConfig
from trtllm_forespark.drafters.estimators import ConfidenceHead
from trtllm_forespark.drafters.markov import markov_head


class MarkovDrafter(BlockDrafter):
    """A block drafter that corrects with a Markov head, and whose post-draft estimate is DSpark's confidence."""

    config: MarkovConfig

    def add_heads(self) -> None:
        super().add_heads()
        self.markov_head = markov_head(self.config)
        self.confidence_head = ConfidenceHead(self.config.hidden_size + self.config.markov_rank)

    @property
    def corrector(self) -> Corrector:
        return self.markov_head

    def post_logits(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return self.confidence_head(hidden, self.markov_head.embed(previous))


class DSpark(MarkovDrafter):
    """See the module; the layers are DFlash's."""
