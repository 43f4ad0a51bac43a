"""Invitations, sign-in, and a person's profile."""

from __future__ import annotations

import base64
import contextlib
import hmac
import logging
import re
import secrets
from typing import Final

import pyotp
from fastapi.responses import Response

from serve_app.console.attempts import KNOWN_S, browser_cookie, known_browser
from serve_app.console.passwords import KNOWN, MAX_LENGTH, MIN_LENGTH, UNKNOWN, hashed, is_right, step_of
from serve_app.console.web import BROWSER, SESSION, SESSION_S, Refused, Visit, check_wait
from serve_app.contracts import people
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import digest
from serve_app.storage.sealing import of_totp, seal, unseal

logger = logging.getLogger("ray.serve")

_SECRET: Final = re.compile(r"[A-Z2-7]{32}")
WRONG: Final = "E-mail, password or code is wrong."
MAX_WAITING: Final = 20  # attempts from browsers that are not known; about two seconds of password checks


async def show_invitation(visit: Visit) -> Response:
    token = visit.request.path_params["token"]
    # The page does not depend on whether the address has a login: the account's owner can open it, too.
    email = (await find_invitation(visit, token)).email
    mine = visit.person is not None and visit.me.email == email
    return visit.page("join.html" if mine else "invitation.html", email=email, least=MIN_LENGTH, token=token)


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
    browser = known_browser(console.secret_keys, email, visit.cookie(BROWSER), console.now())
    turns = UNKNOWN if browser is None else KNOWN
    if turns is UNKNOWN and turns.waiting >= MAX_WAITING:
        raise Refused(503, "Too many people sign in right now: try again in a moment.")
    check_wait(console.attempts.begin(visit.limited_address, email, browser))
    person = await console.books.run(people.FindPerson(email))
    right = await is_right(None if person is None else person.password, visit.form.get("password", ""), turns)
    step = None
    if right and person is not None and person.totp_secret is not None:
        if not console.attempts.begin_code(person.email, browser):
            step = step_of(_totp_secret(visit, person), visit.form.get("code", ""), console.now())
        right = right and step is not None
    if person is None or not right:
        return visit.page("sign_in.html", 403, email=email, error=WRONG)
    try:
        return await open_session(visit, person, step, person.password)
    except InvalidValue:  # suspended, a used code, or changed since the check
        return visit.page("sign_in.html", 403, email=email, error=WRONG)


async def sign_out(visit: Visit) -> Response:
    assert visit.session is not None
    await visit.console.books.run(people.EndSession(visit.me.user_id, visit.session.session_id, visit.audit))
    response = visit.go("/sign-in")
    visit.delete_cookie(response, SESSION)
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


async def show_reset(visit: Visit) -> Response:
    return visit.page("reset.html", email=(await _reset(visit)).email, least=MIN_LENGTH)


async def reset(visit: Visit) -> Response:
    """Sets the new password of a person whom an operator has reset, and opens a session."""
    person = await _reset(visit)
    changes: dict[str, str | None] = {"password": await hashed(_new_password(visit))}
    audit = Audit(person.email, address=visit.address)
    await visit.console.books.run(people.ChangePerson(person.user_id, changes, "", audit))
    return await open_session(visit, person)


async def _reset(visit: Visit) -> people.Person:
    """Returns the person with this link. Raises Refused."""
    token, email = visit.request.path_params["link"], ""
    with contextlib.suppress(ValueError):
        email = base64.urlsafe_b64decode(f"{token.partition('.')[0]}===").decode()
    person = await visit.console.books.run(people.FindPerson(email))
    if person is not None and person.password.startswith(people.RESET) and not person.suspended:
        until = float(person.password.split()[1])
        if hmac.compare_digest(people.reset_text(token, until), person.password) and visit.console.now() < until:
            return person
    raise Refused(404, "This link is used, replaced or expired: ask the operator for a new one.")


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
    check_wait(visit.console.attempts.begin_signed_in(visit.me.user_id))
    if not await is_right(visit.me.password, visit.form.get("password", "")):
        raise Refused(403, "The password is wrong.")


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
    visit.set_cookie(response, SESSION, token)
    known = browser_cookie(console.secret_keys, person.email, visit.cookie(BROWSER), console.now())
    visit.set_cookie(response, BROWSER, known, int(KNOWN_S))
    return response
