"""Stop strings: the output ends at the token with which its text first contains one, wherever token borders lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
_PARTIAL = "\ufffd"  # what a character becomes whose bytes are not all there yet


@dataclass(frozen=True)
class StopMatch:
    """count: new tokens up to and including the one that completed the stop string. text: the output's, cut."""

    count: int
    stop: str
    text: str


class StopStrings:
    """Watches one request's output. Decodes a few tokens a step, never the whole output again."""

    def __init__(self, stops: Sequence[str], decode: Decode, *, include: bool = False, min_tokens: int = 0) -> None:
        """include: the cut text keeps the stop string. min_tokens: one completed by an earlier token ends nothing."""
        self._stops, self._decode, self._include, self._least = list(stops), decode, include, min_tokens
        self._text = ""  # of the first _read tokens; they end with a whole character
        self._window = self._read = 0  # decoding starts at _window, so that spaces at token borders come out right

    def find(self, output_ids: Sequence[int], new: Sequence[int]) -> StopMatch | None:
        """The first of ``new``, the tokens after ``output_ids``, that completes a stop string; None where none does."""
        self._follow(output_ids)
        out, ids = len(output_ids), [*output_ids[self._window :], *new]
        prior = self._so_far(ids[: len(ids) - len(new)])
        if self._search(self._so_far(ids), prior) is None:
            return None
        for count in range(1, len(new) + 1):
            text = self._so_far(ids[: len(ids) - len(new) + count])
            found = self._search(text, prior) if out + count >= self._least else None
            if found is not None:
                at, stop = found
                return StopMatch(count, stop, text[: at + len(stop)] if self._include else text[:at])
            prior = text
        return None

    def _search(self, text: str, prior: str) -> tuple[int, str] | None:
        """The stop string that begins first among those that end after ``prior``."""
        found = [(text.find(stop, max(0, len(prior) - len(stop) + 1)), stop) for stop in self._stops]
        return min((f for f in found if f[0] >= 0), key=lambda f: f[0], default=None)

    def _so_far(self, ids: Sequence[int]) -> str:
        """Text of everything up to and including ``ids``, the tokens from the window on, without an unfinished end."""
        return self._text + self._piece(ids).rstrip(_PARTIAL)

    def _piece(self, ids: Sequence[int]) -> str:
        before = self._decode(ids[: self._read - self._window])
        return self._decode(ids)[len(before) :]

    def _follow(self, output_ids: Sequence[int]) -> None:
        if len(output_ids) == self._read:
            return
        piece = self._piece(output_ids[self._window :])
        if not piece.endswith(_PARTIAL):
            self._text += piece
            self._window, self._read = self._read, len(output_ids)
