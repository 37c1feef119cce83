"""Two prompts in one batch under work-conserving speculation, and what it cost."""

from trtllm_forespark import LLM, SamplingParams

llm = LLM("smollm2-135m", policy="wcs", say=print)
prompts = ["The capital of France is", "def fibonacci(n):"]
for output in llm.generate(prompts, SamplingParams(max_tokens=48)):
    print("---")
    print(output.prompt + output.outputs[0].text)
    print(f"[{output.steps} steps, {output.drafted} drafted, {output.verified} verified, {output.accepted} accepted]")
