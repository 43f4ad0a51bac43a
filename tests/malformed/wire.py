"""HTTP by hand over a blocking socket: what no client library would send, and exactly what came back."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from dataclasses import dataclass
from typing import Any


class Closed(Exception):
    """The server ended the connection without an answer."""


@dataclass(frozen=True)
class Answer:
    """One response. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any] | None:
        """The error in the form of the API; None if this is another server's answer."""
        try:
            parsed = json.loads(self.body)
        except ValueError:
            return None
        error = parsed.get("error") if isinstance(parsed, dict) else None
        is_ours = isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}
        return error if is_ours and self.headers.get("content-type") == "application/json" else None


class Wire:
    """One connection, which waits at most `timeout_s` for anything."""

    def __init__(self, port: int, timeout_s: float = 60.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Writes all of it, unless the server has closed: then its earlier response can still be read."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(data)

    def end(self) -> None:
        """Closes this side's half of the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def has_answer(self) -> bool:
        """Returns whether anything has arrived."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def answer(self, method: str = "POST") -> Answer:
        """The next response that is not a 100. Raises Closed."""
        while True:
            try:
                status_line = self._file.readline()
            except ConnectionError:
                raise Closed from None
            if not status_line:
                raise Closed
            status = int(status_line.split()[1])
            headers = {}
            while line := self._file.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            if status != 100:
                return Answer(status, headers, b"" if method == "HEAD" else self._body(headers))

    def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return self._file.read(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return self._file.read()
        body = b""
        while size := int(self._file.readline(), 16):
            body += self._file.read(size)
            self._file.readline()
        self._file.readline()
        return body
