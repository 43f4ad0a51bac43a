"""Runs one step's tokens through the model's own transformers code and returns the logits to sample from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from serve_app.engine import attention, rope
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.kv_cache import KVCache
from serve_app.engine.sequence import Chunk


class ModelRunner:
    """A model with its KV cache. Belongs to one thread.

    `model` is a decoder-only transformers model, placed by accelerate or on one device; it is changed in place
    (attention implementation, rotary embedding). `num_blocks` and `class_bounds` are what the scheduler plans with.
    """

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        _check_supported(model)
        self.model = model.eval()
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.model.set_attn_implementation(attention.NAME)
        self.class_bounds = rope.install(model, settings.max_context)
        self._ropes = [m for m in model.modules() if isinstance(m, rope.LengthClassRope)]
        layers = self._probe()
        self.num_blocks = KVCache.blocks_within(settings.kv_cache_memory, layers, settings.block_size)
        # A context's worth is all that one sequence can use, but every running one may need a block of its own.
        useful = settings.max_running * -(-self.class_bounds[-1] // settings.block_size)
        self.num_blocks = min(self.num_blocks, useful)
        if self.num_blocks < 1:
            raise ModelError(f"kv_cache_memory of {settings.kv_cache_memory:,} bytes is below one block: raise it.")
        try:
            self.cache = KVCache(layers, self.num_blocks, settings.block_size)
        except (RuntimeError, MemoryError) as error:
            raise ModelError(f"No memory for a KV cache of {settings.kv_cache_memory:,} bytes: lower it.") from error

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @torch.inference_mode()
    def execute(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; return float32 logits (n, vocabulary): `num_logits` rows a chunk, in order.

        K and V of all tokens are in the cache afterwards; `num_computed` is the caller's to advance.
        """
        order = sorted(range(len(chunks)), key=lambda i: (chunks[i].length > 1, chunks[i].start))
        packed = [chunks[i] for i in order]
        ids: list[int] = []
        positions: list[int] = []
        classes: list[int] = []
        last_row: dict[int, int] = {}
        for index, chunk in zip(order, packed, strict=True):
            end = chunk.start + chunk.length
            ids += chunk.token_ids
            positions += range(chunk.start, end)
            classes += [chunk.sequence.length_class] * chunk.length
            last_row[index] = len(ids) - 1
        keep = [last_row[i] - back for i, c in enumerate(chunks) for back in reversed(range(c.num_logits))]
        for module in self._ropes:
            module.token_classes = torch.tensor(classes, device=self.device) if any(classes) else None
        logits = self._forward(ids, positions, keep or [len(ids) - 1], attention.PagedStep(self.cache, packed))
        return logits[: len(keep)].float()

    def _forward(
        self, ids: list[int], positions: list[int], keep: list[int], step: attention.AttentionStep
    ) -> torch.Tensor:
        output = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self.device),
            paged=step,
        )
        return output.logits[0]

    @torch.inference_mode()
    def _probe(self) -> dict[int, Any]:
        """Run two tokens through the model to learn what each layer stores, and that the model's code works here."""
        step = attention.ProbeStep()
        try:
            self._forward([0, 0], [0, 1], [1], step)
        except Exception as error:
            raise ModelError(f"The engine can't run a model of type {self.model.config.model_type}: {error}") from error
        if not step.layers:
            raise ModelError(f"A model of type {self.model.config.model_type} has no attention layers to page.")
        return step.layers


def _check_supported(model: Any) -> None:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(
            f"Layers of type {', '.join(sorted(kinds))} are not supported: choose an attention-only model."
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"The code of model type {config.model_type} does not take another attention: not supported.")
