"""Completes ids in the shell: asks the service for them, and gives up silently after a second."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from serve_app.cli.client import AdminClient
from serve_app.cli.connection import SharedOptions, resolve

PATIENCE_S: Final = 1.0
MAX_FOUND: Final = 200
PAGE_SIZE: Final = 200
MAX_ACCOUNTS: Final = 10

#: Ids with a description, which some shells show.
Found = Iterator[tuple[str, str]]


def completes(
    search: Callable[[AdminClient, str | None], Found],
) -> Callable[[typer.Context, str], list[tuple[str, str]]]:
    """Returns a completion that calls `search` with a client and the account on the command line, if any."""

    def complete(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []

        def look_up() -> None:
            try:
                connection = resolve(_shared(ctx), os.environ, Path.cwd())
                account = ctx.params.get("account_id") or ctx.params.get("account")
                with AdminClient(connection, timeout_s=PATIENCE_S, retries=False) as client:
                    for one in search(client, account):
                        if one[0].startswith(incomplete):
                            found.append(one)
                            if len(found) == MAX_FOUND:
                                return
            except Exception:  # the shell can't show an error here
                return

        searching = threading.Thread(target=look_up, daemon=True)
        searching.start()
        searching.join(PATIENCE_S)
        return found[:]

    return complete


def _shared(ctx: Any) -> SharedOptions:
    """Returns the shared options on the command line, including those before the command's name."""
    names = ("url", "key_file", "operator", "insecure")
    given: dict[str, Any] = {}
    while ctx is not None:
        given = {name: ctx.params[name] for name in names if ctx.params.get(name)} | given
        ctx = ctx.parent
    return SharedOptions(**given)


def _accounts(client: AdminClient, _account: str | None = None) -> Found:
    for page in client.pages("accounts", page_size=PAGE_SIZE, query={}):
        yield from ((one["id"], one["name"]) for one in page)


def _keys(client: AdminClient, account: str | None) -> Found:
    """Yields keys of the account. Without an account, yields keys used in the last 31 days.

    Listing the keys of every account would fill the audit log.
    """
    if account:
        yield from ((one["id"], one["name"] or "") for one in client.api_get("accounts", account, "keys")["data"])
        return
    since = (datetime.now(UTC) - timedelta(days=31)).date().isoformat()
    for row in client.api_get("usage", query={"group_by": "key,account", "from": since})["data"]:
        yield row["key_id"], row["account_id"]


def _people(client: AdminClient, account: str | None) -> Found:
    """Yields people of the account. Without an account, yields those of only a few: the audit log records each read."""
    accounts = [account] if account else [one for one, _ in islice(_accounts(client), MAX_ACCOUNTS)]
    for account_id in accounts:
        yield from ((one["email"], one["name"]) for one in client.api_get("accounts", account_id, "people")["data"])


def _models(client: AdminClient, _account: str | None) -> Found:
    yield from ((one["id"], "") for one in client.api_get("models")["data"])


def _backends(client: AdminClient, _account: str | None) -> Found:
    yield from ((one["name"], one["status"]) for one in client.api_get("backends")["data"])


def of_values(values: Iterable[str]) -> Callable[[], list[str]]:
    """Returns a completion with fixed values."""
    return lambda: list(values)


complete_account: Final = completes(_accounts)
complete_key: Final = completes(_keys)
complete_person: Final = completes(_people)
complete_model: Final = completes(_models)
complete_backend: Final = completes(_backends)

AccountId = Annotated[
    str,
    typer.Argument(
        metavar="ACCOUNT_ID", help="Account id, as shown by `accounts list`.", autocompletion=complete_account
    ),
]
KeyId = Annotated[
    str, typer.Argument(metavar="KEY_ID", help="Key id, as shown by `keys list`.", autocompletion=complete_key)
]
Identifier = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Model identifier of requests, such as svc-chat.", autocompletion=complete_model
    ),
]
AccountOption = Annotated[
    str | None, typer.Option(metavar="ACCOUNT_ID", help="Only this account.", autocompletion=complete_account)
]
KeyOption = Annotated[
    str | None, typer.Option(metavar="KEY_ID", help="Only this API key.", autocompletion=complete_key)
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Only this model identifier.", autocompletion=complete_model)
]
