"""`forespark distill`, `train`, `calibrate`, `profile`: a drafter for a model, from nothing."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_forespark.drafters.config import BlockConfig
    from trtllm_forespark.models.config import ModelConfig


def distill(args: argparse.Namespace) -> int:
    from trtllm_forespark.cli import make_llm, say
    from trtllm_forespark.files import write_text
    from trtllm_forespark.runtime.bench.prompts import load_prompts
    from trtllm_forespark.runtime.writing import answers, invented_prompts
    from trtllm_forespark.training import distill as module

    prompts_file = Path(args.prompts or Path(args.output).with_suffix(".prompts.jsonl"))
    llm = make_llm(args, policy=args.policy or "ar")
    if args.invent is not None and not prompts_file.exists():  # else an interrupted run goes on with its own
        known = [p["prompt"] for path in args.avoid for p in load_prompts(path)]
        invented = invented_prompts(llm, args.invent, args.seed or 0, every(say, "prompts"))
        fresh = module.without_overlap(invented, known)
        say(f"{len(fresh)} prompts invented; {len(invented) - len(fresh)} left out that share ten words with --avoid")
        if not fresh:
            raise ValueError(f"{llm.config.model} invented no usable prompt (asked for {args.invent}); give --prompts")
        lines = [json.dumps({"source": "invented", "row": i, "prompt": p}) for i, p in enumerate(fresh)]
        write_text(prompts_file, "\n".join(lines) + "\n")
    prompts = load_prompts(prompts_file)[: args.limit]
    write = answers(llm, args.max_tokens, args.temperature, args.top_p, args.seed or 0)
    sampling = f"{args.max_tokens} tokens, temperature {args.temperature}, top-p {args.top_p}, seed {args.seed or 0}"
    made = f"{llm.config.model}, {llm.dtype}, {sampling}"
    count = module.distill(prompts, write, Path(args.output), every(say, "texts"), made)
    print(f"{count} texts in {args.output}")
    return 0


def train(args: argparse.Namespace) -> int:
    import torch

    from trtllm_forespark.cli import make_llm, say
    from trtllm_forespark.drafters.checkpoint import load_drafter, save_drafter
    from trtllm_forespark.models.registry import drafter_name, locate_drafter
    from trtllm_forespark.runtime.machine import choose_dtype
    from trtllm_forespark.runtime.writing import target_features
    from trtllm_forespark.training.distill import load_texts, write_features
    from trtllm_forespark.training.features import FeatureStore
    from trtllm_forespark.training.trainer import Trainer, TrainSettings

    if args.total_anchors is not None and args.total_anchors < 1:
        raise ValueError(f"--total-anchors {args.total_anchors}: give 1 or more")
    llm = make_llm(args, policy="ar")
    target = llm.backend.target
    c = target.config
    start = load_drafter(locate_drafter(str(drafter_name(llm.config.model, args.init))))[0] if args.init else None
    if start:
        shape = (
            "drafter",
            "block",
            "layers",
            "capture",
            "draft_vocab",
            "markov_head",
            "layout",
            "window",
            "summary_rows",
        )
        given = [name for name in (*shape, "without", "causal") if getattr(args, name)]
        if given:
            options = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ValueError(f"--init takes the drafter's shape from {args.init}; leave out {options}")
    config = start.config if start else new_config(args, c, llm.config.model)
    layers = config.capture_layers
    output = Path(args.output)
    root = Path(args.features) if args.features else output / "features"
    source = f"{llm.config.model}, {llm.dtype}, layers {','.join(str(layer) for layer in layers)}"
    read, say_texts = target_features(llm, layers), every(say, "texts read by the target")
    stores = []
    for number, file in enumerate(args.data):
        folder = root / str(number) if number else root  # one file's features stand in the folder itself
        write_features(
            load_texts(Path(file), c.vocab_size),
            read,
            folder,
            layers,
            c.hidden_size,
            args.seed or 0,
            say_texts,
            source,
        )
        stores.append(FeatureStore(folder, layers, c.hidden_size))
    cpu = torch.device("cpu")
    settings = TrainSettings(
        minutes=args.minutes,
        total_anchors=args.total_anchors,
        seed=args.seed or 0,
        learning_rate=args.learning_rate,
        texts=args.texts,
        anchors=args.anchors,
        lengths=args.lengths,
        ce_share=0.0 if start else TrainSettings.ce_share,
        dtype="bfloat16" if llm.dtype is choose_dtype("auto", cpu) is torch.bfloat16 else "float32",
    )
    embedding, head, norm = (
        w.float().cpu() for w in (target.embedding_weight(), target.lm_head_weight(), target.final_norm_weight())
    )
    trainer = Trainer(config, settings, stores, embedding, head, norm, output, start, target.keys_values)
    final = trainer.run(lambda line: say(json.dumps(line)))
    save_drafter(output, trainer.model)
    print(
        f"{output}: acceptance length {final['held']['acceptance_length']} on held-out texts (teacher-forced); "
        f"now `forespark calibrate --drafter {output} --prompts …`"
    )
    return 130 if final["interrupted"] else 0


def new_config(args: argparse.Namespace, target: ModelConfig, name: str) -> BlockConfig:
    """The drafter that `train` was asked for; its layers are shaped like the target's."""
    from trtllm_forespark.drafters.config import KINDS, LongSparkConfig

    kind = args.drafter or "dflash2"
    count = args.layers if args.layers is not None else (3 if kind == "longspark" else 2)
    if count < 1:
        raise ValueError(f"--layers {count}: give 1 or more")
    capture = args.capture or evenly_spaced(target.num_layers)
    own: dict[str, Any] = {}
    if kind == "longspark":
        # The target's last layer has none after it whose keys and values could be made from its output.
        inputs = evenly_chosen([layer for layer in capture if layer + 1 < target.num_layers], count)
        own = {
            "kv_layers": tuple(layer + 1 for layer in inputs),
            "window": args.window or LongSparkConfig.window,
            "summary_rows": args.summary_rows or LongSparkConfig.summary_rows,
            "views": tuple(v for v in LongSparkConfig.views if v not in args.without),
        }
    if kind == "dspark":
        own = {"sample_from_anchor": args.layout != "extra"}
    if kind != "dflash2":
        own["markov_head_type"] = args.markov_head or "vanilla"
    return KINDS[kind](
        hidden_size=target.hidden_size,
        num_layers=count,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position=target.max_position,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(args.draft_vocab or 12288, target.vocab_size),
        block=args.block or 7,
        capture_layers=tuple(capture),
        target_layers=target.num_layers,
        causal=args.causal,
        target=name,
        **own,
    )


