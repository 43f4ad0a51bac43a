"""Sign-in, invitations, resets by an operator or by e-mail, and a person's profile."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from typing import Any, Final

from fastapi.responses import Response

from serve_app.console import links, messages
from serve_app.console.attempts import KNOWN_S, browser_cookie, known_browser
from serve_app.console.passkeys import host_of, sign_in_options
from serve_app.console.passwords import (
    KNOWN,
    MAX_LENGTH,
    MIN_LENGTH,
    UNKNOWN,
    hashed,
    is_right,
    recovery_digest,
    step_of,
)
from serve_app.console.web import BROWSER, SESSION, SESSION_S, Refused, Visit, check_wait
from serve_app.contracts import people
from serve_app.contracts import sign_in as ways
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import digest
from serve_app.storage.sealing import SecretKeys, of_totp, seal, unseal

logger = logging.getLogger("ray.serve")

WRONG: Final = "Email or password is wrong."
WRONG_CODE: Final = "The code is wrong or used: type the code that your app shows now, or an unused recovery code."
WRONG_PASSWORD: Final = "The password is wrong."
USED: Final = "This link is used, replaced or expired: ask for a new one."
MAX_WAITING: Final = 20  # maximum waiting attempts from unknown browsers; about two seconds of password checks
MAX_NAME: Final = 100  # characters
HALF_S: Final = 600.0  # maximum time from the password to the code
INVITATION: Final = "console_invitation"  # cookie with the invitation that the browser opens again after the sign-in
INVITATION_S: Final = 3600


async def show_invitation(visit: Visit) -> Response:
    token = visit.request.path_params["token"]
    # The account's owner can open this page, too, and must not learn whether the address has a login. So the page is
    # the same in both cases.
    response = _invitation_page(visit, await find_invitation(visit, token))
    if visit.person is None:
        visit.set_cookie(response, INVITATION, token, INVITATION_S)
    return response


async def accept(visit: Visit) -> Response:
    console, token = visit.console, visit.request.path_params["token"]
    invitation = await find_invitation(visit, token)
    check_open(visit, invitation)
    if errors := form_errors(visit):
        return _invitation_page(visit, invitation, 422, errors)
    check_wait(console.attempts.begin_link(invitation.email))
    password = await hashed(visit.form["new_password"])
    command = people.AcceptInvitation(digest(token), name_in(visit), password, visit.address)
    person = await console.books.run(command)
    assert person.email == invitation.email
    return await open_session(visit, person)


async def join(visit: Visit) -> Response:
    """Accepts an invitation to another account, for a person who already has a login."""
    console, token = visit.console, visit.request.path_params["token"]
    await console.books.run(people.JoinAccount(digest(token), visit.me.user_id, visit.address))
    return visit.go("/")


async def show_sign_in(visit: Visit) -> Response:
    return visit.go("/") if visit.person is not None else _sign_in_page(visit)


async def sign_in(visit: Visit) -> Response:
    """Checks the password, and then the code of a person who uses codes."""
    if "half" in visit.form:
        return await _sign_in_with_code(visit)
    console, email = visit.console, visit.form.get("email", "")
    browser = known_browser(console.secret_keys, email, visit.cookie(BROWSER), console.now())
    turns = UNKNOWN if browser is None else KNOWN
    if turns is UNKNOWN and turns.waiting >= MAX_WAITING:
        raise Refused(503, "Too many people are signing in: try again in a moment.")
    check_wait(console.attempts.begin(visit.limited_address, email, browser))
    person = await console.books.run(people.FindPerson(email))
    right = await is_right(None if person is None else person.password, visit.form.get("password", ""), turns)
    if person is None or not right:
        return _sign_in_page(visit, 403, email, WRONG)
    if person.totp_secret is not None:
        return visit.page("sign_in_code.html", half=_half(visit, person), wrong="")
    try:
        return await open_session(visit, person, password=person.password)
    except InvalidValue:  # the person was suspended or changed since the check
        return _sign_in_page(visit, 403, email, WRONG)


async def sign_out(visit: Visit) -> Response:
    assert visit.session is not None
    await visit.console.books.run(people.EndSession(visit.me.user_id, visit.session.session_id, visit.audit))
    response = visit.go("/sign-in")
    visit.delete_cookie(response, SESSION)
    return response


async def profile(visit: Visit) -> Response:
    run = visit.console.books.run
    return visit.page(
        "profile.html",
        sessions=await run(people.ListSessions(visit.me.user_id)),
        here=visit.session,
        least=MIN_LENGTH,
        codes_left=await run(ways.CountRecoveryCodes(visit.me.user_id)),
        passkeys=await run(ways.ListPasskeys(visit.me.user_id)),
        may_add_passkey=bool(host_of(visit)),
    )


async def change_password(visit: Visit) -> Response:
    await check_password(visit)
    if problem := password_problem(visit):
        raise Refused(422, problem)
    return await change_person(visit, {"password": await hashed(visit.form["new_password"])})


async def end_session(visit: Visit) -> Response:
    session_id = visit.request.path_params["session_id"]
    await visit.console.books.run(people.EndSession(visit.me.user_id, session_id, visit.audit))
    return visit.go("/profile")


async def end_other_sessions(visit: Visit) -> Response:
    run, me = visit.console.books.run, visit.me.user_id
    for one in await run(people.ListSessions(me)):
        if visit.session is None or one.session_id != visit.session.session_id:
            await run(people.EndSession(me, one.session_id, visit.audit))
    return visit.go("/profile", done="Other sessions signed out")


async def find_invitation(visit: Visit, token: str) -> people.Invitation:
    """Returns the invitation. Raises Refused."""
    found = await visit.console.books.run(people.FindInvitation(digest(token)))
    if found is None:
        raise Refused(404, "This invitation is used, revoked or expired: ask for a new one.")
    return found


def check_open(visit: Visit, invitation: people.Invitation) -> None:
    """Raises Refused if an owner sent the invitation, and only operators may invite new users."""
    if not _makes_people(visit, invitation):
        raise Refused(403, "Only the operator of this service can invite new users: ask for an invitation.")


async def ask_reset(visit: Visit) -> Response:
    return visit.page("reset_ask.html", email="", sent=False)


async def send_reset(visit: Visit) -> Response:
    """Mails a link to a person with this address. The answer does not show whether there is such a person."""
    console, email = visit.console, visit.form.get("email", "").strip()[:200]
    if console.mailer is None or not console.mails_links:
        raise Refused(404, "This service sends no e-mail: ask its operator for a link.")
    check_wait(console.attempts.begin_mail(visit.limited_address, email))
    if not console.mailer.later(_mail_reset(visit, email)):
        raise Refused(503, "Too many messages wait to be sent: try again in a few minutes.")
    return visit.page("reset_ask.html", email=email, sent=True)


async def _mail_reset(visit: Visit, email: str) -> None:
    console = visit.console
    assert console.mailer is not None
    person = await console.books.run(people.FindPerson(email))
    if person is None or person.suspended:
        return
    token = links.make_link(
        console.secret_keys, links.RESET, person.email, console.now() + links.RESET_S, person.password
    )
    text = messages.RESET.format(product=console.brand.name, link=visit.link(f"/reset/{token}"))
    await console.mailer.send(person.email, f"Reset your {console.brand.name} password", text)


async def show_reset(visit: Visit) -> Response:
    person, is_operators = await _reset(visit)
    return visit.page("reset.html", email=person.email, least=MIN_LENGTH, is_operators=is_operators, errors={})


async def reset(visit: Visit) -> Response:
    """Sets the new password. A person with one-time codes must then sign in with one."""
    person, is_operators = await _reset(visit)
    if problem := password_problem(visit):
        page: dict[str, Any] = {"least": MIN_LENGTH, "is_operators": is_operators, "errors": {"new_password": problem}}
        return visit.page("reset.html", 422, email=person.email, **page)
    changes: dict[str, str | None] = {"password": await hashed(visit.form["new_password"])}
    audit = Audit(person.email, address=visit.address)
    try:
        command = people.ChangePerson(person.user_id, changes, "", audit, before=person.password)
        await visit.console.books.run(command)
    except InvalidValue:
        raise Refused(404, USED) from None
    if person.totp_secret is not None:
        return visit.go("/sign-in", done="Password changed: sign in with it")
    return await open_session(visit, person)


async def _reset(visit: Visit) -> tuple[people.Person, bool]:
    """Returns the person with this link, and whether an operator made it. Raises Refused."""
    console, token = visit.console, visit.request.path_params["link"]
    person = await console.books.run(people.FindPerson(links.address_in(token)))
    if person is not None and not person.suspended:
        if person.password.startswith(people.RESET):
            until = float(person.password.split()[1])
            if hmac.compare_digest(people.reset_text(token, until), person.password) and console.now() < until:
                return person, True
        if links.is_valid(console.secret_keys, links.RESET, token, console.now(), person.password):
            return person, False
    raise Refused(404, USED)


def password_problem(visit: Visit) -> str:
    """Returns what is wrong with the new password of a form, or ""."""
    is_good = MIN_LENGTH <= len(visit.form.get("new_password", "")) <= MAX_LENGTH
    return "" if is_good else f"A password has {MIN_LENGTH} to {MAX_LENGTH} characters."


def name_in(visit: Visit) -> str:
    return visit.form.get("name", "").strip()


def form_errors(visit: Visit) -> dict[str, str]:
    """Returns what is wrong with name and new password of a form, by field."""
    name, errors = name_in(visit), {}
    if not name or len(name) > MAX_NAME or not name.isprintable():
        errors["name"] = f"A name has 1 to {MAX_NAME} characters."
    if problem := password_problem(visit):
        errors["new_password"] = problem
    return errors


def totp_secret(visit: Visit, person: people.Person) -> str:
    """Returns the secret of a person's one-time codes. Raises Refused."""
    assert person.totp_secret is not None
    try:
        return unseal(person.totp_secret, visit.console.secret_keys, of_totp(person.user_id))
    except ValueError as error:
        logger.error("%s can't sign in: %s", person.email, error)
        raise Refused(503, "One-time codes can't be checked: ask the operator of this service.") from None


