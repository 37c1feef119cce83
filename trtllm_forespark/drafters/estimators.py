"""Estimators of acceptance: before drafting (eq. 2) and after it (eq. 5, and DSpark's confidence head)."""

from __future__ import annotations

import torch
from torch import nn


class PreDraftEstimator(nn.Module):
    """u = SiLU(W_c c + W_e e), z = W_o u (eq. 2): conditional-acceptance logits of every candidate length.

    Outputs K(K+1)/2 logits, row d = 1..K one after the other with d entries each; K where the drafter is directional.
    """

    def __init__(self, hidden_size: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.context_projection = nn.Linear(hidden_size, rank)
        self.embedding_projection = nn.Linear(hidden_size, rank, bias=False)
        self.output = nn.Linear(rank, outputs)

    def forward(self, context: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """context c, embedding e: [n, H] -> logits [n, outputs]."""
        return self.output(nn.functional.silu(self.context_projection(context) + self.embedding_projection(embedding)))


class PostDraftEstimator(nn.Module):
    """p_j = sigmoid(w^T [h_j; (W_s h_j) * E_pred(x_{j-1})]) (eq. 5); E_pred is the selector's predecessor codebook.

    It reads the hidden state and the *predecessor* of position j, never the token drawn there (lossless rule 1).
    """

    def __init__(self, hidden_size: int, selector_rank: int) -> None:
        super().__init__()
        self.selector_projection = nn.Linear(hidden_size, selector_rank, bias=False)
        self.output = nn.Linear(hidden_size + selector_rank, 1)

    def forward(self, hidden: torch.Tensor, predecessor: torch.Tensor) -> torch.Tensor:
        """hidden [..., H], predecessor embedding [..., r] -> logits [...]."""
        return _one_output(self.output, hidden, self.selector_projection(hidden) * predecessor)


class ConfidenceHead(nn.Module):
    """DSpark's: c_j = sigmoid(w^T [h_j; W1[x_{j-1}]] + b), conditional acceptance of position j."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, hidden: torch.Tensor, predecessor: torch.Tensor) -> torch.Tensor:
        """hidden [..., H], W1 of the token before [..., r] -> logits [...]."""
        return _one_output(self.proj, hidden, predecessor)


def _one_output(linear: nn.Linear, *parts: torch.Tensor) -> torch.Tensor:
    """A product with a vector (a matrix product that narrow is slow), in float32."""
    with torch.autocast(parts[0].device.type, enabled=False):
        x = torch.cat([part.float() for part in parts], dim=-1)
        return x @ linear.weight[0].float() + linear.bias.float()
