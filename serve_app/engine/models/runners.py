"""Chooses how a loaded model is run: the one place that knows every runner."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import prepared
from serve_app.engine.models import llama
from serve_app.engine.models.fused import FusedRunner
from serve_app.engine.models.native import library as native_library
from serve_app.engine.models.native import runner as native
from serve_app.engine.models.rope import RopeTable
from serve_app.engine.models.runner import ModelRunner

logger = logging.getLogger(__name__)


def native_folder(settings: EngineSettings) -> Path:
    """Where compiled kernels are kept."""
    return prepared.cache_dir(settings.cache_dir) / "native"


def create_runner(
    model: Any, settings: EngineSettings, weights: llama.LlamaWeights | None = None
) -> ModelRunner | FusedRunner | native.NativeRunner:
    """The fastest runner that can run a transformers model as the settings want it.

    `weights` are the decoder's own where the loader has prepared them; the model then needs none. Else a fused runner
    takes them out of the model, which can't be called any more.

    Raises:
        ModelError: int8 is asked for and not possible, the model is of a kind that the engine can't run, or there is
            no memory for the KV cache.
    """
    reason = llama.why_not(model) if settings.fused else "the setting 'fused' is off"
    if reason is None:
        table = RopeTable(model, settings.max_context, getattr(torch, settings.compute_dtype))
        weights = weights or llama.take_weights(model, int8=settings.dtype == "int8")
        if (
            settings.native
            and native.why_not(weights) is None
            and (library := native_library.load(native_folder(settings)))
        ):
            return native.NativeRunner(library, weights, table, settings)
        return FusedRunner(weights, table, settings)
    if settings.dtype == "int8":
        raise ModelError(f"int8 is not possible here: {reason}. Choose dtype float32 or bfloat16.")
    logger.info("The model runs through its own code: %s.", reason)
    return ModelRunner(model, settings)
