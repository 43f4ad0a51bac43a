"""Authenticates the API key of a request before the gateway works on its body."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request

from serve_app.api import errors
from serve_app.api.errors import ApiError
from serve_app.contracts.addresses import client_address, client_host
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.key_format import MANAGEMENT, digest, well_formed
from serve_app.contracts.limiting import Admit, Grant, Identify, Identity, Refusal, UnknownKey
from serve_app.gateway.limiter_client import LimiterClient
from serve_app.gateway.refusal_errors import refusal_error, restarting
from serve_app.gateway.wrong_keys import BEAT_S, Verdict, WrongKeys

NOT_WELL_FORMED = "the API key is not well-formed: check that it was copied completely"
NOT_FOR_CHAT = "a management key works for /account only: send an API key"
NOT_KNOWN = "the API key is not known here: check it or create a new one"
TOO_MANY: Final = "wrong_keys"
CONFIRMED_S: Final = 10.0  # time during which an accepted key counts as confirmed
MAX_CONFIRMED: Final = 10_000
NEVER: Final = (0.0, "")
MAX_WAITING: Final = 500  # requests that wait for the look-up of their key; reached only without the ledger
_KEY: Final = re.compile(r"[!-~]{1,512}")
_EXPECTED: Final = 'Send the header "Authorization: Bearer <your API key>", or "x-api-key: <your API key>".'


class Caller:
    """The sender of one request: the digest of its key, and its address.

    `account_and_key` holds the account id and the key id once the limiter has reported them, even for a refused key.
    """

    __slots__ = ("_authenticator", "_request", "account_and_key", "digest")

    def __init__(self, authenticator: Authenticator, request: Request, digest: str) -> None:
        self._authenticator = authenticator
        self._request = request
        self.digest = digest
        self.account_and_key = "", ""

    @property
    def host(self) -> str:
        """See `Authenticator.host_of`."""
        return self._authenticator.host_of(self._request)

    @property
    def address(self) -> str:
        """See `client_address`."""
        return self._authenticator.address_of(self._request)

    @property
    def is_confirmed(self) -> bool:
        """Whether the limiter accepted the key within the last CONFIRMED_S seconds.

        The gateway may then process the body before it checks the key again. This does not authorise the request.
        Always False for a key that allows only some addresses.
        """
        return self._authenticator.is_confirmed(self.digest)

    @property
    def account_id(self) -> str:
        """The account of a key that the limiter accepted recently, else empty. This does not authorise the request."""
        return self._authenticator.account_of(self.digest)

    async def admit(self, ask: Admit) -> Grant | Refusal:
        """Returns the limiter's answer. `ask.look_up` must be False. Raises Unavailable as `Authenticator.ask` does."""
        answer: Grant | Refusal = await self._authenticator.ask(ask, self._request)
        return answer

    async def identify(self) -> Identity:
        """Returns the account of an active key.

        Raises ApiError: 401; 403 for an address that the key does not allow; 429 after too many wrong keys; 503 while
        the limiter is unavailable.
        """
        try:
            answer = await self._authenticator.ask(Identify(self.digest, False, self.host), self._request)
        except Unavailable:
            raise restarting() from None
        self.account_and_key = answer.account_id, answer.key_id
        if isinstance(answer, Refusal):
            raise refusal_error(answer)
        assert isinstance(answer, Identity)
        return answer


