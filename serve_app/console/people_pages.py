"""Invitations, sign-in, and a person's profile."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Final

import pyotp
from fastapi.responses import Response

from serve_app.console.passwords import MAX_LENGTH, MIN_LENGTH, hashed, is_right, step_of
from serve_app.console.web import COOKIE, SESSION_S, Refused, Visit
from serve_app.contracts import people
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import digest
from serve_app.storage.sealing import of_totp, seal, unseal

logger = logging.getLogger("ray.serve")

_SECRET: Final = re.compile(r"[A-Z2-7]{32}")
WRONG: Final = "E-mail, password or code is wrong."


async def show_invitation(visit: Visit) -> Response:
    token = visit.request.path_params["token"]
    email = (await find_invitation(visit, token)).email
    known = await visit.console.books.run(people.FindPerson(email))
    return visit.page("join.html" if known else "invitation.html", email=email, least=MIN_LENGTH, token=token)


async def accept(visit: Visit) -> Response:
    console, token = visit.console, visit.request.path_params["token"]
    invitation = await find_invitation(visit, token)
    password = _new_password(visit)
    name = visit.form.get("name", "").strip()
    command = people.AcceptInvitation(digest(token), name, await hashed(password), visit.address)
    person = await console.books.run(command)
    assert person.email == invitation.email
    return await open_session(visit, person)


async def join(visit: Visit) -> Response:
    """Accepts an invitation to another account, for a person who already has a login."""
    console, token = visit.console, visit.request.path_params["token"]
    await console.books.run(people.JoinAccount(digest(token), visit.me.user_id, visit.address))
    return visit.go("/")


async def show_sign_in(visit: Visit) -> Response:
    return visit.go("/") if visit.person is not None else visit.page("sign_in.html", email="")


async def sign_in(visit: Visit) -> Response:
    console, email = visit.console, visit.form.get("email", "")
    if not console.attempts.begin(visit.address, email):
        raise Refused(429, "Too many attempts: try again in 15 minutes.")
    person = await console.books.run(people.FindPerson(email))
    right = await is_right(None if person is None else person.password, visit.form.get("password", ""))
    step = None
    if right and person is not None and person.totp_secret is not None:
        step = step_of(_totp_secret(visit, person), visit.form.get("code", ""), console.now())
        right = right and step is not None
    if person is None or not right:
        return visit.page("sign_in.html", 403, email=email, error=WRONG)
    try:
        response = await open_session(visit, person, step, person.password)
    except InvalidValue:  # suspended, a used code, or changed since the check
        return visit.page("sign_in.html", 403, email=email, error=WRONG)
    console.attempts.succeeded(email)
    return response


async def sign_out(visit: Visit) -> Response:
    assert visit.session is not None
    await visit.console.books.run(people.EndSession(visit.me.user_id, visit.session.session_id, visit.audit))
    response = visit.go("/sign-in")
    response.delete_cookie(COOKIE, path=visit.root or "/")
    return response


async def profile(visit: Visit) -> Response:
    sessions = await visit.console.books.run(people.ListSessions(visit.me.user_id))
    secret = pyotp.random_base32()
    return visit.page("profile.html", sessions=sessions, here=visit.session, secret=secret, least=MIN_LENGTH)


async def change_password(visit: Visit) -> Response:
    await check_password(visit)
    return await _change(visit, {"password": await hashed(_new_password(visit))})


async def totp_on(visit: Visit) -> Response:
    await check_password(visit)
    secret = visit.form.get("secret", "")
    if not _SECRET.fullmatch(secret) or step_of(secret, visit.form.get("code", ""), visit.console.now()) is None:
        raise Refused(422, "The code is wrong: add the secret to your app again, and type what it shows.")
    sealed = seal(secret, visit.console.secret_keys, of_totp(visit.me.user_id))
    return await _change(visit, {"totp_secret": sealed})


async def totp_off(visit: Visit) -> Response:
    await check_password(visit)
    return await _change(visit, {"totp_secret": None})


async def end_session(visit: Visit) -> Response:
    session_id = visit.request.path_params["session_id"]
    await visit.console.books.run(people.EndSession(visit.me.user_id, session_id, visit.audit))
    return visit.go("/profile")


async def find_invitation(visit: Visit, token: str) -> people.Invitation:
    """Returns the invitation. Raises Refused."""
    found = await visit.console.books.run(people.FindInvitation(digest(token)))
    if found is None:
        raise Refused(404, "This invitation is used, revoked or expired: ask for a new one.")
    return found


def _new_password(visit: Visit) -> str:
    password = visit.form.get("new_password", "")
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise Refused(422, f"A password has {MIN_LENGTH} to {MAX_LENGTH} characters.")
    return password


def _totp_secret(visit: Visit, person: people.Person) -> str:
    """Returns the secret of a person's one-time codes. Raises Refused."""
    assert person.totp_secret is not None
    try:
        return unseal(person.totp_secret, visit.console.secret_keys, of_totp(person.user_id))
    except ValueError as error:
        logger.error("%s can't sign in: %s", person.email, error)
        raise Refused(503, "One-time codes can't be checked: ask the operator of this service.") from None


async def check_password(visit: Visit) -> None:
    """Checks the password. Raises Refused. An open session alone must not suffice to take over a person."""
    if not visit.console.attempts.begin(visit.address, visit.me.email):
        raise Refused(429, "Too many attempts: try again in 15 minutes.")
    if not await is_right(visit.me.password, visit.form.get("password", "")):
        raise Refused(403, "The password is wrong.")
    visit.console.attempts.succeeded(visit.me.email)


async def _change(visit: Visit, changes: dict[str, str | None]) -> Response:
    assert visit.session is not None
    command = people.ChangePerson(visit.me.user_id, changes, visit.session.session_id, visit.audit)
    await visit.console.books.run(command)
    return visit.go("/profile")


async def open_session(
    visit: Visit, person: people.Person, step: int | None = None, password: str | None = None
) -> Response:
    """Opens a session with a new token and replaces the browser's. `step`, `password`: as in `OpenSession`."""
    console, token = visit.console, secrets.token_urlsafe(32)
    audit = Audit(person.email, address=visit.address)
    expires_at = console.now() + SESSION_S
    opened = people.OpenSession(person.user_id, digest(token), expires_at, step, audit, password)
    await console.books.run(opened)
    response = visit.go("/")
    visit.set_cookie(response, COOKIE, token)
    return response
