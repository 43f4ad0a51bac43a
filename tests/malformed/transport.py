"""Requests that are malformed below JSON: lengths, chunks, heads. Which server responds, and with what.

Invalid HTTP never reaches the application. Its server answers 400 in plain text, HAProxy in front of it in HTML;
neither can be configured to send more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.malformed.documents import FIFTY_MB, GOOD

MB = 2**20


@dataclass(frozen=True)
class Case:
    """`alone` is the answer of the gateway itself, `balanced` of HAProxy in front of it.

    A number is a status in the form of the API; a text beginning with "plain" one that is another server's; "closed"
    an end of the connection without an answer.
    """

    name: str
    pieces: tuple[bytes, ...]
    alone: int | str
    balanced: int | str
    method: str = "POST"
    ends: bool = False  # the client closes its half after the last piece
    usable: bool = False  # the connection takes another request afterwards


def head(
    key: str, *headers: str, target: str = "/chat/completions", method: str = "POST", version: str = "1.1"
) -> bytes:
    """The first lines of a request."""
    lines = (f"{method} {target} HTTP/{version}", "host: gateway", f"authorization: Bearer {key}", *headers)
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def good(key: str) -> bytes:
    """A whole request that is served."""
    return head(key, f"content-length: {len(GOOD)}") + GOOD


def chunked(*chunks: bytes) -> bytes:
    """Chunks, without the last one."""
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)


def _get(text: str, version: str = "1.1") -> tuple[bytes]:
    first, *rest = text.split("\n")
    return ("\r\n".join([f"{first} HTTP/{version}", *rest, "", ""]).encode("latin-1"),)


def cases(key: str) -> Iterator[Case]:
    """Every case, sent with this key."""
    yield from _lengths(key)
    yield from _chunks(key)
    yield from _heads(key)


SAMPLE = frozenset({
    "50 MB, written before anything is read", "50 MB announced, nothing sent", "a body that waits to be asked",
    "cut short and closed", "shorter than announced, and silence", "longer than announced", "a length in words",
    "three requests at once", "chunks", "a bad body in chunks", "no size of a chunk", "chunks and a length",
    "a compressed body", "two hosts", "a key of bytes", "an address with NUL", "a browser asks for leave",
    "HEAD of nothing", "TLS on a plain port",
})  # fmt: skip
"""Names of a few cases: each status, each server that answers, with and without chunks."""


def sample(key: str) -> Iterator[Case]:
    """The cases of `SAMPLE`."""
    return (case for case in cases(key) if case.name in SAMPLE)


def _lengths(key: str) -> Iterator[Case]:
    length = f"content-length: {len(GOOD)}"
    many = [b"x" * MB] * (FIFTY_MB // MB)
    yield Case(
        "50 MB, written before anything is read",
        (head(key, f"content-length: {FIFTY_MB // MB * MB}"), *many),
        400,
        400,
        usable=True,
    )
    yield Case(
        "50 MB in chunks, written before anything is read",
        (head(key, "transfer-encoding: chunked"), *map(chunked, many), b"0\r\n\r\n"),
        400,
        400,
        usable=True,
    )
    yield Case("50 MB announced, nothing sent", (head(key, "content-length: 50000000"),), 400, 400)
    yield Case(
        "50 MB announced, waiting to be asked",
        (head(key, "content-length: 50000000", "expect: 100-continue"),),
        400,
        400,
    )
    yield Case(
        "a body that waits to be asked", (head(key, length, "expect: 100-continue"), GOOD), 200, 200, usable=True
    )
    yield Case("an expectation that nobody knows", (head(key, length, "expect: miracles"), GOOD), 200, 200)
    yield Case("cut short and closed", (head(key, length), GOOD[:-9]), "closed", "closed", ends=True)
    yield Case("shorter than announced, and silence", (head(key, length), GOOD[:-9]), 408, 408)
    yield Case("longer than announced", (head(key, f"content-length: {len(GOOD) - 9}"), GOOD), "plain 400", 400)
    yield Case("a negative length", (head(key, "content-length: -5"), GOOD), "plain 400", "plain 400")
    yield Case("a length in words", (head(key, "content-length: five"), GOOD), "plain 400", "plain 400")
    yield Case("a length of 30 digits", (head(key, "content-length: " + "9" * 30), GOOD), "plain 400", "plain 400")
    yield Case("two lengths", (head(key, length, "content-length: 5"), GOOD), "plain 400", "plain 400")
    yield Case("no length", (head(key),), 400, 400, usable=True)
    yield Case("a length of nothing", (head(key, "content-length: 0"),), 400, 400, usable=True)
    yield Case("three requests at once", (good(key) * 3,), 200, 200, usable=True)
    yield Case("a bad request and a good one at once", (head(key, "content-length: 1") + b"{" + good(key),), 400, 400)
    yield Case("HTTP/1.0", (head(key, length, version="1.0"), GOOD), 200, 200)
    yield Case("a bad body over HTTP/1.0", (head(key, "content-length: 1", version="1.0"), b"{"), 400, 400)


def _chunks(key: str) -> Iterator[Case]:
    start = head(key, "transfer-encoding: chunked")
    both = head(key, "transfer-encoding: chunked", "content-length: 5")
    end = b"0\r\n\r\n"
    yield Case("chunks", (start, chunked(GOOD[:9], GOOD[9:]), end), 200, 200, usable=True)
    yield Case("chunks of a byte", (start, chunked(*(bytes([byte]) for byte in GOOD)), end), 200, 200, usable=True)
    yield Case("chunks with extensions", (start, b"%x;a=b\r\n%s\r\n" % (len(GOOD), GOOD), end), 200, 200)
    yield Case("chunks and a trailer", (start, chunked(GOOD), b"0\r\nx: y\r\n\r\n"), 200, 200)
    yield Case("a bad body in chunks", (start, chunked(b"{"), end), 400, 400, usable=True)
    yield Case("no size of a chunk", (start, b"zz\r\nhello\r\n"), "plain 400", "plain 400")
    yield Case("a chunk longer than its size", (start, b"5\r\nhelloworld"), "plain 400", "plain 400")
    yield Case("a size of 17 digits", (start, b"F" * 17 + b"\r\nhello"), "plain 400", "plain 400")
    yield Case("a negative size", (start, b"-5\r\nhello"), "plain 400", "plain 400")
    yield Case("chunks without an end, closed", (start, chunked(GOOD)), "closed", "closed", ends=True)
    yield Case("chunks without an end, and silence", (start, chunked(GOOD)), 408, 408)
    # HAProxy drops the length, as RFC 9112 (6.3) allows, so that no server behind it is misled.
    yield Case("chunks and a length", (both, chunked(GOOD), end), "plain 400", 200)
    yield Case("an unknown transfer-encoding", (head(key, "transfer-encoding: gzip"), GOOD), "plain 400", "plain 400")


def _heads(key: str) -> Iterator[Case]:
    length = f"content-length: {len(GOOD)}"
    yield Case("a compressed body", (head(key, length, "content-encoding: gzip"), GOOD), 400, 400, usable=True)
    yield Case("a body that is said to be plain", (head(key, length, "content-encoding: identity"), GOOD), 200, 200)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "???"):
        yield Case(f"content-type {kind or 'empty'}", (head(key, length, f"content-type: {kind}"), GOOD), 200, 200)
    yield Case(
        "a charset that is none", (head(key, length, "content-type: application/json; charset=x"), GOOD), 200, 200
    )
    yield Case("no host", _get("GET /health"), 200, 200, method="GET")
    yield Case("two hosts", _get("GET /health\nhost: a\nhost: b"), 200, "plain 400", method="GET")
    yield Case("a header without a colon", _get("GET /health\nhost: a\ngarbage"), "plain 400", "plain 400")
    yield Case("a header with NUL", _get("GET /health\nhost: a\nx: a\0b"), "plain 400", "plain 400")
    yield Case("a header of 100 KB", _get("GET /health\nhost: a\nx: " + "a" * 100_000), 200, "plain 400", method="GET")
    yield Case("a key of 10 KB", (head("k" * 10_000, target="/models", method="GET"),), 401, 401, method="GET")
    yield Case("a key of bytes", (head("\xff\xfe", target="/models", method="GET"),), 401, 401, method="GET")
    yield Case("an address of 100 KB", _get("GET /" + "a" * 100_000), "plain 400", "plain 400")
    yield Case("an address of 10 KB", _get("GET /" + "a" * 10_000), 404, 404, method="GET")
    yield Case("an address of bytes", _get("GET /\xff"), "plain 400", "plain 400")
    yield Case("an address with NUL", (head(key, target="/models/%00%ff", method="GET"),), 404, 404, method="GET")
    yield Case("two slashes", _get("GET //health\nhost: a"), 404, 404, method="GET")
    yield Case("dots", _get("GET /v1/../health\nhost: a"), 404, 404, method="GET")
    yield Case("a browser asks for leave", _get("OPTIONS /chat/completions\nhost: a\norigin: https://a"), 405, 405)
    yield Case("OPTIONS *", _get("OPTIONS *\nhost: a"), 404, "plain 404")
    yield Case("HEAD of what can be got", _get("HEAD /health\nhost: a"), "plain 405", "plain 405", method="HEAD")
    yield Case("HEAD of nothing", _get("HEAD /nothing\nhost: a"), "plain 404", "plain 404", method="HEAD")
    yield Case("a rare method", _get("PURGE /health\nhost: a"), 405, 405)
    yield Case("an unknown method", _get("BREW /coffee\nhost: a"), "plain 400", "plain 400")
    yield Case("a method in small letters", _get("get /health\nhost: a"), "plain 400", "plain 400")
    sockets = (
        "connection: upgrade\nupgrade: websocket\nsec-websocket-version: 13\nsec-websocket-key: " + "A" * 22 + "=="
    )
    yield Case("a web socket", _get(f"GET /health\nhost: a\n{sockets}"), 404, 404, method="GET")
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100
    yield Case("TLS on a plain port", (tls,), "plain 400", "plain 400")
    yield Case("no HTTP at all", (b"\xff\xfe\xfd\r\n\r\n",), "plain 400", "plain 400")
