"""Passkeys: a person adds and removes them, and signs in with one.

A passkey proves two factors: the device, and its user by PIN, finger or face. It is found by its own id, so the visitor
types no address.
"""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi.responses import Response
from webauthn import (
    base64url_to_bytes,
    generate_registration_options,
    options_to_json,
    verify_authentication_response,
    verify_registration_response,
)
from webauthn.helpers import bytes_to_base64url
from webauthn.helpers.exceptions import WebAuthnException
from webauthn.helpers.structs import (
    AuthenticatorSelectionCriteria,
    PublicKeyCredentialDescriptor,
    ResidentKeyRequirement,
)

from serve_app.console.passkeys import ADD, CHALLENGE_S, REQUIRED, SIGN_IN, checked_challenge, host_of, new_challenge
from serve_app.console.people_pages import check_password, open_session
from serve_app.console.web import Refused, Visit
from serve_app.contracts import sign_in as ways
from serve_app.contracts.errors import InvalidValue

FRESH_S: Final = 600.0  # maximum age of a session that adds a passkey without a password
FAILED: Final = "The passkey was not accepted: try again, or sign in another way."


async def sign_in(visit: Visit) -> Response:
    challenge = checked_challenge(visit, SIGN_IN)
    credential = _credential(visit)
    found = await visit.console.books.run(ways.FindPasskey(str(credential.get("id", ""))))
    if found is None:
        raise Refused(403, "This passkey is not registered here: sign in with your password.")
    passkey, person = found
    try:
        verified = verify_authentication_response(
            credential=credential,
            expected_challenge=challenge,
            expected_rp_id=host_of(visit),
            expected_origin=visit.origin,
            credential_public_key=base64url_to_bytes(passkey.public_key),
            credential_current_sign_count=passkey.sign_count,
            require_user_verification=True,
        )
        return await open_session(visit, person, passkey=(passkey.passkey_id, verified.new_sign_count))
    except (WebAuthnException, InvalidValue, ValueError):  # InvalidValue: suspended person, or removed passkey
        raise Refused(403, FAILED) from None


async def show(visit: Visit) -> Response:
    """Shows the page that adds a passkey."""
    host = host_of(visit)
    if not host:
        return visit.page("passkey.html", options=None, port=visit.request.url.port)
    have = await visit.console.books.run(ways.ListPasskeys(visit.me.user_id))
    challenge, sealed = new_challenge(visit, ADD)
    options = generate_registration_options(
        rp_id=host,
        rp_name=visit.console.brand.name,
        user_id=visit.me.user_id.encode(),
        user_name=visit.me.email,
        user_display_name=visit.me.name,
        challenge=challenge,
        timeout=int(CHALLENGE_S * 1000),
        authenticator_selection=AuthenticatorSelectionCriteria(
            resident_key=ResidentKeyRequirement.REQUIRED, user_verification=REQUIRED
        ),
        exclude_credentials=[PublicKeyCredentialDescriptor(base64url_to_bytes(one.passkey_id)) for one in have],
    )
    return visit.page("passkey.html", options=options_to_json(options), challenge=sealed)


async def add(visit: Visit) -> Response:
    if visit.me.password:
        await check_password(visit)
    elif visit.session is None or visit.console.now() - visit.session.created_at > FRESH_S:
        raise Refused(403, "Sign in again first: then you can add a passkey for ten minutes.")
    challenge, name = checked_challenge(visit, ADD), visit.form.get("name", "").strip()
    try:
        made = verify_registration_response(
            credential=_credential(visit),
            expected_challenge=challenge,
            expected_rp_id=host_of(visit),
            expected_origin=visit.origin,
            require_user_verification=True,
        )
    except (WebAuthnException, ValueError):
        raise Refused(422, "The passkey could not be added: try again.") from None
    command = ways.AddPasskey(
        bytes_to_base64url(made.credential_id),
        visit.me.user_id,
        name,
        bytes_to_base64url(made.credential_public_key),
        made.sign_count,
        visit.audit,
    )
    await visit.console.books.run(command)
    return visit.go("/profile", done="Passkey added")


async def remove(visit: Visit) -> Response:
    command = ways.RemovePasskey(visit.me.user_id, visit.request.path_params["passkey_id"], visit.audit)
    await visit.console.books.run(command)
    return visit.go("/profile", done="Passkey removed")


def _credential(visit: Visit) -> dict[str, Any]:
    """Returns the browser's answer. Raises Refused."""
    try:
        found = json.loads(visit.form.get("credential", ""))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refused(422, FAILED)
    return found
