"""Removes one speed-up from the service. Python imports this module at the start of each process.

SERVE_APP_BENCH_WITHOUT names the speed-up. Its module is patched right after its import, so the service's code needs no
switch. If the patched name no longer exists, the import fails, and the service does not start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

VARIABLE: Final = "SERVE_APP_BENCH_WITHOUT"
SWITCH: Final = "SERVE_APP_BENCH_SWITCH"
APPLIED: Final = "BENCH_WITHOUT"  # attribute of a patched module: name of the speed-up


@dataclass(frozen=True, slots=True)
class Speedup:
    """A speed-up of the service, and the function that removes it from its module."""

    text: str
    module: str
    remove: Callable[[Any], None]


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute. Raises AttributeError if it does not exist."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner!r} no longer has {name!r}: update the patch in {__file__}")
    setattr(owner, name, value)


def _sockets(module: Any) -> None:
    async def send(line: Any, message: Any) -> Any:
        return await line._by_serve(message)

    _replace(module.Line, "send", send)


def _coalescer(module: Any) -> None:
    class Alone(module.Coalescer):
        """Sends each message in a separate call, immediately."""

        def submit(self, ask: Any) -> Any:
            return joining(self._send, timeout_s=self.timeout_s).submit(ask)

    joining = module.Coalescer
    _replace(module, "Coalescer", Alone)


def _gathered_metrics(module: Any) -> None:
    def add(metrics: Any, counter: Any, value: float, *labels: str) -> None:
        metrics._ray(counter).inc(value, dict(zip(counter.labels, labels, strict=True)))

    def observe(metrics: Any, histogram: Any, value: float, *labels: str) -> None:
        gathered(metrics, histogram, value, *labels)
        metrics.flush_metrics()

    gathered = module.RayMetrics.observe

    _replace(module.RayMetrics, "add", add)
    _replace(module.RayMetrics, "observe", observe)


def _plain_pickle(module: Any) -> None:
    _replace(module, "PICKLED", {})


def _observation(module: Any) -> None:
    for name in ("ended", "gap", "first_token"):
        _switched(module.Observer, name)


def _request_metrics(module: Any) -> None:
    for name in ("_count", "gap", "first_token"):
        _switched(module.Observer, name)


def _sinks(module: Any) -> None:
    # This only checks that `log_line` still exists. `ended` below is a copy of the observer's method, with a switch.
    _replace(module, "log_line", module.log_line)
    count = module.Observer._count

    def ended(observer: Any, record: Any) -> None:
        count(observer, record)
        if not is_switched_off():
            for sink in observer._sinks:
                sink(record)

    _replace(module.Observer, "ended", ended)


def _switched(owner: Any, name: str) -> None:
    """Patches a method to do nothing while `is_switched_off` returns True."""
    does = getattr(owner, name)
    _replace(owner, name, lambda *values: None if is_switched_off() else does(*values))


def is_switched_off() -> bool:
    """Returns whether SERVE_APP_BENCH_SWITCH names an existing file. Checks at most ten times per second."""
    now = time.monotonic()
    if now - _switch["looked"] > 0.1:
        _switch.update(looked=now, off=os.path.exists(os.environ[SWITCH]))
    return bool(_switch["off"])


_switch: dict[str, Any] = {"looked": 0.0, "off": False}

SPEEDUPS: Final = {
    "sockets": Speedup(
        "sockets to limiter and accounting, instead of calls through Serve", "deployments.direct_calls", _sockets
    ),
    "joined-asks": Speedup(
        "waiting messages to the limiter are sent in one call", "serve_app.gateway.limiter_client", _coalescer
    ),
    "joined-settlements": Speedup(
        "waiting settlements are sent in one call", "serve_app.gateway.settlements", _coalescer
    ),
    "gathered-metrics": Speedup(
        "metrics are collected for half a second before they go to Ray", "deployments.metrics", _gathered_metrics
    ),
    "plain-pickle": Speedup("pickle in place of Serve's cloudpickle", "deployments.handles", _plain_pickle),
}

#: Parts that should cost little. `--costs` switches them off and on while the service runs.
COSTS: Final = {
    "observation": Speedup("metrics, log line and trace of each request", "serve_app.gateway.observer", _observation),
    "request-metrics": Speedup("metrics of each request", "serve_app.gateway.observer", _request_metrics),
    "request-sinks": Speedup("log line and trace of each request", "serve_app.gateway.observer", _sinks),
}
REMOVABLE: Final = SPEEDUPS | COSTS


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the speed-up's module on the usual path, and patches it after its import."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._speedup = REMOVABLE[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._speedup.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            raise ImportError(f"{fullname} no longer exists: update the patch in {__file__}")
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._speedup.remove(module)
            setattr(module, APPLIED, self._name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if name := os.environ.get(VARIABLE):
    sys.meta_path.insert(0, _Finder(name))
