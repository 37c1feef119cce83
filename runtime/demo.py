"""`forespark demo`: the embedded model under four policies on real prompts, what speculation gained, one answer."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trtllm_forespark.runtime.bench import decode
from trtllm_forespark.runtime.request import SamplingParams

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM

POLICIES = ["ar", "full", "adaptive", "wcs"]  # `batchwise` first needs minutes to find its caps: `bench decode`
QUESTION = "Explain in three sentences why the sky is blue."


def run(make_llm: Callable[..., LLM], say: Callable[[str], None], quick: bool = False) -> dict[str, Any]:
    """Measure the policies, then answer one question with WCS."""
    loads, tokens, rounds = ([1, 8], 24, 1) if quick else ([1, 4, 8, 16, 32], 32, 2)
    llm = make_llm(policy="ar", max_batch_size=max(loads))
    say(f"{llm.config.model} with {llm.drafter_name} on {llm.identity['device']}, {llm.identity['dtype']}")
    result = decode.run(llm, POLICIES, loads, tokens, rounds, requests=4, say=say)
    executor = llm.new_executor("wcs")
    llm.executor = executor
    output = llm.answer(QUESTION, SamplingParams(max_tokens=96, temperature=0.0))
    result["answer"] = {"question": QUESTION, "text": output.outputs[0].text, **executor.metrics.to_json()}
    return result


def text(result: dict[str, Any]) -> str:
    """What the demo prints at its end."""
    answer = result["answer"]
    lines = ["", decode.table(result), ""]
    for gain in result["gains"]:
        lines.append(
            f"load {gain['load']}: work-conserving speculation is {gain['over_ar']['wcs']:.2f} x autoregressive, "
            f"{gain['wcs_over_best_other']:.2f} x the best other policy ({gain['best_other']})"
        )
    lines += [
        "",
        f"Q: {answer['question']}",
        textwrap.fill("A: " + answer["text"].strip(), 100),
        f"({answer['emitted'] + 1} tokens in {answer['steps']} steps, "
        f"acceptance length {answer['acceptance_length']:.2f}, "
        f"{answer['drafted']} drafted, {answer['verified']} verified, {answer['accepted']} accepted)",
    ]
    return "\n".join(lines)
