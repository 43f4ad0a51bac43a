"""PostgreSQL connections on which every wait has a deadline. Imported only if the ledger is on PostgreSQL.

Keepalives detect a lost machine. They do not detect a proxy that stops forwarding and keeps the connection open,
because the proxy answers them itself. This case needs a client-side timeout. psycopg waits for sockets only in
`Connection.wait`, which wakes up ten times a second, so the waiting thread checks the deadline itself.

An abandoned session may stay open at the server and keep its lock on the ledger's head. If a proxy cut a message in the
middle, no server timeout applies: the session is neither idle nor in a statement, but waits for the rest of the
message. Sessions therefore have names, and the next connection terminates the abandoned ones.
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

_MIN_CONNECT_S = 2  # psycopg raises shorter connection timeouts to this


def keepalives(timeout_s: float) -> dict[str, int]:
    """Returns libpq parameters that detect a lost machine within about `timeout_s` seconds."""
    return {
        "keepalives": 1,
        "keepalives_idle": max(1, round(0.3 * timeout_s)),
        "keepalives_interval": max(1, round(0.2 * timeout_s)),
        "keepalives_count": 3,
        "tcp_user_timeout": round(900 * timeout_s),  # milliseconds: 0.9 of the timeout
        "connect_timeout": max(_MIN_CONNECT_S, round(0.5 * timeout_s)),
    }


class Connector:
    """Opens the connections of one engine.

    `open` is the handler of SQLAlchemy's `do_connect` event, `prepare` the handler of its `connect` event.

    `ends_at()` is the deadline of the running operation, on the monotonic clock. `bounds` are PostgreSQL settings of
    the session: timeouts and keepalives.
    """

    def __init__(self, ends_at: Callable[[], float], bounds: dict[str, str]) -> None:
        self._ends_at = ends_at
        self._bounds = bounds
        self._given_up: deque[str] = deque(maxlen=1000)  # session names

    def open(self, _dialect: Any, _record: Any, arguments: Any, parameters: dict[str, Any]) -> Connection:
        left_s = self._ends_at() - time.monotonic()
        if left_s <= 0:
            raise _TimeIsUp("connection timed out")
        if math.isfinite(left_s):
            most = max(_MIN_CONNECT_S, math.ceil(left_s))
            parameters = parameters | {"connect_timeout": min(int(parameters["connect_timeout"]), most)}
        connection = Connection.connect(*arguments, **parameters)
        connection.ends_at, connection.given_up = self._ends_at, self._given_up
        return connection

    def prepare(self, connection: Connection, _record: Any) -> None:
        connection.name = f"serve-app ledger {uuid.uuid4().hex[:16]}"
        settings = self._bounds | {"application_name": f"'{connection.name}'"}
        connection.autocommit = True  # otherwise, BEGIN and COMMIT would take two more round trips
        connection.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
        if names := list(self._given_up):
            end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = ANY(%s)"
            with contextlib.suppress(psycopg.errors.InsufficientPrivilege):  # the role lacks the privilege
                connection.execute(end, (names,))
            for name in names:
                with contextlib.suppress(ValueError):  # another thread has already removed it
                    self._given_up.remove(name)
        connection.autocommit = False


class Connection(psycopg.Connection[Any]):
    """A connection on which every wait ends at the deadline of the running operation."""

    ends_at: Callable[[], float]
    given_up: deque[str]
    name = ""

    def wait(self, gen: PQGen[Result], interval: float = 0.1, timeout: float | None = None) -> Result:
        try:
            return super().wait(_until(gen, self.ends_at()), interval, timeout)
        except _TimeIsUp:
            if self.name:
                self.given_up.append(self.name)
            self.close()  # SQLAlchemy then drops this connection and all older ones
            raise


class _TimeIsUp(psycopg.OperationalError):
    """The operation has taken too long."""


def _until(gen: PQGen[Result], ends_at: float) -> Generator[Any, Any, Result]:
    """Runs the steps of `gen`. Raises _TimeIsUp when `ends_at` is reached, instead of running the next step."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if time.monotonic() >= ends_at:
                raise _TimeIsUp("query timed out")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: Result = end.value
        return result