async def check_password(visit: Visit) -> None:
    """Checks the password. Raises Refused. An open session alone must not suffice to take over a login."""
    if not await is_confirmed(visit):
        raise Refused(403, WRONG_PASSWORD)


async def is_confirmed(visit: Visit) -> bool:
    """Returns whether the signed-in person has typed the right password. Raises Refused after too many tries."""
    check_wait(visit.console.attempts.begin_signed_in(visit.me.user_id))
    return await is_right(visit.me.password, visit.form.get("password", ""))


async def change_person(
    visit: Visit, changes: dict[str, str | None], recovery: tuple[str, ...] = (), step: int | None = None
) -> Response:
    assert visit.session is not None
    keep = visit.session.session_id
    command = people.ChangePerson(visit.me.user_id, changes, keep, visit.audit, recovery, totp_step=step)
    await visit.console.books.run(command)
    return visit.go("/profile", done="Saved")


async def open_session(
    visit: Visit,
    person: people.Person,
    step: int | None = None,
    password: str | None = None,
    recovery: str | None = None,
    passkey: tuple[str, int] | None = None,
) -> Response:
    """Opens a session with a new token, which replaces the browser's.

    `OpenSession` explains the last four parameters.
    """
    console, token = visit.console, secrets.token_urlsafe(32)
    audit = Audit(person.email, address=visit.address)
    expires_at = console.now() + SESSION_S
    opened = people.OpenSession(
        person.user_id, digest(token), expires_at, step, audit, password, recovery=recovery, passkey=passkey
    )
    await console.books.run(opened)
    response = visit.go(await _after_sign_in(visit, person))
    visit.delete_cookie(response, INVITATION)
    visit.set_cookie(response, SESSION, token)
    known = browser_cookie(console.secret_keys, person.email, visit.cookie(BROWSER), console.now())
    visit.set_cookie(response, BROWSER, known, int(KNOWN_S))
    return response


