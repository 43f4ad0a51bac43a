"""An OpenID Connect provider on a port of its own: it asks nobody, and checks what its client must send."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

CLIENT, SECRET = "console", "secret of the client"


@cache
def key(name: str) -> RSAKey:
    """All have the same id. To generate one takes longer than a sign-in."""
    return RSAKey.generate_key(2048, {"kid": "one"})


class Provider:
    """`claims` are added to an ID token, `key` and `algorithm` sign it; tests change them."""

    def __init__(self, now: Any) -> None:
        self.key: RSAKey | OctKey = key("first")
        self.keys = [self.key]
        self.algorithm = "RS256"
        self.claims: dict[str, Any] = {"sub": "subject-1", "name": "Ada L."}
        self.is_away = False
        self._now, self._begun = now, dict[str, dict[str, str]]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805
                documents = {
                    "/.well-known/openid-configuration": self.metadata(),
                    "/keys": {"keys": [key.as_dict(private=False) for key in self.keys]},
                }
                handler.reply(200, documents[handler.path])

            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers["content-length"])).decode()
                fields = {name: values[0] for name, values in parse_qs(body).items()}
                handler.reply(*self.token(fields, handler.headers["authorization"]))

            def reply(handler, status: int, document: dict[str, Any]) -> None:  # noqa: N805
                body = json.dumps(document).encode()
                handler.send_response(503 if self.is_away else status)
                handler.send_header("content-type", "application/json")
                handler.send_header("content-length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: Any) -> None:  # noqa: N805
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def metadata(self) -> dict[str, Any]:
        ends = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/keys"}
        return {"issuer": self.issuer} | {name: self.issuer + path for name, path in ends.items()}

    def sign_in(self, address: str) -> str:
        """Follows `address` and signs in as a browser does. Returns the path and query to which it is redirected."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        assert (asked["client_id"], asked["response_type"]) == (CLIENT, "code")
        assert asked["code_challenge_method"] == "S256"
        code = f"code-{len(self._begun)}"
        self._begun[code] = asked
        back = urlsplit(asked["redirect_uri"])
        return f"{back.path}?{urlencode({'code': code, 'state': asked['state']})}"

    def token(self, fields: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        asked = self._begun.pop(fields["code"], None)  # opens once
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(fields["code_verifier"].encode()).digest()).decode()
        if (
            asked is None
            or authorization != f"Basic {basic}"
            or challenge.rstrip("=") != asked["code_challenge"]
            or fields["redirect_uri"] != asked["redirect_uri"]
        ):
            return 400, {"error": "invalid_grant"}
        now = int(self._now())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"]}
        claims |= self.claims
        head = {"alg": self.algorithm, "kid": "one"}
        signed = jwt.encode(head, claims, self.key, algorithms=[self.algorithm])
        return 200, {"access_token": "not used", "token_type": "Bearer", "id_token": signed}
