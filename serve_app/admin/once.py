"""What a change makes up, such as a key: the same again when the change is repeated under its idempotency key.

It follows from the server's secret, the caller's own key and the idempotency key, and is stored nowhere. Who has only
one of the two secrets learns nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from serve_app.contracts.key_format import digest


@dataclass(frozen=True, slots=True)
class Once:
    """Of one request. Without an idempotency key, all that it makes up is random."""

    secret: bytes = field(repr=False)
    key: str = field(repr=False)
    idempotency_key: str | None = field(repr=False)

    def bits(self, what: str) -> int:
        """256 bits for `what` that nobody can guess."""
        if self.idempotency_key is None:
            return secrets.randbits(256)
        return int(digest("\0".join(("once", what, self.key, self.idempotency_key)), self.secret), 16)
