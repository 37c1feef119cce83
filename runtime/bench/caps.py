"""The batch-wise caps of this machine: every cap at every load, each load keeps its fastest (appendix B)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trtllm_forespark.runtime.bench.decode import cache_for, decode_in_turns
from trtllm_forespark.runtime.bench.prompts import load_prompts
from trtllm_forespark.wcs.policies import fastest_caps

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM

LOADS = (1, 4, 8, 16, 32)


def measure_caps(
    llm: LLM, say: Callable[[str], None], loads: tuple[int, ...] = LOADS, tokens: int = 16, rounds: int = 2
) -> dict[str, Any]:
    """{"caps": {load: cap}, "tok_s": {load: {cap: mean of the rounds}}}; cap 0 is autoregressive.

    Caps take turns within a batch; the package's own prompts, from the far end (benchmarks begin at the near one).
    """
    assert llm.backend.spec is not None
    ids = [llm.chat_ids(p["prompt"]) for p in load_prompts()][::-1]
    loads = tuple(n for n in loads if n <= llm.config.max_batch_size)
    room = cache_for(llm, ids, max(loads), tokens)
    executors = {
        cap: llm.new_executor("batchwise", cache_tokens=room, caps={1: cap})
        for cap in range(llm.backend.spec.block + 1)
    }
    speed: dict[int, dict[int, float]] = {load: {} for load in loads}
    for round_index in range(rounds):
        for load in loads:
            batch = [ids[(round_index * 7 + i) % len(ids)] for i in range(load)]
            for cap, decoded in decode_in_turns(llm, executors, batch, tokens).items():
                speed[load][cap] = speed[load].get(cap, 0.0) + decoded.throughput / rounds
        say(f"caps: round {round_index + 1} of {rounds}")
    return {
        "caps": fastest_caps(speed),
        "tok_s": {load: {c: round(v, 2) for c, v in by_cap.items()} for load, by_cap in speed.items()},
    }
