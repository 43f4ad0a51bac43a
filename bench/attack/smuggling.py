"""Sends requests that HAProxy and the gateway may parse differently, on raw connections through HAProxy.

Each case hides a second request in bytes that RFC 9112 defines as one request or as invalid. These must hold:
- The connection gets no more responses than the number of requests sent on it.
- The hidden request has no effect and no response, unless RFC 9112 also allows reading it as a separate request.
- Other clients, whose requests share HAProxy's connections to the gateway, get the responses to their own requests.

The hidden request creates an account with the operator key, so its effect is visible even if its response is lost. An
honest pipelined request of the same kind shows that the test would see an effect.
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

SILENCE_S: Final = 0.3  # wait for an unexpected further response
PATIENCE_S: Final = 3.0
NEIGHBOURS: Final = 4
NEIGHBOUR: Final = "127.0.0.8"
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_ID: Final = re.compile(rb"\r\nx-request-id: *([^\r\n]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of one case."""

    reply: bytes  # everything that the connection received
    closed: bool  # whether the service closed the connection
    neighbours: tuple[tuple[str, bytes], ...]  # other clients' request ids and replies
    has_effect: bool  # the hidden request created its account


def verdict(number: int, case: Case, seen: Seen) -> dict[str, Any]:
    """Returns the case's row: its responses and its problems."""
    statuses = _statuses(seen.reply)
    problems = []
    if case.honest:
        if not seen.has_effect or len(statuses) != case.most:
            problems.append("the honest second request was not served")
    elif len(statuses) > case.most:
        problems.append(f"{len(statuses)} responses instead of at most {case.most}")
    if not case.honest and not case.either:
        if f"{PREFIX}{number}".encode() in seen.reply:
            problems.append("the hidden request got a response")
        if seen.has_effect:
            problems.append("the hidden request was executed")
    for own, reply in seen.neighbours:
        found = [one.decode("latin-1") for one in _ID.findall(reply)]
        if found != [own] or _statuses(reply) != [200]:
            problems.append(f"another client got {reply[:40]!r} for its request")
    return {"case": case.name, "statuses": statuses, "closed": seen.closed, "problems": problems}


async def send(port: int, case: Case) -> tuple[bytes, bool]:
    """Sends a case. Returns everything that the connection receives, and whether the service closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(SOURCE, 0))
    reply, closed = b"", False
    with contextlib.suppress(ConnectionError):
        writer.write(case.data)
        with contextlib.suppress(TimeoutError):
            while not closed:
                # After the last expected response, wait for an unexpected one.
                patience = SILENCE_S if len(_statuses(reply)) >= case.most else PATIENCE_S
                data = await asyncio.wait_for(reader.read(2**16), patience)
                reply, closed = reply + data, not data
    writer.transport.abort()
    return reply, closed


async def neighbours(port: int, number: int) -> tuple[tuple[str, bytes], ...]:
    """Sends requests of other clients right after a case, each with a different id. Returns ids and replies."""

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
    """The numbers of the cases whose account is in `names`."""
    return {int(name.removeprefix(PREFIX)) for name in names if re.fullmatch(rf"{PREFIX}\d+", name)}


def _statuses(reply: bytes) -> list[int]:
    """Returns the statuses of all final responses."""
    return [int(status) for status in _STATUS.findall(reply) if not status.startswith(b"1")]
