"""The `idempotency-key` header: what it may be, and how a retry is told from another request under the same key."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Final

from pydantic_core import from_json

from serve_app.api import errors

# A promise to whoever makes keys, and a bound on what the service keeps for each for a day.
MAX_KEY_LENGTH: Final = 255
_KEY: Final = re.compile(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}")


def idempotency_key(header: str) -> str:
    """The key in the header. Raises InvalidParametersError (422) unless it is 1 to 255 visible ASCII characters."""
    if not _KEY.fullmatch(header):
        raise errors.invalid_parameters(
            f"The idempotency-key header must be 1 to {MAX_KEY_LENGTH} visible ASCII characters without spaces, for "
            "example a UUID.",
            param="idempotency-key",
        )
    return header


def fingerprint(body: bytes) -> str:
    """SHA-256 of what a valid JSON body says, in 64 hex digits: the order of members and white space do not count.

    Of the body as it was sent and not of the request made from it: a retry after an upgrade of the service, which may
    know more fields or other defaults, is still the same request.
    """
    canonical = json.dumps(from_json(body, allow_inf_nan=False), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
