"""API keys (`sk-`) and management keys (`mk-`): 256 random bits, and a checksum that catches typos without asking the
database.

A key is shown once. What is stored is its HMAC-SHA256 under a server secret and a hint (start and end), so a stolen
database opens nothing. Digests are looked up by an index, which is no timing leak: without the secret an
attacker cannot choose the digest that a guess leads to.
"""

from __future__ import annotations

import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field
from typing import Final, Literal

Prefix = Literal["sk-", "mk-"]

PREFIX: Prefix = "sk-"
MANAGEMENT: Prefix = "mk-"
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_BODY = 43  # 62**43 > 2**256
_CHECKSUM = 6  # 62**6 > 2**32
_FORM = re.compile(rf"(?:{PREFIX}|{MANAGEMENT})[0-9A-Za-z]{{{_BODY + _CHECKSUM}}}", re.ASCII)
MARK_DIGITS: Final = 8
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32: no i, l, o, u to misread


def new_key(prefix: Prefix = PREFIX, *, bits: int | None = None) -> str:
    """A new key of 52 characters, of 256 `bits` that nobody can guess; without them of random ones."""
    body = _base62(secrets.randbits(256) if bits is None else bits, _BODY)
    return f"{prefix}{body}{_checksum(body)}"


def well_formed(key: str, prefix: Prefix = PREFIX) -> bool:
    """Whether this can be a key at all. Any single wrong or swapped character is caught (CRC-32), without secrets."""
    if not key.startswith(prefix) or not _FORM.fullmatch(key):
        return False
    body, checksum = key[len(PREFIX) : -_CHECKSUM], key[-_CHECKSUM:]
    return checksum == _checksum(body)


def digest(key: str, secret: str | bytes) -> str:
    """HMAC-SHA256 of the key under the server's secret, as 64 hex digits. Raises ValueError for an empty secret."""
    if not secret:
        raise ValueError("the server secret for API keys is empty: set one, and keep it for as long as the keys live")
    raw = secret.encode() if isinstance(secret, str) else secret
    return hmac.digest(raw, key.encode(), "sha256").hex()


def mark_of(secret: bytes) -> str:
    """Tells secrets apart, and says nothing else of them."""
    return digest("mark", secret)[:MARK_DIGITS]


@dataclass(frozen=True, slots=True)
class Hashed:
    """A key's digest under a secret, and the mark of that secret."""

    digest: str = field(repr=False)
    mark: str


@dataclass(frozen=True, slots=True, repr=False)
class KeySecrets:
    """The secret under which keys are hashed, and the one before it while both are valid.

    Without a repr, so that no log shows them.
    """

    current: bytes
    previous: bytes = b""  # empty: none

    @property
    def valid(self) -> tuple[bytes, ...]:
        """The current one first."""
        return (self.current, self.previous) if self.previous else (self.current,)

    def hashed(self, key: str) -> tuple[Hashed, Hashed | None]:
        """The key under the current secret, and under the one before."""
        now = Hashed(digest(key, self.current), mark_of(self.current))
        return now, Hashed(digest(key, self.previous), mark_of(self.previous)) if self.previous else None


def hint(key: str) -> str:
    """Enough of the key to recognise it by, e.g. "sk-4fGh…x9Qz"."""
    return f"{key[: len(PREFIX) + 4]}…{key[-4:]}"


def new_id(prefix: str) -> str:
    """A readable id of 100 random bits, e.g. "acct_7k2m…"."""
    return prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), _CHECKSUM)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
