"""Secrets that the service must read again, sealed for the ledger: who has only the database learns nothing.

AES-256-GCM under a key that follows from the service's key secret. `purpose` says whose it is, and what for: what was
copied to another row does not open there.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from serve_app.contracts.key_format import KeySecrets

_MARK: Final = "sealed:"
_SEPARATOR: Final = "."
_MAX_PARTS: Final = 2
_NONCE: Final = 12


def seal(secret: str, key_secrets: KeySecrets, purpose: str) -> str:
    """Under each valid secret, the current one first: processes that know only one of them open it too."""
    return _MARK + _SEPARATOR.join(_sealed(secret, one, purpose) for one in key_secrets.valid)


def unseal(stored: str, key_secrets: KeySecrets, purpose: str) -> str:
    """What was stored before secrets were sealed comes back as it is. Raises ValueError for what does not open."""
    if not stored.startswith(_MARK):
        return stored
    return open_sealed(stored, key_secrets, purpose)


def open_sealed(text: str, key_secrets: KeySecrets, purpose: str) -> str:
    """What `seal` made under a valid secret, and nothing else. Raises ValueError."""
    for part in text.removeprefix(_MARK).split(_SEPARATOR)[:_MAX_PARTS]:
        for one in key_secrets.valid:
            with contextlib.suppress(InvalidTag, binascii.Error, UnicodeDecodeError):
                sealed = base64.b64decode(part, validate=True)
                return _cipher(one).decrypt(sealed[:_NONCE], sealed[_NONCE:], purpose.encode()).decode()
    raise ValueError("a stored secret does not open: it was sealed under another SERVE_APP_KEY_SECRET")


def is_current(stored: str, key_secrets: KeySecrets, purpose: str) -> bool:
    """Whether the current secret opens it and, when no other one is valid, none of before does.

    What was sealed while two secrets were valid stays open to both until it is sealed again; its first part is under
    the newer one.
    """
    current = KeySecrets(key_secrets.current)
    newest, _, other = stored.removeprefix(_MARK).partition(_SEPARATOR)
    is_of_before = bool(other) and stored.startswith(_MARK) and _opens(_MARK + newest, current, purpose)
    return _opens(stored, current, purpose) and (bool(key_secrets.previous) or not is_of_before)


def of_totp(user_id: str) -> str:
    """The purpose of a person's secret of one-time codes."""
    return f"one-time codes of {user_id}"


def of_webhooks(account_id: str) -> str:
    """The purpose of the secrets that an account's webhooks are signed with."""
    return f"webhooks of {account_id}"


def _opens(stored: str, key_secrets: KeySecrets, purpose: str) -> bool:
    try:
        unseal(stored, key_secrets, purpose)
    except ValueError:
        return False
    return True


def _sealed(secret: str, key_secret: bytes, purpose: str) -> str:
    nonce = secrets.token_bytes(_NONCE)
    return base64.b64encode(nonce + _cipher(key_secret).encrypt(nonce, secret.encode(), purpose.encode())).decode()


def _cipher(key_secret: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), 32, salt=None, info=b"serve-app: secrets in the ledger").derive(key_secret))
