"""Chooses the runner of a loaded model: native int8, torch with joined weights, or transformers' code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import prepared
from serve_app.engine.models import llama_weights
from serve_app.engine.models.native import library, native_runner
from serve_app.engine.models.native.native_runner import NativeRunner
from serve_app.engine.models.rope import RopeTable
from serve_app.engine.models.torch_runner import TorchRunner
from serve_app.engine.models.transformers_runner import TransformersRunner

logger = logging.getLogger(__name__)


def native_folder(settings: EngineSettings) -> Path:
    """The folder of the compiled kernels."""
    return prepared.cache_dir(settings.cache_dir) / "native"


def create_runner(
    model: Any, settings: EngineSettings, weights: llama_weights.LlamaWeights | None = None
) -> TransformersRunner | TorchRunner | NativeRunner:
    """The fastest runner that fits the model and the settings.

    `weights`: the decoder's weights, if the loader has prepared them. `model` then needs none. With None, the weights
    of a llama-like model are moved out of `model`, which can then no longer be called.

    Raises:
        ModelError: int8 is not possible, the engine cannot run the model, or there is no memory for the KV cache.
    """
    reason = llama_weights.why_not(model) if settings.fused else "the setting 'fused' is off"
    if reason is None:
        table = RopeTable(model, settings.max_context, getattr(torch, settings.compute_dtype))
        weights = weights or llama_weights.extract_weights(model, int8=settings.dtype == "int8")
        if (
            settings.native
            and native_runner.why_not(weights) is None
            and (compiled := library.load(native_folder(settings)))
        ):
            return NativeRunner(compiled, weights, table, settings)
        return TorchRunner(weights, table, settings)
    if settings.dtype == "int8":
        raise ModelError(f"int8 is not possible here: {reason}. Choose dtype float32 or bfloat16.")
    logger.info("The model runs through transformers' code: %s.", reason)
    return TransformersRunner(model, settings)
