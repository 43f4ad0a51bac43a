"""Starts and stops backends, so that Serve runs the applications that the ledger lists.

Every gateway does this. A newly started cluster therefore gets its backends back from the ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from serve_app.contracts.calls import detached
from serve_app.contracts.ports import ApplicationsPort, BackendUnavailable
from serve_app.contracts.served import Backend

logger = logging.getLogger("ray.serve")

# Seconds from a backend's retirement to its deletion. By then, no gateway sends it requests. Its replicas still finish
# the replies in progress.
DRAIN_S: Final = 5.0
RETRY_S: Final = 15.0  # between two attempts on one backend; Serve's status shows an attempt within seconds


class Applications:
    """Starts and stops backends through `port`, one call per backend at a time. `clock` returns seconds."""

    def __init__(self, port: ApplicationsPort, clock: Callable[[], float]) -> None:
        self._port = port
        self._clock = clock
        self._retired: dict[str, float] = {}  # by backend: when it was first seen as retired
        self._tried: dict[str, float] = {}  # by backend: time of the last attempt

    def follow(self, backends: Mapping[str, Backend], status: Mapping[str, Mapping[str, Any]]) -> None:
        """Starts the steps that are due, and never waits. `status` is Serve's status of all applications, by name."""
        now = self._clock()
        self._retired = {
            name: self._retired.get(name, now) for name, one in backends.items() if one.retired_at is not None
        }
        for name, backend in backends.items():
            runs = name in status and status[name]["status"] != "DELETING"
            is_due = now - self._tried.get(name, -RETRY_S) >= RETRY_S
            if name in self._retired:
                if runs and is_due and now - self._retired[name] >= DRAIN_S:
                    self._begin(backend, now, self._port.delete)
            elif name not in status and is_due:
                self._begin(backend, now, self._port.deploy)

    def _begin(self, backend: Backend, now: float, step: Callable[[Backend], Any]) -> None:
        self._tried[backend.name] = now
        detached(self._run(backend, step), endless=True)

    async def _run(self, backend: Backend, step: Callable[[Backend], Any]) -> None:
        try:
            await step(backend)
        except BackendUnavailable as error:
            logger.error("could not start or stop the backend %s: %s", backend.name, error)
