"""Signing in through a provider, accepting an invitation with it, and linking a person to it.

An identity is never matched by its e-mail address: a person links it while signed in, or with an invitation. The state
that the browser returns is sealed for its session. A different browser can therefore not complete the sign-in.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from typing import Final

from fastapi.responses import Response

from serve_app.console.openid import OpenId, ProviderAway, SignInRefused
from serve_app.console.people_pages import check_open, check_password, find_invitation, open_session
from serve_app.console.web import Refused, Visit, check_wait
from serve_app.contracts import people
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import digest
from serve_app.storage.sealing import SecretKeys, seal, unseal

logger = logging.getLogger("ray.serve")

BACK: Final = "/sign-in/openid/return"
TRY_S: Final = 600.0
SIGN_IN, LINK, ACCEPT = "sign in", "link", "accept"


async def begin_sign_in(visit: Visit) -> Response:
    return await _leave(visit, SIGN_IN)


async def begin_link(visit: Visit) -> Response:
    if visit.me.password:
        await check_password(visit)
    return await _leave(visit, LINK)


async def begin_accept(visit: Visit) -> Response:
    await find_invitation(visit, visit.request.path_params["token"])
    return await _leave(visit, ACCEPT, visit.request.path_params["token"])


async def unlink(visit: Visit) -> Response:
    await check_password(visit)
    issuer = _provider(visit).settings.issuer
    await visit.console.books.run(people.UnlinkIdentities(visit.me.user_id, issuer, visit.audit))
    return visit.go("/profile")


async def come_back(visit: Visit) -> Response:
    provider, query = _provider(visit), visit.request.query_params
    purpose, invited, keys = _opened(visit, query.get("state", ""))
    check_wait(visit.console.attempts.begin_openid(visit.limited_address, query["state"]))
    if "code" not in query:
        raise Refused(403, f"You have not signed in with {provider.settings.name}.")
    nonce, verifier = _derived(keys, query["state"])
    try:
        identity, name = await provider.finish(query["code"], nonce, verifier, visit.origin + visit.root + BACK)
    except (SignInRefused, ProviderAway) as error:
        raise _refused(provider, error) from error
    run = visit.console.books.run
    if purpose == LINK:
        if visit.person is None:
            raise Refused(403, "Your session is over: sign in, and link again.")
        await run(people.LinkIdentity(visit.me.user_id, identity, visit.audit))
        return visit.go("/profile")
    person = await run(people.FindIdentity(identity))
    if purpose == ACCEPT and person is None:
        invitation = await find_invitation(visit, invited)
        check_open(visit, invitation)
        name = name.strip()[:100] if name.strip() and name.isprintable() else invitation.email
        command = people.AcceptInvitation(digest(invited), name, "", visit.address, identity)
        person = await run(command)
    elif purpose == ACCEPT:
        raise Refused(
            409, "This identity is already linked to a person: sign in with it, then open the invitation again."
        )
    if person is None:
        raise Refused(
            403, "This identity is not linked to a login: link it on your profile, or accept an invitation with it."
        )
    try:
        return await open_session(visit, person)
    except InvalidValue:
        raise Refused(403, "You can no longer sign in here: ask the operator of this service.") from None


async def _leave(visit: Visit, purpose: str, invited: str = "") -> Response:
    """Returns a page that leads to the provider.

    It does not redirect, because some browsers check a redirect after a form against the form page's policy
    `form-action 'self'`, and would block it.
    """
    provider, now = _provider(visit), visit.console.now()
    text = json.dumps([purpose, invited, now, secrets.token_hex(16)])
    keys = SecretKeys(visit.console.secret_keys.current)
    state = seal(text, keys, f"openid {visit.token}")
    nonce, verifier = _derived(keys, state)
    try:
        address = await provider.begin(state, nonce, verifier, visit.origin + visit.root + BACK)
    except (SignInRefused, ProviderAway) as error:
        raise _refused(provider, error) from error
    return visit.page("leave.html", address=address, provider=provider.settings.name)


def _opened(visit: Visit, state: str) -> tuple[str, str, SecretKeys]:
    """Returns the purpose, the invitation, and the secret key that the sign-in began with. Raises Refused."""
    for keys in map(SecretKeys, visit.console.secret_keys.valid):
        with contextlib.suppress(ValueError):
            purpose, invited, at, _ = json.loads(unseal(state, keys, f"openid {visit.token}"))
            break
    else:
        raise Refused(403, "This sign-in was not started in this browser: start again.")
    if not 0 <= visit.console.now() - at <= TRY_S:
        raise Refused(403, "This sign-in took too long: begin again.")
    return purpose, invited, keys


def _derived(keys: SecretKeys, state: str) -> tuple[str, str]:
    """Returns the nonce and the PKCE verifier of a sign-in. Nothing is stored between its two requests."""
    return keys.derive(f"openid nonce {state}"), keys.derive(f"openid verifier {state}")


def _provider(visit: Visit) -> OpenId:
    """Returns the provider. Raises Refused."""
    if visit.console.openid is None:
        raise Refused(404, "This service has no sign-in through a provider.")
    return visit.console.openid


def _refused(provider: OpenId, error: SignInRefused | ProviderAway) -> Refused:
    logger.warning("a sign-in with %s failed: %s", provider.settings.issuer, error)
    if isinstance(error, ProviderAway):
        return Refused(503, f"{provider.settings.name} does not answer: try again in a moment.")
    return Refused(403, f"The sign-in with {provider.settings.name} failed: try again.")
