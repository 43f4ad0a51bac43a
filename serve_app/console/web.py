"""Common handling of all pages: the rule of the route, the session, the form with its token, and the headers."""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, quote, unquote

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from serve_app.console import formats
from serve_app.console.attempts import MAX_KEPT, Attempts
from serve_app.console.mailer import Mailer
from serve_app.console.notices import Notices
from serve_app.console.openid import OpenId
from serve_app.console.payments import PaymentProvider
from serve_app.console.pressure import Pressure
from serve_app.console.rules import ANYONE, OPERATORS, PROVIDER, SIGNED_IN
from serve_app.contracts.addresses import client_address
from serve_app.contracts.billing import Seller
from serve_app.contracts.books import Audit
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import GetAccount
from serve_app.contracts.errors import LedgerError, LedgerUnavailable
from serve_app.contracts.key_format import digest
from serve_app.contracts.limiting import AccountStatus
from serve_app.contracts.money import NANO_PER_UNIT, format_amount, format_price, places_of
from serve_app.contracts.people import (
    FindSession,
    Person,
    SignedIn,
    TouchSession,
)
from serve_app.contracts.ports import BooksPort
from serve_app.contracts.rates import Rates
from serve_app.contracts.served import Offer
from serve_app.settings import BrandSettings
from serve_app.storage.request_log import Found
from serve_app.storage.sealing import SecretKeys

SESSION: Final = "console_session"
DONE: Final = "console_done"  # result of the last form, for the next page to show
VISIT: Final = "console_visit"  # before sign-in, form tokens are bound to it
BROWSER: Final = "console_browser"  # see `attempts.known_browser`
SESSION_S: Final = 12 * 3600.0
TOUCH_S: Final = 60.0
MAX_BYTES: Final = 64 * 1024
FORMS_PER_MINUTE: Final = 60  # per person
PAGES_PER_MINUTE: Final = 300  # per session
HEADERS: Final = {
    # The design system's style sheet embeds small pictures as data: URLs.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
TEMPLATES: Final = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)
TEMPLATES.filters["money"] = format_amount
TEMPLATES.filters["exact_places"] = places_of
TEMPLATES.filters["price"] = format_price
TEMPLATES.filters["clock"] = lambda at: time.strftime("%H:%M:%S", time.gmtime(at))
TEMPLATES.filters |= formats.FILTERS
#: Icons by the name of the page, in the order of the navigation.
NAVIGATION: Final = {
    "Overview": "layout-dashboard",
    "Service": "gauge",
    "Accounts": "building",
    "People": "users",
    "Playground": "message-chatbot",
    "API keys": "key",
    "Usage": "chart-bar",
    "Requests": "list-details",
    "Billing": "credit-card",
    "Alerts": "bell",
    "Members": "users",
    "Settings": "settings",
    "Live": "activity",
    "Models": "cpu",
    "Revenue": "coins",
    "Credits": "gift",
    "Notices": "speakerphone",
    "Audit": "history",
    "Accounting": "book",
    "API reference": "api",
}
MAX_ACCOUNTS: Final = 20  # in the account switcher
ACCOUNT_NAMES_S: Final = 60.0  # how long an account's name is cached


