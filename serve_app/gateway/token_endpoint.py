"""Handles requests that tokenize: identifies the key, reads the body, and asks a replica.

These requests are free: nothing is held or settled. Because they delay other calls at the replicas, keys and accounts
have rate limits for them, and an account may run only MAX_AT_ONCE of them at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from serve_app.api import errors
from serve_app.api.errors import ApiError
from serve_app.api.token_door import TokenDoor, TokenQuery
from serve_app.contracts.generation import Rejected, Tokenized
from serve_app.contracts.limiting import Identity
from serve_app.contracts.ports import BackendUnavailable
from serve_app.gateway.authentication import Authenticator, Caller
from serve_app.gateway.backends import Catalogue
from serve_app.gateway.query_rates import QueryRates
from serve_app.gateway.refusal_errors import rejection_error, restarting
from serve_app.gateway.reply_endpoint import IncompleteBodies, aside
from serve_app.gateway.services import Services
from serve_app.gateway.web import BodyReader, ClientGone, Sender, Share, error_response, until_gone

logger = logging.getLogger("ray.serve")

PER_QUERY: Final = 10  # the rate limit of a key, as a multiple of `queries_per_minute`
BYTES_OF_A_REQUEST: Final = 16 * 1024  # each time a body contains this many bytes, it counts as one more request
MAX_AT_ONCE: Final = 4  # running requests of one account
ANSWER_S: Final = 60.0  # maximum time to wait for the replica


class TokenLimits:
    """The limits of a gateway on requests that tokenize, for all token doors together."""

    def __init__(self) -> None:
        self.rates = QueryRates(of="requests that count or convert tokens")
        self._running: Counter[str] = Counter()  # number of running requests by account

    @contextlib.contextmanager
    def place(self, account_id: str) -> Iterator[None]:
        """Counts a running request of the account. Raises ApiError (429) if MAX_AT_ONCE are running."""
        if self._running[account_id] >= MAX_AT_ONCE:
            message = (
                f"At most {MAX_AT_ONCE} requests that count or convert tokens may run at once. Wait for one to end."
            )
            raise errors.rate_limit(message, code="concurrency", retry_after_s=1)
        self._running[account_id] += 1
        try:
            yield
        finally:
            self._running[account_id] -= 1
            if not self._running[account_id]:
                del self._running[account_id]


class TokenEndpoint:
    """Answers the requests of one token door."""

    def __init__(
        self,
        door: TokenDoor,
        services: Services,
        authenticator: Authenticator,
        bodies: IncompleteBodies,
        limits: TokenLimits,
    ) -> None:
        self._door = door
        self._services = services
        self._authenticator = authenticator
        self._bodies = bodies
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._respond(Request(scope, receive), receive)
        except ApiError as error:
            response = self._error(error, scope)
        except ClientGone:
            return
        except Exception:
            logger.exception("a request failed")
            response = self._error(errors.server_error(), scope)
        self._services.observer.answered_for_free(self._door.path)
        with contextlib.suppress(ClientGone), contextlib.closing(Sender(send)) as sender:
            await response(scope, receive, sender.send_message)

    def _error(self, error: ApiError, scope: Scope) -> JSONResponse:
        return error_response(error, door=self._door, request_id=scope["state"].get("request_id", ""))

    async def _respond(self, request: Request, receive: Receive) -> JSONResponse:
        settings = self._services.settings
        caller = self._authenticator.caller(request)
        reader = BodyReader(request, settings.max_body_bytes, settings.body_timeout_s)
        sender_max = max(settings.bodies_max_bytes // 8, settings.max_body_bytes)
        identity = await self._identify(caller, reader, sender_max)
        request.state.identified = True
        catalogue = self._services.catalogue  # one for the whole request: an operator may remove the model meanwhile
        if not catalogue.is_known:
            raise restarting()
        rates = self._limits.rates
        rates.per_minute = PER_QUERY * settings.queries_per_minute
        rates.count(identity)
        with self._limits.place(identity.account_id):
            with Share(self._bodies.identified, caller.digest, settings.bodies_max_bytes, sender_max) as share:
                body = await reader.read(share)
                rates.charge(identity, len(body) // BYTES_OF_A_REQUEST)
                query = await self._read_query(body, identity, catalogue)
            answers: list[Tokenized] = []

            async def ask() -> None:
                answers.append(await self._ask(query, identity, catalogue))

            await until_gone(receive, ask())
        context_length, _ = catalogue.served[query.model]
        return JSONResponse(self._door.answer(query, answers[0], context_length))

    async def _identify(self, caller: Caller, reader: BodyReader, sender_max: int) -> Identity:
        """Identifies the key. If the key is not confirmed, reads the body meanwhile."""
        if caller.is_confirmed:
            return await caller.identify()
        found: list[Identity] = []

        async def identify() -> None:
            found.append(await caller.identify())

        with Share(self._bodies.unidentified, caller.address, sender_max, sender_max) as share:
            await reader.read_while(identify(), share)
        return found[0]

    async def _read_query(self, body: bytes, identity: Identity, catalogue: Catalogue) -> TokenQuery:
        return await aside(body, lambda: self._parse(body, catalogue))

    def _parse(self, body: bytes, catalogue: Catalogue) -> TokenQuery:
        settings = self._services.settings
        return self._door.parse(body, catalogue.served, settings.max_body_bytes, settings.max_body_items)

    async def _ask(self, query: TokenQuery, identity: Identity, catalogue: Catalogue) -> Tokenized:
        """Asks a replica of the model's backend. Raises ApiError."""
        if identity.models is not None and query.model not in identity.models:
            raise errors.model_not_allowed(query.model, identity.models)
        call = replace(query.call, account_id=identity.account_id)
        backend = catalogue.choose_backend(query.model, identity.account_id, call.messages, may_probe=False)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._services.backends.tokenize(backend, call)
        except (BackendUnavailable, TimeoutError) as error:
            logger.warning("backend %s did not tokenize: %s", backend, error or "timeout")
            raise errors.overloaded("no replica of the model answered: try again", retry_after_s=2) from None
        if isinstance(answer, Rejected):
            raise query.named(rejection_error(answer))
        return answer
