"""The engines that a backend may name, with what differs before they start. Each is imported only when it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from serve_app.engine.config import EngineSettings
from serve_app.engine.errors import ModelError
from serve_app.engine.vllm_adapter.vllm_settings import VllmSettings, problem

if TYPE_CHECKING:
    from serve_app.engine.port import EnginePort

Say = Callable[[str], None]


class EngineKind(Protocol):
    """One kind of engine. `options` are the settings under the engine's own name, None if it has none."""

    remedy: str  # when its Python is missing

    def python(self) -> str | None:
        """The interpreter of its replicas; None: that of the service."""

    def problem(self, settings: EngineSettings, options: Any) -> str | None:
        """What is wrong with the settings; None if nothing is known to be."""

    def start(self, settings: EngineSettings, options: Any, gpus: float, on_nodes: bool, say: Say) -> EnginePort:
        """Loads the model. The process has `gpus`; with `on_nodes`, Ray has a placement group of GPUs for it instead.

        Raises ModelError.
        """


class Native:
    """The engine of this package."""

    remedy = "see 'interpreter'"

    def python(self) -> str | None:
        return None

    def problem(self, settings: EngineSettings, options: Any) -> str | None:
        return None

    def start(self, settings: EngineSettings, options: Any, gpus: float, on_nodes: bool, say: Say) -> EnginePort:
        from serve_app.engine.engine import Engine
        from serve_app.engine.loading.placement import check_gpus

        check_gpus(settings, gpus)
        return Engine.from_settings(settings, progress=say)


class Vllm:
    """vLLM, in an environment of its own."""

    remedy = "run `make engine-vllm`, or set 'interpreter'"

    def python(self) -> str | None:
        return os.environ.get("SERVE_APP_VLLM_PYTHON") or str(Path(".vllm").absolute() / "bin" / "python")

    def problem(self, settings: EngineSettings, options: VllmSettings) -> str | None:
        return problem(settings, options)

    def start(
        self, settings: EngineSettings, options: VllmSettings, gpus: float, on_nodes: bool, say: Say
    ) -> EnginePort:
        if find_spec("vllm") is None:
            raise ModelError(
                f"This replica runs on {sys.executable}, which has no vLLM. Where config.yaml has ray_actor_options "
                "for Model, add runtime_env: {py_executable: PATH}; `make engine-vllm` installs vLLM."
            )
        from serve_app.engine.vllm_adapter import start

        return start.start(settings, options, gpus, on_nodes, say)


ENGINES: Final[dict[str, EngineKind]] = {"native": Native(), "vllm": Vllm()}
