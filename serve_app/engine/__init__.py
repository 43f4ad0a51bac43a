"""Continuous-batching inference over any decoder-only transformers model."""

from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.engine import Engine, EngineStats
from serve_app.engine.errors import ContextLengthExceeded, EngineClosed, EngineError, ModelError, QueueFull
from serve_app.engine.loader import convert_gguf
from serve_app.engine.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    Started,
)

__all__ = [
    "ChatRenderer",
    "ContextLengthExceeded",
    "Delta",
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineSettings",
    "EngineStats",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationRequest",
    "ModelError",
    "QueueFull",
    "SamplingParams",
    "Started",
    "convert_gguf",
]
