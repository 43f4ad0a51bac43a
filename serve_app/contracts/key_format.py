"""Creates and checks API keys (`sk-`) and management keys (`mk-`).

A key has 256 random bits, and a checksum that catches typos without a database query. A key is shown once. The ledger
stores its SHA-256 digest and a hint (start and end). A stolen database gives no access: a digest of 256 random bits
cannot be inverted or guessed, so it needs no salt and no slow hash.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib
from typing import Literal

Prefix = Literal["sk-", "mk-"]

PREFIX: Prefix = "sk-"
MANAGEMENT: Prefix = "mk-"
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_BODY = 43  # 62**43 > 2**256
_CHECKSUM = 6  # 62**6 > 2**32
_FORM = re.compile(rf"(?:{PREFIX}|{MANAGEMENT})[0-9A-Za-z]{{{_BODY + _CHECKSUM}}}", re.ASCII)
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32, without the easily misread i, l, o and u


def new_key(prefix: Prefix = PREFIX, *, bits: int | None = None) -> str:
    """Returns a new key of 52 characters with 256 secret `bits`, random unless given."""
    body = _base62(secrets.randbits(256) if bits is None else bits, _BODY)
    return f"{prefix}{body}{_checksum(body)}"


def well_formed(key: str, prefix: Prefix = PREFIX) -> bool:
    """Returns whether the checksum (CRC-32) is right. It catches any single wrong or swapped character."""
    if not key.startswith(prefix) or not _FORM.fullmatch(key):
        return False
    body, checksum = key[len(PREFIX) : -_CHECKSUM], key[-_CHECKSUM:]
    return checksum == _checksum(body)


def digest(key: str) -> str:
    """Returns the SHA-256 of a key or another random token, as 64 hex digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def hint(key: str) -> str:
    """Returns enough of the key to recognise it, e.g. "sk-4fGh…x9Qz"."""
    return f"{key[: len(PREFIX) + 4]}…{key[-4:]}"


def new_id(prefix: str) -> str:
    """Returns a readable id with 100 random bits, e.g. "acct_7k2m…"."""
    return prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), _CHECKSUM)


def _base62(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 62)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
