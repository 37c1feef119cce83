"""The step loop: continuous batching around the four stages of work-conserving speculation.

`Executor.step` is the whole decode step: estimate, schedule, draft, distribute, then verify and commit. The policy
behind the controller decides lengths and budget; nothing here asks which one runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from trtllm_forespark.runtime.backends.base import Backend, DraftBatch, TargetBatch
from trtllm_forespark.runtime.batch import BatchScheduler, Preempted, StepWork, known_tokens, prefill_goal
from trtllm_forespark.runtime.kv_cache import KVCacheManager
from trtllm_forespark.runtime.metrics import Metrics
from trtllm_forespark.runtime.noise import Streams
from trtllm_forespark.runtime.penalties import shape_logits
from trtllm_forespark.runtime.request import Request, Status, cut
from trtllm_forespark.runtime.sampling import Proposing, SamplingRows
from trtllm_forespark.runtime.verify import Verified, verify
from trtllm_forespark.wcs.controller import WcsController
from trtllm_forespark.wcs.stages import Draft, Estimate, Outcome, Plan, Selection


@dataclass(frozen=True)
class ExecutorConfig:
    """max_batch_size: requests that run at once. max_num_tokens: N + B of a step at most. seed: of the unseeded
    requests' random streams, None takes entropy. max_passed_over: steps in a row that a request which may draft is left
    without a draft while others draft; then it gets one token at least. 0: no bound."""

    max_batch_size: int = 64
    max_num_tokens: int = 1024
    seed: int | None = None
    max_passed_over: int = 0

    def __post_init__(self) -> None:
        bound = self.max_passed_over
        if not isinstance(bound, int) or isinstance(bound, bool) or bound < 0:
            raise ValueError(
                f"ExecutorConfig.max_passed_over = {bound!r}: must be an integer >= 0; give 0 for no bound"
            )


class Executor:
    """Runs requests to their end on one backend under one controller; single-threaded, one call a step."""

    def __init__(self, backend: Backend, controller: WcsController, config: ExecutorConfig | None = None) -> None:
        self.backend, self.controller = backend, controller
        self.config = config or ExecutorConfig()
        self.block = backend.spec.block if backend.spec else 0
        self.drafts = backend.spec is not None and controller.policy.needs_drafter
        self.scheduler = BatchScheduler(
            KVCacheManager(backend.num_pages, backend.page_size),
            self.config.max_batch_size,
            self.config.max_num_tokens,
            backend.max_seq_len,
        )
        self.requests: dict[object, Request] = {}
        self.streams = Streams.new(backend.device, self.config.seed)
        self.metrics = Metrics()

    # Requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that can never run; the others are not touched."""
        request.check_fits(self.backend.max_seq_len, self.backend.vocab_size)
        if request.id in self.requests:
            raise ValueError(f"request id {request.id!r} is in use; ids must be unique among open requests")
        need = self.scheduler.pages_needed(request)
        if need > self.backend.num_pages:
            raise ValueError(
                f"request {request.id!r} may grow to {need * self.backend.page_size} tokens, the KV cache holds "
                f"{self.backend.num_pages * self.backend.page_size}; lower max_tokens or raise the cache size"
            )
        self.requests[request.id] = request
        self.scheduler.add(request)

    def cancel(self, request_id: object) -> bool:
        """End a request now; False where it is not open."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "cancelled")
        return True

    def preempt(self, request_id: object) -> bool:
        """Send a running request back to the queue, to go on later with the same text; False where it does not run."""
        request = self.requests.get(request_id)
        if request is None or request not in self.scheduler.seats:
            return False
        self._give_up(self.scheduler.preempt(request))
        return True

    @property
    def idle(self) -> bool:
        return not self.requests

    def run(self, on_step: Callable[[], None] | None = None) -> None:
        """Step until no request is open."""
        while not self.idle:
            self.step()
            if on_step:
                on_step()

    # The step ----------------------------------------------------------------------------------------------------

    def step(self) -> StepWork:
        """One decode step (ForeSpark §4): four stages, then the target's verdict."""
        return self._run(self.scheduler.next_step())

    def prefill_step(self) -> StepWork:
        """A step for prompts alone; who has a first token waits (the barrier of decode-only benchmarks)."""
        return self._run(self.scheduler.next_step(decode=False))

    def _run(self, work: StepWork) -> StepWork:
        started, before = time.perf_counter(), dict(self.metrics.seconds)
        for preempted in work.preempted:
            self._give_up(preempted)
        if not work:
            return work
        stage = self.metrics.stage
        with stage("pre_draft"):
            estimate = self.pre_draft_estimate(work)
        with stage("schedule"):
            plan = self.joint_schedule(work, estimate)
        with stage("draft"):
            draft = self.draft(work, plan)
        with stage("distribute"):
            selection = self.distribute(work, plan, draft)
        with stage("verify"):
            verified = self.verify(work, draft, selection)
            outcome = verified.outcome()  # waits for the device
        if work.decoding:
            self.controller.observe([r.key for r in work.decoding], draft, selection, outcome, plan)
        self.commit(work, draft, selection, verified, outcome)
        took, spent = time.perf_counter() - started, {n: s - before[n] for n, s in self.metrics.seconds.items()}
        self.metrics.seconds["other"] += took - sum(spent.values())
        n = len(work.decoding)
        self.controller.timed(
            plan,
            selection,
            work.num_tokens,
            tokens=n + int(np.asarray(outcome.accepted)[:n].sum()),
            draft=spent["draft"],
            verify=spent["verify"],
            whole=took,
            look=spent["pre_draft"] + spent["schedule"],
        )
        return work

    def pre_draft_estimate(self, work: StepWork) -> Estimate | None:
        """Stage 1: what every candidate length would yield for each decoding request (eq. 2-3)."""
        n = len(work.decoding)
        if n == 0 or not self.controller.policy.needs_estimate:
            return None
        if not any(r.speculation.min_draft for r in work.decoding) and self.controller.rests(n):
            return None
        return self.backend.estimate(self._draft_batch(work))

    def joint_schedule(self, work: StepWork, estimate: Estimate | None) -> Plan:
        """Stage 2: draft lengths and verification budget together (eq. 4)."""
        if estimate is None and self.controller.policy.needs_estimate:
            return self.controller.nothing(len(work.decoding))
        longest = np.array([self._longest_draft(r) for r in work.decoding], np.int64)
        limits = self.scheduler.draft_room(work.decoding, longest)
        spare = max(self.config.max_num_tokens - work.num_tokens, 0)
        if spare == 0:
            limits[:] = 0  # prompts fill the step: nothing could be verified
        plan = self.controller.plan(
            [r.key for r in work.decoding],
            estimate,
            limits,
            work.num_tokens,
            spare,
            floors=self._floors(work),
            overdue=self._overdue(work),
            context=sum(r.num_computed_tokens for r in work.decoding) // max(len(work.decoding), 1),
        )
        drafts = np.asarray(plan.draft_lengths)
        if drafts.any():
            for request, length, limit in zip(work.decoding, drafts.tolist(), limits.tolist(), strict=True):
                request.passed_over = 0 if length else request.passed_over + (limit > 0)
        return plan

    def draft(self, work: StepWork, plan: Plan) -> Draft:
        """Stage 3: one packed pass over the blocks of the requests that draft (§4.4)."""
        lengths = np.asarray(plan.draft_lengths)
        if not lengths.any():
            return no_draft(len(work.decoding), self.block)
        propose = Proposing(SamplingRows.of(work.decoding, self.backend.device), self.streams.draft)
        return self.backend.draft(self._draft_batch(work), lengths.tolist(), propose)

    def distribute(self, work: StepWork, plan: Plan, draft: Draft) -> Selection:
        """Stage 4: the budget goes to the positions most likely to survive (eq. 5), prefixes of every draft."""
        greedy = all(r.params.greedy for r in work.decoding)
        return self.controller.select(plan, draft, work.num_tokens, greedy)

    def verify(self, work: StepWork, draft: Draft, selection: Selection) -> Verified:
        """The target reads N + B tokens in one packed pass and accepts losslessly (docs/lossless.md)."""
        verified = np.asarray(selection.verified_lengths).tolist()
        tokens, starts = draft.token_ids.tolist(), draft.cu_lengths.tolist()
        ids: list[int] = []
        positions: list[int] = []
        cu = [0]
        logits_at: list[int] = []
        for request, b, start in zip(work.decoding, verified, starts, strict=False):
            first = request.num_computed_tokens
            self._reserve(request, first + 1 + b)
            logits_at.extend(range(len(ids), len(ids) + 1 + b))
            ids += [
                request.output_ids[-1] if request.output_ids else request.prompt_ids[-1],
                *tokens[start : start + b],
            ]
            positions.extend(range(first, first + 1 + b))
            cu.append(len(ids))
        for chunk in work.chunks:
            ids += known_tokens(chunk.request)[chunk.start : chunk.start + chunk.count]
            positions.extend(range(chunk.start, chunk.start + chunk.count))
            cu.append(len(ids))
            if chunk.last:
                logits_at.append(len(ids) - 1)
        everyone = [*work.decoding, *(chunk.request for chunk in work.chunks)]
        tables = self.scheduler.cache.page_table([r.id for r in everyone])
        seats = [self.scheduler.seats[r] for r in everyone]
        logits = self.backend.forward(TargetBatch(ids, positions, cu, tables, logits_at, seats), self.drafts)
        sampled = [*work.decoding, *(chunk.request for chunk in work.chunks if chunk.last)]
        extra = len(sampled) - len(work.decoding)
        all_verified = torch.tensor(verified + [0] * extra, dtype=torch.int64)
        padded = replace(draft, cu_lengths=torch.cat([draft.cu_lengths, draft.cu_lengths[-1:].expand(extra)]))
        logits = shape_logits(logits, sampled, verified + [0] * extra, padded)
        rows = SamplingRows.of(sampled, self.backend.device)
        return verify(padded, all_verified, logits, rows, self.streams.verify)

    def commit(self, work: StepWork, draft: Draft, selection: Selection, verified: Verified, outcome: Outcome) -> None:
        """Hand out tokens, keep what was accepted in the caches, end what is at its end."""
        accepted, failed = verified.accepted.tolist(), verified.failed.tolist()
        drafted = draft.cu_lengths.diff().tolist()
        n = len(work.decoding)
        budget = np.asarray(selection.verified_lengths).tolist()
        sampled = [*work.decoding, *(chunk.request for chunk in work.chunks if chunk.last)]
        keys = [request.key for request in sampled]
        kept = [1 + a for a in accepted[:n]] + [chunk.count for chunk in work.chunks]
        if self.drafts:
            self.backend.commit(kept)
        for request, bad in zip(sampled, failed, strict=True):
            if bad:  # before any of its pages can go to another request
                self.backend.clear(self.scheduler.cache.pages(request.id))
        for request, count in zip([*work.decoding, *(c.request for c in work.chunks)], kept, strict=True):
            request.num_computed_tokens += count
            if request.status is Status.DECODE:  # pages only rejected drafts reached go back; a prompt keeps its own
                self.scheduler.cache.truncate(request.id, request.num_computed_tokens)
            if request.status is Status.PREFILL and request.num_computed_tokens == prefill_goal(request):
                request.status = Status.DECODE
        emitted, counted = 0, []
        for i, request in enumerate(sampled):
            if request.finished or request.key != keys[i]:  # a callback of this loop cancelled or preempted it
                if i < n:
                    counted.append(0)
                continue
            tokens, reason = cut(outcome.emitted[i], request, self.backend.max_seq_len)
            before = request.accepted
            if i < n:
                request.emit(tokens, drafted=drafted[i], verified=budget[i], accepted=accepted[i])
                counted.append(request.accepted - before)
                emitted += len(tokens)
            else:
                request.output_ids.extend(tokens)
            if failed[i] and reason is None:
                self._finish(request, "error", "the target's logits were not finite", tokens)
            elif reason is not None:
                self._finish(request, reason, new_tokens=tokens)
            elif tokens:
                self._deliver(request, tokens)
        if n:
            self.metrics.count(drafted, budget, counted, emitted)

    def check(self) -> None:
        """Integrity between steps: every open request is in one queue, and nothing else is held for any. Raises
        AssertionError."""
        self.scheduler.check()
        queued = [*self.scheduler.waiting, *self.scheduler.running]
        if len(queued) != len(self.requests) or any(self.requests.get(r.id) is not r for r in queued):
            raise AssertionError(f"{len(self.requests)} open requests, {len(queued)} queued or running")
        lost = self.controller.known - {r.key for r in self.scheduler.running}
        if lost:
            raise AssertionError(f"the controller remembers requests that do not run: {sorted(map(repr, lost))}")

    # Small parts -------------------------------------------------------------------------------------------------

    def _draft_batch(self, work: StepWork) -> DraftBatch:
        return DraftBatch(
            anchors=[r.output_ids[-1] for r in work.decoding],
            positions=[r.num_computed_tokens for r in work.decoding],
            page_table=self.scheduler.cache.page_table([r.id for r in work.decoding]),
            seats=[self.scheduler.seats[r] for r in work.decoding],
        )

    def _longest_draft(self, request: Request) -> int:
        """K, or less near max_tokens (the last token is the target's own), the context limit or the drafter's."""
        if self.backend.spec is None:
            return 0
        left = request.tokens_left(self.backend.max_seq_len) - 1
        return max(
            0,
            min(
                request.speculation.longest(self.block),
                left,
                self.backend.spec.max_position - 1 - request.num_computed_tokens,
            ),
        )

    def _floors(self, work: StepWork) -> npt.NDArray[np.int64] | None:
        """[n], draft tokens each request asks for at least; None where all leave that to the policy."""
        own = [r.speculation.min_draft for r in work.decoding]
        if all(floor is None for floor in own):
            return None
        return np.array([self.controller.policy.floor if f is None else f for f in own], np.int64)

    def _overdue(self, work: StepWork) -> npt.NDArray[np.bool_] | None:
        """[n], who was passed over as long as may be; None where nobody was."""
        bound = self.config.max_passed_over
        if not bound or all(r.passed_over < bound for r in work.decoding):
            return None
        return np.array([r.passed_over >= bound for r in work.decoding])

    def _reserve(self, request: Request, tokens: int) -> None:
        if not self.scheduler.cache.reserve(request.id, tokens):
            raise RuntimeError(f"request {request.id!r}: no page for token {tokens}, though its pages were promised")

    def _finish(
        self, request: Request, reason: str, error: str | None = None, new_tokens: list[int] | None = None
    ) -> None:
        if request in self.scheduler.seats:
            unproven = self.scheduler.unproven_pages(request)
            self._give_up(Preempted(request.key, self.scheduler.seats[request], unproven))
        request.finish(reason, error)  # type: ignore[arg-type]
        self.scheduler.release(request)
        del self.requests[request.id]
        self._deliver(request, new_tokens or [])
        request.callback = None

    def _give_up(self, gone: Preempted) -> None:
        """Nothing of a request that ended or was preempted stays with backend or controller."""
        self.backend.release(gone.seat)
        if gone.unproven:
            self.backend.clear(gone.unproven)
        self.controller.forget(gone.key)

    def _deliver(self, request: Request, tokens: list[int]) -> None:
        """Call a request's callback; one that raises ends its own request, never the step of the others."""
        if request.callback is None:
            return
        try:
            request.callback(request, tokens)
        except Exception as error:
            request.callback = None
            if not request.finished:
                self._finish(request, "error", f"its callback raised {error!r}")


def no_draft(n: int, block: int) -> Draft:
    """The draft of a step that drafts nothing."""
    none = torch.zeros(0, dtype=torch.int64)
    return Draft(
        none, torch.zeros(n + 1, dtype=torch.int64), none.view(0, 1), none.view(0, 1).float(), torch.zeros(n, block)
    )
