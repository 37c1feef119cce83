"""Autoregressive decoding of the Markov chain of `chain.py`, one token at a time, written as plainly as can be.

It shares no code with the library: penalties count with ``list.count``, truncation looks at one row.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from .chain import TARGET, VOCAB

LOGITS = TARGET.double().numpy()


def row(text: list[int], params: dict) -> np.ndarray:
    """Logits [VOCAB] of the token after ``text`` (prompt and output), after bias, penalties and bad words."""
    x = LOGITS[text[-1]].copy()
    bias = params.get("embedding_bias", {})
    for token, value in bias.items() if isinstance(bias, dict) else enumerate(bias):
        x[token] += value
    for token in range(VOCAB):
        count = text.count(token)
        if count:
            r = params.get("repetition_penalty", 1.0)
            x[token] = x[token] * r if x[token] < 0 else x[token] / r
            x[token] -= params.get("presence_penalty", 0.0) + count * params.get("frequency_penalty", 0.0)
    for word in params.get("words", []):
        if text[len(text) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    return x


def probability(x: np.ndarray, params: dict) -> np.ndarray:
    """Of one row of logits, after temperature, top-k and min-p."""
    p = np.exp((x - x.max()) / params.get("temperature", 1.0))
    if params.get("top_k"):
        p[p < np.sort(p)[-params["top_k"]]] = 0
    p[p < params.get("min_p", 0.0) * p.max()] = 0
    return p / p.sum()


def exact(prompt: list[int], params: dict, length: int = 3) -> np.ndarray:
    """Probability of every continuation of ``length`` tokens, [VOCAB ** length]."""
    out = []
    for sequence in itertools.product(range(VOCAB), repeat=length):
        steps = (probability(row([*prompt, *sequence[:i]], params), params)[t] for i, t in enumerate(sequence))
        out.append(math.prod(steps))
    return np.array(out)


def greedy(prompt: list[int], params: dict, length: int) -> list[int]:
    text = list(prompt)
    for _ in range(length):
        text.append(int(row(text, params).argmax()))
    return text[len(prompt) :]
