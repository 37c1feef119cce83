"""Latency tables and batch-wise caps of this machine: found in the cache, or measured once and kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_forespark.files import write_text
from trtllm_forespark.models.registry import cache_home
from trtllm_forespark.runtime.profile import Probe
from trtllm_forespark.wcs.latency import LatencyTable, LatencyTableError, profile

if TYPE_CHECKING:
    from trtllm_forespark.runtime.llm import LLM

Say = Callable[[str], None]

USUAL_CONTEXT = 160
USUAL_REQUESTS = 32
"""Tables reach at least this many requests, whatever the engine they are measured in admits."""


def cached_path(identity: dict[str, str]) -> Path:
    name = "_".join(
        re.sub(r"[^A-Za-z0-9.]+", "-", identity[k]).strip("-") for k in ("model", "drafter", "dtype", "device")
    )
    return cache_home() / "tables" / f"{name}.json"


def load_or_profile(llm: LLM, say: Say) -> LatencyTable:
    """The table at ``llm.table_path``, which must be for this device, model, drafter and dtype; else a new one."""
    path = llm.table_path
    largest = max(USUAL_REQUESTS, min(llm.config.max_batch_size, 64))
    if llm.config.latency_table:
        if not path.exists():
            raise ValueError(f"latency_table {path} does not exist; make it with `forespark profile --output {path}`")
        return LatencyTable.load(path, expect=llm.identity)
    if path.exists():
        try:
            table = LatencyTable.load(path, expect=llm.identity)
            if int(table.verify.requests[-1]) >= largest:
                return table
            say(f"the kept latency table ends at {table.verify.requests[-1]} requests; measuring up to {largest}")
        except LatencyTableError as error:
            say(f"measuring again: {error}")
    else:
        say(
            "no latency table for this machine yet; measuring a coarse one (kept; `forespark profile` makes a fine one)"
        )
    table = measure(llm, say, timings=3, max_requests=largest, coarse=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    table.save(temporary)
    os.replace(temporary, path)
    return table


class Timings:
    """Measured times on disk, a JSON line each: what a run that stopped goes on from, and afterwards its log.

    The grid is gone through in one order, so the lines of an earlier run are given back instead of measuring again as
    long as they fit what is asked. A file that ends with "done", or was made for something else, is begun anew.
    """

    def __init__(self, path: Path, made_for: dict[str, Any]) -> None:
        self.path = path
        header = {"made_for": made_for}
        lines: list[Any] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                break  # a crash cut it short
        going_on = lines[:1] == [header] and lines[-1] != "done"
        self._stored = lines[1:] if going_on else []
        self._lines: list[Any] = [header]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rewrite()

    @property
    def resumed(self) -> int:
        """Times of an earlier run that have not been given back yet."""
        return len(self._stored)

    def of(self, kind: str, measure: Callable[[int, int], float]) -> Callable[[int, int], float]:
        """``measure``, remembered."""

        def timed(requests: int, tokens: int) -> float:
            if self._stored and self._stored[0][:3] == [kind, requests, tokens]:
                self._lines.append(self._stored.pop(0))
                return float(self._lines[-1][3])
            if self._stored:
                self._stored.clear()  # another grid: from here on the old times are of no use
                self._rewrite()
            seconds = measure(requests, tokens)
            self._write([kind, requests, tokens, seconds])
            return seconds

        return timed

    def done(self) -> None:
        self._write("done")

    def _rewrite(self) -> None:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in [*self._lines, *self._stored]))

    def _write(self, line: Any) -> None:
        self._lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def measure(
    llm: LLM,
    say: Say,
    timings: int = 9,
    context: int | None = None,
    max_requests: int | None = None,
    log: Path | None = None,
    coarse: bool = False,
) -> LatencyTable:
    """Time the target and the drafter over a grid of batch sizes and lengths (appendix B).

    context: tokens every request has (None: 160, or what the engine's limit leaves). log: see `Timings`. coarse: fewer
    points, for a start that must not take long.
    """
    spec = llm.backend.spec
    if spec is None:
        raise ValueError("latency tables need a drafter; give drafter=…")
    context = context or max(2, min(USUAL_CONTEXT, llm.max_seq_len - spec.block - 1))
    probe = Probe(llm.backend, context, max_requests or USUAL_REQUESTS)
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n <= probe.max_requests]
    lengths = [d for d in (1, 2, 3, 5, 7, 10, 15, 23, 31) if d <= spec.block]
    if coarse:
        lengths = sorted({1, (spec.block + 1) // 2, spec.block})
    kept = Timings(log, {**llm.identity, "context": context, "timings": timings}) if log else None
    if kept and kept.resumed:
        say(f"profile: {kept.resumed} times of an earlier run are taken up")
    try:
        probe.draft(sizes[-1], 2 * sizes[-1])  # the first passes pay for memory
        table = profile(
            kept.of("verify", probe.verify) if kept else probe.verify,
            kept.of("draft", probe.draft) if kept else probe.draft,
            verify=[(n, n + b) for n in sizes for b in sorted({0, 1, n // 2, *(n * d for d in lengths)})],
            draft=[(n, n * (d + 1)) for n in sizes for d in lengths],
            timings=timings,
            interpolation="linear" if llm.device.type == "cpu" else "staircase",
            progress=lambda done, total: say(f"profile: round {done} of {total}"),
            **llm.identity,
        )
    finally:
        probe.close()
    if kept:
        kept.done()
    return table


def load_or_measure_caps(llm: LLM, say: Say) -> dict[int, int]:
    """Batch-wise caps by load, as appendix B finds them: every cap at every load, the fastest kept."""
    path = caps_path(llm.table_path)
    if path.exists():
        try:
            return {int(load): int(cap) for load, cap in json.loads(path.read_text())["caps"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no caps ({error!r}); remove it to measure them again") from None
    say("no batch-wise caps for this machine yet; running every cap at every load (about two minutes, kept)")
    return measure_and_keep_caps(llm, say, path)


def measure_and_keep_caps(llm: LLM, say: Say, path: Path) -> dict[int, int]:
    from trtllm_forespark.runtime.bench.caps import measure_caps

    measured = measure_caps(llm, say)
    write_text(path, json.dumps(measured, indent=1) + "\n")
    return measured["caps"]


def caps_path(table: Path) -> Path:
    """Where the caps that belong to a latency table lie."""
    return table.with_suffix(".caps.json")
