"""Sign-up with a confirmed address, and the sign-in link that `make serve` prints for the first person."""

from __future__ import annotations

from typing import Final

from fastapi.responses import Response

from serve_app.console import links, messages
from serve_app.console.passwords import MIN_LENGTH, hashed
from serve_app.console.people_pages import MAX_NAME, form_errors, name_in, open_session
from serve_app.console.web import Refused, Visit, check_wait
from serve_app.contracts import people
from serve_app.contracts import sign_in as ways
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.key_format import digest
from serve_app.contracts.notices import is_email

NO_LINK: Final = "This link is used, replaced or expired. For a new one: serve-app people sign-in-link ACCOUNT_ID"


async def show(visit: Visit) -> Response:
    _check_open(visit)
    return visit.go("/") if visit.person is not None else _ask_page(visit)


async def send(visit: Visit) -> Response:
    """Mails a link. The answer does not show whether the address has a login; the mail does."""
    console, email = visit.console, visit.form.get("email", "").strip().lower()
    _check_open(visit)
    assert console.mailer is not None
    if len(email) > 200 or not is_email(email):
        return _ask_page(visit, 422, email, wrong="Enter an email address such as ada@example.org.")
    check_wait(console.attempts.begin_mail(visit.limited_address, email, is_sign_up=True))
    if not console.mailer.later(_mail(visit, email)):
        raise Refused(503, "Too many messages wait to be sent: try again in a few minutes.")
    return _ask_page(visit, email=email, sent=True)


async def show_confirmed(visit: Visit) -> Response:
    return _form_page(visit, _confirmed(visit))


async def sign_up(visit: Visit) -> Response:
    console, email = visit.console, _confirmed(visit)
    account = visit.form.get("account", "").strip() or name_in(visit)
    errors = form_errors(visit)
    if len(account) > MAX_NAME or not account.isprintable():
        errors["account"] = f"A name has 1 to {MAX_NAME} characters."
    if errors:
        return _form_page(visit, email, 422, errors)
    check_wait(console.attempts.begin_link(email))
    password = await hashed(visit.form["new_password"])
    credit = (console.signup_credit, console.signup_credit_per_day)
    try:
        person = await console.books.run(
            ways.SignUp(email, name_in(visit), account, password, *credit, address=visit.address)
        )
    except Conflict:
        raise Refused(409, "This address has a login already: sign in.") from None
    return await open_session(visit, person)


async def show_first(visit: Visit) -> Response:
    link = await _first(visit)
    if visit.person is not None and link.person is not None and visit.me.user_id == link.person.user_id:
        return visit.go("/")
    return _first_page(visit, link)


async def use_first(visit: Visit) -> Response:
    """Signs in the account's first person. If there is none, creates this person first."""
    link, token, email = await _first(visit), visit.request.path_params["token"], visit.form.get("email", "").strip()
    password = ""
    if link.person is None:
        errors = form_errors(visit)
        if len(email) > 200 or not is_email(email):
            errors["email"] = "Enter an email address such as ada@example.org."
        if errors:
            return _first_page(visit, link, 422, errors)
        password = await hashed(visit.form["new_password"])
    command = ways.UseSignInLink(digest(token), email, name_in(visit), password, visit.address)
    try:
        person = await visit.console.books.run(command)
    except Conflict:
        return _first_page(visit, link, 409, {"email": "This address has a login already: use another one."})
    except InvalidValue:
        raise Refused(404, NO_LINK) from None
    return await open_session(visit, person)


async def _mail(visit: Visit, email: str) -> None:
    console, product = visit.console, visit.console.brand.name
    assert console.mailer is not None
    if await console.books.run(people.FindPerson(email)) is not None:
        text = messages.HAS_LOGIN.format(product=product, link=visit.link("/sign-in"))
        await console.mailer.send(email, f"Your {product} account", text)
        return
    token = links.make_link(console.secret_keys, links.SIGN_UP, email, console.now() + links.SIGN_UP_S)
    text = messages.SIGN_UP.format(product=product, link=visit.link(f"/sign-up/{token}"))
    await console.mailer.send(email, f"Confirm your email address for {product}", text)


def _check_open(visit: Visit) -> None:
    if visit.console.signup != "open" or not visit.console.mails_links:
        raise Refused(404, "Sign-up is closed: ask the operator or an account's owner for an invitation.")


def _confirmed(visit: Visit) -> str:
    """Returns the address that the link confirms. Raises Refused."""
    _check_open(visit)
    token = visit.request.path_params["token"]
    if not links.is_valid(visit.console.secret_keys, links.SIGN_UP, token, visit.console.now()):
        raise Refused(404, "This link is expired or incomplete: sign up again.")
    return links.address_in(token)


async def _first(visit: Visit) -> ways.SignInLink:
    """Returns the link. Raises Refused."""
    found = await visit.console.books.run(ways.FindSignInLink(digest(visit.request.path_params["token"])))
    if found is None:
        raise Refused(404, NO_LINK)
    return found


def _ask_page(visit: Visit, status: int = 200, email: str = "", wrong: str = "", *, sent: bool = False) -> Response:
    return visit.page("sign_up_ask.html", status, email=email, wrong=wrong, sent=sent)


def _form_page(visit: Visit, email: str, status: int = 200, errors: dict[str, str] | None = None) -> Response:
    values = {"name": name_in(visit), "account": visit.form.get("account", "")}
    return visit.page("sign_up.html", status, email=email, errors=errors or {}, least=MIN_LENGTH, **values)


def _first_page(
    visit: Visit, link: ways.SignInLink, status: int = 200, errors: dict[str, str] | None = None
) -> Response:
    values = {"name": name_in(visit), "email": visit.form.get("email", "")}
    return visit.page("first.html", status, link=link, errors=errors or {}, least=MIN_LENGTH, **values)
