"""`serve-app accounts …`: open accounts, add funds, set limits, suspend."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Annotated, Any

import typer

from serve_app.cli.command import Session, command
from serve_app.cli.errors import usage_error

app = typer.Typer(help="Open accounts, add funds, set limits.")

MAX_DECIMALS = 9  # the ledger counts in billionths
LIMITS = ("rpm", "tpm", "concurrency")

AccountId = Annotated[str, typer.Argument(metavar="ACCOUNT_ID", help="Id as `accounts list` shows it.")]
Amount = Annotated[str, typer.Argument(metavar="AMOUNT", help="Above 0, for instance 5 or 0.25.")]
LimitOption = Annotated[str | None, typer.Option(metavar="N|default", help="Whole number, or `default`.")]
IdempotencyKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Repeat an earlier attempt without doing it twice.")
]
GrantOption = Annotated[bool, typer.Option("--grant", help="Granted, not paid for.")]


@command(app, "create")
def create(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for people.")],
    credit: Annotated[str | None, typer.Option(metavar="AMOUNT", help="Funds to start with.")] = None,
    grant: GrantOption = False,
    rpm: LimitOption = None,
    tpm: LimitOption = None,
    concurrency: LimitOption = None,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Open an account."""
    body: dict[str, Any] = {"name": name}
    if credit is not None:
        body |= {"credit": _amount(credit), "kind": _kind(grant)}
    elif grant:
        raise usage_error("--grant says how --credit is booked: give --credit as well")
    body |= {limit: value for limit, value in _limits(rpm, tpm, concurrency, []).items() if value is not None}
    account = session.client.post("accounts", body=body, idempotency_key=idempotency_key or _fresh_key())
    _show(session, account, note=f"Next: serve-app keys create {account['id']}")


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
                a["balance"],
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
    _show(session, session.client.get("accounts", account_id))


@command(app, "credit")
def credit(
    session: Session,
    account_id: AccountId,
    amount: Amount,
    grant: GrantOption = False,
    memo: Annotated[str | None, typer.Option(metavar="TEXT", help="Kept with the journal entry.")] = None,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Add funds."""
    body = {"amount": _amount(amount), "kind": _kind(grant)}
    if memo is not None:
        body["memo"] = memo
    key = idempotency_key or _fresh_key()
    _show(session, session.client.post("accounts", account_id, "credit", body=body, idempotency_key=key))


@command(app, "limits")
def limits(
    session: Session,
    account_id: AccountId,
    rpm: LimitOption = None,
    tpm: LimitOption = None,
    concurrency: LimitOption = None,
    default: Annotated[
        list[str] | None, typer.Option(metavar="|".join(LIMITS), help="Back to the service's default.")
    ] = None,
) -> None:
    """Set an account's limits: requests and tokens per minute, requests at once. Those not given stay."""
    changes = _limits(rpm, tpm, concurrency, default or [])
    if not changes:
        raise usage_error("nothing to change: give --rpm, --tpm, --concurrency or --default")
    _show(session, session.client.patch("accounts", account_id, "limits", body=changes))


@command(app, "suspend")
def suspend(
    session: Session,
    account_id: AccountId,
    resume: Annotated[bool, typer.Option("--resume", help="Let a suspended account in again.")] = False,
) -> None:
    """Refuse all of an account's requests, until it is resumed."""
    _show(session, session.client.post("accounts", account_id, "resume" if resume else "suspend"))


def _show(session: Session, account: dict[str, Any], *, note: str = "") -> None:
    session.out.record(account, _fields(account), note=note)


def _fields(account: dict[str, Any]) -> Iterator[tuple[str, object]]:
    usage, currency = account["usage"], account["currency"]
    yield "id", account["id"]
    yield "name", account["name"]
    yield "status", account["status"]
    yield "balance", f"{account['balance']} {currency}"
    yield "  topped up", f"{account['topped_up']} {currency}"
    yield "  granted", f"{account['granted']} {currency}"
    yield "  held", f"{account['held']} {currency}"
    for limit in LIMITS:
        own = account["contract"].get(limit)
        yield limit, f"{account['limits'][limit]:,}" + ("" if own is not None else " (default)")
    yield "requests", usage["requests"]
    yield "prompt tokens", f"{usage['prompt_tokens']:,} ({usage['cached_tokens']:,} cached)"
    yield "completion tokens", usage["completion_tokens"]
    yield "charged", f"{usage['charged']} {currency}"
    yield "created", account["created_at"]


def _fresh_key() -> str:
    return secrets.token_hex(16)


def _kind(grant: bool) -> str:
    return "grant" if grant else "top_up"


def _amount(text: str) -> str:
    """A positive sum as the API wants it: a plain decimal string."""
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise usage_error(f"{text!r} is not an amount: write it like 5 or 0.25") from None
    if not amount.is_finite() or amount <= 0:
        raise usage_error(f"the amount must be above 0, not {text}")
    exponent = amount.normalize().as_tuple().exponent
    if isinstance(exponent, int) and -exponent > MAX_DECIMALS:
        raise usage_error(f"{text} has more than {MAX_DECIMALS} decimals")
    return f"{amount:f}"


def _limits(rpm: str | None, tpm: str | None, concurrency: str | None, reset: list[str]) -> dict[str, int | None]:
    """The limits to set; None takes the service's default again."""
    changes = {name: _limit(name, text) for name, text in zip(LIMITS, (rpm, tpm, concurrency), strict=True) if text}
    for name in reset:
        if name not in LIMITS:
            raise usage_error(f"--default {name}: must be one of {', '.join(LIMITS)}")
        if name in changes:
            raise usage_error(f"--{name} and --default {name} contradict each other")
        changes[name] = None
    return changes


def _limit(name: str, text: str) -> int | None:
    if text == "default":
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise usage_error(f"--{name} {text}: must be a whole number of at least 1, or `default`")
    return int(text)