def calibrate(args: argparse.Namespace) -> int:
    from trtllm_forespark.cli import make_llm, say, write_json
    from trtllm_forespark.runtime.bench.prompts import load_prompts
    from trtllm_forespark.runtime.calibration import LONG, table, to_json
    from trtllm_forespark.runtime.calibration import calibrate as run

    llm = make_llm(args, policy="ar")
    prompts = [p["prompt"] for p in load_prompts(args.prompts)]
    random.Random(args.seed or 0).shuffle(prompts)  # files are often sorted by source
    prompts = prompts[: args.limit]
    result = run(llm, prompts, args.max_tokens, say, Path(args.record_triangles) if args.record_triangles else None)
    print(to_json({k: v for k, v in result["report"].items() if k not in LONG}))
    print(table(result["report"]))
    write_json(args.json, result)
    return 0


def profile(args: argparse.Namespace) -> int:
    from trtllm_forespark.cli import make_llm, say
    from trtllm_forespark.runtime import tables

    llm = make_llm(args, policy="ar", max_batch_size=args.requests)
    path = Path(args.output) if args.output else tables.cached_path(llm.identity)
    table = tables.measure(llm, say, args.timings, args.context, args.requests, path.with_suffix(".log.jsonl"))
    path.parent.mkdir(parents=True, exist_ok=True)
    table.save(path)
    print(path)
    if args.caps:
        print(json.dumps(tables.measure_and_keep_caps(llm, say, tables.caps_path(path))))
    return 0


def every(say: Callable[[str], None], what: str, parts: int = 50) -> Callable[[int, int], None]:
    """A progress callback that speaks about ``parts`` times in all, however often it is called."""
    spoken = 0

    def report(done: int, total: int) -> None:
        nonlocal spoken
        if done == total or done * parts >= (spoken + 1) * total:
            spoken = done * parts // max(total, 1)
            say(f"{done} of {total} {what}")

    return report


def evenly_spaced(num_layers: int, count: int = 5) -> list[int]:
    """Captured layers as published drafters choose them: from the second to the one before the last, evenly spaced."""
    first, last = min(1, num_layers - 1), max(num_layers - 2, 0)
    return sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)})


def evenly_chosen(layers: list[int], count: int) -> list[int]:
    """``count`` of the captured layers, the first and the last among them; LongSpark's draft layers read the keys and
    values of the target layers that come next, so that training can make them from what was captured."""
    if count == 1:
        return layers[-1:]
    if count > len(layers):
        raise ValueError(f"--layers {count}: LongSpark needs a captured layer for each; capture that many (--capture)")
    return [layers[round(i * (len(layers) - 1) / (count - 1))] for i in range(count)]


