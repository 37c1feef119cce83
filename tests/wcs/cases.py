"""Random triangles and small latency tables that the tests of `wcs` share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.survival import triangle_size, triangle_to_survival


def random_survival(rng: np.random.Generator, n: int, block: int, mean: float = 0.5, spread: float = 1.5) -> np.ndarray:
    return triangle_to_survival(rng.normal(mean, spread, (n, triangle_size(block))))


@st.composite
def curves(draw: st.DrawFn, most: int = 5, longest: int = 17) -> np.ndarray:
    """Reward curves [n, K + 1], some with ties, flat and falling parts; R(0) = 0."""
    n, block = draw(st.integers(1, most)), draw(st.integers(1, longest))
    step = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -0.5]), st.floats(-1, 1, width=32))
    steps = draw(st.lists(st.lists(step, min_size=block, max_size=block), min_size=n, max_size=n))
    rewards = np.maximum(np.cumsum(np.array(steps, np.float32), axis=1), 0)
    return np.concatenate([np.zeros((n, 1), np.float32), rewards], axis=1)


def dense_table(
    n: int,
    block: int,
    draft: Callable[[int, int], float],
    verify: Callable[[int, int], float],
    prefill: int = 0,
    interpolation: str = "staircase",
) -> LatencyTable:
    """A table with an entry for every batch size up to n and every token count: both functions exactly."""
    return LatencyTable.from_functions(
        verify,
        draft,
        requests=range(1, max(n, 1) + 1),
        verify_tokens=range(1, n * (block + 1) + prefill + 1),
        draft_tokens=range(1, n * (block + 1) + 1),
        interpolation=interpolation,  # type: ignore[arg-type]
    )


def stairs(width: int, base: float, step: float) -> Callable[[int, int], float]:
    """Cost by buckets of `width` tokens."""
    return lambda requests, tokens: base + step * -(-tokens // width)


def gpu_table(interpolation: str = "staircase", most: int = 256) -> LatencyTable:
    """Like SGLang's public numbers for Qwen3-14B with a block drafter, in CUDA-graph buckets."""
    tokens = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
    return LatencyTable.from_functions(
        lambda n, t: 8.7e-3 + max(0, t - 16) * 33.6e-3 / 1008,
        lambda n, t: 1.7e-3 + t * 5.6e-3 / 1024,
        requests=[1, most],
        verify_tokens=tokens,
        draft_tokens=tokens,
        interpolation=interpolation,  # type: ignore[arg-type]
    )
