"""Tokens as they come: a callback per prompt, several prompts at once, a seed that repeats."""

from trtllm_forespark import LLM, SamplingParams

llm = LLM("smollm2-135m", policy="wcs")
streams = [llm.tokenizer.stream() for _ in range(2)]
questions = ["Name three rivers.", "Write a haiku about rain."]
params = [SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=seed) for seed in (1, 2)]

llm.generate(
    [llm.chat_ids(question) for question in questions],
    params,
    on_tokens=lambda index, tokens: print(f"{index}: {streams[index].push(tokens)!r}", flush=True),
)
