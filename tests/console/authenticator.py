"""A passkey's device: it makes the answers of a browser, without attestation."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from webauthn.helpers import bytes_to_base64url

VERIFIED, PRESENT, HAS_KEY = 4, 1, 64  # flags of the answer


class Authenticator:
    """A device with one passkey. `origin` is what its browser reports; `flags`, whether its user was verified."""

    def __init__(self, origin: str, host: str) -> None:
        self.origin, self.host = origin, host
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.passkey_id = secrets.token_bytes(16)
        self.count = 0
        self.flags = VERIFIED | PRESENT

    def create(self, options: str) -> str:
        """Answers `navigator.credentials.create`."""
        numbers = self.key.public_key().public_numbers()
        public = {1: 2, 3: -7, -1: 1, -2: numbers.x.to_bytes(32, "big"), -3: numbers.y.to_bytes(32, "big")}
        attested = bytes(16) + len(self.passkey_id).to_bytes(2, "big") + self.passkey_id + cbor2.dumps(public)
        stated = self._stated(self.flags | HAS_KEY) + attested
        statement = cbor2.dumps({"fmt": "none", "attStmt": {}, "authData": stated})
        return self._answer(self._client("webauthn.create", options), attestationObject=statement)

    def get(self, options: str) -> str:
        """Answers `navigator.credentials.get`."""
        self.count += 1
        client, stated = self._client("webauthn.get", options), self._stated(self.flags)
        signature = self.key.sign(stated + hashlib.sha256(client).digest(), ec.ECDSA(SHA256()))
        return self._answer(client, authenticatorData=stated, signature=signature)

    def _stated(self, flags: int) -> bytes:
        return hashlib.sha256(self.host.encode()).digest() + bytes([flags]) + self.count.to_bytes(4, "big")

    def _client(self, kind: str, options: str) -> bytes:
        challenge = json.loads(options)["challenge"]
        return json.dumps({"type": kind, "challenge": challenge, "origin": self.origin}).encode()

    def _answer(self, client: bytes, **parts: bytes) -> str:
        response = {name: bytes_to_base64url(part) for name, part in {"clientDataJSON": client, **parts}.items()}
        own = bytes_to_base64url(self.passkey_id)
        found: dict[str, Any] = {"id": own, "rawId": own, "type": "public-key", "response": response}
        return json.dumps(found)