def add_commands(commands: Any, add: Callable[..., argparse.ArgumentParser]) -> None:
    """Attach the four commands to the top-level parser."""
    from trtllm_forespark.cli import add_engine_arguments

    made = add(commands, "distill", distill, "let the target write training text", json_too=False)
    asked = made.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompts", help="JSONL with a prompt a line")
    asked.add_argument(
        "--invent", type=int, metavar="N", help="let the target write N prompts too (kept in OUTPUT's .prompts.jsonl)"
    )
    made.add_argument(
        "--avoid", nargs="+", default=[], metavar="FILE", help="drop invented prompts that share ten words with these"
    )
    made.add_argument("--output", required=True, help=".npz to write; an interrupted run goes on")
    made.add_argument("--limit", type=int, default=None, help="use the first N prompts")
    made.add_argument("--max-tokens", type=int, default=192)
    made.add_argument("--temperature", type=float, default=0.2)
    made.add_argument("--top-p", type=float, default=0.9)
    add_engine_arguments(made)

    made = add(commands, "train", train, "train a drafter and its estimators on distilled text", json_too=False)
    made.add_argument("--data", required=True, nargs="+", metavar="FILE", help=".npz of `forespark distill`")
    made.add_argument("--output", required=True, help="folder of the drafter; a run that stands there goes on")
    made.add_argument("--features", default=None, help="folder of the target's features (default: OUTPUT/features)")
    made.add_argument(
        "--minutes", type=float, default=60.0, help="training time over all resumed runs (default: %(default)s)"
    )
    made.add_argument(
        "--total-anchors",
        type=int,
        default=None,
        metavar="N",
        help="train on N anchors instead of for some minutes: the same run on any machine",
    )
    made.add_argument(
        "--init",
        default=None,
        metavar="DIR",
        help="start from this drafter's weights; its shape, captured layers and draft vocabulary are taken over",
    )
    made.add_argument("--drafter", choices=("dflash2", "dspark", "longspark"), default=None, help="default: dflash2")
    made.add_argument("--block", type=int, default=None, help="K, the longest draft (default: 7)")
    made.add_argument(
        "--layers", type=int, default=None, help="decoder layers of the drafter (default: 2, longspark 3)"
    )
    made.add_argument("--draft-vocab", type=int, default=None, help="tokens it can draft (default: 12288)")
    made.add_argument(
        "--capture", type=lambda s: [int(x) for x in s.split(",")], default=None, help="captured target layers, from 0"
    )
    made.add_argument(
        "--markov-head",
        choices=("vanilla", "gated", "rnn"),
        default=None,
        help="correction by the token before, of dspark and longspark (default: vanilla)",
    )
    made.add_argument(
        "--layout",
        choices=("anchor", "extra"),
        default=None,
        help="dspark: the anchor's slot predicts position 1, or a block has a slot more (default: anchor)",
    )
    made.add_argument(
        "--window", type=int, default=None, help="longspark: newest tokens seen one by one (default: 256)"
    )
    made.add_argument(
        "--summary-rows", type=int, default=None, help="longspark: frozen queries a layer and head (default: 16)"
    )
    made.add_argument(
        "--without",
        nargs="+",
        choices=("boundary", "window", "summary"),
        default=[],
        help="longspark: views to leave out, for ablations",
    )
    made.add_argument("--causal", action="store_true", help="directional: causal attention within the block")
    made.add_argument(
        "--lengths",
        choices=("full", "varied"),
        default="full",
        help="drafts that train the drafter: all of K, or every second one shorter, as they are served "
        "(default: %(default)s)",
    )
    made.add_argument("--learning-rate", type=float, default=3e-3)
    made.add_argument("--texts", type=int, default=4, help="texts a step")
    made.add_argument("--anchors", type=int, default=32, help="anchors a text")
    made.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default=None,
        help="of the target and, where the CPU multiplies it, of training's products",
    )
    for name in ("--model", "--device", "--config"):
        made.add_argument(name, default=None)
    for name in ("--seed", "--threads"):
        made.add_argument(name, type=int, default=None)

    made = add(
        commands, "calibrate", calibrate, "fit both estimators on prompts; writes calibration.json beside the drafter"
    )
    made.add_argument("--prompts", required=True, help="JSONL with a prompt a line, in neither training nor evaluation")
    made.add_argument(
        "--limit",
        type=int,
        default=240,
        help="prompts, drawn at random; a third judges (default: %(default)s)",
    )
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument(
        "--record-triangles", metavar="FILE", default=None, help="also save calibrated pre-draft logits (.npz)"
    )
    add_engine_arguments(made, policy=False)

    made = add(commands, "profile", profile, "measure the latency table of this machine", json_too=False)
    made.add_argument("--output", default=None, help="default: the cache")
    made.add_argument("--timings", type=int, default=30, help="passes an entry (default: %(default)s)")
    made.add_argument(
        "--context",
        type=int,
        default=None,
        help="tokens of context of every request (default: 160)",
    )
    made.add_argument("--requests", type=int, default=32, help="largest batch (default: %(default)s)")
    made.add_argument("--caps", action="store_true", help="also find the batch-wise caps (every cap at every load)")
    add_engine_arguments(made, policy=False)