class Authenticator:
    """Checks API keys against the limiter, and checks operator keys.

    During a rotation, the old and the new operator key are both valid. `trusted_proxies` is explained at
    `client_address`; it may be set at any time.
    """

    def __init__(
        self,
        limiter: LimiterClient,
        *,
        operator_keys: Sequence[str],
        trusted_proxies: int = 0,
        wrong_keys: WrongKeys | None = None,
    ) -> None:
        self.trusted_proxies = trusted_proxies
        self.beat_s = BEAT_S
        self._limiter = limiter
        self._operator_keys = [key.encode() for key in operator_keys]
        self.wrong_keys = WrongKeys(time.monotonic) if wrong_keys is None else wrong_keys
        #: Key digest -> (confirmed until, account id), least recently confirmed first.
        self._confirmed: dict[str, tuple[float, str]] = {}
        self._beat: asyncio.Event | None = None  # set at the next beat
        self._waiting = 0

    def caller(self, request: Request) -> Caller:
        """Returns the sender of the request.

        Raises ApiError: 401 for a missing or malformed API key, 429 after too many malformed ones.
        """
        key = sent_key(request.headers)
        if not well_formed(key):
            raise self.wrong(request, NOT_FOR_CHAT if key.startswith(MANAGEMENT) else NOT_WELL_FORMED)
        return Caller(self, request, digest(key))

    def check_operator(self, request: Request) -> None:
        """Raises ApiError unless the request carries an operator key: 401, or 429 after too many wrong keys."""
        given = sent_key(request.headers).encode()
        # Compares with every key, so that the response time does not show which one nearly matches.
        if not sum([hmac.compare_digest(given, key) for key in self._operator_keys]):
            raise self.wrong(request, "this needs the operator key of the service")

    async def ask(self, ask: Admit | Identify, request: Request) -> Any:
        """Returns the limiter's answer. `ask.look_up` must be False.

        This method itself looks up a key that the limiter does not know, and limits these look-ups.

        Raises Unavailable while the limiter is unavailable. For a key that the limiter does not know, it also raises
        Unavailable while the ledger is unavailable.
        """
        answer = await self._limiter.ask(ask)
        if isinstance(answer, UnknownKey):
            answer = await self._ask_ledger(ask, request)
        self._learn(ask.key_digest, answer)
        return answer

    async def _ask_ledger(self, ask: Admit | Identify, request: Request) -> Any:
        """Returns the answer for a key that the limiter does not know."""
        found = await self._look_up(ask.key_digest, request)
        if isinstance(ask, Identify):
            return found
        if isinstance(found, Refusal):
            return replace(found, request_id=ask.request_id)
        answer = await self._limiter.ask(ask)
        if isinstance(answer, UnknownKey):
            raise Unavailable("the limiter has forgotten the key again")
        return answer

    def is_confirmed(self, digest: str) -> bool:
        """Returns whether the limiter accepted the key within the last CONFIRMED_S seconds."""
        return self._confirmed.get(digest, NEVER)[0] > time.monotonic()

    def account_of(self, digest: str) -> str:
        """Returns the account of a key that the limiter accepted recently, else an empty string."""
        return self._confirmed.get(digest, NEVER)[1]

    def _learn(self, digest: str, answer: Any) -> None:
        _, account_id = self._confirmed.pop(digest, NEVER)
        if _leaves_unconfirmed(answer):
            return
        account_id = getattr(answer, "account_id", "") or account_id
        # A key with allowed addresses is never confirmed: each request's address is checked before its body is parsed.
        until = time.monotonic() + CONFIRMED_S if answer.from_anywhere else 0.0
        self._confirmed[digest] = until, account_id
        if len(self._confirmed) > MAX_CONFIRMED:
            del self._confirmed[next(iter(self._confirmed))]
        if digest not in self.wrong_keys.right_keys:
            self.wrong_keys.right(digest)

    def address_of(self, request: Request) -> str:
        """See `client_address`."""
        peer = request.client.host if request.client is not None else None
        return client_address(peer, request.headers.getlist("x-forwarded-for"), self.trusted_proxies)

    def host_of(self, request: Request) -> str:
        """See `client_host`. The address is not parsed, because almost no key depends on it."""
        peer = request.client.host if request.client is not None else ""
        forwarded_for = request.headers.getlist("x-forwarded-for")
        return client_host(peer, forwarded_for, self.trusted_proxies) if forwarded_for else peer

    async def _look_up(self, digest: str, request: Request) -> Identity | Refusal:
        """Returns the key's owner, or a refusal: 401, 403, or 429 after too many wrong keys. Raises Unavailable."""
        wrong_keys, address = self.wrong_keys, self.address_of(request)
        verdict = wrong_keys.verdict(address, digest)
        if verdict is not Verdict.WRONG:
            if self._waiting >= MAX_WAITING:
                raise Unavailable("too many keys are being looked up")
            self._waiting += 1
            try:
                if verdict is Verdict.LOOK_UP_AT_BEAT:
                    await self._next_beat()
                answer = await self._limiter.ask(Identify(digest, address=self.host_of(request)))
            finally:
                self._waiting -= 1
            is_wrong = isinstance(answer, Refusal) and answer.status == 401
            wrong_keys.looked_up(digest, is_wrong)
            if not is_wrong:
                assert isinstance(answer, Identity | Refusal)
                return answer
        wait_s = wrong_keys.count(address)
        return _too_many("", wait_s) if wait_s else Refusal("", 401, "invalid_api_key", NOT_KNOWN)

    async def _next_beat(self) -> None:
        if self._beat is None:
            self._beat = asyncio.Event()
            asyncio.get_running_loop().call_later(self.beat_s, self._end_beat)
        await self._beat.wait()

    def _end_beat(self) -> None:
        assert self._beat is not None
        self._beat.set()
        self._beat = None

    def wrong(self, request: Request, message: str) -> ApiError:
        """Counts a wrong key. Returns a 401, or a 429 after too many."""
        wait_s = self.wrong_keys.count(self.address_of(request))
        return refusal_error(_too_many("", wait_s)) if wait_s else errors.authentication(message)


def _leaves_unconfirmed(answer: Any) -> bool:
    """Returns whether the key is wrong, revoked, used from an address it does not allow, or could not be checked."""
    return isinstance(answer, Refusal) and (answer.status in (401, 403, 503) or answer.code == TOO_MANY)


def _too_many(request_id: str, wait_s: float) -> Refusal:
    message = (
        f"Too many requests with wrong API keys came from this address. Check the key, and try again in {wait_s:.0f} s."
    )
    return Refusal(request_id, 429, TOO_MANY, message, wait_s)


def sent_key(headers: Mapping[str, str]) -> str:
    """Returns the key in the `Authorization` header, or else in `x-api-key`. Raises ApiError (401).

    HAProxy's rules for senders use the same order (`launch/haproxy_config.py`).
    """
    authorization = headers.get("authorization")
    if authorization is None and (key := headers.get("x-api-key")) is not None:
        return _checked("x-api-key header", key.strip())
    return bearer(authorization)


def bearer(authorization: str | None) -> str:
    """Returns the key in an `Authorization` header (RFC 6750). Raises ApiError (401), which never repeats the input."""
    if authorization is None or not authorization.strip():
        raise errors.authentication(f"The Authorization header is missing. {_EXPECTED}")
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer":
        raise errors.authentication(f"The Authorization header does not begin with Bearer. {_EXPECTED}")
    return _checked("Authorization header", key.strip())


def _checked(header: str, key: str) -> str:
    if not key:
        after = " after Bearer" if header.startswith("A") else ""
        raise errors.authentication(f"The {header} has no key{after}. {_EXPECTED}")
    if not _KEY.fullmatch(key):
        raise errors.authentication(f"The key in the {header} has spaces or invalid characters. {_EXPECTED}")
    return key
