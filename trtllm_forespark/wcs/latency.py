"""Latency tables: what a draft and a verification cost (section 4.3, appendix B).

T_verify is known by (requests, tokens of the pass), T_draft by (requests that draft, tokens with their anchor slots);
drafting nothing costs nothing. Times are seconds. Along tokens costs are a staircase (CUDA graphs replay buckets of
tokens; a bucket's border is the largest token count that costs that much) or linear between the profiled counts (a CPU,
where each token costs, the first draft of a step most). Between measured batch sizes they are interpolated linearly, at
equal tokens in a staircase, else at equal drafts. They never fall as tokens grow: what noise put out of order is pooled
(isotonic regression, weighted by timings).
"""

from __future__ import annotations

import datetime
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.prices import Prices

Interpolation = Literal["staircase", "linear"]
Array = npt.NDArray[Any]

VERSION = 3  # 2: T_draft held the estimate, 1 and 2: drafts of one length
_KIND = "forespark-latency-table"
_IDENTITY = ("device", "model", "drafter", "dtype")
#: Up to so many requests each round times an entry so often: such passes are short, and small differences decide there.
_FEW, _MORE = 4, 3


class LatencyTableError(ValueError):
    """A latency table that is broken, or was made for something else; the message says what and how to mend it."""


@dataclass(frozen=True)
class Entry:
    """One measured point; seconds: the lower quartile of `timings` passes."""

    requests: int
    tokens: int
    seconds: float
    timings: int = 1


