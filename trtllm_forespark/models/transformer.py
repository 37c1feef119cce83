"""The target: one packed, variable-length forward of a dense Llama or Qwen model over many requests' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from .attention import AttentionPlan
from .config import ModelConfig, rope_frequencies
from .kv import PagedKV
from .linear import Affine, GatedMLP, PackedLinear
from .loaders import WeightSource
from .norm import rms_norm

_MOST_TABULATED = 16384  # positions whose rotations are kept ready (4 MB in bfloat16 for heads of 64)


@dataclass(frozen=True)
class PackedBatch:
    """The tokens of a step, request i in rows `cu_lengths[i]:cu_lengths[i + 1]`.

    On the device: token_ids, positions, slots [T] int64. On the host: cu_lengths [n + 1]. plan: who sees which keys.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_lengths: np.ndarray
    plan: AttentionPlan

    @property
    def tokens(self) -> int:
        return int(self.cu_lengths[-1])

    @classmethod
    def build(
        cls,
        token_ids: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        lengths: Sequence[int] | np.ndarray,
        page_table: np.ndarray,
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> PackedBatch:
        """token_ids, positions: [T] packed; lengths: [n] tokens a request (0 allowed); page_table: [n, max_pages].

        Raises ValueError where the sizes disagree or a position lies past its request's pages.
        """
        tokens, where = np.asarray(token_ids, np.int64), np.asarray(positions, np.int64)
        counts, table = np.asarray(lengths, np.int64), np.asarray(page_table, np.int64)
        cu = np.concatenate([[0], np.cumsum(counts)])
        if tokens.shape != (cu[-1],) or where.shape != tokens.shape or table.ndim != 2 or len(table) != len(counts):
            raise ValueError(
                f"PackedBatch: token_ids {tokens.shape}, positions {where.shape}, lengths {counts.shape} summing to "
                f"{cu[-1]} and page_table {table.shape} do not describe one batch"
            )
        if where.size and where.max() >= table.shape[1] * page_size:
            raise ValueError(f"PackedBatch: position {where.max()} lies past {table.shape[1]} pages of {page_size}")
        request = np.repeat(np.arange(len(counts)), counts)
        slots = table[request, where // page_size] * page_size + where % page_size
        return cls(
            token_ids=torch.from_numpy(tokens).to(device),
            positions=torch.from_numpy(where).to(device),
            slots=torch.from_numpy(slots).to(device),
            cu_lengths=cu,
            plan=AttentionPlan(cu, where + 1, table, page_size, device),
        )


@dataclass(frozen=True)
class ForwardOutput:
    """In the model's dtype: logits [m, V] and hidden [m, H] (after the final norm) at the asked rows, features
    [T, captured, H]."""

    logits: torch.Tensor | None
    hidden: torch.Tensor | None
    features: torch.Tensor | None


class Rope:
    """Rotary positions: cosines and sines of a step's tokens, made once and used by every layer."""

    def __init__(self, frequencies: torch.Tensor, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        """frequencies: [dim / 2] float32."""
        self.frequencies, self.factor, self.dtype = frequencies, factor, dtype
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def tabulate(self, positions: int) -> None:
        """From now on no position >= ``positions`` will be asked for: keep all ready, unless that takes much memory."""
        self._table = None
        if positions <= _MOST_TABULATED:
            self._table = self.tables(torch.arange(positions, device=self.frequencies.device))

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos, sin [T, 1, dim]; the first half of sin is negated, as `rotate` needs it."""
        if self._table is not None:
            return self._table[0].index_select(0, positions), self._table[1].index_select(0, positions)
        angles = positions.to(torch.float32).unsqueeze(-1) * self.frequencies
        cos, sin = angles.cos().mul_(self.factor), angles.sin().mul_(self.factor)
        cos, sin = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)
        return cos.to(self.dtype), sin.to(self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [T, heads, dim] by a step's tables (halves as in Hugging Face checkpoints); a new tensor."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@dataclass
class _Layer:
    attention_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    mlp: GatedMLP


class PackedTransformer:
    """A dense decoder over packed tokens with paged keys and values. Inference only; call it under inference_mode."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Takes every tensor once from `weights`. Raises CheckpointError for a missing or misshaped one."""
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        frequencies, factor = rope_frequencies(config)
        self.rope = Rope(torch.tensor(frequencies, dtype=torch.float32, device=device), factor, dtype)
        c, eps = config, config.rms_norm_eps
        self._eps, self._scale = eps, c.head_dim**-0.5
        q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def take(name: str, *shape: int) -> torch.Tensor:
            return weights.take(name, shape).to(device=device, dtype=dtype)

        def linear(names: Sequence[tuple[str, int]], inputs: int, bias: bool) -> PackedLinear:
            weight = torch.cat([take(f"{name}.weight", rows, inputs) for name, rows in names])
            return PackedLinear(weight, torch.cat([take(f"{n}.bias", rows) for n, rows in names]) if bias else None)

        def affine(name: str, rows: int, inputs: int, bias: bool) -> Affine:
            return take(f"{name}.weight", rows, inputs), take(f"{name}.bias", rows) if bias else None

        self._embedding = take("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
        self.layers: list[_Layer] = []
        for index in range(c.num_layers):
            at = f"model.layers.{index}"
            attention, mlp = f"{at}.self_attn", f"{at}.mlp"
            self.layers.append(
                _Layer(
                    attention_norm=take(f"{at}.input_layernorm.weight", c.hidden_size),
                    qkv=linear(
                        [
                            (f"{attention}.q_proj", q_rows),
                            (f"{attention}.k_proj", kv_rows),
                            (f"{attention}.v_proj", kv_rows),
                        ],
                        c.hidden_size,
                        c.attention_bias,
                    ),
                    q_norm=take(f"{attention}.q_norm.weight", c.head_dim) if c.qk_norm else None,
                    k_norm=take(f"{attention}.k_norm.weight", c.head_dim) if c.qk_norm else None,
                    output=linear([(f"{attention}.o_proj", c.hidden_size)], q_rows, c.attention_output_bias),
                    mlp_norm=take(f"{at}.post_attention_layernorm.weight", c.hidden_size),
                    mlp=GatedMLP(
                        affine(f"{mlp}.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
                        affine(f"{mlp}.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
                        affine(f"{mlp}.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
                    ),
                )
            )
        self._final_norm = take("model.norm.weight", c.hidden_size)
        head = self._embedding if c.tie_word_embeddings else take("lm_head.weight", c.vocab_size, c.hidden_size)
        self._head = PackedLinear(head)

    def new_kv(self, num_pages: int, page_size: int) -> PagedKV:
        """Storage for this model's keys and values, in its dtype and on its device."""
        c = self.config
        return PagedKV(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [...] -> embeddings [..., H]."""
        return F.embedding(token_ids, self._embedding)

    def embedding_weight(self) -> torch.Tensor:
        """The embedding table [V, H] itself."""
        return self._embedding

    def final_norm_weight(self) -> torch.Tensor:
        """The final norm's weight [H]."""
        return self._final_norm

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, H] (after a final norm) -> logits [m, V]."""
        return self._head(hidden) if len(hidden) else hidden.new_zeros(0, self.config.vocab_size)

    def lm_head_weight(self) -> torch.Tensor:
        """The head's weight [V, H]: the embedding itself where tied; a copy where it is held packed only."""
        return self._embedding if self.config.tie_word_embeddings else self._head.weight()

    def linears(self) -> list[PackedLinear]:
        """Every matrix a pass multiplies by, in order, the head last (what `bench forward` times alone)."""
        per_layer = [(layer.qkv, layer.output, *layer.mlp.linears()) for layer in self.layers]
        return [linear for group in per_layer for linear in group] + [self._head]

    def warm(self, rows: int) -> None:
        """Every kind of product a pass over ``rows`` tokens makes, once (see `TorchBackend.warm`)."""
        layer, hidden = self.layers[0], self.config.hidden_size
        x = torch.zeros(rows, hidden, dtype=self.dtype, device=self.device)
        layer.qkv(x)
        attended = self.config.num_heads * self.config.head_dim
        layer.output(torch.zeros(rows, attended, dtype=self.dtype, device=self.device), add=x)
        layer.mlp(x, add=x)
        self.lm_head(x)

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's input [T, H] -> rotated queries and keys [T, heads + kv_heads, d], values [T, kv_heads, d]."""
        c, eps = self.config, self._eps
        heads, kv_heads = c.num_heads, c.num_kv_heads
        qkv = layer.qkv(rms_norm(x, layer.attention_norm, eps)).view(len(x), heads + 2 * kv_heads, c.head_dim)
        turned = qkv[:, : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            turned = torch.cat(
                (rms_norm(turned[:, :heads], layer.q_norm, eps), rms_norm(turned[:, heads:], layer.k_norm, eps)), 1
            )
        return rotate(turned, cos, sin), qkv[:, heads + kv_heads :]

    def keys_values(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (rotated) and values [T, kv_heads, d] of one layer from its input, the residual stream [T, H]."""
        turned, value = self._project(self.layers[layer], x.to(self.dtype), *self.rope.tables(positions))
        return turned[:, self.config.num_heads :], value

    @property
    def bytes(self) -> int:
        """Bytes of the weights held, the plain embedding table beside the packed head included."""
        plain = self._embedding.numel() * self._embedding.element_size()
        shared = self.config.tie_word_embeddings and not self._head.packed
        return sum(linear.bytes for linear in self.linears()) + (0 if shared else plain)

    def forward(
        self,
        batch: PackedBatch,
        kv: PagedKV,
        logits_at: torch.Tensor | None = None,
        capture: Sequence[int] = (),
    ) -> ForwardOutput:
        """Run a step: writes the tokens' keys and values to their slots, attends to everything each token sees.

        logits_at: [m] rows of the batch whose logits are wanted, None for none. capture: layer ids; feature id i is the
        output of layer i, the residual stream after it (`hidden_states[i + 1]` in transformers; for the last layer the
        state before the final norm). features[t, j] belongs to capture[j].
        """
        c, eps = self.config, self._eps
        hidden_size, tokens = c.hidden_size, batch.tokens
        bad = [layer for layer in capture if not 0 <= layer < c.num_layers]
        if bad:
            raise ValueError(f"forward: captured layers {bad} do not exist, the model has {c.num_layers}")
        features = (
            torch.empty(tokens, len(capture), hidden_size, dtype=self.dtype, device=self.device) if capture else None
        )
        x = self.embed(batch.token_ids)
        if tokens:
            cos, sin = self.rope.tables(batch.positions)
            rows = kv.rows(batch.slots)
            heads, dim = c.num_heads, c.head_dim
            for index, layer in enumerate(self.layers):
                turned, value = self._project(layer, x, cos, sin)
                kv.write_rows(index, rows, turned[:, heads:], value)
                out = batch.plan.attend(turned[:, :heads], kv, index, self._scale)
                x = layer.output(out.view(tokens, heads * dim), add=x)
                x = layer.mlp(rms_norm(x, layer.mlp_norm, eps), add=x)
                if features is not None and index in capture:
                    features[:, capture.index(index)] = x
        if logits_at is None:
            return ForwardOutput(None, None, features)
        hidden = rms_norm(x.index_select(0, logits_at), self._final_norm, eps)
        return ForwardOutput(self.lm_head(hidden), hidden, features)