class Refused(Exception):
    """A request that is refused with an error page and a reason."""

    def __init__(self, status: int, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.field = field  # name of the form field that is wrong, if any


#: Runs an operator's request in a gateway: see `admin/for_console.py`. Raises Unavailable.
Administer = Callable[[str, Mapping[str, Any], Audit | None], Awaitable[dict[str, Any]]]


async def _no_gateway(_: str, __: Mapping[str, Any], ___: Audit | None) -> dict[str, Any]:
    raise Unavailable("this console has no gateway")


@dataclass(slots=True)
class Console:
    """Services that all pages share. `models` returns the served identifiers."""

    books: BooksPort
    secret_keys: SecretKeys
    models: Callable[[], Awaitable[list[str]]]
    live: Callable[[], Awaitable[dict[str, Any]]]  # the reply of `GET /admin/live`; raises Unavailable
    status_of: Callable[[str], Awaitable[AccountStatus]]  # by account; raises Unavailable
    document: Callable[[], Awaitable[bytes]] | None = None  # the operators' OpenAPI document
    now: Callable[[], float] = time.time
    administer: Administer = _no_gateway
    trusted_proxies: int = 0
    has_mail: bool = False
    mailer: Mailer | None = None
    url: str = ""  # this and the next three: as in ConsoleArgs
    signup: str = "invited"
    signup_credit: int = 0
    signup_credit_per_day: int = 0
    private_webhooks: bool = False  # as in ConsoleArgs
    payments: PaymentProvider | None = None
    credit_alone: int = 100 * NANO_PER_UNIT  # an operator's maximum in 24 hours without a second operator
    openid: OpenId | None = None
    find_lines: Callable[..., Found] = lambda *_, **__: Found([])  # `request_log.find_lines` of this machine; blocks
    trace_url: str = ""  # as in ConsoleArgs
    offers: Callable[[], Awaitable[list[Offer]]] | None = None  # raises Unavailable
    brand: BrandSettings = field(default_factory=BrandSettings)
    seller: Seller = field(default_factory=lambda: Seller("serve-app"))  # on statements and invoices
    pages: Sequence[Page] = field(init=False, default=())
    attempts: Attempts = field(init=False)
    rates: Rates = field(init=False)
    pressure: Pressure = field(init=False)
    notices: Notices = field(init=False)
    rejected: dict[str, tuple[str, float]] = field(init=False, default_factory=dict)  # cache of `overview_pages`
    _names: dict[str, tuple[str, float]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.attempts = Attempts(self.now)
        self.rates = Rates(self.now, MAX_KEPT)
        self.pressure = Pressure(self.books, self.live, self.now, self.administer)
        self.notices = Notices(self.books, self.now)

    async def administer_or_refuse(
        self, operation: str, given: Mapping[str, Any] = MappingProxyType({}), audit: Audit | None = None
    ) -> dict[str, Any]:
        """Runs an operator's request in a gateway. Raises Refused, Unavailable."""
        found = await self.administer(operation, dict(given), audit)
        if (refused := found.get("refused")) is not None:
            raise Refused(refused["status"], refused["message"])
        return found

    @property
    def mails_links(self) -> bool:
        """Whether people can ask for links by e-mail. False without `url`: the request would choose the link's host."""
        return self.mailer is not None and bool(self.url)

    def sections(self, prefix: str, role: str | None = None) -> dict[str, str]:
        """Returns the names, by path, of the pages below `prefix` that `role` may open, or of all if `role` is None."""
        named = [page for page in self.pages if page.section and page.path.startswith(prefix)]
        order = list(NAVIGATION)
        named.sort(key=lambda page: order.index(page.section) if page.section in NAVIGATION else len(order))
        return {page.path.removeprefix(prefix): page.section for page in named if role is None or role in page.rule}

    async def account_names(self, account_ids: Iterable[str]) -> dict[str, str]:
        """Returns the names of the accounts, at most ACCOUNT_NAMES_S old."""
        now = self.now()
        for account_id in account_ids:
            if self._names.get(account_id, ("", 0.0))[1] <= now:
                if len(self._names) >= MAX_KEPT:
                    self._names.clear()
                account = await self.books.run(GetAccount(account_id))
                self._names[account_id] = (account.name or account_id, now + ACCOUNT_NAMES_S)
        return {account_id: self._names[account_id][0] for account_id in account_ids}


@dataclass(slots=True)
class Visit:
    """A request to a page."""

    console: Console
    request: Request
    token: str  # token of the session, or of the visit before sign-in
    session: SignedIn | None = None
    person: Person | None = None
    accounts: Mapping[str, str] = field(default_factory=dict)  # names of the person's accounts
    body: bytes = field(default=b"", repr=False)
    form: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, list[str]] = field(default_factory=dict)
    refused: Refused | None = None  # why the form on this page was refused

    @property
    def root(self) -> str:
        return str(self.request.scope.get("root_path", ""))

    @property
    def address(self) -> str:
        peer = self.request.client.host if self.request.client is not None else None
        return client_address(peer, self.request.headers.getlist("x-forwarded-for"), self.console.trusted_proxies)

    @property
    def limited_address(self) -> str | None:
        """The address by which attempts are limited. None: not known, because no trusted proxy writes it."""
        return self.address if self.console.trusted_proxies else None

    @property
    def is_secure(self) -> bool:
        return is_secure(self.request)

    @property
    def origin(self) -> str:
        """The service's origin, as the browser sees it."""
        return f"{'https' if self.is_secure else 'http'}://{self.request.url.netloc}"

    def link(self, path: str) -> str:
        """Returns the URL of a page, for use in an e-mail."""
        return self.console.url + path

    @property
    def me(self) -> Person:
        assert self.person is not None
        return self.person

    @property
    def audit(self) -> Audit:
        return Audit(self.me.email, address=self.address)

    @property
    def csrf(self) -> str:
        return self.csrf_tokens[0]

    @property
    def csrf_tokens(self) -> tuple[str, ...]:
        """The valid tokens of a form. New forms contain the first."""
        return self.console.secret_keys.derive_all(f"form {self.token}")

    @property
    def path(self) -> str:
        """The page's path below the console's root."""
        return self.request.url.path.removeprefix(self.root)

    def page(self, template: str, status: int = 200, *, section: str = "", **values: Any) -> Response:
        """Renders a page. `section` is the path of the navigation entry to highlight; default: the page's own path."""
        account_id, me = self.request.path_params.get("account_id"), self.person
        role = me.roles.get(account_id, "") if me is not None and account_id is not None else ""
        # Pages that belong to no account show the navigation of the person's first account.
        nav_id = account_id if role else next(iter(me.roles), None) if me is not None else None
        nav_role = me.roles.get(nav_id, "") if me is not None and nav_id is not None else ""
        done = unquote(self.cookie(DONE))
        refused = self.refused
        shared = {
            "root": self.root,
            "csrf": self.csrf,
            "csrf_token": self.csrf,  # the same value for ui.html, where `csrf` is a macro
            "me": me,
            "account_id": account_id,
            "error": "" if refused is None else str(refused),
            "errors": {} if refused is None or not refused.field else {refused.field: str(refused)},
            "form": self.form,
            "lists": self.lists,
            "done": done,
            "now": self.console.now(),
            "brand": self.console.brand,
            "accounts_of_me": self.accounts,
            "nav_id": nav_id,
            "navigation": self.console.sections("/accounts/{account_id}", nav_role),
            "sections": self.console.sections("/accounts/{account_id}", role),
            "operator_sections": self.console.sections("/operator"),
            "icons_of": NAVIGATION,
            "path": section or self.path,
            "operator": (is_operator := me is not None and f"{self.path}/".startswith("/operator/")),
            "notices": [] if me is None or is_operator else self.console.notices.shown(account_id if role else None),
            "signup": self.console.signup,
            "mails_links": self.console.mails_links,
            "openid": None if self.console.openid is None else self.console.openid.settings,
            "once": secrets.token_hex(16),
        }
        status = status if refused is None else refused.status
        response = HTMLResponse(TEMPLATES.get_template(template).render(shared | values), status)
        if done:
            self.delete_cookie(response, DONE)
        return response

    def go(self, path: str, *, done: str = "") -> Response:
        """Redirects to a page of the console, which shows `done`. The URL always begins with the console's root."""
        response = RedirectResponse(self.root + path, 303)
        if done:
            self.set_cookie(response, DONE, quote(done), 60)
        return response

    def cookie(self, name: str) -> str:
        """Returns the value of one of the console's cookies; empty without it."""
        return cookie_of(self.request, name)

    def set_cookie(self, response: Response, name: str, token: str, max_age: int | None = None) -> None:
        name, path = cookie_name(self.request, name), self._cookie_path
        response.set_cookie(name, token, max_age, path=path, httponly=True, samesite="lax", secure=self.is_secure)

    def delete_cookie(self, response: Response, name: str) -> None:
        response.delete_cookie(cookie_name(self.request, name), self._cookie_path, secure=self.is_secure, httponly=True)

    @property
    def _cookie_path(self) -> str:
        return "/" if self.is_secure else self.root or "/"


Handler = Callable[[Visit], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Page:
    """A route: its rule, its handler, and its name in the navigation, if any."""

    method: Literal["GET", "POST"]
    path: str
    rule: frozenset[str]
    handler: Handler
    section: str = ""

    @property
    def route(self) -> str:
        return f"{self.method} {self.path}"


def is_secure(request: Request) -> bool:
    return request.headers.get("x-forwarded-proto", request.url.scheme) == "https"


def cookie_name(request: Request, name: str) -> str:
    """Returns the name under which the browser stores a cookie.

    Over HTTPS, the prefix keeps other hosts of the domain, and pages over plain HTTP, from setting the cookie.
    """
    return f"__Host-{name}" if is_secure(request) else name


def cookie_of(request: Request, name: str) -> str:
    return request.cookies.get(cookie_name(request, name), "")


def check_wait(wait_s: float) -> None:
    """Raises Refused unless `wait_s` is 0."""
    if wait_s:
        wait = f"{math.ceil(wait_s)} seconds" if wait_s < 120 else f"{math.ceil(wait_s / 60)} minutes"
        raise Refused(429, f"Too many attempts: try again in {wait}.")


def responder(console: Console, page: Page) -> Callable[[Request], Awaitable[Response]]:
    """Returns a handler that checks the page's rule, and then calls the page's handler."""

    async def respond(request: Request) -> Response:
        token = cookie_of(request, SESSION) or cookie_of(request, VISIT) or secrets.token_urlsafe(32)
        visit = Visit(console, request, token)
        try:
            response = await _checked(visit, page.rule, page.handler)
        except Refused as error:
            response = await _refuse(visit, page, error)
        except (Unavailable, LedgerUnavailable):
            response = visit.page("message.html", 503, error="The service is busy: try again in a moment.")
        except LedgerError as error:
            response = await _refuse(visit, page, Refused(422, str(error)))
        # Responses that a shared cache may store get no cookie: the cache would send it to all visitors.
        is_page = "cache-control" not in response.headers and page.rule is not PROVIDER
        if visit.person is None and is_page and not visit.cookie(VISIT):
            visit.set_cookie(response, VISIT, visit.token)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return respond


async def _refuse(visit: Visit, page: Page, error: Refused) -> Response:
    """Shows why a form is refused, on the form's page with the typed values if possible, or on a separate page."""
    if page.method == "POST" and error.status == 422:
        for one in visit.console.pages:
            if (one.method, one.path, one.rule) == ("GET", page.path, page.rule):
                visit.refused = error
                try:
                    return await one.handler(visit)
                except (Refused, LedgerError, Unavailable, LedgerUnavailable):
                    visit.refused = None
                    break
    return visit.page("message.html", error.status, error=str(error))


async def _checked(visit: Visit, rule: frozenset[str], handler: Handler) -> Response:
    console, request = visit.console, visit.request
    if rule is PROVIDER:
        await _read_body(visit)
        return await handler(visit)
    found = await console.books.run(FindSession(digest(visit.token))) if visit.cookie(SESSION) else None
    if found is not None:
        visit.session, visit.person = found
        await console.notices.look()
        if console.now() - visit.session.seen_at >= TOUCH_S:
            await console.books.run(TouchSession(visit.session.session_id))
        visit.accounts = await console.account_names(list(visit.person.roles)[:MAX_ACCOUNTS])
    else:
        visit.token = visit.cookie(VISIT) or secrets.token_urlsafe(32)
    if rule is not ANYONE:
        if visit.person is None:
            if request.method == "GET":
                return visit.go("/sign-in")
            raise Refused(401, "Sign in first.")
        if request.method == "GET" and visit.session is not None:
            check_wait(console.rates.count((visit.session.session_id, PAGES_PER_MINUTE)))
        if rule <= OPERATORS:
            role = visit.me.operator_role
        else:
            role = visit.me.roles.get(request.path_params.get("account_id", ""))
        # An account that does not exist is refused like other people's accounts, so nobody learns which ones exist.
        if rule is not SIGNED_IN and role not in rule:
            raise Refused(403, "Your role does not open this page.")
    if request.method == "POST":
        await _read_form(visit)
        if visit.session is not None and rule is not ANYONE:
            check_wait(console.rates.count((visit.me.user_id, FORMS_PER_MINUTE)))
    return await handler(visit)


async def _read_body(visit: Visit) -> None:
    async for part in visit.request.stream():
        visit.body += part
        if len(visit.body) > MAX_BYTES:
            raise Refused(413, "The form is too long.")


async def _read_form(visit: Visit) -> None:
    await _read_body(visit)
    try:
        pairs = parse_qsl(visit.body.decode(), keep_blank_values=True, max_num_fields=200, errors="strict")
    except ValueError:
        raise Refused(400, "The form can't be read.") from None
    lists: dict[str, list[str]] = {}
    for name, value in pairs:
        lists.setdefault(name, []).append(value)
    visit.lists, visit.form = lists, {name: values[-1] for name, values in lists.items()}
    given = visit.form.get("csrf", "").encode()
    if not any(hmac.compare_digest(given, token.encode()) for token in visit.csrf_tokens):
        raise Refused(403, "This form is out of date: open its page again.")
