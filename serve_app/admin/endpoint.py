"""Declares each endpoint once: its route and its operation in the OpenAPI document follow from the declaration.

A handler is an async function whose first argument is AdminServices. It returns a Reply or a Response. Its name is the
operation's id, and its docstring the operation's description. It also receives the path parameters, and any of these
arguments that its signature names:

- `body`: a model that the request's body is parsed into
- `query`: a model of the declared query parameters
- `identity`: the account and the API or management key
- `audit`: the actor who makes the change
- `idempotency_key`: a key under which the change is made only once, even if the client repeats the request
- `once`: generates keys and other values; a repeated request gets the same values
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeVar, get_type_hints

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from serve_app.admin.auditing import FailedLogins
from serve_app.admin.management_keys import ManagementKeys
from serve_app.admin.once import Once
from serve_app.admin.values import Body, Query, Reply, Schema
from serve_app.api import errors
from serve_app.api.codec import parse_object
from serve_app.api.errors import ApiError
from serve_app.contracts.books import Audit
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.commands import Answer, Command, RecordAudit
from serve_app.contracts.errors import (
    AccountNotFound,
    BackendNotFound,
    GrantNotFound,
    KeyNotFound,
    LedgerError,
    LedgerUnavailable,
    ModelNotFound,
)
from serve_app.contracts.limiting import Identity
from serve_app.contracts.ports import BackendPort, BackendUnavailable, BooksPort
from serve_app.gateway.authentication import Authenticator, sent_key
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.gateway.query_rates import QueryRates
from serve_app.gateway.web import BodyReader
from serve_app.settings import BrandSettings
from serve_app.storage.request_log import Found
from serve_app.storage.sealing import SecretKeys

RETRY_S = 0.5
MAX_BYTES: Final = 64 * 1024
# Characters of an idempotency key. The ledger allows 200: for an opening credit, it appends `:credit` to the key.
MAX_KEY: Final = 128
_IDEMPOTENCY_KEY: Final = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_KEY - 2}}}[!-~])?", re.ASCII)
_OPERATOR: Final = re.compile(r"[!-~](?:[ -~]{0,98}[!-~])?", re.ASCII)

KeyKind = Literal["apiKey", "managementKey", "operatorKey"]  # names of the document's security schemes
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Reply | Response]])


@dataclass(slots=True)
class AdminServices:
    """Services that all endpoints of a gateway share."""

    authenticator: Authenticator
    accounting: BooksPort
    limiter: LimiterClient
    backends: BackendPort
    # Returns what BackendPort.status returns. The gateway also routes requests by this value, so /ready agrees with the
    # routing.
    status: Callable[[], Awaitable[dict[str, dict[str, Any]]]]
    catalogue: Callable[[], Catalogue]  # returns the current configuration
    secret_keys: SecretKeys
    currency: str = "USD"
    queries: QueryRates = field(default_factory=QueryRates)
    find_lines: Callable[[str], Found] = lambda _: Found([])  # searches this gateway's log; blocks
    recent_lines: Callable[..., Found] = lambda *_, **__: Found([])  # the same log by time: `request_log.recent_lines`
    patience_s: float = 10.0  # maximum time to wait for an unavailable ledger
    now: Callable[[], float] = time.time  # Unix seconds
    alert_mail: bool = False  # whether alerts can be sent by e-mail
    private_webhooks: bool = False  # whether alerts can be sent to non-public addresses
    brand: BrandSettings = field(default_factory=BrandSettings)  # brand of the pages below `/docs`
    console: Callable[[], str | None] = lambda: None  # the console's path; None: no console runs
    failed_logins: FailedLogins = field(init=False)
    management: ManagementKeys = field(init=False)

    def __post_init__(self) -> None:
        self.failed_logins = FailedLogins(self.accounting)
        self.management = ManagementKeys(self.authenticator, self.run, lambda: self.now())

    async def run(self, command: Command[Answer]) -> Answer:
        """Runs a command and returns its answer. Raises ApiError: 404, 422, or 503 if the ledger stays unavailable."""
        # Retrying is safe: each command has an idempotency key, or sets a value.
        try:
            async with asyncio.timeout(self.patience_s):
                while True:
                    try:
                        return await self.accounting.run(command)
                    except (Unavailable, LedgerUnavailable):
                        await asyncio.sleep(RETRY_S)
                    except (AccountNotFound, KeyNotFound, GrantNotFound, ModelNotFound, BackendNotFound) as error:
                        raise errors.not_found(str(error)) from None
                    except LedgerError as error:
                        raise errors.invalid_parameters(str(error)) from None
        except TimeoutError:
            raise errors.overloaded("the ledger is unavailable: try again", retry_after_s=5) from None

    async def backend_status(self) -> dict[str, dict[str, Any]]:
        """Returns status and number of replicas by backend. Raises 503 while Serve can't be reached."""
        try:
            return await self.status()
        except BackendUnavailable:
            raise errors.overloaded("the service is starting: try again", retry_after_s=2) from None


