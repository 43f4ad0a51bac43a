"""One process's line to another: over a socket where Serve says that it is on this machine, else through Serve.

Serve stays the one who knows which replica is the right one. It is asked again twice a second for the address, and a
connection that it has not confirmed lately is not used: a replica that was replaced may live on for a moment, and two
limiters must not both decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from serve_app.gateway.direct import Connection, connect
from serve_app.gateway.tasks import detached

CONFIRM_S: Final = 0.4
TRUST_S: Final = 1.2  # after a confirmation; with a heartbeat, less than a new limiter waits to hear of open holds
TIMEOUT_S: Final = 1.0  # of a confirmation


class Line:
    """Calls methods of the one replica that `through_serve(method, *arguments)` reaches.

    The replica answers the method `address` with the address of its direct.Server, or None.
    """

    def __init__(
        self, through_serve: Callable[..., Awaitable[Any]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._through_serve = through_serve
        self._clock = clock
        self._address: str | None = None
        self._connection: Connection | None = None
        self._trusted_until = 0.0
        self._confirm_at: float | None = None
        self._confirming: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The answer. Raises Unavailable when it did not arrive; nobody knows then whether the call took effect."""
        now = self._clock()
        if self._confirm_at is None:
            self._confirm_at = now  # by the next call: many a line is used once
        elif now >= self._confirm_at and (self._confirming is None or self._confirming.done()):
            self._confirm_at = now + CONFIRM_S
            self._confirming = detached(self._confirm())
        connection = self._connection
        if connection is None or not connection.is_open or now >= self._trusted_until:
            return await self._through_serve(method, *arguments)
        return await connection.call(method, *arguments)

    async def _confirm(self) -> None:
        asked_at = self._clock()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                address = await self._through_serve("address")
        except Exception:  # away, or of a release that has no such method
            address = None
        connection = self._connection
        if connection is None or not connection.is_open or address != self._address:
            if connection is not None:
                connection.retire()
            self._address, self._connection = address, None if address is None else await connect(address)
        self._trusted_until = asked_at + TRUST_S
