"""What a run did: counts and where its time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STAGES = ("pre_draft", "schedule", "draft", "distribute", "verify", "other")


@dataclass
class Metrics:
    """Sums over decode steps. seconds: by stage; "other" is what a step spends outside the five stages.

    steps: target passes with at least one decoding request. decoded: request-steps (a request in a step).
    drafted, verified, accepted: draft tokens. emitted: tokens of decoding requests. varied: steps in which two requests
    drafted different lengths. accepted_at, verified_at: by draft position (index 0 is position 1).
    """

    steps: int = 0
    decoded: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    varied: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    accepted_at: list[int] = field(default_factory=list)
    verified_at: list[int] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def count(self, lengths: list[int], verified: list[int], accepted: list[int], emitted: int) -> None:
        """One decode step of len(lengths) requests."""
        self.steps += 1
        self.decoded += len(lengths)
        self.drafted += sum(lengths)
        self.verified += sum(verified)
        self.accepted += sum(accepted)
        self.emitted += emitted
        self.varied += len(set(lengths)) > 1
        for counts, values in ((self.verified_at, verified), (self.accepted_at, accepted)):
            for value in values:
                counts.extend([0] * (value - len(counts)))
                for position in range(value):
                    counts[position] += 1

    def add(self, other: Metrics) -> None:
        """Take in the sums of another run."""
        for name in ("steps", "decoded", "drafted", "verified", "accepted", "emitted", "varied"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for stage, value in other.seconds.items():
            self.seconds[stage] += value
        for mine, theirs in ((self.verified_at, other.verified_at), (self.accepted_at, other.accepted_at)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, value in enumerate(theirs):
                mine[position] += value

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts a verification."""
        return 1.0 + self.accepted / self.decoded if self.decoded else 0.0

    def to_json(self) -> dict[str, object]:
        total = sum(self.seconds.values()) or 1.0
        return {
            "steps": self.steps,
            "acceptance_length": round(self.acceptance_length, 4),
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "varied_steps_share": round(self.varied / self.steps, 4) if self.steps else 0.0,
            "conditional_by_position": [
                round(a / v, 4) if v else None
                for v, a in zip(self._reached(), self.accepted_at + [0] * len(self.verified_at), strict=False)
            ],
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
            "share": {name: round(value / total, 4) for name, value in self.seconds.items()},
        }

    def _reached(self) -> list[int]:
        """Verified drafts whose predecessors were all accepted, by position."""
        return [
            min(v, before)
            for v, before in zip(self.verified_at, [self.decoded, *self.accepted_at, *[0] * 64], strict=False)
        ]
