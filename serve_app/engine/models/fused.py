"""The forward pass of llama-like models over joined weights: a step's tokens in, logits out.

It computes what transformers' own code computes, with fewer and larger operations: one matrix for q, k and v, one for
gate and up, rotary tables instead of frequencies, logits of the wanted tokens alone. On GPUs, steps that only decode
are replayed from CUDA graphs (`cuda_graphs`). What needs a GPU has run on none yet.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own convention

from serve_app.engine.config import EngineSettings
from serve_app.engine.models import quantize
from serve_app.engine.models.attention import AttentionStep, PagedStep
from serve_app.engine.models.cuda_graphs import DecodeReplay, capture_cuda, plan_buckets
from serve_app.engine.models.kv_cache import KVCache, LayerShape
from serve_app.engine.models.llama import LlamaLayer, LlamaWeights, Weight
from serve_app.engine.models.packing import pack
from serve_app.engine.models.pointwise import PLAIN, Pointwise, compiled
from serve_app.engine.models.quantize import Int8Weight
from serve_app.engine.models.rope import RopeTable
from serve_app.engine.scheduling.sequence import Chunk


@dataclass(frozen=True, slots=True)
class Rotation:
    """A step's rotary factors on one device, each (T, 1, head size)."""

    cos: torch.Tensor
    signed_sin: torch.Tensor  # negative in the first half

    def to(self, device: torch.device) -> Rotation:
        """The same on another device."""
        if self.cos.device == device:
            return self
        return Rotation(self.cos.to(device), self.signed_sin.to(device))


class LlamaDecoder:
    """The decoder as a function of tensors; it keeps no state of sequences.

    Every layer computes on the device of its weights and activations follow. They are of type `dtype`, as all weights
    are but int8 matrices and the embedding.
    """

    def __init__(self, weights: LlamaWeights, table: RopeTable, dtype: torch.dtype) -> None:
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = dtype
        self._cos = table.cos.to(self.device, self.dtype)
        self._sin = table.sin.to(self.device, self.dtype)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.weights.head.shape[0]

    @property
    def layer_shapes(self) -> dict[int, LayerShape]:
        """What each layer stores per token, and where."""
        shape = self.weights.shape
        stored = (shape.kv_heads, shape.head_dim)
        return {
            number: LayerShape(stored, stored, self.dtype, layer.input_norm.device)
            for number, layer in enumerate(self.weights.layers)
        }

    @property
    def is_on_one_gpu(self) -> bool:
        """Whether all of it lies on one CUDA device, so that a step can be captured as one graph."""
        devices = {self.device, self.weights.final_norm.device} | {s.device for s in self.layer_shapes.values()}
        return len(devices) == 1 and self.device.type == "cuda"

    def forward(
        self,
        ids: torch.Tensor,
        rope_rows: torch.Tensor,
        keep: torch.Tensor | None,
        step: AttentionStep,
        pointwise: Pointwise = PLAIN,
    ) -> torch.Tensor:
        """Logits (n, vocabulary) of the rows that `keep` (n,) names, in the type of activations; None keeps all.

        `ids` and `rope_rows` are (T,), on `device` as `keep` is; rows of `rope_rows` are those of the rope table.
        What follows the last layer's attention is computed for the kept rows alone.
        """
        weights = self.weights
        cos, sin = self._cos.index_select(0, rope_rows), self._sin.index_select(0, rope_rows)
        rotation = Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
        x = F.embedding(ids, weights.embedding).to(self.dtype)
        last = len(weights.layers) - 1
        for number, layer in enumerate(weights.layers):
            x, rotation = x.to(layer.input_norm.device), rotation.to(layer.input_norm.device)
            attended = self._attend(number, layer, x, rotation, step, pointwise)
            if number == last and keep is not None:
                keep = keep.to(x.device)
                attended, x = attended.index_select(0, keep), x.index_select(0, keep)
            x = _add_linear(x, attended, layer.output, layer.output_bias)
            gate_up = _linear(self._norm(x, layer.post_norm), layer.gate_up, None)
            x = _add_linear(x, pointwise.gate(gate_up), layer.down, None)
        x = self._norm(x.to(weights.final_norm.device), weights.final_norm)
        return _linear(x.to(_device_of(weights.head)), weights.head, None)

    def _attend(
        self,
        number: int,
        layer: LlamaLayer,
        x: torch.Tensor,
        rotation: Rotation,
        step: AttentionStep,
        pointwise: Pointwise,
    ) -> torch.Tensor:
        shape = self.weights.shape
        heads, kv_heads = shape.heads, shape.kv_heads
        joined = _linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias).unflatten(-1, (-1, shape.head_dim))
        v = joined[:, heads + kv_heads :]
        if layer.q_norm is None or layer.k_norm is None:
            qk = pointwise.rotate(joined[:, : heads + kv_heads], rotation.cos, rotation.signed_sin)
            q, k = qk[:, :heads], qk[:, heads:]
        else:
            q, k = (
                pointwise.rotate(self._norm(part, norm), rotation.cos, rotation.signed_sin)
                for part, norm in (
                    (joined[:, :heads], layer.q_norm),
                    (joined[:, heads : heads + kv_heads], layer.k_norm),
                )
            )
        attended = step.attend(number, q, k, v, shape.head_dim**-0.5, shape.windows[number])
        return attended.flatten(1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.weights.shape.norm_eps)


