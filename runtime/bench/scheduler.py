"""`forespark bench scheduler`: what the host's decision costs, and what it loses against exhaustive search.

`decide` is everything the host does from the pooled reward curves to (D, B), before the drafter starts. At more than
`EXACT_SLOTS` slots B is then priced again by the survival of the rows chosen, while the drafter runs (`reprice`);
losses are of the lengths and the B that come out in the end. All timings of one set of triangles are taken in turn,
round by round, on batches that differ from round to round.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_forespark.wcs.envelope import scores
from trtllm_forespark.wcs.latency import LatencyTable
from trtllm_forespark.wcs.oracle import exhaustive
from trtllm_forespark.wcs.schedule import Schedule, adaptive_budget, decide, goodput_of, joint_schedule, split
from trtllm_forespark.wcs.survival import prefix_survival, rewards, triangle_size, triangle_to_survival

#: Logits [m, K(K+1)/2] float16 recorded from SmolLM2 and its drafter (`record`), calibration applied.
RECORDED = Path(__file__).with_name("triangles_smollm2.npz")
PIECES = ("whole", "paper")

Survival = npt.NDArray[np.float32]


#: Cost of a token beside SGLang's, where losses are taken: a batch that drafts nothing loses nothing and says nothing.
TOKEN_COSTS = (1.0, 1 / 4, 1 / 16)


def serving_table(interpolation: str = "staircase", token_cost: float = 1.0) -> LatencyTable:
    """SGLang's public numbers for Qwen3-14B with a block drafter on one GPU, in buckets of CUDA graphs.

    Verification 8.71 ms at 8 tokens, 8.77 at 16, 42.34 at 1,024; drafting 1.74 ms at 1 request, 7.37 at 128 (of a
    block of 7), taken as linear in tokens between. Past 1,024 both go on at that slope. token_cost
    scales what a token adds.
    """
    tokens = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)]
    tokens += [1280, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 36864]
    return LatencyTable.from_functions(
        lambda n, t: 8.65e-3 + token_cost * (7.5e-6 * min(t, 16) + max(t - 16, 0) * (42.34e-3 - 8.77e-3) / 1008),
        lambda n, t: 1.73e-3 + token_cost * t * (7.37e-3 - 1.74e-3) / 1016,
        requests=[1, 4096],
        verify_tokens=tokens,
        draft_tokens=tokens,
        interpolation=interpolation,  # type: ignore[arg-type]
        device="synthetic",
        model="Qwen3-14B",
    )


def random_triangles(rng: np.random.Generator, requests: int, block: int) -> Survival:
    """Independent logits, N(0.5, 1.5): rows that have nothing to do with each other, the worst a schedule can meet."""
    return triangle_to_survival(rng.normal(0.5, 1.5, (requests, triangle_size(block))))


def record(path: str | Path, logits: npt.NDArray[np.floating]) -> None:
    """Write calibrated logits [m, K(K+1)/2], one row a request and step, as the file the benchmark ships with."""
    logits = np.asarray(logits)
    triangle_to_survival(logits[:1])  # complains about a wrong shape
    np.savez_compressed(path, logits=np.clip(logits, -60000, 60000).astype(np.float16))


def load_recorded(path: str | Path = RECORDED) -> tuple[npt.NDArray[np.float32], int] | None:
    """Recorded logits [m, K(K+1)/2] and their K; None where the file is not there."""
    if not Path(path).exists():
        return None
    with np.load(path, allow_pickle=False) as data:
        logits = data["logits"].astype(np.float32)
    return logits, triangle_to_survival(logits[:1]).shape[1]


def fit_block(survival: Survival, block: int) -> tuple[Survival, str]:
    """Triangles [m, K', K'] as [m, block, block], and in words what was done to them.

    Shorter: the first rows, as they were recorded. Longer: nobody measured those, so rows past K' repeat row K' and go
    on with the conditional acceptance of its last position.
    """
    recorded = survival.shape[1]
    if block <= recorded:
        cut = "" if block == recorded else f", the first {block} of {recorded} rows"
        return np.ascontiguousarray(survival[:, :block, :block]), cut
    last = survival[:, -1]
    ratio = last[:, -1:] / np.maximum(last[:, -2:-1] if recorded > 1 else 1.0, 1e-6)
    tail = last[:, -1:] * np.minimum(ratio, 1) ** np.arange(1, block - recorded + 1)
    out = prefix_survival(np.concatenate([last, tail], axis=1))
    out[:, :recorded, :recorded] = survival
    return out, f", recorded at K = {recorded} and continued past it at row {recorded}'s last conditional acceptance"


def measure(
    draw: Callable[[np.random.Generator], Survival], requests: int, block: int, seed: int, rounds: int
) -> dict[str, Any]:
    """Timings and losses on batches that `draw` makes."""
    rng, table = np.random.default_rng(seed), serving_table()
    linear, cheaper = serving_table("linear"), [serving_table(token_cost=cost) for cost in TOKEN_COSTS[1:]]
    batches = [draw(rng) for _ in range(min(rounds, 16))]
    curves = [rewards(survival) for survival in batches]
    judged = min(len(batches), 2000 // requests if requests <= 1024 else 0)  # the oracle takes minutes beyond
    pooled = [scores(curve).ravel() for curve in curves]
    names = ("decide", "decide_paper", "decide_linear", "reprice", "np_sort", "oracle")
    times: dict[str, list[int]] = {name: [] for name in names}
    judge = Judge()

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter_ns()
        result = call()
        times[name].append(time.perf_counter_ns() - started)
        return result

    for index in range(max(rounds, 1)):
        which = index % len(batches)
        survival, curve = batches[which], curves[which]
        timed("np_sort", partial(np.sort, pooled[which]))
        totals = timed("decide", partial(decide, curve, survival, requests, table))
        timed("decide_paper", partial(decide, curve, survival, requests, table, pieces="paper"))
        timed("decide_linear", partial(decide, curve, survival, requests, linear))
        lengths = split(scores(curve), totals.total)
        rows = _rows(survival, lengths)
        timed("reprice", partial(adaptive_budget, rows, lengths, requests, table))
        if index >= judged:
            continue
        best = timed("oracle", partial(exhaustive, survival, requests, table))
        judge.add(survival, requests, table, best)
        for cheap in cheaper:
            judge.add(survival, requests, cheap, exhaustive(survival, requests, cheap))
    result: dict[str, Any] = {f"{name}_us_median": _median_us(values) for name, values in times.items()}
    return result | judge.report()


class Judge:
    """Losses of both readings of the scores, over the batches in which the oracle drafts at all."""

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {pieces: [] for pieces in PIECES}
        self.batches, self.drafted, self.verified = 0, 0.0, 0.0

    def add(self, survival: Survival, requests: int, table: LatencyTable, best: Schedule) -> None:
        """Judge one batch against the oracle's `best`."""
        self.batches += 1
        found = {
            pieces: joint_schedule(rewards(survival), survival, requests, table, pieces=pieces)  # type: ignore[arg-type]
            for pieces in PIECES
        }
        if not best.total and not any(schedule.total for schedule in found.values()):
            return
        goodputs = {
            pieces: goodput_of(survival, schedule.lengths, schedule.budget, requests, table)
            for pieces, schedule in found.items()
        }
        reference = max(best.goodput, *goodputs.values())  # above 3 requests the oracle can be beaten
        for pieces in PIECES:
            self.losses[pieces].append(1 - goodputs[pieces] / reference)
        self.drafted += found["whole"].total / requests
        self.verified += found["whole"].budget / requests

    def report(self) -> dict[str, Any]:
        """Losses, and how much was drafted and verified a request where anything was."""
        drafting = len(self.losses["whole"])
        pairs = {pieces: _loss(values) for pieces, values in self.losses.items()}
        named = {pieces: {"goodput_loss_mean": m, "goodput_loss_max": w} for pieces, (m, w) in pairs.items()}
        return {
            **named["whole"],
            **named,
            "batches_judged": self.batches,
            "batches_that_draft": drafting,
            "drafted_per_request": round(self.drafted / max(drafting, 1), 3),
            "verified_per_request": round(self.verified / max(drafting, 1), 3),
        }


