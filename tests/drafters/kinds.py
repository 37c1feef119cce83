"""Small random drafters of every kind, and contexts for them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from trtllm_forespark.drafters.base import DraftContext, Verified
from trtllm_forespark.drafters.block import BlockDrafter
from trtllm_forespark.drafters.calibration import Calibration
from trtllm_forespark.drafters.checkpoint import new_drafter
from trtllm_forespark.drafters.config import BlockConfig, DFlash2Config, DSparkConfig, LongSparkConfig
from trtllm_forespark.drafters.packing import Blocks
from trtllm_forespark.drafters.runner import BlockRunner, make_runner
from trtllm_forespark.models.kv import PagedKV

SHAPE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 90,
    "draft_vocab_size": 40,
    "block": 5,
    "capture_layers": (0, 2),
    "target_layers": 4,
    "estimator_rank": 16,
    "max_position": 256,
}
PAGE = 16
_DFLASH2 = DFlash2Config(**SHAPE, conv_group_size=8, selector_rank=8, selector_top_k=4)
_DSPARK = DSparkConfig(**SHAPE, markov_rank=6, candidates=4)
_LONGSPARK = LongSparkConfig(**SHAPE, markov_rank=6, candidates=4, kv_layers=(1, 3), window=12, summary_rows=3)
KINDS: dict[str, BlockConfig] = {
    "dflash2": _DFLASH2,
    "dflash2-causal": dataclasses.replace(_DFLASH2, causal=True),
    "dspark": _DSPARK,
    "dspark-causal": dataclasses.replace(_DSPARK, causal=True),
    "dspark-extra-slot": dataclasses.replace(_DSPARK, sample_from_anchor=False),
    "dspark-gated": dataclasses.replace(_DSPARK, markov_head_type="gated"),
    "dspark-rnn": dataclasses.replace(_DSPARK, markov_head_type="rnn"),
    "longspark": _LONGSPARK,
    "longspark-causal": dataclasses.replace(_LONGSPARK, causal=True),
    "longspark-no-summary": dataclasses.replace(_LONGSPARK, views=("boundary", "window")),
    "longspark-no-boundary": dataclasses.replace(_LONGSPARK, views=("window", "summary")),
    "longspark-no-window": dataclasses.replace(_LONGSPARK, views=("boundary", "summary")),
}


def random_drafter(config: BlockConfig, std: float = 0.3, seed: int = 0) -> BlockDrafter:
    torch.manual_seed(seed)
    model = new_drafter(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
        model.d2t.copy_(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    return model


class World:
    """A runner of one kind, the target's keys and values it may read, and texts' features to fill contexts with."""

    def __init__(self, config: BlockConfig, num_pages: int = 24, seats: int = 8, seed: int = 0) -> None:
        model = random_drafter(config, seed=seed)
        self.config, self.embedding = config, torch.randn(config.vocab_size, config.hidden_size)
        self.head = torch.randn(config.vocab_size, config.hidden_size)
        calibration = Calibration.identity(config.block, config.estimator_outputs)
        self.runner: BlockRunner = make_runner(model, calibration, self.embedding, self.head, PAGE, torch.float32)
        self.kv = PagedKV(config.target_layers, num_pages, PAGE, config.num_kv_heads, config.head_dim)
        self.runner.begin(num_pages, seats, self.kv)

    def texts(self, lengths: list[int], seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(features [T, L, H], keys and values [layers, 2, T, kv_heads, d]) of each."""
        generator = torch.Generator().manual_seed(seed)
        c = self.config
        return [
            (
                torch.randn(n, len(c.capture_layers), c.hidden_size, generator=generator),
                torch.randn(c.target_layers, 2, n, c.num_kv_heads, c.head_dim, generator=generator),
            )
            for n in lengths
        ]

    def table(self, lengths: list[int]) -> np.ndarray:
        """Pages handed out in turns, so that no request's lie together."""
        n, most = len(lengths), max(-(-length // PAGE) for length in lengths)
        return np.ascontiguousarray(np.arange(n * most).reshape(most, n).T)

    def append(self, seat: int, text, pages: np.ndarray, start: int, end: int) -> None:
        """Tokens [start, end) of a text, as a target pass and a commit would leave them."""
        positions = torch.arange(start, end)
        slots = torch.from_numpy(pages)[positions // PAGE] * PAGE + positions % PAGE
        features, kv = text
        for layer in range(self.config.target_layers):
            self.kv.write(layer, slots, kv[layer, 0, start:end], kv[layer, 1, start:end])
        self.runner.append(Verified(features[start:end], positions, slots, np.full(end - start, seat)))

    def fill(self, lengths: list[int], seed: int = 1) -> tuple[DraftContext, np.ndarray]:
        table = self.table(lengths)
        for i, text in enumerate(self.texts(lengths, seed)):
            self.append(i, text, table[i], 0, lengths[i])
        generator = torch.Generator().manual_seed(seed + 1)
        anchors = torch.randint(0, self.config.vocab_size, (len(lengths),), generator=generator)
        return DraftContext(anchors, torch.tensor(lengths), torch.arange(len(lengths))), table

    def hidden(self, context: DraftContext, lengths, table) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of packed blocks and each slot's in-block index."""
        at = Blocks.of(np.asarray(lengths), self.runner.spec.anchor_slots)
        return self.runner.hidden(context, at, table), torch.from_numpy(at.index)


def rows(context: DraftContext, which: list[int]) -> DraftContext:
    return DraftContext(*(getattr(context, f.name)[which] for f in dataclasses.fields(context)))
