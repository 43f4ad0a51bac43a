"""The text that `make serve` prints when the service is ready: everything for a first call, with a first API key."""

from __future__ import annotations

import shlex
import ssl
from pathlib import Path
from typing import Any

import httpx

from serve_app import secret_files

FIRST_CREDIT = "5"


def first_key(home: Path, base_url: str, operator_key: str, verify: ssl.SSLContext | bool = True) -> str:
    """Returns the first account's API key.

    The first start creates it through `/admin`; later starts read it from the state folder.
    """
    path = home / "secrets" / "first-api-key"
    headers = {"authorization": f"Bearer {operator_key}", "x-operator": "make serve"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=30, trust_env=False, verify=verify) as client:
        if path.exists():
            key = path.read_text().strip()
            if client.get("/models", headers={"authorization": f"Bearer {key}"}).status_code != 401:
                return key
            # The service has a new database, or the key was revoked: create a new key.
            path.unlink()
        account = client.post(
            "/admin/accounts",
            json={"name": "first account", "credit": FIRST_CREDIT, "kind": "grant"},
            # A repetition after an interruption returns the same account.
            headers={"idempotency-key": f"first-account-{secret_files.secret_file(home, 'first-account-token')}"},
        )
        account.raise_for_status()
        key_response = client.post(f"/admin/accounts/{account.json()['id']}/keys", json={"name": "first key"})
        key_response.raise_for_status()
    return secret_files.secret_file(home, "first-api-key", key_response.json()["key"])


def banner(facts: dict[str, Any]) -> str:
    """Returns the facts of `--json` as text for a terminal; both snippets work when pasted."""
    base_url, api_key = facts["base_url"], facts["api_key"]
    dashboard = "off"
    if facts["dashboard_url"]:
        dashboard = f"{facts['dashboard_url']}   (token: {facts['dashboard_token_file']})"
    ca_file = facts["ca_file"]
    trust = f"\n  certificate     for SDKs: export SSL_CERT_FILE={shlex.quote(ca_file)}" if ca_file else ""
    option = f" --cacert {shlex.quote(ca_file)}" if ca_file else ""
    return f"""
  serve-app is ready.

  base address    {base_url}   (or {base_url}/v1){trust}
  API key         {api_key}
  Ray dashboard   {dashboard}
  metrics         {facts["metrics_url"]}
  state folder    {facts["home"]}

  With curl:

curl{option} {base_url}/v1/chat/completions \\
  -H "Authorization: Bearer {api_key}" \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "svc-chat", "temperature": 0,
       "messages": [{{"role": "user", "content": "Name the capital of France."}}]}}'

  With the SDK (pip install openai):

from openai import OpenAI

client = OpenAI(base_url="{base_url}/v1", api_key="{api_key}")
reply = client.chat.completions.create(
    model="svc-chat",
    temperature=0,
    messages=[{{"role": "user", "content": "Name the capital of France."}}],
)
print(reply.choices[0].message.content)

  Ctrl-C stops everything.
"""