class FusedRunner:
    """A llama-like decoder with its KV cache; the same surface as `runner.ModelRunner`. Belongs to one thread."""

    def __init__(self, weights: LlamaWeights, table: RopeTable, settings: EngineSettings) -> None:
        """Make the cache and, on one GPU, the graphs.

        Raises:
            ModelError: there is no memory for the cache.
        """
        self.decoder = LlamaDecoder(weights, table, getattr(torch, settings.compute_dtype))
        self.class_bounds = table.bounds
        self._table = table
        shapes = self.decoder.layer_shapes
        graphs = settings.cuda_graphs and self.decoder.is_on_one_gpu
        self.cache = KVCache.within(settings, shapes, table.bounds[-1], spare=1 if graphs else 0)
        self.num_blocks = self.cache.num_blocks
        self.replay: DecodeReplay | None = None
        if graphs:
            buckets = plan_buckets(settings.max_running, table.bounds[-1], shapes[0].bytes_per_token)
            device = self.decoder.device
            pointwise = compiled(device, self.decoder.dtype)
            self.replay = DecodeReplay(self.decoder, self.cache, table, buckets, capture_cuda(device), pointwise)
            self.replay.prepare()

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.decoder.vocab_size

    def clear_blocks(self, blocks: Seq[int]) -> None:
        """Overwrite blocks with zeros: what a sequence with NaN left there must not reach the next one."""
        self.cache.clear(blocks)

    @torch.inference_mode()
    def execute(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; return float32 logits (n, vocabulary): `num_logits` rows a chunk, in order.

        K and V of all tokens are in the cache afterwards; `num_computed` is the caller's to advance.
        """
        if self.replay is not None:
            logits = self.replay.run(chunks)
            if logits is not None:
                return logits
        packed = pack(chunks)
        device = self.decoder.device
        rows = [self._table.row(c, p) for c, p in zip(packed.classes, packed.positions, strict=True)]
        keep = None if packed.keep == list(range(len(rows))) else torch.tensor(packed.keep, device=device).long()
        logits = self.decoder.forward(
            torch.tensor(packed.token_ids, device=device),
            torch.tensor(rows, device=device),
            keep,
            PagedStep(self.cache, packed.chunks),
        )
        return logits.float()


def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(weight, Int8Weight):
        return F.linear(x, weight, bias)
    product = quantize.linear(x, weight)
    return product if bias is None else product + bias


def _add_linear(x: torch.Tensor, y: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` plus the product: where nothing else is added, as a part of the product itself."""
    if bias is None and not isinstance(weight, Int8Weight):
        return torch.addmm(x, y, weight.t())
    return x + _linear(y, weight, bias)


def _device_of(weight: Weight) -> torch.device:
    return weight.values.device if isinstance(weight, Int8Weight) else weight.device
