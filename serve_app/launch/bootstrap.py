"""The first account and key, made once through the running service's own `/admin`."""

from __future__ import annotations

from pathlib import Path

import httpx

from serve_app import secrets

FIRST_CREDIT = "5"


def first_key(home: Path, base_url: str, operator_key: str) -> str:
    """The API key that `make serve` prints: made on the first start, read from the state folder afterwards."""
    path = home / "secrets" / "first-api-key"
    headers = {"authorization": f"Bearer {operator_key}", "x-operator": "make serve"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=30, trust_env=False) as client:
        if path.exists():
            key = path.read_text().strip()
            answer = client.get("/models", headers={"authorization": f"Bearer {key}"})
            if answer.status_code != 401:
                return key
            # The database behind the service is another one, or the key was revoked: make a new one.
            path.unlink()
        account = client.post(
            "/admin/accounts",
            json={"name": "first account", "credit": FIRST_CREDIT, "kind": "grant"},
            # Asked again after an interruption, the same account answers.
            headers={"idempotency-key": f"first-account-{secrets.secret_file(home, 'first-account-token')}"},
        )
        account.raise_for_status()
        key_answer = client.post(f"/admin/accounts/{account.json()['id']}/keys", json={"name": "first key"})
        key_answer.raise_for_status()
    return secrets.secret_file(home, "first-api-key", key_answer.json()["key"])
