"""Starts vLLM's processes so that each of them ends with its parent.

vLLM's engine process does not notice that its parent was killed, and keeps the GPU's memory (vllm#55510). The processes
of tensor parallelism notice the end of the engine process only while they wait for a step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.multiproc_executor import WorkerProc

from serve_app.engine.vllm_adapter.parent_death import end_with_parent

_run_engine_core = EngineCoreProc.run_engine_core
_run_worker = WorkerProc.worker_main


def bind_to_parents() -> None:
    """Make every process that vLLM starts from now on end with its parent. vLLM (0.32) has no setting for this."""
    EngineCoreProc.run_engine_core = staticmethod(_engine_core)
    WorkerProc.worker_main = staticmethod(_worker)


def _engine_core(*args: Any, **kwargs: Any) -> None:
    end_with_parent()
    bind_to_parents()  # repeated, because a spawned process imports the unchanged classes
    _run_engine_core(*args, **kwargs)


def _worker(*args: Any, **kwargs: Any) -> None:
    end_with_parent()
    _run_worker(*args, **kwargs)
