"""The cases of request smuggling. Each hides a second request in bytes that are one request by RFC 9112, or invalid."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

PREFIX: Final = "smuggled-"


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `most` is the maximum number of responses."""

    name: str
    data: bytes
    most: int = 1
    honest: bool = False  # the second request must be served
    either: bool = False  # the second request may be served: RFC 9112 also allows reading it as a separate one


def cases(operator_key: str) -> Iterator[Case]:
    """Yields all cases. A hidden request creates an account named `PREFIX` plus the case's number."""
    for number, (name, make, options) in enumerate(_CASES):
        yield Case(name, make(_hidden(number, operator_key)), **options)


def _hidden(number: int, operator_key: str) -> bytes:
    body = json.dumps({"name": f"{PREFIX}{number}"}).encode()
    return (
        f"POST /admin/accounts HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {operator_key}\r\n"
        f"content-type: application/json\r\nx-request-id: {PREFIX}{number}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def _outer(*headers: str, version: str = "1.1", end: str = "\r\n") -> bytes:
    # The request has no key, so the response is an immediate 401.
    lines = [f"POST /v1/chat/completions HTTP/{version}", "host: 127.0.0.1", *headers]
    return end.join([*lines, "", ""]).encode("latin-1")


def _chunked(data: bytes, size: str | None = None, line: bytes = b"\r\n") -> bytes:
    return (f"{len(data):x}" if size is None else size).encode() + line + data + line + b"0" + line + line


def _length(data: bytes) -> str:
    return f"content-length: {len(data)}"


_TE: Final = "transfer-encoding: chunked"
_PAD: Final = b" " * 2**20
_END: Final = b"0\r\n\r\n"
_GET: Final = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"

# Bytes after a first request with both a length and chunks also count as hidden: RFC 9112, section 6.3, requires the
# server to close the connection after such a request.
_CASES: Final[list[tuple[str, Callable[[bytes], bytes], dict[str, Any]]]] = [
    ("honest: two requests, one after the other", lambda h: _GET + b"\r\n" + h, {"most": 2, "honest": True}),
    ("a body that is not read", lambda h: _outer(_length(h)) + h, {}),
    ("a body in chunks that is not read", lambda h: _outer(_TE) + _chunked(h), {}),
    ("a body that is not read, after 1 MB", lambda h: _outer(_length(_PAD + h)) + _PAD + h, {}),
    ("a body above the size limit, after 5 MB", lambda h: _outer(_length(5 * _PAD + h)) + 5 * _PAD + h, {}),
    ("length counts, chunks end early", lambda h: _outer(_length(_END + h), _TE) + _END + h, {}),
    ("length counts, chunks end early and are named first", lambda h: _outer(_TE, _length(_END + h)) + _END + h, {}),
    ("chunks count, length ends early", lambda h: _outer("content-length: 4", _TE) + _chunked(h), {}),
    ("length of 0 and chunks", lambda h: _outer("content-length: 0", _TE) + _chunked(h), {}),
    ("two lengths, the larger first", lambda h: _outer(_length(h), "content-length: 0") + h, {}),
    ("two lengths, the smaller first", lambda h: _outer("content-length: 0", _length(h)) + h, {}),
    ("a list of lengths", lambda h: _outer(f"content-length: 0, {len(h)}") + h, {}),
    ("two equal lengths", lambda h: _outer(_length(h), _length(h)) + h, {}),
    ("a length with a plus sign", lambda h: _outer(f"content-length: +{len(h)}") + h, {}),
    ("a length in hexadecimal", lambda h: _outer(f"content-length: 0x{len(h):x}") + h, {}),
    ("a length with a space inside", lambda h: _outer(f"content-length: {len(h)} 0") + h, {}),
    ("a length beyond 64 bits", lambda h: _outer(f"content-length: {2**64 + len(h)}") + h, {}),
    ("a space before the colon of the length", lambda h: _outer(f"content-length : {len(h)}") + h, {}),
    ("a space before the colon of the chunks", lambda h: _outer("transfer-encoding : chunked", _length(h)) + h, {}),
    ("transfer-encoding xchunked", lambda h: _outer("transfer-encoding: xchunked", _length(h)) + h, {}),
    ("chunks named twice", lambda h: _outer(_TE, _TE) + _chunked(h), {}),
    ("chunks before identity", lambda h: _outer("transfer-encoding: chunked, identity", _length(h)) + h, {}),
    ("chunks after a tab", lambda h: _outer("transfer-encoding:\tchunked", "content-length: 4") + _chunked(h), {}),
    ("chunks with a vertical tab", lambda h: _outer("transfer-encoding: \x0bchunked", _length(h)) + h, {}),
    (
        "chunks in a folded line",
        lambda h: _outer("transfer-encoding:\r\n chunked", "content-length: 4") + _chunked(h),
        {},
    ),
    (
        "a folded line that hides a length",
        lambda h: _outer(f"x: y\r\n content-length: {len(h)}") + h,
        {"most": 2, "either": True},
    ),
    ("a bare carriage return in a header", lambda h: _outer(f"x: y\rcontent-length: {len(h)}") + h, {}),
    ("a header's name that begins with NUL", lambda h: _outer(f"\0content-length: {len(h)}") + h, {}),
    ("bare line feeds in the head", lambda h: _outer(_length(h), end="\n") + h, {}),
    ("a bare line feed hides chunks", lambda h: _outer(f"x: y\n{_TE}", "content-length: 4") + _chunked(h), {}),
    ("chunk extensions", lambda h: _outer(_TE) + _chunked(h, f"{len(h):x};a=b"), {}),
    ("a chunk extension with a bare line feed", lambda h: _outer(_TE) + b"2;\nxx" + b"\r\n" + _END + h, {}),
    ("a chunk extension of 64 KB", lambda h: _outer(_TE) + _chunked(h, f"{len(h):x};a=" + "b" * 65536), {}),
    ("chunks that end with bare line feeds", lambda h: _outer(_TE) + _chunked(h, line=b"\n"), {}),
    ("a chunk's size with 0x", lambda h: _outer(_TE) + _chunked(h, f"0x{len(h):x}"), {}),
    ("a chunk's size beyond 64 bits", lambda h: _outer(_TE) + _chunked(h, f"1{len(h):016x}"), {}),
    ("a chunk's size with an underscore", lambda h: _outer(_TE) + _chunked(h, f"0_{len(h):x}"), {}),
    ("a chunk longer than its size", lambda h: _outer(_TE) + b"2\r\nxx" + h + _END, {}),
    (
        "a trailer that names a length",
        lambda h: _outer(_TE) + b"0\r\n" + _length(h).encode() + b"\r\n\r\n" + _GET + b"\r\n",
        {"most": 2},
    ),
    ("chunks over HTTP/1.0", lambda h: _outer(_TE, "content-length: 4", version="1.0") + _chunked(h), {}),
    ("a GET with a body", lambda h: _GET + _length(h).encode() + b"\r\n\r\n" + h, {}),
    (
        "an upgrade, then a request",
        lambda h: _GET + b"connection: upgrade\r\nupgrade: h2c\r\n" + _length(h).encode() + b"\r\n\r\n" + h,
        {},
    ),
    ("the length named in connection", lambda h: _outer("connection: content-length", _length(h)) + h, {}),
    ("the chunks named in connection", lambda h: _outer("connection: transfer-encoding", _TE) + _chunked(h), {}),
    ("a head of 100 KB", lambda h: _outer("x: " + "a" * 100_000, _length(h)) + h, {}),
    ("a head of 16 KB", lambda h: _outer("x: " + "a" * 15_800, _length(h)) + h, {}),
    ("500 headers", lambda h: _outer(*(f"x{n}: y" for n in range(500)), _length(h)) + h, {}),
    ("a body sent without waiting for 100 Continue", lambda h: _outer("expect: 100-continue", _length(h)) + h, {}),
]
