"""Generates the values of a change, such as a new key. A retry with the same idempotency key gets the same values.

They are derived from the server's secret, the caller's key and the idempotency key, and are not stored. Knowing only
the server's secret or only the caller's key reveals nothing. While two server secrets are valid, a retry of a
change that was made under the previous secret still finds that change's values.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from serve_app.storage.sealing import SecretKeys


@dataclass(frozen=True, slots=True)
class Once:
    """Generates the values of one request. Without an idempotency key, all of them are random."""

    secrets: SecretKeys
    key: str = field(repr=False)
    idempotency_key: str | None = field(repr=False)

    def bits(self, what: str) -> tuple[int, ...]:
        """Returns 256-bit numbers for `what` that can't be guessed.

        Without an idempotency key, there is one random number. With one, there is a number for each valid server
        secret, derived from that secret and both keys. A repeated change finds its earlier value as the first number,
        or as the second if the secret was replaced.
        """
        if self.idempotency_key is None:
            return (secrets.randbits(256),)
        text = "\0".join(("once", what, self.key, self.idempotency_key))
        return tuple(int(token, 16) for token in self.secrets.derive_all(text))
