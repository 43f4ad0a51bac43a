"""Runs llama-like models through torch with joined weights, on any device: a step's tokens in, logits out.

It computes the same as transformers' code with fewer, larger operations: one matrix for q, k and v, one for gate and
up, rotary tables instead of frequencies, and only the logits that are needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

from serve_app.engine.config import EngineSettings
from serve_app.engine.models import quantize
from serve_app.engine.models.kv_cache import KVCache, LayerShape
from serve_app.engine.models.llama_weights import LlamaLayer, LlamaWeights, Weight
from serve_app.engine.models.paged_attention import PagedStep, Scores, pack
from serve_app.engine.models.quantize import Int8Weight
from serve_app.engine.models.rope import RopeTable
from serve_app.engine.scheduling.sequence import Chunk


class TorchRunner:
    """A llama-like decoder with its KV cache; a `core.Runner`.

    Every layer computes on the device of its weights, and activations are moved there. Activations have the type
    `settings.compute_dtype`, and so do all weights except int8 matrices and the embedding.
    """

    def __init__(self, weights: LlamaWeights, table: RopeTable, settings: EngineSettings) -> None:
        """Reserve the cache.

        Raises:
            ModelError: there is no memory for it.
        """
        self._weights = weights
        self._table = table
        self._device = weights.embedding.device
        self._dtype: torch.dtype = getattr(torch, settings.compute_dtype)
        self._cos = table.cos.to(self._device, self._dtype)
        self._sin = table.sin.to(self._device, self._dtype)
        self.vocab_size = weights.head.shape[0]
        self.class_bounds = table.bounds
        stored = (weights.shape.kv_heads, weights.shape.head_dim)
        layers = {
            number: LayerShape(stored, stored, self._dtype, layer.input_norm.device)
            for number, layer in enumerate(weights.layers)
        }
        self.cache = KVCache.within(settings, layers, table.bounds[-1])
        self.num_blocks = self.cache.num_blocks

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self.cache.clear(blocks)

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        packed = pack(chunks)
        rows = [self._table.row(c, p) for c, p in zip(packed.classes, packed.positions, strict=True)]
        keep = None
        if packed.keep != list(range(len(rows))):
            keep = torch.tensor(packed.keep, device=self._device).long()
        logits = self._forward(
            torch.tensor(packed.token_ids, device=self._device),
            torch.tensor(rows, device=self._device),
            keep,
            PagedStep(self.cache, packed.chunks),
        )
        return logits.float()

    def _forward(
        self, ids: torch.Tensor, rope_rows: torch.Tensor, keep: torch.Tensor | None, step: PagedStep
    ) -> torch.Tensor:
        """Logits (n, vocabulary) of the rows in `keep` (n,), in the type of activations; None keeps all rows.

        `ids` (T,) and `rope_rows` (T,), the rows of the rope table, are on the embedding's device, and so is `keep`.
        After the last layer's attention, only the rows in `keep` are computed.
        """
        weights = self._weights
        cos, sin = self._cos.index_select(0, rope_rows), self._sin.index_select(0, rope_rows)
        rotation = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        x = F.embedding(ids, weights.embedding).to(self._dtype)
        last = len(weights.layers) - 1
        for number, layer in enumerate(weights.layers):
            device = layer.input_norm.device
            x, rotation = x.to(device), (rotation[0].to(device), rotation[1].to(device))
            attended = self._attend(number, layer, x, rotation, step)
            if number == last and keep is not None:
                keep = keep.to(x.device)
                attended, x = attended.index_select(0, keep), x.index_select(0, keep)
            x = _add_linear(x, attended, layer.output, layer.output_bias)
            gate, up = _linear(self._norm(x, layer.post_norm), layer.gate_up, None).chunk(2, dim=-1)
            x = _add_linear(x, F.silu(gate) * up, layer.down, None)
        x = self._norm(x.to(weights.final_norm.device), weights.final_norm)
        return _linear(x.to(_device_of(weights.head)), weights.head, None)

    def _attend(
        self,
        number: int,
        layer: LlamaLayer,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep,
    ) -> torch.Tensor:
        shape = self._weights.shape
        heads, kv_heads = shape.heads, shape.kv_heads
        joined = _linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias).unflatten(-1, (-1, shape.head_dim))
        v = joined[:, heads + kv_heads :]
        if layer.q_norm is None or layer.k_norm is None:
            qk = _rotate(joined[:, : heads + kv_heads], *rotation)
            q, k = qk[:, :heads], qk[:, heads:]
        else:
            q = _rotate(self._norm(joined[:, :heads], layer.q_norm), *rotation)
            k = _rotate(self._norm(joined[:, heads : heads + kv_heads], layer.k_norm), *rotation)
        attended = step.attend(number, q, k, v, Scores(shape.head_dim**-0.5, shape.windows[number]))
        return attended.flatten(1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._weights.shape.norm_eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate (T, heads, size) by position: bit for bit `x * cos + rotate_half(x) * sin`, in fewer operations.

    `cos` and `signed_sin` are (T, 1, size); the latter is the sine, negated in the first half.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(weight, Int8Weight):
        return F.linear(x, weight, bias)
    product = quantize.linear(x, weight)
    return product if bias is None else product + bias


def _add_linear(x: torch.Tensor, y: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` plus a linear layer's output for `y`: one operation, unless there is a bias or the weight is int8."""
    if bias is None and not isinstance(weight, Int8Weight):
        return torch.addmm(x, y, weight.t())
    return x + _linear(y, weight, bias)


def _device_of(weight: Weight) -> torch.device:
    return weight.values.device if isinstance(weight, Int8Weight) else weight.device
