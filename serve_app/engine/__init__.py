"""Continuous-batching inference over any decoder-only transformers model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from serve_app.engine.chat import ChatRenderer
from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineError,
    ModelError,
    QueueFull,
    UnsupportedGrammar,
)
from serve_app.engine.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    Started,
    TokenLogprob,
)

if TYPE_CHECKING:
    from serve_app.engine.engine import Engine, EngineStats
    from serve_app.engine.loading.loader import convert_gguf

# These bring torch, which takes seconds to import: gateways only need the settings and the messages.
_ON_DEMAND = {"Engine": "engine", "EngineStats": "engine", "convert_gguf": "loading.loader"}


if not TYPE_CHECKING:  # a type checker should find names that are not there

    def __getattr__(name: str) -> Any:
        if name not in _ON_DEMAND:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)


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
    "Grammar",
    "GrammarKind",
    "ModelError",
    "QueueFull",
    "SamplingParams",
    "Started",
    "TokenLogprob",
    "UnsupportedGrammar",
    "convert_gguf",
]