def small_batches(draw: Callable[[np.random.Generator, int], Survival], block: int, seed: int) -> dict[str, Any]:
    """Losses against brute force at 1 to 3 requests, where the reference is exact, over costs of 1 to 40% a token."""
    rng, judge = np.random.default_rng(seed), Judge()
    for _ in range(150):
        n = int(rng.integers(1, 4))
        survival = draw(rng, n)
        per_draft, per_verified = np.exp(rng.uniform(np.log(0.01), np.log(0.4), 2))
        tokens = range(1, n * (block + 1) + 1)
        table = LatencyTable.from_functions(
            partial(_line, 1.0, per_verified),
            partial(_line, 0.3, per_draft),
            requests=[1, 2, 3],
            verify_tokens=tokens,
            draft_tokens=tokens,
        )
        judge.add(survival, n, table, exhaustive(survival, n, table))
    return judge.report()


def run(requests: int = 192, block: int = 15, seed: int = 0, rounds: int = 300) -> dict[str, Any]:
    """The report: its top level speaks of recorded triangles where there are any, else of random ones.

    Keys ending in `_us_median` are microseconds. Losses are shares of the best goodput known: the oracle's (brute force
    up to 3 requests, above it the knapsack of `wcs.oracle`, which ignores what its docstring says), or what either
    reading of the scores found where that is more; over batches that draft, at the token costs of `TOKEN_COSTS`.
    """
    if requests < 1 or block < 1 or rounds < 1:
        raise ValueError(f"requests, block and rounds must be 1 or more, not {requests}, {block}, {rounds}")
    sets: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # synthetic tables end somewhere
        random = measure(lambda rng: random_triangles(rng, requests, block), requests, block, seed, rounds)
        random["triangles"] = "random: independent logits, N(0.5, 1.5)"
        random["small_batches"] = small_batches(lambda rng, n: random_triangles(rng, n, 4), 4, seed)
        sets["random"] = random
        recorded = load_recorded()
        if recorded is not None:
            logits, _ = recorded
            survival, done = fit_block(triangle_to_survival(logits), block)

            def draw(rng: np.random.Generator, n: int = requests) -> Survival:
                return survival[rng.integers(0, len(survival), n)]

            sets["recorded"] = measure(draw, requests, block, seed, rounds)
            sets["recorded"]["triangles"] = f"{len(logits)} of SmolLM2-135M and its drafter{done}"
            sets["recorded"]["small_batches"] = small_batches(draw, block, seed)
    top = sets.get("recorded", sets["random"])
    head = ("decide_us_median", "np_sort_us_median", "oracle_us_median", "goodput_loss_mean", "goodput_loss_max")
    return {
        "requests": requests,
        "block": block,
        **{key: top[key] for key in head},
        "triangles": top["triangles"],
        "table": "synthetic, after SGLang's numbers for Qwen3-14B",
        **sets,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `forespark bench scheduler`."""
    parser.add_argument("--requests", type=int, default=192, help="requests in the batch (default: %(default)s)")
    parser.add_argument("--block", type=int, default=15, help="longest draft K (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random triangles (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=300, help="timings of each kind (default: %(default)s)")


def main(args: argparse.Namespace) -> dict[str, Any]:
    """`run` with the parsed options."""
    return run(args.requests, args.block, args.seed, args.rounds)


def _line(start: float, slope: float, requests: int, tokens: int) -> float:
    return start + slope * tokens


def _rows(survival: Survival, lengths: npt.NDArray[np.int64]) -> Survival:
    rows = survival[np.arange(len(lengths)), np.maximum(lengths, 1) - 1]
    return np.where(lengths[:, None] > 0, rows, np.float32(0))


def _median_us(nanoseconds: list[int]) -> float | None:
    return round(float(np.median(nanoseconds)) / 1e3, 1) if nanoseconds else None


def _loss(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return round(float(np.mean(values)), 6) + 0.0, round(float(np.max(values)), 6) + 0.0  # no -0.0


if __name__ == "__main__":
    import json

    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    print(json.dumps(main(parser.parse_args()), indent=1))
