"""Raw connections of a hostile client to this machine: many at once, with little processor time."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, cast

SOURCE: Final = "127.0.0.1"  # address of all attackers; ordinary clients use other addresses
OPENED_PER_S: Final = 500  # connections opened by a Holder; more would only measure how fast they are accepted
MAX_BYTES: Final = 16 * 2**30  # maximum bytes that one attack sends
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)

Request = tuple[bytes, ...]


@dataclass(slots=True)
class Tally:
    """Counts of one attack's requests, responses and connections."""

    statuses: Counter[str] = field(default_factory=Counter)  # responses by status
    requests: int = 0  # requests that the attack began; a Holder counts each connection
    hung_up: int = 0  # requests that the attacker hung up on
    cut: int = 0  # connections that the service closed without a response
    refused: int = 0  # connections that could not be opened
    opened: int = 0
    open_now: int = 0
    most_open: int = 0
    bytes_written: int = 0

    def wrote(self, data: Request) -> None:
        """Adds the request's bytes to `bytes_written`."""
        self.bytes_written += sum(map(len, data))


def whole(reply: bytes | bytearray) -> bool:
    """Returns whether a response is complete, judged by its length or its last chunk."""
    head, there, body = reply.partition(b"\r\n\r\n")
    if not there:
        return False
    length = _LENGTH.search(head + b"\r\n")
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


def status_of(reply: bytes | bytearray) -> str:
    """The status of a response, or "other"."""
    return reply[9:12].decode() if reply.startswith(b"HTTP/1.") and reply[9:12].isdigit() else "other"


class Strategy(ABC):
    """One kind of attack. `run` continues until it is cancelled."""

    def __init__(self, port: int, tally: Tally) -> None:
        self._port, self.tally = port, tally
        self._open: set[_Line] = set()

    @abstractmethod
    async def run(self) -> None:
        """Attacks until it is cancelled."""

    def close(self) -> None:
        """Drops all connections."""
        for line in list(self._open):
            line.abort()

    async def _connect(self, line: _Line) -> bool:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(5):
                await loop.create_connection(lambda: line, "127.0.0.1", self._port, local_addr=(SOURCE, 0))
        except OSError:  # TimeoutError is a subclass
            self.tally.refused += 1
            return False
        return True

    def opened(self, line: _Line) -> None:
        """Counts a new connection."""
        self._open.add(line)
        self.tally.opened += 1
        self.tally.open_now += 1
        self.tally.most_open = max(self.tally.most_open, self.tally.open_now)

    def closed(self, line: _Line) -> None:
        """Counts a closed connection."""
        self._open.discard(line)
        self.tally.open_now -= 1


class _Line(asyncio.Protocol):
    """One connection."""

    def __init__(self, owner: Strategy) -> None:
        self._owner = owner
        self._reply = bytearray()
        self._transport: asyncio.Transport | None = None
        self.lost = asyncio.Event()
        self.replied = asyncio.Event()
        self.waiting = False  # whether a response is still to come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have another class
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        self._reply += data
        if whole(self._reply):
            self._owner.tally.statuses[status_of(self._reply)] += 1
            self._reply.clear()
            self.waiting = False
            self.replied.set()

    def connection_lost(self, exc: Exception | None) -> None:
        tally = self._owner.tally
        if self._reply:  # a response without a length ends when the connection closes
            tally.statuses[status_of(self._reply)] += 1
        elif self.waiting:
            tally.cut += 1
        self._transport = None
        self._owner.closed(self)
        self.lost.set()
        self.replied.set()

    def send(self, data: Request) -> None:
        """Writes a request or a part of one."""
        if self._transport is not None:
            self._owner.tally.wrote(data)
            self._transport.writelines(data)

    def abort(self) -> None:
        """Drops the connection."""
        self.waiting = False
        if self._transport is not None:
            self._transport.abort()


class Hammer(Strategy):
    """Each connection sends a request after each response. It hangs up if a response takes longer than `hang_up_s`."""

    def __init__(
        self,
        port: int,
        tally: Tally,
        connections: int,
        requests: Callable[[int], Iterator[Request]],
        hang_up_s: float | None = None,
    ) -> None:
        super().__init__(port, tally)
        self._requests = [requests(number) for number in range(connections)]
        self._hang_up_s = hang_up_s

    async def run(self) -> None:
        await asyncio.gather(*map(self._client, self._requests))

    async def _client(self, requests: Iterator[Request]) -> None:
        line: _Line | None = None
        for request in requests:
            if self.tally.bytes_written > MAX_BYTES:
                return
            while line is None or line.lost.is_set():
                line = _Line(self)
                if not await self._connect(line):
                    line = None
                    await asyncio.sleep(0.05)
            self.tally.requests += 1
            line.replied.clear()
            line.waiting = True
            line.send(request)
            if self._hang_up_s is None:
                await line.replied.wait()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._hang_up_s):
                    await line.replied.wait()
            if line.waiting:
                self.tally.hung_up += 1
                line.abort()
                await line.lost.wait()


class Holder(Strategy):
    """Keeps connections open and sends at most an unfinished request on each. Reopens closed ones."""

    def __init__(self, port: int, tally: Tally, connections: int, begin: Callable[[int], bytes], drip: bytes) -> None:
        super().__init__(port, tally)
        self._connections, self._begin, self._drip = connections, begin, drip
        self._lines: list[_Line | None] = [None] * connections

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            missing = [number for number, line in enumerate(self._lines) if line is None or line.lost.is_set()]
            for tenth in range(10):  # spread over the second: opening all at once would be a different attack
                await asyncio.gather(*map(self._hold, missing[:OPENED_PER_S][tenth::10]))
                if self._drip:
                    for line in self._lines[tenth::10]:
                        if line is not None:
                            line.send((self._drip,))
                await asyncio.sleep(max(0.0, began + (tenth + 1) / 10 - time.monotonic()))

    async def _hold(self, number: int) -> None:
        line = self._lines[number] = _Line(self)
        if await self._connect(line):
            self.tally.requests += 1
            if begin := self._begin(number):
                line.waiting = True
                line.send((begin,))
        else:
            line.lost.set()
