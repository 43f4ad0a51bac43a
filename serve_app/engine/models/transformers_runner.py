"""Runs any decoder-only model through its transformers code, with the engine's paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading.placement import execution_device
from serve_app.engine.models import paged_attention, rope
from serve_app.engine.models.kv_cache import KVCache
from serve_app.engine.models.paged_attention import PagedStep, ProbeStep, pack
from serve_app.engine.scheduling.sequence import Chunk


class TransformersRunner:
    """A model with its KV cache; a `core.Runner`.

    `model` is placed by accelerate or on one device. The runner changes it in place (attention implementation, rotary
    embedding).
    """

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        _check_supported(model)
        self.model = model.eval()
        self.device = execution_device(model)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.model.set_attn_implementation(paged_attention.NAME)
        self.class_bounds = rope.install(model, settings.max_context)
        self._ropes = [m for m in model.modules() if isinstance(m, rope.LengthClassRope)]
        layers = self._probe()
        self.cache = KVCache.within(settings, layers, self.class_bounds[-1])
        self.num_blocks = self.cache.num_blocks

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self.cache.clear(blocks)

    @torch.inference_mode()
    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        packed = pack(chunks)
        keep = packed.keep or [len(packed.token_ids) - 1]
        for module in self._ropes:
            module.token_classes = torch.tensor(packed.classes, device=self.device) if any(packed.classes) else None
        step = PagedStep(self.cache, packed.chunks)
        return self._forward(packed.token_ids, packed.positions, keep, step)[: len(packed.keep)].float()

    def _forward(
        self, ids: list[int], positions: list[int], keep: list[int], step: PagedStep | ProbeStep
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
        """Run two tokens through the model to learn what each layer stores, and whether the engine can run it."""
        step = ProbeStep()
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
        raise ModelError(f"Models of type {config.model_type} are not supported: their attention can't be replaced.")
