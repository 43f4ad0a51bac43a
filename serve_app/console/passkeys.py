"""The challenges of passkeys: sealed for the browser's session, valid for CHALLENGE_S, and accepted once."""

from __future__ import annotations

import ipaddress
import json
import secrets
from typing import Any, Final

from webauthn import base64url_to_bytes, generate_authentication_options, options_to_json
from webauthn.helpers import bytes_to_base64url
from webauthn.helpers.structs import UserVerificationRequirement

from serve_app.console.web import Refused, Visit
from serve_app.storage.sealing import SecretKeys, seal, unseal

CHALLENGE_S: Final = 300.0
ADD, SIGN_IN = "add", "sign in"
REQUIRED: Final = UserVerificationRequirement.REQUIRED
OUTDATED: Final = "This form is out of date: open its page again."


def sign_in_options(visit: Visit) -> dict[str, Any]:
    """Returns what the sign-in page needs for passkeys."""
    if not host_of(visit):
        return {"passkey_options": None}
    challenge, sealed = new_challenge(visit, SIGN_IN)
    options = generate_authentication_options(
        rp_id=host_of(visit), challenge=challenge, user_verification=REQUIRED, timeout=int(CHALLENGE_S * 1000)
    )
    return {"passkey_options": options_to_json(options), "passkey_challenge": sealed}


def host_of(visit: Visit) -> str:
    """Returns the host to which passkeys belong; empty for an IP address, which can't have passkeys."""
    host = visit.request.url.hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return ""


def new_challenge(visit: Visit, purpose: str) -> tuple[bytes, str]:
    """Returns a new challenge, and its sealed form for this browser and purpose."""
    challenge = secrets.token_bytes(32)
    text = json.dumps([bytes_to_base64url(challenge), visit.console.now()])
    keys = SecretKeys(visit.console.secret_keys.current)
    return challenge, seal(text, keys, f"passkey {purpose} {visit.token}")


def checked_challenge(visit: Visit, purpose: str) -> bytes:
    """Returns the challenge of a form, and marks it as used. Raises Refused."""
    console, sealed = visit.console, visit.form.get("challenge", "")
    try:
        challenge, at = json.loads(unseal(sealed, console.secret_keys, f"passkey {purpose} {visit.token}"))
    except ValueError:
        raise Refused(403, OUTDATED) from None
    is_used = console.attempts.begin_passkey(visit.limited_address, challenge) > 0
    if is_used or not 0 <= console.now() - at <= CHALLENGE_S:
        raise Refused(403, OUTDATED)
    return base64url_to_bytes(challenge)
