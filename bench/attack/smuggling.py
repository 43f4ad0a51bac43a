"""Requests that two servers in a row may read differently, sent through HAProxy on raw connections.

Each case hides a second request in what is one request by RFC 9112, or invalid. What must be true: the connection gets
no more responses than it sent requests, the hidden request has no effect and no response on any connection, and other
clients, whose requests share HAProxy's connections to the gateway, get the responses to their own requests.

The hidden request creates an account with the operator's key, so its effect shows even where its response is lost. An
honest pipelined request of the same kind shows that an effect would be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.attack.connections import SOURCE
from bench.attack.smuggling_cases import PREFIX, Case

SILENCE_S: Final = 0.3  # after a response, for one that must not come
PATIENCE_S: Final = 3.0
NEIGHBOURS: Final = 4
NEIGHBOUR: Final = "127.0.0.8"
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_ID: Final = re.compile(rb"\r\nx-request-id: *([^\r\n]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of one case."""

    reply: bytes  # all that the connection got
    closed: bool  # by the service
    neighbours: tuple[tuple[str, bytes], ...]  # other clients' request ids with what they got
    has_effect: bool  # the hidden request created its account


def verdict(number: int, case: Case, seen: Seen) -> dict[str, Any]:
    """The case's row: its responses, and what was wrong, if anything."""
    statuses = _statuses(seen.reply)
    problems = []
    if case.honest:
        if not seen.has_effect or len(statuses) != case.most:
            problems.append("the honest second request was not served")
    elif len(statuses) > case.most:
        problems.append(f"{len(statuses)} responses where {case.most} may come")
    if not case.honest and not case.either:
        if f"{PREFIX}{number}".encode() in seen.reply:
            problems.append("the hidden request got a response")
        if seen.has_effect:
            problems.append("the hidden request was carried out")
    for own, reply in seen.neighbours:
        found = [one.decode("latin-1") for one in _ID.findall(reply)]
        if found != [own] or _statuses(reply) != [200]:
            problems.append(f"another client got {reply[:40]!r} for its request")
    return {"case": case.name, "statuses": statuses, "closed": seen.closed, "problems": problems}


async def send(port: int, case: Case) -> tuple[bytes, bool]:
    """Everything that the connection gets, and whether the service closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(SOURCE, 0))
    reply, closed = b"", False
    with contextlib.suppress(ConnectionError):
        writer.write(case.data)
        with contextlib.suppress(TimeoutError):
            while not closed:
                # A response may be followed by one that must not come.
                patience = SILENCE_S if len(_statuses(reply)) >= case.most else PATIENCE_S
                data = await asyncio.wait_for(reader.read(2**16), patience)
                reply, closed = reply + data, not data
    writer.transport.abort()
    return reply, closed


async def neighbours(port: int, number: int) -> tuple[tuple[str, bytes], ...]:
    """Several other clients' requests, each with an id of its own, right after a case."""

    async def one(place: int) -> tuple[str, bytes]:
        own = f"neighbour-{number}-{place}"
        text = f"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-request-id: {own}\r\nconnection: close\r\n\r\n"
        reply = b""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(NEIGHBOUR, 0))
                writer.write(text.encode())
                reply = await reader.read(-1)
                writer.close()
        return own, reply

    return tuple(await asyncio.gather(*map(one, range(NEIGHBOURS))))


def effects(names: Sequence[str]) -> set[int]:
    """The numbers of the cases whose account is among these."""
    return {int(name.removeprefix(PREFIX)) for name in names if re.fullmatch(rf"{PREFIX}\d+", name)}


def _statuses(reply: bytes) -> list[int]:
    """Returns the statuses of all final responses."""
    return [int(status) for status in _STATUS.findall(reply) if not status.startswith(b"1")]
