"""Runs one step's tokens through the model's own transformers code and returns the logits to sample from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading.placement import execution_device
from serve_app.engine.models import attention, rope
from serve_app.engine.models.kv_cache import KVCache
from serve_app.engine.models.packing import pack
from serve_app.engine.scheduling.sequence import Chunk


class ModelRunner:
    """A model with its KV cache. Belongs to one thread.

    `model` is a decoder-only transformers model, placed by accelerate or on one device; it is changed in place
    (attention implementation, rotary embedding). `num_blocks` and `class_bounds` are what the scheduler plans with.
    """

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        _check_supported(model)
        self.model = model.eval()
        self.device = execution_device(model)
        self.model.set_attn_implementation(attention.NAME)
        self.class_bounds = rope.install(model, settings.max_context)
        self._ropes = [m for m in model.modules() if isinstance(m, rope.LengthClassRope)]
        layers = self._probe()
        self.cache = KVCache.within(settings, layers, self.class_bounds[-1])
        self.num_blocks = self.cache.num_blocks

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def clear_blocks(self, blocks: Seq[int]) -> None:
        """Overwrite blocks with zeros: what a sequence with NaN left there must not reach the next one."""
        self.cache.clear(blocks)

    @torch.inference_mode()
    def execute(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Compute the chunks' tokens; return float32 logits (n, vocabulary): `num_logits` rows a chunk, in order.

        K and V of all tokens are in the cache afterwards; `num_computed` is the caller's to advance.
        """
        packed = pack(chunks)
        keep = packed.keep or [len(packed.token_ids) - 1]
        for module in self._ropes:
            module.token_classes = torch.tensor(packed.classes, device=self.device) if any(packed.classes) else None
        step = attention.PagedStep(self.cache, packed.chunks)
        return self._forward(packed.token_ids, packed.positions, keep, step)[: len(packed.keep)].float()

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
