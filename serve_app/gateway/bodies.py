"""The bodies of requests as they come in: bounded in size and in time."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import ClientDisconnect, Request

from serve_app.api import errors
from serve_app.gateway.exchange import ClientGone

TIMEOUT_S: Final = 30.0


async def read_body(request: Request, most: int, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body, refused as soon as it is known to be over `most` bytes or compressed.

    A client that goes on sending what was refused is read and ignored by the server, and so it sees the refusal.

    Raises:
        InvalidFormatError: it is too long or compressed.
        BodyTimeoutError: it is not complete after `timeout_s` seconds, however steadily it comes.
        ClientGone: the client hung up before its end.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise errors.body_encoded(encoding)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        raise errors.body_too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise errors.body_too_large(most)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise errors.body_timeout(timeout_s) from None
    return bytes(body)
