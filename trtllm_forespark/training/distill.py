"""Text a target writes itself, and its features: what a drafter is trained on (appendix A).

The running engine is handed in (`Generate`, `Features`), so that this floor knows no executor.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from trtllm_forespark.training.answers import Answer, AnswerLog
from trtllm_forespark.training.features import TOP


class Generate(Protocol):
    """The engine at work: numbered prompts in, prompt and response token ids out, in any order, as they finish."""

    def __call__(self, prompts: Sequence[tuple[int, str]]) -> Iterator[tuple[int, list[int], list[int], bool]]:
        """Yields (number of the prompt, prompt ids, response ids, ended by itself); no response: it did not fit."""
        ...


class Features(Protocol):
    """One target pass over a text: tokens [T] -> captured features [T, L, H] and logits [R, V] of the last R positions
    that have a successor, for R = ``responses``."""

    def __call__(self, tokens: np.ndarray, responses: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def distill(
    prompts: list[dict], generate: Generate, output: Path, report: Callable[[int, int], None], made: str = ""
) -> int:
    """Let the engine answer prompts into ``output`` (.npz: prompt, resp, their offsets, source, row).

    Finished answers also stand in ``output``.partial.jsonl, from which a run that was interrupted goes on; made says
    what they are made with. Answers that did not end by themselves are kept (cut). Returns how many there are.
    """
    output = Path(output)
    log = AnswerLog(output.with_suffix(".partial.jsonl"), [p["prompt"] for p in prompts], made)
    for index, prompt_ids, response_ids, ended in generate(log.todo()):
        log.add(index, Answer(prompt_ids, response_ids, ended))
        report(len(log.done), len(prompts))
    kept = [i for i in sorted(log.done) if log.done[i].response]
    save_texts(output, [log.done[i] for i in kept], [prompts[i] for i in kept])
    log.remove()
    return len(kept)


def without_overlap(prompts: list[str], known: list[str], words: int = 10) -> list[str]:
    """The prompts that share no run of ``words`` words (case and punctuation aside) with a known one."""

    def runs(text: str) -> set[tuple[str, ...]]:
        parts = re.findall(r"\w+", text.lower())
        return {tuple(parts[i : i + words]) for i in range(len(parts) - words + 1)}

    taken = set().union(*map(runs, known))
    return [prompt for prompt in prompts if taken.isdisjoint(runs(prompt))]


def save_texts(output: Path, answers: list[Answer], prompts: list[dict]) -> None:
    """Write a text file of `load_texts`; prompts may carry source and row."""
    flat = lambda parts: np.array([t for part in parts for t in part], np.uint32)  # noqa: E731
    offsets = lambda parts: np.cumsum([0] + [len(part) for part in parts]).astype(np.int64)  # noqa: E731
    asked, written = [a.prompt for a in answers], [a.response for a in answers]
    temporary = output.with_suffix(".tmp.npz")
    np.savez_compressed(
        temporary,
        prompt=flat(asked),
        prompt_off=offsets(asked),
        resp=flat(written),
        resp_off=offsets(written),
        source=np.array([str(p.get("source", "")) for p in prompts]),
        row=np.array([int(p.get("row", i)) for i, p in enumerate(prompts)], np.int32),
    )
    os.replace(temporary, output)


def load_texts(path: Path, vocab_size: int) -> list[tuple[np.ndarray, int]]:
    """(tokens, prompt length) of every text of a `distill` file. Raises ValueError for a file that is not one."""
    try:
        data = np.load(path)
        prompt, prompt_off, resp, resp_off = (data[k] for k in ("prompt", "prompt_off", "resp", "resp_off"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a file of `forespark distill`: {error}") from None
    if len(prompt_off) != len(resp_off) or prompt_off[-1] != len(prompt) or resp_off[-1] != len(resp):
        raise ValueError(f"{path}: offsets and tokens do not match")
    if len(prompt) and max(int(prompt.max()), int(resp.max())) >= vocab_size:
        raise ValueError(
            f"{path}: holds token ids past the target's vocabulary of {vocab_size}; was it made with another model?"
        )
    return [
        (np.concatenate([prompt[p0:p1], resp[r0:r1]]).astype(np.int64), int(p1 - p0))
        for p0, p1, r0, r1 in zip(prompt_off, prompt_off[1:], resp_off, resp_off[1:], strict=False)
    ]


def write_features(
    texts: Sequence[tuple[np.ndarray, int]],
    features: Features,
    folder: Path,
    layers: Sequence[int],
    hidden_size: int,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
    source: str = "",
) -> None:
    """Run the target over every text once, in a seeded random order, into a `FeatureStore`; resumable.

    layers: those that ``features`` captures; source: what else the features depend on (target, dtype).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(seed).permutation(len(texts))
    lengths = np.array([len(texts[i][0]) for i in order])
    responses = np.array([len(texts[i][0]) - texts[i][1] for i in order])
    tok_off, resp_off = (np.concatenate([[0], np.cumsum(x)]) for x in (lengths, responses))
    tokens = np.concatenate([texts[i][0] for i in order])
    progress = folder / "progress"
    shapes = {
        "hidden.f16": (np.float16, (int(tok_off[-1]), len(layers), hidden_size)),
        "topi.u32": (np.uint32, (int(resp_off[-1]), TOP)),
        "topp.f16": (np.float16, (int(resp_off[-1]), TOP)),
    }
    if progress.exists():
        index = np.load(folder / "index.npz")
        made_from = str(index.get("source", ""))
        if (
            made_from != source
            or not np.array_equal(index.get("layers", []), layers)
            or not np.array_equal(np.load(folder / "tokens.npy"), tokens)
        ):
            raise ValueError(
                f"{folder} holds the features of other texts, layers or another target ({made_from or 'unnamed'}); "
                "give another folder"
            )
    else:
        np.save(folder / "tokens.npy", tokens)
        np.savez(
            folder / "index.npz",
            order=order,
            tok_off=tok_off,
            resp_off=resp_off,
            source=np.array(source),
            layers=np.array(layers),
        )
    maps = {
        name: np.memmap(folder / name, dtype, "r+" if progress.exists() else "w+", shape=shape)
        for name, (dtype, shape) in shapes.items()
    }
    for i in range(int(progress.read_text()) if progress.exists() else 0, len(order)):
        hidden, logits = features(tokens[tok_off[i] : tok_off[i + 1]], int(responses[i]))
        top = logits.float().topk(TOP, dim=-1)
        rows = slice(resp_off[i], resp_off[i + 1])
        maps["hidden.f16"][tok_off[i] : tok_off[i + 1]] = hidden.clamp(-60000, 60000).to(torch.float16).numpy()
        maps["topi.u32"][rows] = top.indices.numpy()
        maps["topp.f16"][rows] = (top.values - logits.float().logsumexp(-1, keepdim=True)).exp().numpy()
        if i % 16 == 15 or i == len(order) - 1:
            temporary = folder / "progress.tmp"
            temporary.write_text(str(i + 1))
            os.replace(temporary, progress)
            report(i + 1, len(order))
