"""`serve-app accounts credit`, `correct`, `grants` and `take-back`: manages the money of an account."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.accounts import (
    ExpiryOption,
    GrantOption,
    IdempotencyKey,
    app,
    credit_fields,
    expiry_to_repeat,
    print_account,
)
from serve_app.cli.command import Session, command
from serve_app.cli.completion import AccountId
from serve_app.cli.output import UsageError
from serve_app.cli.values import plain_amount

Amount = Annotated[str, typer.Argument(metavar="AMOUNT", help="Amount above 0, for example 5 or 0.25.")]
SignedAmount = Annotated[
    str,
    typer.Argument(
        metavar="AMOUNT", help="A positive amount is credited, a negative amount is debited: 0.25 or -0.25."
    ),
]
Reason = Annotated[
    str, typer.Option("--memo", metavar="TEXT", help="Mistake that this corrects; stored with the entry.")
]


@command(
    app,
    "credit",
    examples=(
        "serve-app accounts credit ACCOUNT_ID 10 --memo 'invoice 4711'",
        "serve-app accounts credit ACCOUNT_ID 2.50 --grant --expires 30d",
    ),
)
def credit(
    session: Session,
    account_id: AccountId,
    amount: Amount,
    grant: GrantOption = False,
    expires: ExpiryOption = None,
    memo: Annotated[str | None, typer.Option(metavar="TEXT", help="Stored with the journal entry.")] = None,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Add funds. Grants are spent before top-ups, and the grant that expires first is spent first."""
    body = {"amount": plain_amount(amount)} | credit_fields(grant, expires)
    if memo is not None:
        body["memo"] = memo
    path = "accounts", account_id, "credit"
    account = session.client.book(*path, body=body, idempotency_key=idempotency_key, repeat_with=expiry_to_repeat(body))
    print_account(session, account)


@command(
    app,
    "correct",
    examples=(
        "serve-app accounts correct ACCOUNT_ID 0.75 --memo 'outage, 3 November'",
        "serve-app accounts correct ACCOUNT_ID -5 --memo 'booked twice'",
    ),
    signed=True,
)
def correct(
    session: Session, account_id: AccountId, amount: SignedAmount, memo: Reason, idempotency_key: IdempotencyKey = None
) -> None:
    """Correct a mistake with a new journal entry. Existing entries never change."""
    body = {"amount": plain_amount(amount, signed=True), "memo": _checked_memo(memo)}
    path = "accounts", account_id, "correct"
    print_account(session, session.client.book(*path, body=body, idempotency_key=idempotency_key))


@command(app, "grants")
def list_grants(session: Session, account_id: AccountId) -> None:
    """List an account's grants, with the amount left and the expiry."""
    data = session.client.api_get("accounts", account_id, "grants")["data"]
    session.out.table(
        {"data": data},
        ("id", "status", "amount", "left", "expires", "memo", "created"),
        [
            (str(g["id"]), g["status"], g["amount"], g["left"], g["expires_at"] or "never", g["memo"], g["created_at"])
            for g in data
        ],
        wide=("created",),
        empty=f"No grants. Next: serve-app accounts credit {account_id} AMOUNT --grant",
    )


@command(app, "take-back", examples=("serve-app accounts take-back ACCOUNT_ID 17 --memo 'given to the wrong account'",))
def take_back(
    session: Session,
    account_id: AccountId,
    grant: Annotated[
        int, typer.Argument(metavar="GRANT_ID", min=1, help="Grant number, as shown by `accounts grants`.")
    ],
    memo: Reason,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Take back the remainder of a grant that was a mistake. Spent amounts stay spent."""
    path = "accounts", account_id, "grants", str(grant), "take-back"
    account = session.client.book(*path, body={"memo": _checked_memo(memo)}, idempotency_key=idempotency_key)
    print_account(session, account)


def _checked_memo(memo: str) -> str:
    if not memo.strip():
        raise UsageError("--memo is empty: say which mistake it corrects")
    return memo
