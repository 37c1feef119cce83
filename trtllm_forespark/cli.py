"""The `forespark` command: parses, calls a floor, prints. Results go to standard output, progress to standard error."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Command = Callable[[argparse.Namespace], int]


class UsageError(ValueError):
    """Bad input: one line, exit status 2."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_output(where: str | None, option: str = "--json") -> None:
    """Before any work: a result must have somewhere to go."""
    if where not in (None, "-") and (Path(where).is_dir() or not Path(where).absolute().parent.is_dir()):
        raise UsageError(f"{option} {where}: not a file in a folder that exists")


def write_json(where: str | None, result: Any) -> None:
    """``-`` is standard output; None writes nothing."""
    if where is None:
        return
    text = json.dumps(result, indent=1)
    if where == "-":
        print(text)
    else:
        Path(where).write_text(text + "\n", encoding="utf-8")


def add_engine_arguments(parser: argparse.ArgumentParser, policy: bool = True) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", default=None, help="embedded name, Hugging Face id, folder or .gguf (default: smollm2-135m)"
    )
    group.add_argument(
        "--drafter", default=None, help="drafter name or folder (default: the one shipped for the model)"
    )
    if policy:
        group.add_argument(
            "--policy", default=None, help="ar, full, batchwise, adaptive, wcs, wcs-single-curve, exhaustive"
        )
    group.add_argument("--dtype", default=None, help="auto, float32, bfloat16, float16 (default: auto)")
    group.add_argument("--device", default=None, help="auto, cpu, cuda, cuda:N (default: auto)")
    group.add_argument("--max-batch-size", type=int, default=None)
    group.add_argument("--max-num-tokens", type=int, default=None)
    group.add_argument("--max-seq-len", type=int, default=None)
    group.add_argument(
        "--recalibrate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="follow observed acceptances in the calibration of every estimate (default: yes)",
    )
    group.add_argument("--recalibration", default=None, help="JSON of LLM.save_recalibration to start from")
    group.add_argument("--latency-table", default=None, help="JSON of `forespark profile` (default: the cached one)")
    group.add_argument("--seed", type=int, default=None)
    group.add_argument("--threads", type=int, default=None)
    group.add_argument("--config", default=None, help="YAML with the names of EngineConfig; options given here win")


ENGINE_FIELDS = (
    "model", "drafter", "policy", "dtype", "device", "max_batch_size", "max_num_tokens", "max_seq_len", "latency_table",
    "recalibrate", "recalibration", "seed", "threads",
)  # fmt: skip


def make_llm(args: argparse.Namespace, **overrides: Any) -> Any:
    from trtllm_forespark.config import EngineConfig
    from trtllm_forespark.runtime.llm import LLM

    given = {name: getattr(args, name) for name in ENGINE_FIELDS if getattr(args, name, None) is not None}
    given.update(overrides)
    config = EngineConfig.from_yaml(args.config, **given) if args.config else EngineConfig.of(**given)
    return LLM(say=say, **config.model_dump())


# Commands ---------------------------------------------------------------------------------------------------------


def doctor(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime import doctor as module

    found = module.report()
    if args.json != "-":
        print(module.text(found))
    write_json(args.json, found)
    return 0


def pull(args: argparse.Namespace) -> int:
    from trtllm_forespark.models.registry import pull as fetch

    path = fetch(args.name, say)
    print(path)
    return 0


def generate(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime.request import SamplingParams

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed if args.temperature > 0 else None,
    )
    llm = make_llm(args)
    ids = llm.tokenizer.encode(prompt) if args.raw else llm.chat_ids(prompt)
    stream = llm.tokenizer.stream()
    quiet = args.json == "-"

    def on_tokens(_: int, tokens: list[int]) -> None:
        if not quiet:
            print(stream.push(tokens), end="", flush=True)

    output = llm.generate(ids, params, on_tokens=on_tokens)
    if not quiet:
        print(stream.flush(), flush=True)
    if output.error:
        raise RuntimeError(output.error)
    completion = output.outputs[0]
    result = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(ids),
        "policy": llm.config.policy,
        "drafter": llm.drafter_name,
        **llm.identity,
        **llm.executor.metrics.to_json(),
    }
    write_json(args.json, result)
    return 0


