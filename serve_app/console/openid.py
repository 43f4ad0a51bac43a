"""Sign-in at an OpenID Connect provider: an authorization code with PKCE, and validation of the ID token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import httpx2
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet
from joserfc.jws import JWSRegistry

from serve_app.contracts.people import Identity
from serve_app.settings import OpenIdSettings

#: Accepted algorithms of ID tokens. The provider's own list is not used, because it could name a symmetric algorithm.
ALGORITHMS: Final = ("RS256", "PS256", "ES256", "Ed25519", "EdDSA")
TIMEOUT_S: Final = 10.0
LEEWAY_S: Final = 60


class SignInRefused(Exception):
    """The provider refuses the sign-in, or its answer fails validation."""


class ProviderAway(Exception):
    """The provider does not answer."""


class OpenId:
    """A client of the provider. `now` returns seconds since 1970. The provider redirects to the URL `back`."""

    def __init__(self, settings: OpenIdSettings, secret: str, now: Callable[[], float]) -> None:
        self.settings = settings
        self._secret, self._now = secret, now
        self._metadata: dict[str, Any] | None = None

    async def begin(self, state: str, nonce: str, verifier: str, back: str) -> str:
        """Returns the provider's sign-in URL. Raises ProviderAway, SignInRefused."""
        metadata = await self._discover()
        async with self._client(metadata, back) as client:
            url, _ = client.create_authorization_url(
                metadata["authorization_endpoint"], state=state, nonce=nonce, code_verifier=verifier
            )
        return str(url)

    async def finish(self, code: str, nonce: str, verifier: str, back: str) -> tuple[Identity, str]:
        """Returns the identity that signed in, and the name that the provider has for it, or "".

        Raises ProviderAway, SignInRefused.
        """
        metadata = await self._discover()
        try:
            async with self._client(metadata, back) as client:
                token = await client.fetch_token(metadata["token_endpoint"], code=code, code_verifier=verifier)
                keys = await client.request("GET", metadata["jwks_uri"], withhold_token=True)
                keys.raise_for_status()
            registry = JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False)
            signed = jwt.decode(token["id_token"], KeySet.import_key_set(keys.json()), registry=registry)
            wanted = {"iss": self.settings.issuer, "aud": self.settings.client_id}
            claims = CodeIDToken(
                signed.claims,
                signed.header,
                {name: {"essential": True, "value": value} for name, value in wanted.items()},
                {"nonce": nonce, "client_id": self.settings.client_id, "access_token": token.get("access_token")},
            )
            claims.validate(now=int(self._now()), leeway=LEEWAY_S)
        except httpx2.HTTPError as error:
            raise ProviderAway(f"{type(error).__name__}: {error}") from error
        except (AuthlibBaseError, JoseError, ValueError, KeyError, TypeError) as error:
            raise SignInRefused(f"{type(error).__name__}: {error}") from error
        name = claims.get("name")
        return Identity(self.settings.issuer, str(claims["sub"])), name if isinstance(name, str) else ""

    def _client(self, metadata: dict[str, Any], back: str) -> AsyncOAuth2Client:
        methods = metadata.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        basic = "client_secret_basic" in methods
        return AsyncOAuth2Client(
            self.settings.client_id,
            self._secret,
            token_endpoint_auth_method="client_secret_basic" if basic else "client_secret_post",
            scope="openid profile",
            redirect_uri=back,
            code_challenge_method="S256",
            timeout=TIMEOUT_S,
        )

    async def _discover(self) -> dict[str, Any]:
        """Returns the provider's metadata, which is read once. Raises ProviderAway, SignInRefused."""
        if self._metadata is None:
            address = self.settings.issuer.rstrip("/") + "/.well-known/openid-configuration"
            try:
                async with httpx2.AsyncClient(timeout=TIMEOUT_S) as http:
                    answer = await http.get(address)
                    answer.raise_for_status()
                    found = answer.json()
            except (httpx2.HTTPError, ValueError) as error:
                raise ProviderAway(f"{type(error).__name__}: {error}") from error
            if not isinstance(found, dict) or found.get("issuer") != self.settings.issuer:
                raise SignInRefused(f"{address} is not the metadata of {self.settings.issuer}")
            self._metadata = found
        return self._metadata
