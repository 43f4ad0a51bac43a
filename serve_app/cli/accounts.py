"""`serve-app accounts …`: open accounts, set limits and weight, suspend. Their money is in `funds`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from serve_app.cli.amounts import IdempotencyKey, amount_of, fresh_key
from serve_app.cli.command import Session, command
from serve_app.cli.errors import usage_error
from serve_app.cli.expiry import METAVAR, expiry_of
from serve_app.cli.limits import LIMITS, LimitOption, WeightOption, limits_of

app = typer.Typer(help="Open accounts, add funds, set limits.")

AccountId = Annotated[str, typer.Argument(metavar="ACCOUNT_ID", help="Id as `accounts list` shows it.")]
GrantOption = Annotated[bool, typer.Option("--grant", help="Granted, not paid for.")]
ExpiryOption = Annotated[
    str | None, typer.Option(metavar=METAVAR, help="When the grant expires; a day counts to its end, UTC.")
]


@command(
    app,
    "create",
    examples=(
        "serve-app accounts create Research --credit 5",
        "serve-app accounts create Trial --credit 2 --grant --expires 30d --rpm 60",
    ),
)
def create(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for people.")],
    credit: Annotated[str | None, typer.Option(metavar="AMOUNT", help="Funds to start with.")] = None,
    grant: GrantOption = False,
    expires: ExpiryOption = None,
    rpm: LimitOption = None,
    tpm: LimitOption = None,
    concurrency: LimitOption = None,
    weight: WeightOption = None,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Open an account."""
    body: dict[str, Any] = {"name": name}
    if credit is not None:
        body |= {"credit": amount_of(credit)} | booking(grant, expires)
    elif grant or expires is not None:
        raise usage_error("--grant and --expires say how --credit is booked: give --credit as well")
    given = {"rpm": rpm, "tpm": tpm, "concurrency": concurrency, "weight": weight}
    body |= {limit: value for limit, value in limits_of(given, word="default").items() if value is not None}
    account = session.client.post(
        "accounts", body=body, idempotency_key=idempotency_key or fresh_key(), repeat_with=repeat_with(body, expires)
    )
    show_account(session, account, note=f"Next: serve-app keys create {account['id']}")


@command(app, "list")
def list_accounts(
    session: Session,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
) -> None:
    """List accounts."""
    accounts = list(islice(session.client.accounts(), limit))
    session.out.table(
        {"data": accounts},
        ("id", "name", "status", "balance", "held", "currency", "requests", "charged"),
        [
            (
                a["id"],
                a["name"],
                a["status"],
                a.get("available", a["balance"]),
                a["held"],
                a["currency"],
                a["usage"]["requests"],
                a["usage"]["charged"],
            )
            for a in accounts
        ],
        empty="No accounts yet. Next: serve-app accounts create NAME --credit 5",
    )


@command(app, "show")
def show(session: Session, account_id: AccountId) -> None:
    """Show balance, limits and usage of one account."""
    show_account(session, session.client.get("accounts", account_id))


@command(
    app,
    "limits",
    examples=(
        "serve-app accounts limits ACCOUNT_ID --rpm 60 --tpm 100000 --weight 200",
        "serve-app accounts limits ACCOUNT_ID --concurrency default",
    ),
)
def limits(
    session: Session,
    account_id: AccountId,
    rpm: LimitOption = None,
    tpm: LimitOption = None,
    concurrency: LimitOption = None,
    weight: WeightOption = None,
    default: Annotated[
        list[str] | None, typer.Option(metavar="|".join((*LIMITS, "weight")), help="Back to the service's default.")
    ] = None,
) -> None:
    """Set an account's limits: requests and tokens per minute, requests at once, weight. Those not given stay."""
    given = {"rpm": rpm, "tpm": tpm, "concurrency": concurrency, "weight": weight}
    changes = limits_of(given, default, word="default")
    if not changes:
        raise usage_error("nothing to change: give --rpm, --tpm, --concurrency, --weight or --default")
    show_account(session, session.client.patch("accounts", account_id, "limits", body=changes))


@command(app, "suspend")
def suspend(
    session: Session,
    account_id: AccountId,
    resume: Annotated[bool, typer.Option("--resume", help="Let a suspended account in again.")] = False,
) -> None:
    """Refuse all of an account's requests, until it is resumed."""
    show_account(session, session.client.post("accounts", account_id, "resume" if resume else "suspend"))


def booking(grant: bool, expires: str | None) -> dict[str, Any]:
    """How a credit is booked, as the API takes it. Raises a usage error for a top-up that expires."""
    if expires is not None and not grant:
        raise usage_error("--expires is for grants: what was paid for never expires; give --grant as well")
    body = {"kind": "grant" if grant else "top_up"}
    return body | ({} if expires is None else {"expires_at": expiry_of("--expires", expires, datetime.now(UTC))})


def repeat_with(body: dict[str, Any], expires: str | None) -> str:
    """The expiry as a time: a duration would mean another one when it is typed again."""
    return f"--expires {body['expires_at']}" if expires is not None else ""


def show_account(session: Session, account: dict[str, Any], *, note: str = "") -> None:
    """Print one account."""
    session.out.record(account, _fields(account), note=note)


def _fields(account: dict[str, Any]) -> Iterator[tuple[str, object]]:
    usage, currency = account["usage"], account["currency"]
    yield "id", account["id"]
    yield "name", account["name"]
    yield "status", account["status"]
    yield "balance", f"{account.get('available', account['balance'])} {currency}"
    yield "  topped up", f"{account['topped_up']} {currency}"
    yield "  granted", f"{account['granted']} {currency}"
    for grant in account.get("expiring", ()):
        yield "    expiring", f"{grant['left']} {currency} at {grant['expires_at']}"
    if account.get("available", account["balance"]) != account["balance"]:
        yield "  expired", f"a part of the grants; {account['balance']} {currency} are on the books still"
    yield "  held", f"{account['held']} {currency}"
    for limit in LIMITS:
        yield limit, _limit(account, limit)
    if "weight" in account:
        own = account["contract"].get("weight")
        yield "weight", f"{account['weight']:,}" + ("" if own is not None else " (default)")
    yield "requests", usage["requests"]
    yield "prompt tokens", f"{usage['prompt_tokens']:,} ({usage['cached_tokens']:,} cached)"
    yield "completion tokens", usage["completion_tokens"]
    yield "charged", f"{usage['charged']} {currency}"
    yield "created", account["created_at"]


def _limit(account: dict[str, Any], name: str) -> str:
    """A limit, whether it is the account's own, and what pressure leaves of it now."""
    limit = account["limits"][name]
    now = account.get("effective", {}).get(name, limit)
    text = f"{limit:,}" + ("" if account["contract"].get(name) is not None else " (default)")
    return text if now >= limit else f"{text}, {now:,} under the present load"
