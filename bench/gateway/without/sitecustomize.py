"""Takes one speed-up out of the service: Python imports this module at the start of each process.

SERVE_APP_BENCH_WITHOUT names the speed-up. Its module is patched right after it is imported, so the service itself
needs no switch. Where there is nothing to patch any more, the import fails, and so does the start of the service.
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
APPLIED: Final = "BENCH_WITHOUT"  # a patched module has the speed-up's name under this one


@dataclass(frozen=True, slots=True)
class Speedup:
    """A speed-up of the service, and how it is taken out of its module."""

    text: str
    module: str
    remove: Callable[[Any], None]


def _replace(owner: Any, name: str, value: Any) -> None:
    """Raises AttributeError where there is nothing to replace."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner!r} has no {name!r} any more: renew the patch in {__file__}")
    setattr(owner, name, value)


def _sockets(module: Any) -> None:
    async def send(line: Any, message: Any) -> Any:
        return await line._by_serve(message)

    _replace(module.Line, "send", send)


def _coalescer(module: Any) -> None:
    class Alone(module.Coalescer):
        """A call of its own for each ask, at once."""

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
    _replace(module, "log_line", module.log_line)  # the sinks are what `ended` does beside `_count`
    count = module.Observer._count

    def ended(observer: Any, record: Any) -> None:
        count(observer, record)
        if not is_switched_off():
            for sink in observer._sinks:
                sink(record)

    _replace(module.Observer, "ended", ended)


def _switched(owner: Any, name: str) -> None:
    """Does nothing while the switch is off."""
    does = getattr(owner, name)
    _replace(owner, name, lambda *values: None if is_switched_off() else does(*values))


def is_switched_off() -> bool:
    """Returns whether SERVE_APP_BENCH_SWITCH names an existing file. Looks ten times a second."""
    now = time.monotonic()
    if now - _switch["looked"] > 0.1:
        _switch.update(looked=now, off=os.path.exists(os.environ[SWITCH]))
    return bool(_switch["off"])


_switch: dict[str, Any] = {"looked": 0.0, "off": False}

SPEEDUPS: Final = {
    "sockets": Speedup("local sockets beside Serve's calls", "deployments.transport", _sockets),
    "joined-asks": Speedup(
        "asks to the limiter that wait travel in one call", "serve_app.gateway.limiter_client", _coalescer
    ),
    "joined-settlements": Speedup(
        "settlements that wait travel in one call", "serve_app.gateway.settlements", _coalescer
    ),
    "gathered-metrics": Speedup(
        "metrics are summed for half a second before Ray gets them", "deployments.metrics", _gathered_metrics
    ),
    "plain-pickle": Speedup("pickle in place of Serve's cloudpickle", "deployments.handles", _plain_pickle),
}

#: What is not for speed, and is to cost little: `--costs` switches it off and on while the service runs.
COSTS: Final = {
    "observation": Speedup(
        "each request's metrics, line in the log and trace", "serve_app.gateway.observer", _observation
    ),
    "request-metrics": Speedup("of these its metrics", "serve_app.gateway.observer", _request_metrics),
    "request-sinks": Speedup("of these its line in the log and its trace", "serve_app.gateway.observer", _sinks),
}
REMOVABLE: Final = SPEEDUPS | COSTS


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the speed-up's module as Python does, and patches it after its import."""

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
            raise ImportError(f"there is no {fullname} any more: renew the patch in {__file__}")
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._speedup.remove(module)
            setattr(module, APPLIED, self._name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if name := os.environ.get(VARIABLE):
    sys.meta_path.insert(0, _Finder(name))
