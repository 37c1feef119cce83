"""Joint training of a block drafter and both estimators (§4.5, appendix A; LongSpark §2.4)."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.checkpoint import new_drafter
from trtllm_forespark.drafters.config import BlockConfig, LongSparkConfig
from trtllm_forespark.training.blocks import AnchorBatch, TargetKV, draft_hidden, sample_anchors, views
from trtllm_forespark.training.features import FeatureStore, FeatureStores, draft_vocabulary
from trtllm_forespark.training.losses import Targets, binary_cross_entropy, draft_loss
from trtllm_forespark.training.state import load_state, save_state


@dataclass(frozen=True)
class TrainSettings:
    """minutes: training time over all resumed runs; the cosine schedule follows it. total_anchors: where given, the run
    ends, and the schedule goes, by anchors instead, so that it is the same on any machine. texts, anchors: a step's
    batch.

    ce_share: share of the run trained on cross-entropy alone before 0.1 CE + 0.9 TV (total variation has no gradient
    where the drafter gives a token no probability). held: texts at the first store's start kept for validation.
    lambda_pre, lambda_post: weights of the estimators' losses. dtype: float32, or bfloat16 for the products (weights,
    losses and Adam's moments stay float32). lengths: of the drafts that train the drafter; "full" is the paper's
    (always K), with "varied" every second step's are as long as its row of the triangle: cheaper, and as served.
    """

    minutes: float = 60.0
    total_anchors: int | None = None
    texts: int = 4
    anchors: int = 32
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    ce_share: float = 0.4
    lambda_pre: float = 1.0
    lambda_post: float = 0.1
    held: int = 64
    seed: int = 0
    dtype: str = "float32"
    lengths: str = "full"
    log_every: int = 50
    save_every: int = 500

    def __post_init__(self) -> None:
        if self.total_anchors is not None and self.total_anchors < 1:
            raise ValueError(f"total_anchors {self.total_anchors}: give 1 or more")


@dataclass(frozen=True)
class StepResult:
    losses: dict[str, float]
    matched: torch.Tensor
    valid: torch.Tensor
    anchors: int


@dataclass
class Progress:
    """How far a run is, over all its resumptions. seconds of training, anchors trained on."""

    step: int = 0
    seconds: float = 0.0
    anchors: int = 0


def lengths_of(step: int, block: int, lengths: str) -> tuple[int, int]:
    """(row of the pre-draft triangle, tokens of the drafts that train the drafter) of a step.

    The rows go K, 1, …, K - 1 (§4.5); with "varied" K comes every second step, the others in turn.
    """
    if lengths == "full":
        return step % block or block, block
    if lengths != "varied":
        raise ValueError(f"lengths must be 'full' or 'varied', not {lengths!r}")
    row = block if step % 2 == 0 or block == 1 else step // 2 % (block - 1) + 1
    return row, row


class Trainer:
    """Holds a model, its optimiser and a store; `run` trains until the minutes are used or a signal comes."""

    def __init__(
        self,
        config: BlockConfig,
        settings: TrainSettings,
        stores: list[FeatureStore],
        embedding: torch.Tensor,
        head: torch.Tensor,
        final_norm: torch.Tensor,
        output: Path,
        start: BlockDrafter | None = None,
        target_kv: TargetKV | None = None,
    ) -> None:
        """embedding [V, H], head [V, H] and final_norm [H] of the target; float32, on the CPU. start: a trained drafter
        of the same configuration whose weights and draft vocabulary a new run takes over. target_kv: for a drafter that
        reads the target's keys and values."""
        for store in stores:
            if store.layers != config.capture_layers:
                raise ValueError(
                    f"{store.folder} holds layers {store.layers}, the drafter reads {config.capture_layers}"
                )
        if isinstance(config, LongSparkConfig):
            for layer in config.kv_layers:
                if layer and layer - 1 not in config.capture_layers:
                    raise ValueError(f"kv layer {layer}: training needs layer {layer - 1} captured, which is its input")
        self.settings, self.store, self.output = settings, FeatureStores(stores), Path(output)
        self.output.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(settings.seed)
        self.model = new_drafter(config)
        self.embedding, self.target_kv = embedding, target_kv
        if start is None:
            self._initialise(final_norm)
        elif start.config == config:
            self.model.load_state_dict(start.state_dict())
        else:
            differ = [name for name, value in asdict(config).items() if value != asdict(start.config)[name]]
            raise ValueError(f"the drafter to start from differs in {', '.join(differ)}")
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.progress = Progress(**(load_state(self.output, self.model, self.optimizer) or {}))
        self.head = head[self.model.d2t].to(getattr(torch, settings.dtype))
        self.t2d = torch.full((config.vocab_size,), -1).index_put((self.model.d2t,), torch.arange(len(self.model.d2t)))

    def _initialise(self, final_norm: torch.Tensor) -> None:
        """Start near the target: fc reads the last captured layer, every layer scaled to unit RMS; its final norm."""
        model, config = self.model, self.model.config
        hidden = config.hidden_size
        sample = np.concatenate(
            [self.store[i].hidden[4:].astype(np.float32) for i in range(min(16, self.store.finished()))]
        )
        scale = torch.from_numpy(1.0 / np.sqrt((sample**2).mean((0, 2))))
        with torch.no_grad():
            kept = {model.fc, getattr(model, "input_projection", None)}
            for module in model.modules():
                if isinstance(module, torch.nn.Linear) and module not in kept and module.weight.abs().sum() > 0:
                    module.weight.normal_(std=module.in_features**-0.5 * 0.5)
            weight = model.fc.weight.view(hidden, -1, hidden)
            weight.normal_(std=0.02)
            weight *= scale[None, :, None]
            weight[:, -1] += torch.eye(hidden) * scale[-1]
            model.norm.weight.copy_(final_norm)
            model.mask_embedding.copy_(self.embedding.mean(0))
            model.pre_draft_estimator.output.weight.zero_()
            for name in ("post_draft_estimator.output", "confidence_head.proj"):
                if name.split(".")[0] in model._modules:
                    model.get_submodule(name).weight.zero_()  # type: ignore[operator]
        vocabulary = draft_vocabulary(self.store.stores, config.draft_vocab_size, config.vocab_size)
        model.d2t.copy_(torch.from_numpy(vocabulary))

    # One step ---------------------------------------------------------------------------------------------------

    def targets(self, batch: AnchorBatch, length: int, every: int = 1) -> Targets:
        labels = batch.labels[::every, :length]
        return Targets(
            label=torch.where(labels >= 0, self.t2d[labels.clamp(min=0)], -1),
            valid=labels >= 0,
            top_ids=self.t2d[batch.top_ids[::every, :length]],
            top_probs=batch.top_probs[::every, :length],
            previous=batch.previous[::every, :length],
        )

    def forward(
        self, batch: AnchorBatch, length: int, total_variation: float, drafted: int | None = None
    ) -> tuple[torch.Tensor, StepResult]:
        """Loss of one batch; ``length`` is the row d of the pre-draft triangle this step trains, ``drafted`` (K) how
        many tokens the drafts have that train the drafter."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return self._forward(batch, length, total_variation, drafted or self.model.config.block)

    def _forward(
        self, batch: AnchorBatch, length: int, total_variation: float, drafted: int
    ) -> tuple[torch.Tensor, StepResult]:
        model = self.model
        seen = views(model, batch, self.target_kv, self.embedding)
        embeddings = self.embedding[batch.anchor_tokens]
        hidden = draft_hidden(model, batch, seen, embeddings, drafted)
        targets = self.targets(batch, drafted)
        draft = draft_loss(model, hidden, self.head, targets, total_variation)
        post_logits = model.post_logits(hidden, targets.previous)
        post = binary_cross_entropy(post_logits, draft.acceptance, targets.valid.float())

        # Row d of the triangle is labelled by drafts of exactly d tokens (a shorter draft is another proposal).
        # A directional drafter's rows are prefixes of row K, so one length labels all.
        alpha, valid, every = draft.acceptance, targets.valid, 1
        if length < drafted and not model.config.causal:
            every = 4
            with torch.no_grad():
                short = draft_hidden(model, batch, seen, embeddings, length, every)
                short_targets = self.targets(batch, length, every)
                alpha, valid = draft_loss(model, short, self.head, short_targets, 1.0).acceptance, short_targets.valid
        logits = model.pre_draft_estimator(seen.boundary.detach()[::every], embeddings[::every])
        if model.config.causal:
            logits = logits[:, :drafted]
        else:
            start = length * (length - 1) // 2
            logits = logits[:, start : start + length]
        pre = binary_cross_entropy(logits, alpha, valid.float())

        loss = draft.loss + self.settings.lambda_pre * pre + self.settings.lambda_post * post
        losses = {"draft": draft.loss.item(), "pre": pre.item(), "post": post.item()}
        return loss, StepResult(losses, draft.matched, targets.valid, len(batch.anchor_tokens))

    @property
    def share(self) -> float:
        """How much of the run is done."""
        settings, progress = self.settings, self.progress
        if settings.total_anchors is not None:
            return progress.anchors / settings.total_anchors
        return progress.seconds / (60.0 * settings.minutes) if settings.minutes else 1.0

    def step(self) -> StepResult:
        settings, step = self.settings, self.progress.step
        rng = np.random.default_rng((settings.seed, step))
        available = self.store.finished() - settings.held
        if available < settings.texts:
            folders = ", ".join(str(store.folder) for store in self.store.stores)
            raise ValueError(
                f"{folders}: {self.store.finished()} finished texts; training needs at least "
                f"{settings.held} to validate on and {settings.texts} to train on"
            )
        texts = [self.store[settings.held + i] for i in rng.choice(available, settings.texts, replace=False)]
        batch = sample_anchors(texts, settings.anchors, self.model.config.block, rng)
        block = self.model.config.block
        share = self.share
        length, drafted = lengths_of(step, block, settings.lengths)
        loss, result = self.forward(batch, length, 0.9 if share >= settings.ce_share else 0.0, drafted)
        rate = settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
        rate *= 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {step}: the gradient is {norm.item()}; lower --learning-rate")
        self.optimizer.step()
        return result

    # The run ----------------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, Any]:
        """Teacher-forced greedy match on the held texts, by position, given that the positions before matched."""
        rng = np.random.default_rng(1)
        block = self.model.config.block
        reached, kept = torch.zeros(block), torch.zeros(block)
        with torch.no_grad():
            for start in range(0, self.settings.held, 4):
                texts = [self.store[i] for i in range(start, min(start + 4, self.settings.held))]
                _, result = self.forward(sample_anchors(texts, 16, block, rng), block, 1.0)
                chain = (result.matched & result.valid).cumprod(1).bool()
                before = torch.cat([result.valid[:, :1], chain[:, :-1] & result.valid[:, 1:]], 1)
                reached += before.sum(0)
                kept += (chain & before).sum(0)
        conditional = (kept / reached.clamp(min=1)).tolist()
        length = 1.0 + float(np.cumprod(conditional).sum())
        return {"acceptance_length": round(length, 4), "conditional": [round(c, 4) for c in conditional]}

    def run(self, report: Callable[[dict], None] = lambda line: None) -> dict[str, Any]:
        """Train until ``minutes`` are used up (over resumed runs); every line of the log also goes to ``report``."""
        stop: list[int] = []
        previous = {
            s: signal.signal(s, lambda number, frame: stop.append(number)) for s in (signal.SIGINT, signal.SIGTERM)
        }
        progress, settings = self.progress, self.settings
        started, base = time.monotonic(), progress.seconds
        window: list[StepResult] = []
        anchors_before, seconds_before = progress.anchors, progress.seconds
        (self.output / "settings.json").write_text(
            json.dumps({"train": asdict(settings), "drafter": self.model.config.asdict()}, indent=1)
        )
        try:
            while self.share < 1.0 and not stop:
                window.append(self.step())
                progress.step += 1
                progress.anchors += window[-1].anchors
                progress.seconds = base + time.monotonic() - started
                if progress.step % settings.log_every == 0:
                    line = self._summary(window)
                    line["anchors_per_second"] = round(
                        (progress.anchors - anchors_before) / (progress.seconds - seconds_before), 1
                    )
                    anchors_before, seconds_before, window = progress.anchors, progress.seconds, []
                    if progress.step % settings.save_every == 0:
                        line["held"] = self.validate()
                        save_state(self.output, self.model, self.optimizer, asdict(progress))
                    self._log(line, report)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        save_state(self.output, self.model, self.optimizer, asdict(progress))
        final = {
            "step": progress.step,
            "seconds": round(progress.seconds, 1),
            "anchors": progress.anchors,
            "held": self.validate(),
            "interrupted": bool(stop),
        }
        self._log(final, report)
        return final

    def _summary(self, window: list[StepResult]) -> dict[str, Any]:
        block = self.model.config.block
        matched, valid = (
            torch.cat([F.pad(getattr(r, name), (0, block - r.valid.shape[1])) for r in window])
            for name in ("matched", "valid")
        )
        share = (matched.float() * valid).sum(0) / valid.sum(0).clamp(min=1)
        return {
            "step": self.progress.step,
            "seconds": round(self.progress.seconds, 1),
            "anchors": self.progress.anchors,
            "texts": self.store.finished(),
            **{name: round(float(np.mean([r.losses[name] for r in window])), 4) for name in window[0].losses},
            "matched": [round(s, 3) for s in share.tolist()],
        }

    def _log(self, line: dict, report: Callable[[dict], None]) -> None:
        with (self.output / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        report(line)
