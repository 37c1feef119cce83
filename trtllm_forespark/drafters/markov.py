"""DSpark's sequential correction: a low-rank bias from the token before (vanilla), gated by the backbone's state
(gated), or from the whole path through a small recurrence (rnn)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_forespark.drafters.block import Corrector
from trtllm_forespark.drafters.config import MarkovConfig


class MarkovHead(Corrector):
    """vanilla: z = W1[a]; logits + W2 z."""

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__()
        self.top_k = config.candidates
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Embedding(config.draft_vocab_size, config.markov_rank)  # [V, r], as the published linear
        with torch.no_grad():
            self.markov_w1.weight.normal_(std=0.1)
            self.markov_w2.weight.normal_(std=0.02)

    @property
    def successors(self) -> torch.Tensor:
        return self.markov_w2.weight

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        return F.embedding(previous, self.markov_w1.weight)

    def latents(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.embed(previous), None


class GatedMarkovHead(MarkovHead):
    """z = sigmoid(W_g [h; W1[a]] + b) * W1[a]."""

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latents(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        embedded = self.embed(previous)
        m, predecessors, rank = embedded.shape
        both = torch.cat([hidden.unsqueeze(1).expand(-1, predecessors, -1).to(embedded.dtype), embedded], -1)
        gate = self.gate_proj(both.view(m * predecessors, -1)).sigmoid().view(m, predecessors, rank)
        return gate * embedded, None


class RNNMarkovHead(MarkovHead):
    """A gated recurrence along the block: [g, u, o] = W [s; W1[a]; h] + b; z = tanh(o);
    s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(u), s = 0 before the first position."""

    recurrent = True

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def latents(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """previous [m, 1]: a path has one predecessor. Returns z [m, 1, r] and the new state [m, r]."""
        embedded = self.embed(previous.squeeze(1))
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat([state, embedded, hidden.to(embedded.dtype)], -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = gate.sigmoid()
        return output.tanh().unsqueeze(1), gate * state + (1 - gate) * candidate.tanh()

    def along(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        state, out = None, []
        for step in range(hidden.shape[1]):
            latent, state = self.latents(hidden[:, step], previous[:, step : step + 1], state)
            out.append(latent)
        return torch.cat(out, 1)


def markov_head(config: MarkovConfig) -> MarkovHead:
    """The head that ``markov_head_type`` names."""
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}
    return kinds[config.markov_head_type](config)