def bench_scheduler(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime.bench import scheduler

    result = scheduler.main(args)
    if args.json != "-":
        for key, value in result.items():
            if not isinstance(value, (dict, list)):
                print(f"{key:24} {value}")
    write_json(args.json, result)
    return 0


def bench_forward(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime.bench import forward

    result = forward.main(args)
    if args.json != "-":
        print(f"{'model':28}{'tokens':>8}{'seconds':>12}{'products':>12}{'ratio':>8}")
        for run in result["runs"]:
            print(
                f"{run['model']:28}{run['tokens']:>8}{run['seconds']:>12.5f}{run['matmul_seconds']:>12.5f}{run['ratio']:>8.2f}"
            )
    write_json(args.json, result)
    return 0


def bench_executor(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime.bench import executor
    from trtllm_forespark.runtime.bench.prompts import load_prompts

    loads, policies = numbers(args.requests), names(args.policies)
    check_policies(policies)
    if args.steps < 1:
        raise UsageError(f"--steps {args.steps}: give 1 or more")
    model = None
    if not args.stub_only:
        llm = make_llm(args, policy="ar", max_batch_size=max(loads))
        model = executor.embedded(llm, [p["prompt"] for p in load_prompts(None)])
    result = executor.run(loads, policies, args.steps, model, say if args.json == "-" else print)
    write_json(args.json, result)
    return 0


def bench_decode(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime.bench import decode
    from trtllm_forespark.runtime.bench.prompts import load_prompts

    policies, loads = names(args.policies), numbers(args.loads)
    check_policies(policies)
    for option in ("tokens", "rounds", "requests"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option} {getattr(args, option)}: give 1 or more")
    prompts = [p["prompt"] for p in load_prompts(args.prompts)]
    results: list[dict[str, Any]] = []
    for drafter in names(args.drafters) if args.drafters else [None]:
        llm = make_llm(args, policy="ar", max_batch_size=max(loads), **({"drafter": drafter} if drafter else {}))
        result = decode.run(
            llm, policies, loads, args.tokens, args.rounds, args.requests, prompts, args.temperature, say
        )
        results.append(result)
        if args.json != "-":
            print((f"drafter {llm.drafter_name}\n" if args.drafters else "") + decode.table(result))
        if result["interrupted"]:
            break
    write_json(args.json, decode.joined(results))
    return 130 if results[-1]["interrupted"] else 0


def bench_acceptance(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime.bench import acceptance

    drafters = names(args.drafters) if args.drafters else [None]
    runs = []
    for drafter in drafters:
        llm = make_llm(args, policy="ar", **({"drafter": drafter} if drafter else {}))
        for dataset in args.dataset:
            runs.append(acceptance.run(llm, dataset, args.limit, args.tokens, say))
    if args.json != "-":
        for run in runs:
            by_position = " ".join(f"{c:.2f}" for c in run["conditional_by_position"])
            print(
                f"{run['drafter']} on {run['dataset']}: {run['acceptance_length']:.2f} ({by_position}), "
                f"{run['draft_seconds'] * 1e3:.1f} ms a draft"
            )
    write_json(args.json, {"runs": runs})
    return 0


def bench_context(args: argparse.Namespace) -> int:
    from trtllm_forespark.drafters.checkpoint import load_drafter
    from trtllm_forespark.models.registry import drafter_name, load_model, locate_drafter
    from trtllm_forespark.runtime.bench import context
    from trtllm_forespark.runtime.machine import choose_device, choose_dtype, prepare_allocator

    contexts, batches, rounds = sorted(set(numbers(args.contexts))), sorted(set(numbers(args.batch))), args.rounds
    if rounds < 1:
        raise UsageError(f"--rounds {rounds}: give 1 or more")
    if contexts[0] < 2:
        raise UsageError("--contexts: give 2 tokens or more")
    check_output(args.plot, "--plot")
    prepare_allocator()
    model = args.model or "smollm2-135m"
    whole = [drafter_name(model, name) for name in names(args.drafters)]
    drafters = {name: load_drafter(locate_drafter(name)) for name in whole if name}
    if not drafters:
        raise UsageError("--drafters names none")
    device = choose_device(args.device or "auto")
    target, _ = load_model(model, choose_dtype(args.dtype or "auto", device), device, say)
    for name, (drafter, _) in drafters.items():
        drafter.config.check_target(target.config, name, model)
    result = context.run(target, drafters, contexts, batches, rounds, say)
    if args.json != "-":
        print(context.table(result))
    write_json(args.json, result)
    if args.plot:
        context.plot(result, Path(args.plot), say)
    return 130 if result["interrupted"] else 0


def bench_recalibration(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime.bench import recalibration

    for option in ("load", "tokens", "limit", "rounds"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option} {getattr(args, option)}: give 1 or more")
    llm = make_llm(args, policy="ar", max_batch_size=args.load)
    result = recalibration.run(llm, args.dataset, args.load, args.tokens, args.limit, args.rounds, say)
    if args.json != "-":
        print(recalibration.text(result))
    write_json(args.json, result)
    return 0


def demo(args: argparse.Namespace) -> int:
    from trtllm_forespark.runtime import demo as module

    result = module.run(lambda **settings: make_llm(args, **settings), say, args.quick)
    print(module.text(result))
    write_json(args.json, result)
    return 0


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def check_policies(policies: list[str]) -> None:
    """Before any work: names that exist, at least one, none twice."""
    from trtllm_forespark.wcs.policies import POLICIES

    wrong = [name for name in policies if name not in POLICIES]
    if wrong or not policies or len(set(policies)) < len(policies):
        raise UsageError(f"policies {','.join(policies)!r}: give some of {', '.join(POLICIES)}, each once")


def numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in names(text)]
    except ValueError:
        raise UsageError(f"{text!r} is not a comma-separated list of whole numbers") from None
    if not values or min(values) < 1:
        raise UsageError(f"{text!r}: give whole numbers from 1 up")
    return values


# Parser -----------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forespark",
        description="Work-conserving speculative decoding: draft and verification lengths decided together.",
    )
    from trtllm_forespark import __version__

    parser.add_argument("--version", action="version", version=f"forespark {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(parent: Any, name: str, run: Command, text: str, json_too: bool = True) -> argparse.ArgumentParser:
        made = parent.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        if json_too:
            made.add_argument("--json", metavar="FILE", help="also write the result as JSON; - for standard output")
        return made

    add(commands, "doctor", doctor, "what this machine has and which backends work here")
    made = add(commands, "pull", pull, "fetch a model into the cache", json_too=False)
    made.add_argument("name", help="smollm2-135m, or a Hugging Face id")

    made = add(commands, "generate", generate, "answer one prompt, streaming the text")
    made.add_argument("prompt", metavar="PROMPT", help="text, or - for standard input")
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--top-k", type=int, default=None)
    made.add_argument("--top-p", type=float, default=None)
    made.add_argument("--raw", action="store_true", help="do not put the prompt into the model's chat template")
    add_engine_arguments(made)

    made = add(commands, "demo", demo, "the policies on the embedded model, by load, and one answer")
    made.add_argument("--quick", action="store_true", help="fewer loads and tokens")
    add_engine_arguments(made)

    bench = commands.add_parser("bench", help="measure", description="measure").add_subparsers(
        required=True, metavar="WHAT"
    )
    made = add(bench, "decode", bench_decode, "closed batches, decode only, all policies in one run")
    _lazy(made, "decode")
    add_engine_arguments(made, policy=False)
    made = add(bench, "acceptance", bench_acceptance, "acceptance length and acceptance by position")
    _lazy(made, "acceptance")
    add_engine_arguments(made, policy=False)
    made = add(bench, "context", bench_context, "drafting time and drafter state by context length")
    _lazy(made, "context")
    for name, text in (
        ("--model", "default: smollm2-135m"),
        ("--dtype", "auto, float32, bfloat16, float16"),
        ("--device", "auto, cpu, cuda"),
    ):
        made.add_argument(name, default=None, help=text)
    made = add(bench, "recalibration", bench_recalibration, "following observed acceptances, on text of another domain")
    _lazy(made, "recalibration")
    add_engine_arguments(made, policy=False)
    made = add(
        bench, "scheduler", bench_scheduler, "the host's decision: time and goodput lost against exhaustive search"
    )
    _lazy(made, "scheduler")
    made = add(bench, "executor", bench_executor, "the loop's own time: all of a step that is no pass of a model")
    _lazy(made, "executor")
    add_engine_arguments(made, policy=False)
    made = add(bench, "forward", bench_forward, "a pass against its matrix products alone")
    _lazy(made, "forward")

    from trtllm_forespark.cli_training import add_commands

    add_commands(commands, add)
    return parser


def _lazy(parser: argparse.ArgumentParser, module: str) -> None:
    """Arguments stand in the benchmark's own module, which is imported only when its command is parsed."""
    original = parser.parse_known_args

    def parse(*args: Any, **kwargs: Any) -> Any:
        if not getattr(parser, "_filled", False):
            from importlib import import_module

            parser._filled = True  # type: ignore[attr-defined]
            import_module(f"trtllm_forespark.runtime.bench.{module}").add_arguments(parser)
        return original(*args, **kwargs)

    parser.parse_known_args = parse  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> int:
    """Run one command; bad input prints one line and returns 2."""
    try:
        args = build_parser().parse_args(argv)
        check_output(getattr(args, "json", None))
        return args.run(args)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:
        say(f"forespark: {error.filename}: {error.strerror}" if error.filename else f"forespark: {error}")
        return 2
    except (ValueError, RuntimeError, ArithmeticError) as error:
        say(f"forespark: {error}")
        return 2
    except ModuleNotFoundError as error:
        say(f"forespark: package {error.name} is missing; pip install 'trtllm-forespark[{extra_for(error.name)}]'")
        return 2


def extra_for(package: str | None) -> str:
    root = (package or "").split(".")[0]
    table = {
        "mpi4py": "mpi", "modelopt": "quantize", "tensorrt": "engines", "triton": "triton", "tensorrt_llm": "trtllm",
        "fastapi": "serve", "uvicorn": "serve",
    }  # fmt: skip
    return table.get(root, "cpu")


if __name__ == "__main__":
    sys.exit(main())
