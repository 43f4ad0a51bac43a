"""The engines that a backend can choose, and their differences that matter before an engine starts.

An engine's libraries are imported only when it starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.loading import prepared
from serve_app.engine.vllm_adapter import process_environment
from serve_app.engine.vllm_adapter.vllm_settings import MAX_SEQUENCES, VllmSettings, max_sequences, problem

if TYPE_CHECKING:
    from serve_app.engine.port import EnginePort

Say = Callable[[str], None]


class EngineKind(Protocol):
    """One kind of engine. `options` are the settings that are specific to this engine; None for the native engine."""

    remedy: str  # the instruction to show if its Python interpreter is missing

    def python(self) -> str | None:
        """The Python interpreter of its replicas; None for the service's interpreter."""

    def problem(self, settings: EngineSettings, options: Any) -> str | None:
        """The first problem with the settings; None if no problem is known."""

    def max_running(self, settings: EngineSettings) -> int:
        """Upper bound of the number of requests that run together. Only a started engine knows the exact number."""

    def start(self, settings: EngineSettings, options: Any, gpus: float, on_nodes: bool, say: Say) -> EnginePort:
        """Load the model and start the engine.

        The process has `gpus` GPUs. With `on_nodes`, it uses the GPUs of a Ray placement group instead.

        Raises ModelError.
        """


class Native:
    """The built-in engine of this package."""

    remedy = "see 'interpreter'"

    def python(self) -> str | None:
        return None

    def problem(self, settings: EngineSettings, options: Any) -> str | None:
        return None

    def max_running(self, settings: EngineSettings) -> int:
        return settings.max_running

    def start(self, settings: EngineSettings, options: Any, gpus: float, on_nodes: bool, say: Say) -> EnginePort:
        from serve_app.engine.engine import Engine
        from serve_app.engine.loading.placement import check_gpus

        check_gpus(settings, gpus)
        return Engine.from_settings(settings, progress=say)


class Vllm:
    """vLLM, in a separate Python environment."""

    remedy = "run `make engine-vllm`, or set 'interpreter'"

    def python(self) -> str | None:
        return os.environ.get("SERVE_APP_VLLM_PYTHON") or str(Path(".vllm").absolute() / "bin" / "python")

    def problem(self, settings: EngineSettings, options: VllmSettings) -> str | None:
        return problem(settings, options)

    def max_running(self, settings: EngineSettings) -> int:
        return max_sequences(settings) or MAX_SEQUENCES

    def start(
        self, settings: EngineSettings, options: VllmSettings, gpus: float, on_nodes: bool, say: Say
    ) -> EnginePort:
        if find_spec("vllm") is None:
            raise ModelError(
                f"This replica runs on {sys.executable}, which has no vLLM. Where config.yaml has ray_actor_options "
                "for Model, add runtime_env: {py_executable: PATH}; `make engine-vllm` installs vLLM."
            )
        process_environment.prepare(prepared.cache_dir(settings.cache_dir) / "vllm")
        from serve_app.engine.vllm_adapter import start

        return start.start(settings, options, gpus, on_nodes, say)


ENGINES: Final[dict[str, EngineKind]] = {"native": Native(), "vllm": Vllm()}
