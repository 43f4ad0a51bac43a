"""What a change makes up, such as a key: the same again when the change is repeated under its idempotency key.

It follows from the server's secret, the caller's own key and the idempotency key, and is stored nowhere. Who has only
one of the two secrets learns nothing. While two server secrets are valid, a repetition may be of a change that was made
under the one before.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from serve_app.storage.sealing import SecretKeys


@dataclass(frozen=True, slots=True)
class Once:
    """Of one request. Without an idempotency key, all that it makes up is random."""

    secrets: SecretKeys
    key: str = field(repr=False)
    idempotency_key: str | None = field(repr=False)

    def bits(self, what: str) -> tuple[int, ...]:
        """Numbers of 256 bits for `what` that can't be guessed.

        Without an idempotency key one random number, else one for each valid secret, which follows from both. So a
        repeated change gets what it got before: by the first number, or by the second if the secret was replaced.
        """
        if self.idempotency_key is None:
            return (secrets.randbits(256),)
        text = "\0".join(("once", what, self.key, self.idempotency_key))
        return tuple(int(token, 16) for token in self.secrets.derive_all(text))
