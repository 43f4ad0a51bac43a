"""The bodies of requests as they come in: bounded in size."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from serve_app.api import errors
from serve_app.gateway.exchange import ClientGone


async def read_body(request: Request, most: int) -> bytes:
    """The body, refused as soon as it is known to be over `most` bytes. Raises ClientGone."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > most:
        raise errors.body_too_large(most)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise errors.body_too_large(most)
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)
