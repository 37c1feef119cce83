"""What one request says about speculation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Overrides of speculation for one request; its text does not depend on them (greedy and seeded, float32).

    enabled: False: nothing is drafted for it.
    max_draft_len: draft tokens a step at most, 1 or more; None: the drafter's block.
    min_draft: draft tokens a step at least, where its limits allow and the engine's policy drafts at all; None: the
        engine's `min_draft`.

    Raises ValueError naming the field, the value and how to mend it.
    """

    enabled: bool = True
    max_draft_len: int | None = None
    min_draft: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise _refuse("enabled", self.enabled, "must be True or False", "give False to draft nothing")
        for name, least, mend in (
            (
                "max_draft_len",
                1,
                "give a positive number, None for the drafter's block, or enabled=False to draft nothing",
            ),
            ("min_draft", 0, "give 0 for no floor, or None for the engine's"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise _refuse(name, value, f"must be an integer >= {least}", mend)
        if self.min_draft:
            if not self.enabled:
                raise _refuse("min_draft", self.min_draft, "goes against enabled = False", "leave one of them out")
            if self.max_draft_len is not None and self.min_draft > self.max_draft_len:
                rule = f"must not exceed max_draft_len = {self.max_draft_len}"
                raise _refuse("min_draft", self.min_draft, rule, "lower it or raise max_draft_len")

    def longest(self, block: int) -> int:
        """Draft tokens at most, of a drafter whose block is so long."""
        if not self.enabled:
            return 0
        return block if self.max_draft_len is None else min(block, self.max_draft_len)


def _refuse(name: str, value: object, rule: str, mend: str) -> ValueError:
    return ValueError(f"Speculation.{name} = {value!r}: {rule}; {mend}")