async def _after_sign_in(visit: Visit, person: people.Person) -> str:
    """Returns the page to open: an invitation of this person that the browser had open before, or the home page."""
    token = visit.cookie(INVITATION)
    found = await visit.console.books.run(people.FindInvitation(digest(token))) if token else None
    return "/" if found is None or found.email != person.email else f"/invitations/{token}"


async def _sign_in_with_code(visit: Visit) -> Response:
    console, person = visit.console, await _half_signed_in(visit)
    if person is None:
        return _sign_in_page(visit, 403, "", "The sign-in took too long: start again.")
    browser = known_browser(console.secret_keys, person.email, visit.cookie(BROWSER), console.now())
    check_wait(console.attempts.begin_code(person.email, browser))
    code = visit.form.get("code", "")
    recovery = recovery_digest(code)
    step = step_of(totp_secret(visit, person), code, console.now()) if recovery is None else None
    try:
        if recovery is not None or step is not None:
            return await open_session(visit, person, step, person.password, recovery)
    except InvalidValue:  # the code is used, or the person was suspended or changed since the check
        pass
    return visit.page("sign_in_code.html", 403, half=visit.form["half"], wrong=WRONG_CODE)


def _half(visit: Visit, person: people.Person) -> str:
    """Returns proof, for this browser, that the password was right. Nothing is stored between the two steps."""
    text = json.dumps([person.email, visit.console.now(), digest(person.password)])
    return seal(text, SecretKeys(visit.console.secret_keys.current), _half_purpose(visit))


async def _half_signed_in(visit: Visit) -> people.Person | None:
    """Returns the person whose password was right; None if that was too long ago, or the password has changed."""
    console = visit.console
    try:
        email, at, password = json.loads(unseal(visit.form["half"], console.secret_keys, _half_purpose(visit)))
    except ValueError:
        return None
    person = await console.books.run(people.FindPerson(email))
    is_valid = person is not None and person.totp_secret is not None and digest(person.password) == password
    return person if is_valid and 0 <= console.now() - at <= HALF_S else None


def _half_purpose(visit: Visit) -> str:
    return f"second factor {visit.token}"


def _sign_in_page(visit: Visit, status: int = 200, email: str = "", error: str = "") -> Response:
    return visit.page("sign_in.html", status, email=email, error=error, **sign_in_options(visit))


def _invitation_page(
    visit: Visit, invitation: people.Invitation, status: int = 200, errors: dict[str, str] | None = None
) -> Response:
    mine = visit.person is not None and visit.me.email == invitation.email
    page: dict[str, Any] = {"invitation": invitation, "least": MIN_LENGTH, "errors": errors or {}}
    page |= {"token": visit.request.path_params["token"], "name": name_in(visit)}
    page["makes_people"] = _makes_people(visit, invitation)
    return visit.page("join.html" if mine else "invitation.html", status, **page)


def _makes_people(visit: Visit, invitation: people.Invitation) -> bool:
    return visit.console.signup != "closed" or invitation.invited_by is None