@dataclass(frozen=True)
class Endpoint:
    handler: Callable[..., Awaitable[Reply | Response]]
    tag: str
    key: KeyKind | None  # kind of key that the endpoint requires
    method: str
    path: str
    summary: str
    # The document's description of a success, or its whole response object if the handler returns no Reply.
    success: str | Schema
    status: int = 200  # HTTP status of a success
    more_errors: tuple[int, ...] = ()  # in addition to those derived from the other fields
    operation_id: str = ""  # replaces the handler's name
    recorded: str = ""  # action in the audit record of a successful read; empty: not recorded

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """The types of the handler's parameters and of its return value."""
        return get_type_hints(self.handler)

    @property
    def error_statuses(self) -> list[int]:
        found = {500, *self.more_errors}
        if self.key is not None:
            found |= {401, 429, 503}
        if self.key == "apiKey":
            found |= {403}
        if "{" in self.path:
            found |= {404}
        if "query" in self.types or self.method != "GET":
            found |= {422}
        if "body" in self.types:
            found |= {400, 408}
        return sorted(found)

    async def respond(self, admin: AdminServices, request: Request) -> Response:
        """Checks the key, prepares the handler's arguments, and calls the handler."""
        given: dict[str, Any] = dict(request.path_params)
        identity: Identity | None = None
        if self.key == "apiKey":
            identity = await admin.authenticator.caller(request).identify()
        elif self.key == "managementKey":
            with _counted(admin, request):
                identity = await admin.management.identify(request)
        elif self.key == "operatorKey":
            with _counted(admin, request):
                admin.authenticator.check_operator(request)
        if identity is not None:
            admin.queries.count(identity)
        request.state.identified = self.key is not None
        if "identity" in self.types:
            given["identity"] = identity
        if "audit" in self.types:
            given["audit"] = _audit(admin, request, identity)
        if "query" in self.types:
            given["query"] = _query(request, self.types["query"])
        if "body" in self.types:
            given["body"] = await _body(request, self.types["body"])
        if "idempotency_key" in self.types:
            given["idempotency_key"] = _idempotency_key(request) or uuid.uuid4().hex
        if "once" in self.types:
            key = sent_key(request.headers)
            given["once"] = Once(admin.secret_keys, key, _idempotency_key(request))
        async with nullcontext() if identity is None else admin.queries.place(identity):
            reply = await self.handler(admin, **given)
        if self.recorded:
            await admin.run(_record(self.recorded, _audit(admin, request, identity), given))
        if isinstance(reply, Response):
            return reply
        return JSONResponse(reply.model_dump(exclude_unset=True), status_code=self.status)


class Endpoints(list[Endpoint]):
    """The endpoints of one tag, in the order of the document. An instance is a decorator for handlers."""

    def __init__(self, tag: str, key: KeyKind | None) -> None:
        super().__init__()
        self._tag = tag
        self._key = key

    def __call__(
        self, method: str, path: str, summary: str, success: str | Schema, **more: Any
    ) -> Callable[[Handler], Handler]:
        """Declares the handler's endpoint; `more` are fields of Endpoint."""

        def declare(handler: Handler) -> Handler:
            self.append(Endpoint(handler, self._tag, self._key, method, path, summary, success, **more))
            return handler

        return declare


@contextmanager
def _counted(admin: AdminServices, request: Request) -> Iterator[None]:
    """Counts a wrong key for the audit log."""
    try:
        yield
    except ApiError as error:
        if error.status in (401, 429) and any(map(request.headers.get, ("authorization", "x-api-key"))):
            admin.failed_logins.count(admin.authenticator.address_of(request))
        raise


def _record(action: str, audit: Audit, given: Mapping[str, Any]) -> RecordAudit:
    """Returns the audit record of a read, with the account and the filters of the request."""
    query = given.get("query")
    asked = {} if query is None else query.model_dump(mode="json", exclude_none=True)
    account = given.get("account_id") or asked.get("account") or ""
    if len(account) > MAX_KEY or not account.isprintable():
        account = ""  # not a valid account id; the record still has it among the filters
    return RecordAudit(audit, action, account or "service", account, asked)


def _audit(admin: AdminServices, request: Request, identity: Identity | None) -> Audit:
    """Returns who makes the request: a management key, or the operator's name and the operator key's fingerprint."""
    request_id = getattr(request.state, "request_id", None)
    address = admin.authenticator.address_of(request)
    if identity is not None:
        return Audit(f"mk:{identity.key_id}", request_id, address)
    name = request.headers.get("x-operator", "").strip()
    if name and not _OPERATOR.fullmatch(name):
        raise errors.invalid_parameters("x-operator must be 1 to 100 printable ASCII characters", param="x-operator")
    key = f"key:{admin.secret_keys.derive(sent_key(request.headers))[:12]}"
    return Audit(f"{name} {key}" if name else key, request_id, address)


def _query(request: Request, model: type[Query]) -> Query:
    """Parses the query parameters. Raises 422."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        param, given = str(problem["loc"][0]), repr(problem["input"])[:60]
        raise errors.invalid_parameters(f"{param}: {problem['msg']}, not {given}", param=param) from None


async def _body(request: Request, model: type[Body]) -> Body:
    """Parses the body. Raises 400 for a wrong format, 422 for a value out of range."""
    raw = await BodyReader(request, MAX_BYTES).read()
    try:
        return model.model_validate(parse_object(raw or b"{}", MAX_BYTES))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, problem["loc"]))
        text = f"{param}: {problem['msg']}" if param else problem["msg"]
        if problem["type"] in ("missing", "extra_forbidden") or problem["type"].endswith("_type"):
            raise errors.invalid_format(text, param=param or None) from None
        raise errors.invalid_parameters(text, param=param or None) from None


def _idempotency_key(request: Request) -> str | None:
    """Returns the idempotency key, if there is one. Raises 422."""
    key = request.headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise errors.invalid_parameters(
            f"idempotency-key must be 1 to {MAX_KEY} printable ASCII characters", param="idempotency-key"
        )
    return key
