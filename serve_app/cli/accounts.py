"""`serve-app accounts …`: creates and suspends accounts, sets limits. The `funds` module has the commands for money."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.completion import AccountId
from serve_app.cli.output import UsageError
from serve_app.cli.values import EXPIRY, AccountLimits, parse_expiry, parse_limits, plain_amount
from serve_app.contracts.limits import ACCOUNT_LIMITS

app = typer.Typer(name="accounts", help="Open accounts, add funds, set limits.")

GrantOption = Annotated[bool, typer.Option("--grant", help="Book the credit as a grant, not as a payment.")]
ExpiryOption = Annotated[str | None, typer.Option(metavar="WHEN", help=f"Expiry of the grant: {EXPIRY}.")]
IdempotencyKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Idempotency key of an earlier attempt, to repeat it safely.")
]


@command(
    app,
    "create",
    examples=(
        "serve-app accounts create Research --credit 5",
        "serve-app accounts create Trial --credit 2 --grant --expires 30d --rpm 60",
    ),
)
def create_account(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Display name.")],
    *,
    credit: Annotated[str | None, typer.Option(metavar="AMOUNT", help="Initial funds.")] = None,
    grant: GrantOption = False,
    expires: ExpiryOption = None,
    limits: AccountLimits,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Create an account."""
    body: dict[str, Any] = {"name": name}
    if credit is not None:
        body |= {"credit": plain_amount(credit)} | credit_fields(grant, expires)
    elif grant or expires is not None:
        raise UsageError("--grant and --expires apply to --credit: add --credit")
    own = parse_limits(limits, word="default")
    body |= {limit: value for limit, value in own.items() if value is not None}
    account = session.client.book(
        "accounts", body=body, idempotency_key=idempotency_key, repeat_with=expiry_to_repeat(body)
    )
    print_account(session, account, note=f"Next: serve-app keys create {account['id']}")


@command(app, "list")
def list_accounts(
    session: Session,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of accounts.")] = None,
) -> None:
    """List accounts."""
    accounts = session.client.first_rows("accounts", limit=limit, say=session.out.progress.say)
    session.out.table(
        {"data": accounts},
        ("id", "name", "status", "balance", "currency", "held", "requests", "charged"),
        [
            (
                a["id"],
                a["name"],
                a["status"],
                _available(a),
                a["currency"],
                a["held"],
                use["requests"],
                use["charged"],
            )
            for a in accounts
            for use in [a["usage"]]
        ],
        wide=("held", "requests", "charged"),
        empty="No accounts yet. Next: serve-app accounts create NAME --credit 5",
    )


@command(app, "show")
def show_account(session: Session, account_id: AccountId) -> None:
    """Show balance, limits and usage of one account."""
    print_account(session, session.client.api_get("accounts", account_id))


@command(
    app,
    "limits",
    examples=(
        "serve-app accounts limits ACCOUNT_ID --rpm 60 --tpm 100000 --weight 200",
        "serve-app accounts limits ACCOUNT_ID --concurrency default",
    ),
)
def set_limits(
    session: Session,
    account_id: AccountId,
    limits: AccountLimits,
    default: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIMIT", help=f"Reset this limit to the service's default. One of: {', '.join(ACCOUNT_LIMITS)}."
        ),
    ] = None,
) -> None:
    """Set limits: requests and tokens per minute, concurrent requests, weight. Omitted limits stay unchanged."""
    changes = parse_limits(limits, default or (), word="default")
    if not changes:
        options = ", ".join(f"--{limit}" for limit in ACCOUNT_LIMITS)
        raise UsageError(f"nothing to change: give {options} or --default")
    print_account(session, session.client.api_patch("accounts", account_id, "limits", body=changes))


@command(app, "suspend")
def suspend(
    session: Session,
    account_id: AccountId,
    resume: Annotated[bool, typer.Option("--resume", hidden=True)] = False,
) -> None:
    """Reject all requests of an account until `accounts resume`."""
    print_account(session, session.client.api_post("accounts", account_id, "resume" if resume else "suspend"))


@command(app, "resume")
def resume(session: Session, account_id: AccountId) -> None:
    """Accept the requests of a suspended account again."""
    print_account(session, session.client.api_post("accounts", account_id, "resume"))


def credit_fields(grant: bool, expires: str | None) -> dict[str, str]:
    """Returns the API's fields for booking a credit. Raises UsageError for a top-up with an expiry."""
    if expires is not None and not grant:
        raise UsageError("--expires applies only to grants, because top-ups never expire: add --grant")
    body = {"kind": "grant" if grant else "top_up"}
    return body | ({} if expires is None else {"expires_at": parse_expiry(expires, datetime.now(UTC))})


def expiry_to_repeat(body: dict[str, Any]) -> str:
    """Returns the `--expires` option for a retry, as a point in time: a repeated duration would give a later expiry."""
    return f"--expires {body['expires_at']}" if "expires_at" in body else ""


def print_account(session: Session, account: dict[str, Any], *, note: str = "") -> None:
    session.out.record(account, _fields(account), note=note)


def _fields(account: dict[str, Any]) -> Iterator[tuple[str, object]]:
    usage, currency = account["usage"], account["currency"]
    yield "id", account["id"]
    yield "name", account["name"]
    yield "status", account["status"]
    yield "balance", f"{_available(account)} {currency}"
    yield "  topped up", f"{account['topped_up']} {currency}"
    yield "  granted", f"{account['granted']} {currency}"
    for grant in account.get("expiring", ()):
        yield "    expiring", f"{grant['left']} {currency} at {grant['expires_at']}"
    if _available(account) != account["balance"]:
        yield "  expired", f"some grants; the ledger's balance still includes them: {account['balance']} {currency}"
    yield "  held", f"{account['held']} {currency}"
    for limit in ACCOUNT_LIMITS:
        if limit in account or limit in account["limits"]:
            yield limit, _limit_text(account, limit)
    yield "requests", usage["requests"]
    yield "prompt tokens", f"{usage['prompt_tokens']:,} ({usage['cached_tokens']:,} cached)"
    yield "completion tokens", usage["completion_tokens"]
    yield "charged", f"{usage['charged']} {currency}"
    yield "created", account["created_at"]


def _available(account: dict[str, Any]) -> str:
    """Returns the balance without expired grants."""
    available: str = account.get("available", account["balance"])
    return available


def _limit_text(account: dict[str, Any], limit: str) -> str:
    """Formats a limit: its value, whether it is the service's default, and the value under load if that is lower."""
    value = account["limits"].get(limit, account.get(limit))  # the API has the weight outside `limits`
    effective = account.get("effective", {}).get(limit, value)
    text = f"{value:,}" + ("" if account["contract"].get(limit) is not None else " (default)")
    return text if effective >= value else f"{text}, {effective:,} under the current load"
