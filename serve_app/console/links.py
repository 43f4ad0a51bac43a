"""Links that are e-mailed: each has the address, its expiry, and a signature.

Nothing is stored, so strangers who ask for links write nothing to the ledger. The signature covers a `state`,
which changes when the link is used. A link therefore works once.
"""

from __future__ import annotations

import base64
import hmac
from typing import Final

from serve_app.storage.sealing import SecretKeys

SIGN_UP: Final = "sign up"
RESET: Final = "reset"
SIGN_UP_S: Final = 24 * 3600.0
RESET_S: Final = 3600.0


def make_link(keys: SecretKeys, purpose: str, email: str, until: float, state: str = "") -> str:
    """Returns the token of a link."""
    text = f"{base64.urlsafe_b64encode(email.encode()).decode().rstrip('=')}.{int(until)}"
    return f"{text}.{keys.derive(_signed(purpose, text, state))}"


def address_in(token: str) -> str:
    """Returns the address that a token claims; empty if there is none."""
    encoded = token.partition(".")[0]
    try:
        return base64.urlsafe_b64decode(f"{encoded}===").decode()
    except ValueError:
        return ""


def is_valid(keys: SecretKeys, purpose: str, token: str, now: float, state: str = "") -> bool:
    """Returns whether this service made the token for this purpose and state, and it has not expired."""
    text, _, given = token.rpartition(".")
    until = text.rpartition(".")[2]
    expected = keys.derive_all(_signed(purpose, text, state))
    if not any(hmac.compare_digest(given.encode(), one.encode()) for one in expected):
        return False
    return float(until) > now


def _signed(purpose: str, text: str, state: str) -> str:
    return f"{purpose} link {text}\0{state}"