class Surface:
    """Seconds by (requests, tokens), from measured entries that need not form a full grid.

    requests: [R], tokens: [T], both rising; seconds: [R, T], non-decreasing along tokens.
    """

    def __init__(self, entries: Iterable[Entry], interpolation: Interpolation, name: str) -> None:
        self.entries = sorted(entries, key=lambda e: (e.requests, e.tokens))
        self.linear = interpolation == "linear"
        self.name = name
        _check(self.entries, name)
        self._warned = False
        self.log_counts: Array = np.log2([(e.requests, e.tokens) for e in self.entries])
        self.requests: Array = np.unique([e.requests for e in self.entries])
        self.tokens: Array = np.unique([e.tokens for e in self.entries])
        rows = []
        for requests in self.requests:
            own = [e for e in self.entries if e.requests == requests]
            tokens = np.array([e.tokens for e in own])
            seconds = isotonic([e.seconds for e in own], [e.timings for e in own])
            rows.append(self._along_tokens(tokens, seconds[None, :], self.tokens)[0])
        self.seconds: Array = np.maximum.accumulate(np.array(rows), axis=1)

    def at(self, requests: Any, tokens: Any) -> Array:
        """Seconds for broadcast arrays of requests (>= 1) and tokens; beyond the table linear, with a warning."""
        requests, tokens = np.broadcast_arrays(np.asarray(requests), np.asarray(tokens))
        which, row = np.unique(requests, return_inverse=True)
        if tokens.size and (which[-1] > self.requests[-1] or int(tokens.max()) > self.tokens[-1]):
            self.warn(int(which[-1]), int(tokens.max()))
        curves = self.rows(which, tokens.ravel())
        return curves[row.ravel(), np.arange(tokens.size)].reshape(tokens.shape)

    def rows(self, requests: Array, tokens: Array) -> Array:
        """[r, t] seconds of each of `requests` [r] (>= 1) at each of `tokens` [t], in any order; never warns."""
        requests = np.asarray(requests)
        curves = []
        for own, seconds in zip(self.requests, self.seconds, strict=True):
            # At equal drafts (linear): as many tokens more or fewer as this batch size has more or fewer requests.
            shift = own - requests if self.linear else np.zeros_like(requests)
            at = np.add.outer(shift, tokens)
            curves.append(self._along_tokens(self.tokens, seconds[None], at.ravel()).reshape(at.shape))
        return self._between_requests(np.stack(curves), requests)

    def borders(self, limit: int) -> Array:
        """Token counts at which the cost changes its rule, up to the first >= `limit`; made up past the last bucket."""
        last = int(self.tokens[-1])
        if limit <= last:
            return self.tokens[: int(np.searchsorted(self.tokens, limit)) + 1]
        if self.linear:
            return np.append(self.tokens, limit)
        step = max(last - int(self.tokens[-2]) if len(self.tokens) > 1 else last, -(-(limit - last) // 256))
        return np.append(self.tokens, np.arange(last + step, limit + step, step))

    def _between_requests(self, curves: Array, requests: Array) -> Array:
        """[R, r, t] what the measured batch sizes say for each of `requests` [r] -> [r, t]."""
        which = np.arange(len(requests))
        if len(self.requests) == 1:
            return np.asarray(curves[0])
        high = np.clip(np.searchsorted(self.requests, requests), 1, len(self.requests) - 1)
        low = high - 1
        part = np.maximum((requests - self.requests[low]) / (self.requests[high] - self.requests[low]), 0)[:, None]
        between = (1 - part) * curves[low, which] + part * curves[high, which]
        # Beyond the largest batch measured: never cheaper than it, never falling.
        beyond = np.maximum.accumulate(np.maximum(between, curves[-1]), axis=1)
        return np.where(part > 1, beyond, between)

    def _along_tokens(self, known: Array, seconds: Array, tokens: Array) -> Array:
        """[r, len(known)] costs at `known` tokens -> [r, len(tokens)] at `tokens`."""
        if len(known) == 1:
            slope_last = seconds[:, -1] / known[-1]
        else:
            slope_last = (seconds[:, -1] - seconds[:, -2]) / (known[-1] - known[-2])
        past = np.maximum(tokens - known[-1], 0)
        index = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
        out = seconds[:, index]
        if self.linear and len(known) > 1:
            high = np.maximum(index, 1)
            part = np.minimum((tokens - known[high - 1]) / (known[high] - known[high - 1]), 1)
            out = np.maximum(seconds[:, high - 1] + part * (seconds[:, high] - seconds[:, high - 1]), 0)
        return out + slope_last[:, None] * past

    def warn(self, requests: int, tokens: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the {self.name} latency table ends at {self.requests[-1]} requests and {self.tokens[-1]} tokens; "
                f"{requests} requests with {tokens} tokens are extrapolated (profile a larger grid)",
                stacklevel=4,
            )


@dataclass
class LatencyTable:
    """T_verify and T_draft of one device, model and drafter.

    Build one with `profile`, `from_functions` or `load`. device, model, drafter, dtype say what it was made for.
    """

    verify: Surface
    draft: Surface
    interpolation: Interpolation = "staircase"
    device: str = ""
    model: str = ""
    drafter: str = ""
    dtype: str = ""
    date: str = ""
    _prices: dict[tuple[int, int], tuple[int, Prices]] = field(default_factory=dict, init=False, repr=False)
    _grid: tuple[Array, Array] | None = field(default=None, init=False, repr=False)

    def verify_seconds(self, requests: Any, tokens: Any) -> Any:
        """T_verify(requests, tokens) [s]; arrays broadcast, 0 requests cost 0."""
        requests = np.asarray(requests)
        return np.where(requests > 0, self.verify.at(np.maximum(requests, 1), tokens), 0.0)[()]

    def draft_seconds(self, requests: Any, tokens: Any) -> Any:
        """T_draft(requests that draft, their tokens with anchor slots) [s]; drafting nothing costs 0."""
        requests = np.asarray(requests)
        return np.where(requests > 0, self.draft.at(np.maximum(requests, 1), tokens), 0.0)[()]

    def prices(self, n: int, block: int, num_tokens: int) -> Prices:
        """Costs for n requests of up to `block` draft tokens and N = `num_tokens` others; cached by (n, block)."""
        need = num_tokens + n * block
        cached = self._prices.get((n, block))
        if cached is not None and cached[0] >= need:
            return cached[1]
        if len(self._prices) >= 1024:
            self._prices.clear()
        reach = need if cached is None else 2 * need  # a prefill chunk came: leave room for the next
        draft_tokens, draft = self._draft_grid(n, block)
        columns = int(draft_tokens.searchsorted(n * (block + 1))) + 1
        verify_tokens = _cover_zero(self.verify.borders(reach), self.verify.linear)
        verify = self.verify.rows(np.array([max(n, 1)]), verify_tokens)[0].astype(np.float32)
        linear = self.interpolation == "linear"
        each = np.zeros(0, np.float32)
        if linear:  # at every count, since the costs of two batch sizes are mixed: their borders are not this one's
            each = self.verify.rows(np.array([max(n, 1)]), np.arange(verify_tokens[-1] + 1))[0].astype(np.float32)
        draft_tokens, draft = draft_tokens[:columns], draft[: n + 1, :columns]
        falling = np.append(draft_tokens[::-1], 0).astype(np.int32)
        at_falling = np.concatenate([draft[:, ::-1], np.zeros((n + 1, 1))], axis=1).astype(np.float32)
        prices = Prices(
            linear=linear,
            draft_tokens=draft_tokens,
            draft=draft,
            verify_tokens=verify_tokens,
            verify=verify,
            verify_each=each,
            draft_borders=falling,
            draft_at_borders=at_falling,
            each_border=np.arange(columns + 1),
            ranks=np.arange(n * block + 1, dtype=np.int32),
        )
        self._prices[n, block] = reach, prices
        return prices

    def _draft_grid(self, n: int, block: int) -> tuple[Array, Array]:
        """Borders, and seconds for 0..n (or more) drafting requests at them: made anew only when the batch doubles."""
        if self._grid is None or len(self._grid[1]) <= n or self._grid[0][-1] < n * (block + 1):
            requests = np.arange(1, 2 * max(n, 8) + 1)
            tokens = _cover_zero(self.draft.borders(int(requests[-1]) * (block + 1)), self.draft.linear)
            self._grid = tokens, np.concatenate([np.zeros((1, len(tokens))), self.draft.rows(requests, tokens)])
        return self._grid

    def scaled(self, verify: Any = 1.0, draft: Any = 1.0) -> LatencyTable:
        """The same table with T_verify and T_draft times these factors: one number, or one an entry."""
        surfaces = []
        for surface, factor in ((self.verify, verify), (self.draft, draft)):
            factors = np.broadcast_to(factor, len(surface.entries)).tolist()
            entries = [replace(e, seconds=e.seconds * f) for e, f in zip(surface.entries, factors, strict=True)]
            surfaces.append(Surface(entries, self.interpolation, surface.name))
        return replace(self, verify=surfaces[0], draft=surfaces[1])

    def note_use(self, n: int, drafting: int, draft_tokens: int, verify_tokens: int) -> None:
        """Warn, once, where a chosen step lies past the last bucket."""
        for surface, requests, tokens in ((self.draft, drafting, draft_tokens), (self.verify, n, verify_tokens)):
            if tokens and (tokens > surface.tokens[-1] or requests > surface.requests[-1]):
                surface.warn(requests, tokens)

    @classmethod
    def from_functions(
        cls,
        verify: Callable[[int, int], float],
        draft: Callable[[int, int], float],
        *,
        requests: Sequence[int],
        verify_tokens: Sequence[int],
        draft_tokens: Sequence[int],
        interpolation: Interpolation = "staircase",
        **made_for: str,
    ) -> LatencyTable:
        """A synthetic table: both functions take (requests, tokens) and return seconds; evaluated on the full grid."""
        return cls(
            Surface(
                [Entry(n, t, float(verify(n, t))) for n in requests for t in verify_tokens], interpolation, "verify"
            ),
            Surface([Entry(n, t, float(draft(n, t))) for n in requests for t in draft_tokens], interpolation, "draft"),
            interpolation,
            **made_for,
        )

    def save(self, path: str | Path) -> None:
        """Write the measured entries as JSON."""
        data: dict[str, Any] = {"kind": _KIND, "version": VERSION}
        data |= {name: getattr(self, name) for name in (*_IDENTITY, "date", "interpolation")}
        data["columns"] = ["requests", "tokens", "seconds", "timings"]
        for surface in (self.verify, self.draft):
            data[surface.name] = [[e.requests, e.tokens, e.seconds, e.timings] for e in surface.entries]
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, expect: Mapping[str, str] | None = None) -> LatencyTable:
        """Read a table; `expect` may name device, model, drafter, dtype it must have been made for.

        Raises LatencyTableError for a file that is no such table, is broken, or was made for something else.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise LatencyTableError(
                f"{path}: cannot read a latency table: {error}; make one with `forespark profile`"
            ) from error
        if not isinstance(data, dict) or data.get("kind") != _KIND:
            raise LatencyTableError(
                f"{path}: not a latency table (kind is not {_KIND!r}); make one with `forespark profile`"
            )
        if data.get("version") != VERSION:
            raise LatencyTableError(
                f"{path}: format version {data.get('version')!r}, this release reads {VERSION}; run `forespark profile`"
            )
        wrong = [
            f"{name}={data.get(name)!r}, not {value!r}"
            for name, value in (expect or {}).items()
            if data.get(name) != value
        ]
        if wrong:
            raise LatencyTableError(
                f"{path}: this latency table was made for {'; '.join(wrong)}; "
                "run `forespark profile` here, or name the table that was made here"
            )
        interpolation = data.get("interpolation")
        if interpolation not in ("staircase", "linear"):
            raise LatencyTableError(f"{path}: interpolation is {interpolation!r}; it must be 'staircase' or 'linear'")
        surfaces = []
        for name in ("verify", "draft"):
            try:
                entries = [Entry(int(n), int(t), float(s), int(k)) for n, t, s, k in data[name]]
                surfaces.append(Surface(entries, interpolation, name))
            except (KeyError, TypeError, ValueError) as error:
                raise LatencyTableError(
                    f"{path}: entries of {name!r} must be [requests, tokens, seconds, timings]: {error}"
                ) from error
        identity = {name: str(data.get(name, "")) for name in (*_IDENTITY, "date")}
        return cls(surfaces[0], surfaces[1], interpolation, **identity)


def profile(
    measure_verify: Callable[[int, int], float],
    measure_draft: Callable[[int, int], float],
    *,
    verify: Sequence[tuple[int, int]],
    draft: Sequence[tuple[int, int]],
    timings: int = 30,
    interpolation: Interpolation = "staircase",
    progress: Callable[[int, int], None] | None = None,
    **made_for: str,
) -> LatencyTable:
    """Measure a table: the lower quartile of `timings` passes an entry (appendix B: the median of at least 30).

    What disturbs a pass makes it slower, never faster, and neighbours on a shared machine disturb whole minutes: of few
    passes the median is then of the disturbed ones for some entries and not for others.

    verify, draft: points (requests, tokens) to measure. measure_verify(requests, tokens): seconds of one target pass;
    as many tokens as requests is a step without drafts. measure_draft(requests, tokens): seconds of one drafter pass,
    an anchor slot a request among its tokens. Passes go round the points `timings` times, so that a slow minute does
    not land on one entry, and at each batch size the two kinds take turns, as in steps that draft. Up to 4 requests an
    entry is timed three times a round. progress(done, all) is called after each round. made_for: device, model,
    drafter, dtype.
    """
    kinds = {"verify": measure_verify, "draft": measure_draft}
    points = _alternating(verify, draft)
    few = [point for point in points if point[1] <= _FEW]
    measured: dict[tuple[str, int, int], list[float]] = {point: [] for point in points}
    for done in range(timings):
        for kind, n, tokens in [*few * (_MORE - 1), *points]:
            measured[kind, n, tokens].append(float(kinds[kind](n, tokens)))
        if progress is not None:
            progress(done + 1, timings)
    entries: dict[str, list[Entry]] = {kind: [] for kind in kinds}
    for (kind, n, tokens), times in measured.items():
        entries[kind].append(Entry(n, tokens, float(np.quantile(times, 0.25)), len(times)))
    return LatencyTable(
        Surface(entries["verify"], interpolation, "verify"),
        Surface(entries["draft"], interpolation, "draft"),
        interpolation,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **made_for,
    )


def _alternating(verify: Sequence[tuple[int, int]], draft: Sequence[tuple[int, int]]) -> list[tuple[str, int, int]]:
    points = []
    for kind, part in (("verify", verify), ("draft", draft)):
        for n in {n for n, _ in part}:
            points += [(n, i, kind, tokens) for i, tokens in enumerate(t for m, t in part if m == n)]
    points.sort(key=lambda point: (*point[:2], point[2] == "draft"))
    return [(kind, n, tokens) for n, _, kind, tokens in points]


def isotonic(values: Sequence[float], weights: Sequence[float]) -> Array:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # [mean, weight, count]
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight_, count = pools.pop()
            total = pools[-1][1] + weight_
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * weight_) / total, total, pools[-1][2] + count]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])


def _cover_zero(borders: Array, linear: bool) -> Array:
    # Below the first profiled count a line needs a left end; a staircase does not.
    return np.concatenate([[0], borders]) if linear and borders[0] > 0 else borders


def _check(entries: Sequence[Entry], name: str) -> None:
    if not entries:
        raise LatencyTableError(f"the {name} latency table has no entries; profile at least one batch size")
    seen = set()
    for e in entries:
        if e.requests < 1 or e.tokens < 1 or e.timings < 1 or not np.isfinite(e.seconds) or e.seconds < 0:
            raise LatencyTableError(
                f"bad entry in the {name} latency table: {e}; counts are >= 1, seconds finite and >= 0"
            )
        if (e.requests, e.tokens) in seen:
            raise LatencyTableError(
                f"two entries for {e.requests} requests and {e.tokens} tokens in the {name} latency table"
            )
        seen.add((e.requests, e.tokens))
