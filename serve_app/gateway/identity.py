"""Whose key a request carries."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from serve_app.api import errors
from serve_app.api.headers import bearer
from serve_app.gateway.coalesce import Unavailable
from serve_app.gateway.leases import Leases
from serve_app.gateway.refusals import as_api_error
from serve_app.ledger.keys import digest, well_formed
from serve_app.limits.messages import Identify, Identity, Refusal


class Authenticator:
    """Checks API keys against the limiter, and the operator key."""

    def __init__(self, leases: Leases, *, key_secret: bytes, operator_key: str) -> None:
        self._leases = leases
        self._key_secret = key_secret
        self._operator_key = operator_key

    def digest(self, request: Request) -> str:
        """Digest of the request's API key. Raises 401 when there is none or a typo is in it."""
        key = bearer(request.headers.get("authorization"))
        if not well_formed(key):
            raise errors.authentication("the API key is not well-formed: check that it was copied completely")
        return digest(key, self._key_secret)

    async def identify(self, key_digest: str) -> Identity:
        """Whose active key it is. Raises 401, or 503 while the limiter is away."""
        try:
            answer = await self._leases.ask(Identify(key_digest))
        except Unavailable:
            raise errors.overloaded("the service is restarting a part of itself: try again", retry_after_s=2) from None
        if isinstance(answer, Refusal):
            raise as_api_error(answer)
        assert isinstance(answer, Identity)
        return answer

    def operator(self, request: Request) -> None:
        """Lets the operator pass. Raises 401."""
        given = bearer(request.headers.get("authorization"))
        if not hmac.compare_digest(given.encode(), self._operator_key.encode()):
            raise errors.authentication("this needs the operator key of the service")
