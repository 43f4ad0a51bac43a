"""Creates a first API key and a sign-in link. `make serve` prints them when the service is ready."""

from __future__ import annotations

import shlex
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from serve_app import secret_files

FIRST_CREDIT: Final = "5"
CONSOLE: Final = "deployments.apps:console"
CONSOLE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first account's API key, and the console's address with a link that signs in once, if the console is on."""

    api_key: str
    console_url: str | None = None
    sign_in_url: str | None = None


def first_call(
    home: Path, base_url: str, operator_key: str, verify: ssl.SSLContext | bool = True, console: str | None = None
) -> FirstCall:
    """Returns the API key and the links for the first user. `console` is the console's path; None: the console is off.

    The first start creates the account and its key through `/admin`; later starts read the key from the state folder.
    """
    headers = {"authorization": f"Bearer {operator_key}", "x-operator": "setup"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=30, trust_env=False, verify=verify) as client:
        key = _first_key(client, home)
        if console is None:
            return FirstCall(key)
        _wait_for_console(client, console)
        made = client.post(f"/admin/accounts/{_first_account(client, home)}/sign-in-link")
        made.raise_for_status()
    return FirstCall(key, f"{base_url}{console}", f"{base_url}{console}{made.json()['path']}")


def console_path(config: dict[str, Any]) -> str | None:
    """Returns the path of the console that a configuration starts, or None."""
    for application in config.get("applications") or []:
        if isinstance(application, dict) and application.get("import_path") == CONSOLE:
            return str(application.get("route_prefix") or "").rstrip("/")
    return None


def _first_key(client: httpx.Client, home: Path) -> str:
    path = home / "secrets" / "first-api-key"
    if path.exists():
        key = path.read_text().strip()
        if client.get("/models", headers={"authorization": f"Bearer {key}"}).status_code != 401:
            return key
        # The service has a new database, or the key was revoked: create a new key.
        path.unlink()
    made = client.post(f"/admin/accounts/{_first_account(client, home)}/keys", json={"name": "first key"})
    made.raise_for_status()
    return secret_files.secret_file(home, "first-api-key", made.json()["key"])


def _first_account(client: httpx.Client, home: Path) -> str:
    """Returns the id of the first account. Creates the account on the first call."""
    account = client.post(
        "/admin/accounts",
        json={"name": "first account", "credit": FIRST_CREDIT, "kind": "grant"},
        # With this key, a repeated request returns the same account, even after a restart.
        headers={"idempotency-key": f"first-account-{secret_files.secret_file(home, 'first-account-token')}"},
    )
    account.raise_for_status()
    return str(account.json()["id"])


def _wait_for_console(client: httpx.Client, console: str) -> None:
    """Waits until the console answers, at most CONSOLE_S. If it starts later, the link works from then on."""
    deadline = time.monotonic() + CONSOLE_S
    while client.get(f"{console}/sign-in").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.3)


def banner(facts: dict[str, Any]) -> str:
    """Returns the facts of `--json` as text for a terminal. Its curl command and Python code work when pasted."""
    base_url, api_key = facts["base_url"], facts["api_key"]
    dashboard = "off"
    if facts["dashboard_url"]:
        dashboard = f"{facts['dashboard_url']}   (token: {facts['dashboard_token_file']})"
    ca_file = facts["ca_file"]
    trust = f"\n  certificate     for SDKs: export SSL_CERT_FILE={shlex.quote(ca_file)}" if ca_file else ""
    option = f" --cacert {shlex.quote(ca_file)}" if ca_file else ""
    console = "off"
    if facts["console_url"]:
        console = f"{facts['console_url']}\n  sign in         {facts['sign_in_url']}   (once, within 10 minutes)"
    return f"""
  serve-app is ready.

  console         {console}
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
