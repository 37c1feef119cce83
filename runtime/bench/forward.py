"""`forespark bench forward`: a pass of the target and of the drafter against its matrix products alone.

Both are timed in turns in one process, medians are reported. The products are replayed from a recorded pass: the same
layers with the same numbers of rows, nothing in between. What the ratio shows beyond 1 is attention, norms, rotations,
reading pages and Python. Sampling is no part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from trtllm_forespark.drafters.checkpoint import load_drafter
from trtllm_forespark.models.linear import PackedLinear
from trtllm_forespark.models.registry import drafter_name, load_model, locate_drafter
from trtllm_forespark.runtime.backends.base import DraftBatch, TargetBatch
from trtllm_forespark.runtime.backends.torch_backend import TorchBackend
from trtllm_forespark.runtime.machine import choose_device, choose_dtype, device_name, prepare_allocator

PAGE_SIZE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default=None, help="default: the one shipped for the model; none: target only")
    parser.add_argument("--tokens", default="1,8,32,64,128", help="tokens of a pass (for the drafter: drafted tokens)")
    parser.add_argument("--requests", type=int, default=None, help="requests they belong to (default: one token each)")
    parser.add_argument("--context", type=int, default=128, help="tokens each request has in the cache")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=3.0, help="time given to each entry")


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Returns `runs`: model, tokens, requests, seconds, matmul_seconds (medians a pass), ratio, passes (timed)."""
    sizes = _sizes(args.tokens)
    if args.requests is not None and not 1 <= args.requests <= min(sizes):
        raise ValueError(f"--requests {args.requests} must be between 1 and the smallest --tokens, {min(sizes)}")
    if args.context < 1:
        raise ValueError(f"--context must be at least 1, found {args.context}")
    if args.threads:
        torch.set_num_threads(args.threads)
    prepare_allocator()
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    target, _ = load_model(args.model, dtype, device)
    name = None if args.drafter == "none" else drafter_name(args.model, args.drafter)
    drafter = load_drafter(locate_drafter(name)) if name else None
    requests = args.requests or max(sizes)
    longest = args.context + max(sizes) // (args.requests or max(sizes)) + 1
    if longest > target.config.max_position:
        raise ValueError(f"--context {args.context} leaves no room before position {target.config.max_position}")
    pages = -(-(longest + 64) // PAGE_SIZE)
    backend = TorchBackend(
        target,
        drafter,
        max_batch_size=requests,
        max_seq_len=pages * PAGE_SIZE,
        num_pages=requests * pages,
        page_size=PAGE_SIZE,
    )
    shape = Shapes(backend, args.context, pages)
    runs = []
    for tokens in sizes:
        run = shape.target_pass(tokens, args.requests or tokens)
        timed = _time(backend, run, args.seconds)
        runs.append({"model": args.model, "tokens": tokens, "requests": args.requests or tokens, **timed})
    for tokens in sizes if drafter else ():
        count, run = shape.draft_pass(tokens, args.requests)
        timed = _time(backend, run, args.seconds)
        runs.append({"model": name, "tokens": tokens, "requests": count, **timed})
    return {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "context": args.context,
        "runs": runs,
    }


class Shapes:
    """Passes of chosen sizes over requests that all have `context` tokens in the cache (zeros: values cost nothing)."""

    def __init__(self, backend: TorchBackend, context: int, pages: int) -> None:
        self.backend, self.context, self.pages = backend, context, pages
        self.rng = np.random.default_rng(0)

    def _table(self, requests: int) -> np.ndarray:
        # Only the pages in use: the pool hands out low numbers first, so those of a running batch are dense.
        used = -(-(self.context + 1) // self.backend.page_size)
        table = np.full((requests, self.pages), 0, np.int64)
        table[:, :used] = np.arange(requests * used).reshape(requests, used)
        table[:, used:] = requests * used + np.arange(requests * (self.pages - used)).reshape(requests, -1)
        return table

    def target_pass(self, tokens: int, requests: int) -> Callable[[], object]:
        counts = _spread(tokens, requests)
        cu = np.concatenate([[0], np.cumsum(counts)])
        positions = np.concatenate([self.context + np.arange(count) for count in counts])
        batch = TargetBatch(
            self.rng.integers(0, self.backend.vocab_size, tokens).tolist(),
            positions.tolist(),
            cu.tolist(),
            self._table(requests),
            list(range(tokens)),
            list(range(requests)),
        )
        return lambda: self.backend.forward(batch)

    def draft_pass(self, tokens: int, requests: int | None) -> tuple[int, Callable[[], object]]:
        """`tokens` drafted tokens, as long blocks as they fill unless `requests` says otherwise."""
        spec = self.backend.spec
        assert spec is not None
        count = min(requests or -(-tokens // spec.block), tokens)
        lengths = [min(length, spec.block) for length in _spread(tokens, count)]
        anchors = self.rng.integers(0, self.backend.vocab_size, count).tolist()
        batch = DraftBatch(anchors, [self.context] * count, self._table(count), list(range(count)))

        def best(scores: torch.Tensor, candidates: torch.Tensor, rows: torch.Tensor, position: torch.Tensor | int):
            return scores.argmax(-1), scores

        return count, lambda: self.backend.draft(batch, lengths, best)


@torch.inference_mode()
def _time(backend: TorchBackend, run: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Medians of the pass and of its products, timed in turns for about `seconds`, five times at least."""
    with _recorded() as calls:
        run()
    inputs = {
        (linear.in_features, rows): torch.randn(rows, linear.in_features, device=backend.device).to(linear.dtype)
        for linear, rows in calls
    }

    def products() -> None:
        for linear, rows in calls:
            linear(inputs[linear.in_features, rows])

    run()
    products()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 1000):
        for work, spent in zip((run, products), times, strict=True):
            _wait(backend.device)
            started = time.perf_counter()
            work()
            _wait(backend.device)
            spent.append(time.perf_counter() - started)
    whole, alone = (statistics.median(spent) for spent in times)
    return {
        "seconds": whole,
        "matmul_seconds": alone,
        "ratio": round(whole / alone, 3),
        "passes": len(times[0]),
    }


@contextlib.contextmanager
def _recorded() -> Iterator[list[tuple[PackedLinear, int]]]:
    """The products of what runs inside: (layer, rows), in order."""
    calls: list[tuple[PackedLinear, int]] = []
    names = ("__call__", "silu", "times")
    originals = {name: getattr(PackedLinear, name) for name in names}

    def recording(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def record(self: PackedLinear, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            calls.append((self, x.numel() // self.in_features))
            return original(self, x, *others, **named)

        return record

    for name in names:
        setattr(PackedLinear, name, recording(originals[name]))
    try:
        yield calls
    finally:
        for name in names:
            setattr(PackedLinear, name, originals[name])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(tokens: int, requests: int) -> list[int]:
    return [tokens // requests + (index < tokens % requests) for index in range(requests)]


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--tokens takes positive numbers with commas between them, as 1,8,32; found {text!r}")
    return sizes
