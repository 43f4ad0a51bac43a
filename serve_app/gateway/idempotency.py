"""Handles retries under an `idempotency-key`: a retry of a finished request gets the stored reply and is not billed.

For an account and an idempotency key, the limiter admits one request at a time. A reply is committed together with its
charge, before the hold is released. So an admitted request finds the reply of the request before it, unless that
request failed or was cancelled.
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
from serve_app.api.chat_door import ChatDoor
from serve_app.contracts.books import StoredReply
from serve_app.contracts.calls import Unavailable
from serve_app.gateway.authentication import Caller
from serve_app.gateway.settlements import Settlements

logger = logging.getLogger("ray.serve")

# A reply of 4,096 tokens has tens of kilobytes. Larger replies would fill the database and the spool, which are sized
# for usage. A reply above this limit is not stored, and a retry is a new request.
MAX_BYTES: Final = 1024 * 1024

# Maximum stored replies that a gateway sends to an account per minute: they are free, but the ledger must read each.
REPLAYS_PER_MINUTE: Final = 300

MAX_KEY_LENGTH: Final = 255  # a promise to clients, and a limit on what the service stores for a day
_KEY: Final = re.compile(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class Retry:
    """Identifies a repeated request, by its key, its door and its body."""

    idempotency_key: str
    fingerprint: str

    @classmethod
    def from_header(cls, header: str, path: str, body: bytes) -> Retry:
        """Builds a Retry from the header, the door's path and the body of a request. Raises ApiError (422)."""
        return cls(valid_idempotency_key(header), request_fingerprint(path, body))

    async def find_stored(self, settlements: Settlements, account_id: str) -> bytes | None:
        """Returns the stored reply, or None.

        Raises ApiError (422) when the key was used with another body, and 429 after too many stored replies. Raises
        Unavailable as `find_reply` does.
        """
        limit = account_id, REPLAYS_PER_MINUTE
        if wait_s := settlements.replays.wait_s(limit):
            message = (
                f"Stored replies per minute of this account: the limit is {REPLAYS_PER_MINUTE}. "
                f"Try again in {wait_s:.3g} s with the same idempotency-key."
            )
            raise errors.rate_limit(message, code="requests", retry_after_s=wait_s)
        stored = await settlements.find_reply(account_id, self.idempotency_key)
        if stored is None:
            return None
        settlements.replays.charge(limit)
        if stored.fingerprint != self.fingerprint:
            raise errors.idempotency_key_reused()
        return stored.body

    async def of_admitted(self, settlements: Settlements, account_id: str) -> bytes | None:
        """Returns the stored reply of a request that finished before this one was admitted. Raises ApiError."""
        try:
            return await self.find_stored(settlements, account_id)
        except Unavailable:
            # The request may have been answered and billed: running it again could bill it twice.
            raise errors.overloaded(
                "the service cannot check right now whether this idempotency-key was answered before: try again",
                retry_after_s=2,
            ) from None

    async def of_refused(self, settlements: Settlements, caller: Caller) -> bytes | None:
        """Returns the stored reply of a request that was not admitted. Raises ApiError.

        The first request with this key may be the reason for the refusal. It may have spent the balance. Or it still
        counts as open, because its gateway died before releasing it.
        """
        try:
            identity = await caller.identify()
            return await self.find_stored(settlements, identity.account_id)
        except Unavailable:
            return None

    def stored(self, body: bytes) -> StoredReply | None:
        """Returns the reply to store with the settlement; None if it is too large."""
        if len(body) > MAX_BYTES:
            logger.warning("a reply of %d bytes is too large to be stored for a retry", len(body))
            return None
        return StoredReply(self.idempotency_key, self.fingerprint, body)


def valid_idempotency_key(header: str) -> str:
    """Returns the key in the header. Raises ApiError (422) unless it is 1 to 255 visible ASCII characters."""
    if not _KEY.fullmatch(header):
        raise errors.invalid_parameters(
            f"The idempotency-key header must be 1 to {MAX_KEY_LENGTH} visible ASCII characters without spaces, for "
            "example a UUID.",
            param="idempotency-key",
        )
    return header


def request_fingerprint(path: str, body: bytes) -> str:
    """Returns the SHA-256 of a door's path and a valid JSON body, in 64 hex digits.

    The order of members and white space make no difference. The path of the chat door is left out, so that replies that
    an earlier release has stored are still found.

    The digest covers the body as sent, not the parsed request. So a retry is recognised even if an upgrade has added
    fields or changed defaults meanwhile.
    """
    canonical = json.dumps(from_json(body, allow_inf_nan=False), sort_keys=True, separators=(",", ":"))
    door = "" if path == ChatDoor.path else path
    return hashlib.sha256((door + canonical).encode()).hexdigest()
