"""Headers in and out: the bearer key, the request id, rate limits and timings."""

from __future__ import annotations

import re
import uuid
from math import ceil
from typing import Final

from serve_app.api import errors

_PRINTABLE: Final = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")
_KEY: Final = re.compile(r"[!-~]{1,512}")
_EXPECTED: Final = 'Send the header "Authorization: Bearer <your API key>".'


def request_id(incoming: str | None) -> str:
    """The caller's `x-request-id` when it is 1 to 128 characters of printable ASCII, else a new one.

    It is for finding a request in logs and not unique: a caller may send the same one again and again. What is
    admitted and billed needs an id of our own making.
    """
    if incoming is not None and _PRINTABLE.fullmatch(incoming):
        return incoming
    return f"req_{uuid.uuid4().hex}"


def bearer(authorization: str | None) -> str:
    """The key in an `Authorization` header (RFC 6750). Raises AuthenticationError; never repeats what was sent."""
    if authorization is None or not authorization.strip():
        raise errors.authentication(f"The Authorization header is missing. {_EXPECTED}")
    scheme, _, key = authorization.strip().partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer":
        raise errors.authentication(f"The Authorization header does not begin with Bearer. {_EXPECTED}")
    if not key:
        raise errors.authentication(f"The Authorization header has no key after Bearer. {_EXPECTED}")
    if not _KEY.fullmatch(key):
        raise errors.authentication(
            f"The key in the Authorization header has spaces or characters that no key has. {_EXPECTED}"
        )
    return key


def rate_limit_headers(requests: tuple[int, int, float], tokens: tuple[int, int, float]) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` from (limit, remaining, seconds until full)."""
    found = {}
    for name, (limit, remaining, reset_s) in (("requests", requests), ("tokens", tokens)):
        found[f"x-ratelimit-limit-{name}"] = str(limit)
        found[f"x-ratelimit-remaining-{name}"] = str(max(0, remaining))
        found[f"x-ratelimit-reset-{name}"] = duration(reset_s)
    return found


def duration(seconds: float) -> str:
    """Seconds as client libraries read them, rounded up to a millisecond: "20ms", "1.5s", "6m0s", "1h0m0s"."""
    ms = max(0, ceil(round(seconds * 1000, 3)))
    if ms == 0:
        return "0s"
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{rest}"
    return f"{minutes}m{rest}" if minutes else rest


def server_timing(**seconds: float) -> str:
    """`server-timing` (W3C Server Timing): each step's name and its duration, given in seconds, told in ms."""
    return ", ".join(f"{name};dur={max(0.0, value) * 1000:.1f}" for name, value in seconds.items())
