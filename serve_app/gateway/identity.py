"""Whose key a request carries; keys that are wrong, and how often one address may send them."""

from __future__ import annotations

import asyncio
import hmac
import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from serve_app.api import ApiError, errors
from serve_app.api.headers import bearer
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.ports import LimiterClient
from serve_app.gateway.refusals import as_api_error
from serve_app.gateway.wrong_keys import Verdict, WrongKeys, client_address
from serve_app.ledger.keys import digest, well_formed
from serve_app.limits.messages import Admit, Grant, Identify, Identity, Refusal, UnknownKey

NOT_WELL_FORMED = "the API key is not well-formed: check that it was copied completely"
NOT_KNOWN = "the API key is not known here: check it or create a new one"


class Caller:
    """Who sends one request: the digest of the key that it carries, and where it comes from."""

    __slots__ = ("_authenticator", "_request", "digest")

    def __init__(self, authenticator: Authenticator, request: Request, digest: str) -> None:
        self._authenticator = authenticator
        self._request = request
        self.digest = digest

    async def admit(self, ask: Admit) -> Grant | Refusal:
        """The limiter's answer. Raises Unavailable while it is away. `ask` is one without `look_up`."""
        answer: Grant | Refusal = await self._authenticator.ask(ask, self._request)
        return answer

    async def identify(self) -> Identity:
        """Whose active key it is. Raises ApiError: 401, 429 for too many wrong keys, 503 while the limiter is away."""
        try:
            answer = await self._authenticator.ask(Identify(self.digest, look_up=False), self._request)
        except Unavailable:
            raise errors.overloaded("the service is restarting a part of itself: try again", retry_after_s=2) from None
        if isinstance(answer, Refusal):
            raise as_api_error(answer)
        assert isinstance(answer, Identity)
        return answer


class Authenticator:
    """Checks API keys against the limiter, and the operator key.

    `trusted_proxies` is explained at `client_address`; it may be set at any time.
    """

    def __init__(
        self,
        leases: LimiterClient,
        *,
        key_secret: bytes,
        operator_key: str,
        trusted_proxies: int = 0,
        wrong_keys: WrongKeys | None = None,
    ) -> None:
        self.trusted_proxies = trusted_proxies
        self._leases = leases
        self._key_secret = key_secret
        self._operator_key = operator_key
        self._wrong_keys = WrongKeys(time.monotonic) if wrong_keys is None else wrong_keys
        self._looked_up = asyncio.Event()  # replaced each time a look-up has ended

    def caller(self, request: Request) -> Caller:
        """Who sends `request`, as far as can be told without asking.

        Raises ApiError: 401 when there is no API key or a typo is in it, 429 for too many of these.
        """
        key = bearer(request.headers.get("authorization"))
        if not well_formed(key):
            raise self._wrong(request, NOT_WELL_FORMED)
        return Caller(self, request, digest(key, self._key_secret))

    def operator(self, request: Request) -> None:
        """Lets the operator pass. Raises ApiError: 401, 429 for too many wrong keys."""
        given = bearer(request.headers.get("authorization"))
        if not hmac.compare_digest(given.encode(), self._operator_key.encode()):
            raise self._wrong(request, "this needs the operator key of the service")

    async def ask(self, ask: Admit | Identify, request: Request) -> Any:
        """The limiter's answer to what `request` asks; looks an unknown key up only as often as its address may.

        `ask` comes without `look_up`: nearly every key is known, and costs one call and nothing else. Raises
        Unavailable while the limiter or, for a key that it does not know, the ledger is away.
        """
        answer = await self._leases.ask(ask)
        if isinstance(answer, UnknownKey):
            answer = await self._look_up(ask, request)
        if not isinstance(answer, Refusal):
            self._wrong_keys.right(ask.key_digest)
        return answer

    async def _look_up(self, ask: Admit | Identify, request: Request) -> Any:
        wrong_keys, address, key = self._wrong_keys, self.address(request), ask.key_digest
        try:
            async with asyncio.timeout(self._leases.admit_timeout_s):
                while (verdict := wrong_keys.verdict(address, key)) is Verdict.WAIT:
                    await self._looked_up.wait()
        except TimeoutError:
            raise Unavailable("the look-ups of this address do not end") from None
        request_id = getattr(ask, "request_id", "")
        if verdict is Verdict.REFUSE:
            return _too_many(request_id, wrong_keys.wait_s(address))
        if verdict is Verdict.WRONG:
            wait_s = wrong_keys.count(address)
            return _too_many(request_id, wait_s) if wait_s else Refusal(request_id, 401, "invalid_api_key", NOT_KNOWN)
        answer = None
        try:
            answer = await self._leases.ask(replace(ask, look_up=True))
        finally:
            wrong_keys.looked_up(address, key, wrong=isinstance(answer, Refusal) and answer.status == 401)
            self._looked_up.set()
            self._looked_up = asyncio.Event()
        return answer

    def _wrong(self, request: Request, message: str) -> ApiError:
        wait_s = self._wrong_keys.count(self.address(request))
        return as_api_error(_too_many("", wait_s)) if wait_s else errors.authentication(message)

    def address(self, request: Request) -> str:
        """Where a request comes from: see `client_address`."""
        peer = request.client.host if request.client is not None else None
        return client_address(peer, request.headers.getlist("x-forwarded-for"), self.trusted_proxies)


def _too_many(request_id: str, wait_s: float) -> Refusal:
    message = (
        f"Too many requests with wrong API keys came from this address. Check the key, and try again in {wait_s:.0f} s."
    )
    return Refusal(request_id, 429, "wrong_keys", message, wait_s)
