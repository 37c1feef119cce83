"""Where randomness comes from: two streams for unseeded requests, a hash of (seed, position, token) for seeded ones."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 256
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Streams:
    """Random streams of the unseeded requests: what a draft was drawn with never decides its verification (rule 2)."""

    draft: torch.Generator
    verify: torch.Generator

    @classmethod
    def new(cls, device: torch.device | str = "cpu", seed: int | None = None) -> Streams:
        """Two independent generators on `device`; seed None takes entropy from the system, so that runs differ."""
        root = torch.tensor([_signed64(secrets.randbits(64) if seed is None else seed)])
        words = [int(_mix64(root + i)) & (2**63 - 1) for i in (1, 2)]
        generators = [torch.Generator(device=device) for _ in words]
        for generator, word in zip(generators, words, strict=True):
            generator.manual_seed(word)
        return cls(*generators)


def _signed64(value: int) -> int:
    """The int64 with the same bits as `value` modulo 2**64."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, elementwise on int64 (a bijection); torch has no unsigned shift, hence the masks."""
    x = x * _signed64(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed64(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed64(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def gumbel(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise that depends on (seed, position, token id) alone (rule 7).

    seed, position: [m] int64, position = index of the token in the request's output. token_ids: [m, C], or [C] for
    every row. Returns [m, C] float32, the same for a token whether it is asked for alone or with the whole vocabulary.
    A counter-based generator: splitmix64 turns (seed, position) into a 64-bit key, a keyed 32-bit mixer turns the
    token id into a uniform of 31 bits whose small end (the likely winners) keeps full float precision.
    """
    key = _mix64(_mix64(seed) + position)
    low, high = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
    x = token_ids.to(torch.int32) ^ low
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= high
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= -0x7B935975  # 0x846CA68B
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def draw_seeded(logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Token argmax(logits + gumbel(seed, position)) of each row: a sample of softmax(logits) (the Gumbel-max trick).

    logits: [m, V] float32, -inf where the probability is 0. seed, position: [m]. Returns [m] int64. Rows are taken a
    few at a time, so that the noise never takes more than a few megabytes.
    """
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    rows = max(1, _CHUNK // max(1, logits.shape[1]))
    parts = [
        gumbel(s, t, ids).add_(part).max(-1).indices
        for part, s, t in zip(logits.split(rows), seed.split(rows), position.split(rows), strict=True)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits.device)


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One index a row with probability weights / sum(weights); an entry of weight 0 is never drawn.

    weights: [m, V] >= 0, any scale, each row with some mass. Returns [m] int64. Inverse of the cumulated weights in
    two levels (a block, then an entry of it), one uniform each: the cost is one pass over the weights.
    """
    m, vocab = weights.shape
    blocks = pad(weights, (0, -vocab % _BLOCK)).view(m, -1, _BLOCK)
    uniform = torch.rand(2, m, generator=generator, device=weights.device, dtype=torch.float64)
    block = _invert(blocks.sum(-1), uniform[0])
    inside = _invert(blocks[torch.arange(m, device=weights.device), block], uniform[1])
    return block * _BLOCK + inside


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index of the first entry whose cumulated weight exceeds uniform * total; [m, W] and [m] in [0, 1) -> [m]."""
    total = weights.double().cumsum(-1)
    most = torch.nextafter(total[:, -1], torch.zeros_like(uniform))
    target = torch.minimum(uniform * total[:, -1], most)
    return (total <= target[:, None]).sum(-1).clamp_(max=weights.shape[1] - 1)
