"""Answers of the target on disk while they are being made, so that a run that stopped goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trtllm_forespark.files import write_text


class Answer(NamedTuple):
    """Token ids of a templated prompt and of what the target wrote; whether it ended by itself."""

    prompt: list[int]
    response: list[int]
    ended: bool


class AnswerLog:
    """A JSON line for every finished answer.

    made: what answers are made with (model, length, sampling); lines that were made with anything else, or belong to
    another prompt, do not count. A line that a crash cut short is passed over.
    """

    def __init__(self, path: Path, prompts: Sequence[str], made: str) -> None:
        self.path, self.made = path, made
        self.prompts = list(prompts)
        self.done: dict[int, Answer] = {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                index, key = row["index"], row["key"]
                answer = Answer(row["prompt"], row["response"], row["ended"])
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
            if index < len(self.prompts) and key == self._key(index):
                self.done[index] = answer
        if text and not text.endswith("\n"):  # what comes next must not be glued to half a line
            write_text(path, text[: text.rfind("\n") + 1])

    def todo(self) -> list[tuple[int, str]]:
        """Numbers and texts of the prompts that lack an answer."""
        return [(i, prompt) for i, prompt in enumerate(self.prompts) if i not in self.done]

    def add(self, index: int, answer: Answer) -> None:
        self.done[index] = answer
        with self.path.open("a") as file:
            file.write(json.dumps({"index": index, "key": self._key(index), **answer._asdict()}) + "\n")

    def remove(self) -> None:
        """Everything is where it belongs."""
        self.path.unlink(missing_ok=True)

    def _key(self, index: int) -> str:
        return hashlib.sha256(f"{self.made}\n{self.prompts[index]}".encode()).hexdigest()[:16]
