"""Prompts of benchmarks: the package's own, or a JSONL file of the user's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

OWN = Path(__file__).with_name("prompts.jsonl")


def load_prompts(path: str | Path | None = None) -> list[dict]:
    """Objects with ``prompt`` (text), and ``id`` where the file has one (HumanEval's ``task_id`` too).

    Raises ValueError naming the file and line.
    """
    path = Path(path) if path else OWN
    opener = gzip.open if path.suffix == ".gz" else open
    rows = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
                if isinstance(row, dict):
                    row.setdefault("prompt", row.get("question") or (row.get("turns") or [None])[0])
                if not isinstance(row, dict) or not isinstance(row["prompt"], str) or not row["prompt"].strip():
                    raise ValueError(f'{path}, line {number}: needs an object with a text under "prompt"')
                row.setdefault("id", row.get("task_id", row.get("question_id", number - 1)))
                rows.append(row)
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not rows:
        raise ValueError(f"{path} holds no prompts")
    return rows
