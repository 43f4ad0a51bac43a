"""PostgreSQL connections on which no wait is endless; imported only where the ledger is on PostgreSQL.

Keepalives end a wait for a machine that is gone. A proxy that stops forwarding without closing answers them itself, and
then only a time limit of the client's own helps. psycopg waits for a socket in one place, `Connection.wait`, and wakes
up ten times a second there: so the thread that waits ends its own wait, and no other thread has to.

The session that was given up may live on at the server, with its lock on the ledger's head. One that a proxy cut in the
middle of a message has no time limit there: neither idle nor in a statement, it waits for the rest. So sessions have
names, and the next connection ends those that were given up.
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen

Result = TypeVar("Result")

_MIN_CONNECT_S = 2  # of psycopg


def keepalives(timeout_s: float) -> dict[str, int]:
    """libpq's parameters that notice a vanished machine within about `timeout_s` seconds."""
    return {
        "keepalives": 1,
        "keepalives_idle": max(1, round(0.3 * timeout_s)),
        "keepalives_interval": max(1, round(0.2 * timeout_s)),
        "keepalives_count": 3,
        "tcp_user_timeout": round(900 * timeout_s),  # milliseconds
        "connect_timeout": max(_MIN_CONNECT_S, round(0.5 * timeout_s)),
    }


class Connector:
    """Makes the connections of one engine; `open` handles SQLAlchemy's event `do_connect`, `prepare` its `connect`.

    `ends_at()`: when the running operation has to end, by the monotonic clock. `bounds`: PostgreSQL's own settings.
    """

    def __init__(self, ends_at: Callable[[], float], bounds: dict[str, str]) -> None:
        self._ends_at = ends_at
        self._bounds = bounds
        self._given_up: deque[str] = deque(maxlen=1000)  # names of sessions

    def open(self, _dialect: Any, _record: Any, arguments: Any, parameters: dict[str, Any]) -> Connection:
        left_s = self._ends_at() - time.monotonic()
        if left_s <= 0:
            raise _TimeIsUp("no connection in time")
        if math.isfinite(left_s):
            most = max(_MIN_CONNECT_S, math.ceil(left_s))
            parameters = parameters | {"connect_timeout": min(int(parameters["connect_timeout"]), most)}
        connection = Connection.connect(*arguments, **parameters)
        connection.ends_at, connection.given_up = self._ends_at, self._given_up
        return connection

    def prepare(self, connection: Connection, _record: Any) -> None:
        connection.name = f"serve-app ledger {uuid.uuid4().hex[:16]}"
        settings = self._bounds | {"application_name": f"'{connection.name}'"}
        connection.autocommit = True  # one round trip
        connection.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
        if names := list(self._given_up):
            end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = ANY(%s)"
            with contextlib.suppress(psycopg.errors.InsufficientPrivilege):  # a role that may not end its own sessions
                connection.execute(end, (names,))
            for name in names:
                with contextlib.suppress(ValueError):  # another thread has ended it too
                    self._given_up.remove(name)
        connection.autocommit = False


class Connection(psycopg.Connection[Any]):
    """Every wait on it ends when the running operation has to."""

    ends_at: Callable[[], float]
    given_up: deque[str]
    name = ""

    def wait(self, gen: PQGen[Result], interval: float = 0.1, timeout: float | None = None) -> Result:
        try:
            return super().wait(_until(gen, self.ends_at()), interval, timeout)
        except _TimeIsUp:
            if self.name:
                self.given_up.append(self.name)
            self.close()  # so that SQLAlchemy drops it, and with it all that were opened before
            raise


class _TimeIsUp(psycopg.OperationalError):
    """The operation has taken too long."""


def _until(gen: PQGen[Result], ends_at: float) -> Generator[Any, Any, Result]:
    """The steps of `gen`. Raises _TimeIsUp in its place at `ends_at`."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if time.monotonic() >= ends_at:
                raise _TimeIsUp("no answer in time")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: Result = end.value
        return result
