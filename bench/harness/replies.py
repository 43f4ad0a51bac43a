"""Decodes the bytes of a server, with their times of arrival, as HTTP and server-sent events.

The load generator only records bytes. They are decoded after the measurement, so that decoding takes no processor time
from the servers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass(slots=True)
class RawReply:
    """One exchange as it arrived at the socket. Times are seconds of one monotonic clock."""

    sent_at: float
    max_tokens: int
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended_at: float | None = None  # end of the reply; None if the request was cancelled
    problem: str | None = None  # why the connection failed


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed reply. `texts` are the non-empty pieces of content with their times of arrival, in order."""

    sent_at: float
    max_tokens: int
    texts: tuple[tuple[float, str], ...]
    ended_at: float | None
    completion_tokens: int | None = None  # from the server's usage; None without usage
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    problem: str | None = None  # an HTTP status other than 200, an error event, a broken connection

    @property
    def text(self) -> str:
        """All content received."""
        return "".join(text for _, text in self.texts)

    @property
    def first_at(self) -> float | None:
        """Returns the time at which the first content arrived."""
        return self.texts[0][0] if self.texts else None

    @property
    def last_at(self) -> float | None:
        """Returns the time at which the last content arrived."""
        return self.texts[-1][0] if self.texts else None

    def text_until(self, moment: float) -> str:
        """The content that had arrived by `moment`."""
        return "".join(text for at, text in self.texts if at <= moment)


def read(raw: RawReply) -> Reply:
    """Decodes an exchange. An event has the time of the piece that completed it."""
    status, body, problem = _http(raw.pieces)
    if raw.problem is not None or problem is not None:
        problem = raw.problem or problem
    elif status not in (None, 200):
        message = b"".join(data for _, data in body).decode(errors="replace")
        problem = f"HTTP {status}: {' '.join(message.split())[:200]}"
        body = []
    texts: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    reason: str | None = None
    for at, data in server_sent_events(body):
        if data == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except ValueError:
            problem = problem or f"an event is not JSON: {data[:80]!r}"
            continue
        if event.get("error"):
            problem = problem or f"error event: {event['error']}"
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if text := (choice.get("delta") or {}).get("content"):
                texts.append((at, text))
            reason = choice.get("finish_reason") or reason
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        sent_at=raw.sent_at,
        max_tokens=raw.max_tokens,
        texts=tuple(texts),
        ended_at=raw.ended_at,
        completion_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        finish_reason=reason,
        problem=problem,
    )


def server_sent_events(body: list[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """The data of each event (HTML standard, section 9.2.6), with its time. Pieces may end anywhere in an event."""
    events: list[tuple[float, str]] = []
    rest = b""
    data: list[str] = []
    for at, piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if data:
                    events.append((at, "\n".join(data)))
                data = []
            elif line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode(errors="replace"))
    return events


def _http(pieces: list[tuple[float, bytes]]) -> tuple[int | None, list[tuple[float, bytes]], str | None]:
    """Returns the status, the pieces of the body, and the error in the response's framing, if any."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "bench")]))
    connection.send(h11.EndOfMessage())
    status: int | None = None
    body: list[tuple[float, bytes]] = []
    try:
        for at, piece in pieces:
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body.append((at, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    return status, body, None
    except h11.RemoteProtocolError as error:
        return status, body, f"not HTTP: {error}"
    return status, body, None
