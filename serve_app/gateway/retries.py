"""Retries under an `idempotency-key`: a finished request gets its stored reply again and is not billed again.

The limiter admits one request of an account and key at a time, and a reply is committed together with its charge,
before the hold is released. So a request that is admitted finds the reply of the one that finished before it, or that
one was not billed as finished.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from typing import Final

from pydantic_core import from_json

from serve_app.api import errors
from serve_app.contracts.books import StoredReply
from serve_app.contracts.calls import Unavailable
from serve_app.gateway.authentication import Caller
from serve_app.gateway.settlements import Settlements

logger = logging.getLogger("ray.serve")

# A reply of 4,096 tokens has tens of kilobytes. One that is larger than this would fill database and spool, which are
# sized for usage; it is not kept, and a retry of it is a new request.
MAX_BYTES: Final = 1024 * 1024

MAX_KEY_LENGTH: Final = 255  # a promise to clients, and a bound on what the service keeps for a day
_KEY: Final = re.compile(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class Retry:
    """What makes two requests the same: their key, and the body."""

    idempotency_key: str
    fingerprint: str

    @classmethod
    def from_header(cls, header: str, body: bytes) -> Retry:
        """From the header and the body of a request. Raises ApiError (422)."""
        return cls(valid_idempotency_key(header), body_fingerprint(body))

    async def find_stored(self, settlements: Settlements, account_id: str) -> bytes | None:
        """The stored reply. Raises ApiError (422) when the key was used otherwise, Unavailable as `find_reply` does."""
        stored = await settlements.find_reply(account_id, self.idempotency_key)
        if stored is None:
            return None
        if stored.fingerprint != self.fingerprint:
            raise errors.idempotency_key_reused()
        return stored.body

    async def of_admitted(self, settlements: Settlements, account_id: str) -> bytes | None:
        """The stored reply of a request that had finished before this one was admitted. Raises ApiError."""
        try:
            return await self.find_stored(settlements, account_id)
        except Unavailable:
            # It may have been answered and billed: running it again without knowing would break the promise.
            raise errors.overloaded(
                "whether this idempotency-key was answered before is unknown right now: try again", retry_after_s=2
            ) from None

    async def of_refused(self, settlements: Settlements, caller: Caller) -> bytes | None:
        """The stored reply of a request that was not admitted. Raises ApiError.

        It may have spent the balance itself, or be open only because its gateway died before it could release it.
        """
        try:
            identity = await caller.identify()
            return await self.find_stored(settlements, identity.account_id)
        except Unavailable:
            return None

    def stored(self, body: bytes) -> StoredReply | None:
        """What the settlement carries; None for a reply that is too large to keep."""
        if len(body) > MAX_BYTES:
            logger.warning("a reply of %d bytes is too large to be kept for a retry", len(body))
            return None
        return StoredReply(self.idempotency_key, self.fingerprint, body)


def valid_idempotency_key(header: str) -> str:
    """The key in the header. Raises ApiError (422) unless it is 1 to 255 visible ASCII characters."""
    if not _KEY.fullmatch(header):
        raise errors.invalid_parameters(
            f"The idempotency-key header must be 1 to {MAX_KEY_LENGTH} visible ASCII characters without spaces, for "
            "example a UUID.",
            param="idempotency-key",
        )
    return header


def body_fingerprint(body: bytes) -> str:
    """SHA-256 of a valid JSON body in 64 hex digits; the order of members and white space do not count.

    It is of the body as sent and not of the request made from it: a retry after an upgrade of the service, which may
    know more fields or other defaults, is still the same request.
    """
    canonical = json.dumps(from_json(body, allow_inf_nan=False), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
