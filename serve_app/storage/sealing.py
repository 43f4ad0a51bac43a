"""The service's secret key: it seals secrets that the ledger stores, and derives tokens that are not stored.

Secrets are sealed with AES-256-GCM. Each seal is bound to a purpose, for example one user's one-time codes. A sealed
text that was copied to another row does not open there.

While the key is replaced, the previous key is valid too. Each secret is then sealed twice, once under each key, so that
processes which know only one of the keys can open it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_SEPARATOR: Final = "."
_NONCE_BYTES: Final = 12


@dataclass(frozen=True, slots=True, repr=False)
class SecretKeys:
    """The current key, and the previous one while both are valid. Their repr omits them, so no log shows them."""

    current: bytes
    previous: bytes = b""  # empty: none

    @property
    def valid(self) -> tuple[bytes, ...]:
        """The valid keys, the current one first."""
        return (self.current, self.previous) if self.previous else (self.current,)

    def derive(self, text: str) -> str:
        """Returns a token of 64 hex digits that only holders of the current key can compute from `text`."""
        return _derived(self.current, text)

    def derive_all(self, text: str) -> tuple[str, ...]:
        """Returns the token under each valid key, the current one first."""
        return tuple(_derived(key, text) for key in self.valid)


def seal(secret: str, keys: SecretKeys, purpose: str) -> str:
    """Seals a secret under each valid key, the current one first."""
    return _SEPARATOR.join(_sealed(secret, key, purpose) for key in keys.valid)


def unseal(sealed: str, keys: SecretKeys, purpose: str) -> str:
    """Returns the secret that was sealed for this purpose. Raises ValueError."""
    for part in sealed.split(_SEPARATOR, maxsplit=1):
        for key in keys.valid:
            with contextlib.suppress(InvalidTag, binascii.Error, UnicodeDecodeError, ValueError):
                raw = base64.b64decode(part, validate=True)
                return _cipher(key).decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], purpose.encode()).decode()
    raise ValueError("a stored secret does not open: it was sealed under another SERVE_APP_SECRET_KEY")


def is_current(sealed: str, keys: SecretKeys, purpose: str) -> bool:
    """Returns whether a secret needs no resealing.

    That is the case if the current key opens it and no part of it is sealed under a key that is no longer valid. In a
    process that still knows only the older of two keys, it returns True for a secret that is sealed under both.
    """
    current = SecretKeys(keys.current)
    newest, _, other = sealed.partition(_SEPARATOR)
    has_older_part = bool(other) and _opens(newest, current, purpose)
    return _opens(sealed, current, purpose) and (bool(keys.previous) or not has_older_part)


def of_totp(user_id: str) -> str:
    """Returns the purpose under which the secret of a person's one-time codes is sealed."""
    return f"one-time codes of {user_id}"


def of_webhooks(account_id: str) -> str:
    """Returns the purpose under which the secrets that sign an account's webhooks are sealed."""
    return f"webhooks of {account_id}"


def _opens(sealed: str, keys: SecretKeys, purpose: str) -> bool:
    try:
        unseal(sealed, keys, purpose)
    except ValueError:
        return False
    return True


def _derived(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), "sha256").hex()


def _sealed(secret: str, key: bytes, purpose: str) -> str:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return base64.b64encode(nonce + _cipher(key).encrypt(nonce, secret.encode(), purpose.encode())).decode()


def _cipher(key: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, salt=None, info=b"serve-app: secrets in the ledger").derive(key))
