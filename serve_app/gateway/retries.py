"""Retries under an `idempotency-key`: a finished request is answered again with its stored reply and not billed again.

The limiter lets one request of an account and key in at a time, and a reply is committed together with its charge,
before the hold is released. So whoever is let in finds the reply of whatever finished before, or nothing of it was
billed as finished.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from serve_app.api import errors, fingerprint, idempotency_key
from serve_app.gateway.outbox import Outbox
from serve_app.ledger.messages import StoredReply

logger = logging.getLogger("ray.serve")

# A reply of 4,096 tokens has tens of kilobytes. One that is larger than this would fill database and spool, which are
# sized for usage; it is not kept, and a retry of it is a new request.
MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Retry:
    """What makes two requests the same: their key, and what they ask for."""

    idempotency_key: str
    fingerprint: str

    @classmethod
    def of(cls, header: str | None, body: bytes) -> Retry | None:
        """From the header and the body of a request; None without the header. Raises ApiError (422)."""
        return None if header is None else cls(idempotency_key(header), fingerprint(body))

    async def find(self, outbox: Outbox, account_id: str) -> bytes | None:
        """The stored reply. Raises ApiError (422) when the key was used otherwise, Unavailable as `find_reply` does."""
        stored = await outbox.find_reply(account_id, self.idempotency_key)
        if stored is None:
            return None
        if stored.fingerprint != self.fingerprint:
            raise errors.idempotency_key_reused()
        return stored.body

    def stored(self, body: bytes) -> StoredReply | None:
        """What the settlement carries; None for a reply that is too large to keep."""
        if len(body) > MOST_BYTES:
            logger.warning("a reply of %d bytes is too large to be kept for a retry", len(body))
            return None
        return StoredReply(self.idempotency_key, self.fingerprint, body)
