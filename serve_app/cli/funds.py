"""`serve-app accounts credit`, `correct`, `grants` and `take-back`: the money of an account."""

from __future__ import annotations

from typing import Annotated

import typer

from serve_app.cli.accounts import AccountId, ExpiryOption, GrantOption, booking, repeat_with, show_account
from serve_app.cli.amounts import IdempotencyKey, amount_of, fresh_key
from serve_app.cli.command import Session, command
from serve_app.cli.errors import usage_error

Amount = Annotated[str, typer.Argument(metavar="AMOUNT", help="Above 0, for instance 5 or 0.25.")]
SignedAmount = Annotated[
    str, typer.Argument(metavar="AMOUNT", help="Above 0 is given back, below 0 is taken: 0.25 or -0.25.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `serve-app accounts`."""
    command(
        app,
        "credit",
        examples=(
            "serve-app accounts credit ACCOUNT_ID 10 --memo 'invoice 4711'",
            "serve-app accounts credit ACCOUNT_ID 2.50 --grant --expires 30d",
        ),
    )(credit)
    command(
        app,
        "correct",
        examples=(
            "serve-app accounts correct ACCOUNT_ID 0.75 --memo 'outage, 3 November'",
            "serve-app accounts correct ACCOUNT_ID -5 --memo 'booked twice'",
        ),
        signed=True,
    )(correct)
    command(app, "grants")(grants)
    command(
        app, "take-back", examples=("serve-app accounts take-back ACCOUNT_ID 17 --memo 'given to the wrong account'",)
    )(take_back)


def credit(
    session: Session,
    account_id: AccountId,
    amount: Amount,
    grant: GrantOption = False,
    expires: ExpiryOption = None,
    memo: Annotated[str | None, typer.Option(metavar="TEXT", help="Kept with the journal entry.")] = None,
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Add funds. Grants are spent before top-ups, those that expire soonest first."""
    body = {"amount": amount_of(amount)} | booking(grant, expires)
    if memo is not None:
        body["memo"] = memo
    key = idempotency_key or fresh_key()
    account = session.client.post(
        "accounts", account_id, "credit", body=body, idempotency_key=key, repeat_with=repeat_with(body, expires)
    )
    show_account(session, account)


def correct(
    session: Session,
    account_id: AccountId,
    amount: SignedAmount,
    memo: Annotated[str, typer.Option(metavar="TEXT", help="Which mistake this rights; kept with the entry.")],
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Right a mistake with a new journal entry: nothing that was written is ever changed."""
    if not memo.strip():
        raise usage_error("--memo is empty: say which mistake this rights")
    body = {"amount": amount_of(amount, signed=True), "memo": memo}
    key = idempotency_key or fresh_key()
    show_account(session, session.client.post("accounts", account_id, "correct", body=body, idempotency_key=key))


def grants(session: Session, account_id: AccountId) -> None:
    """List what an account was given, what is left of it, and when it expires."""
    data = session.client.get("accounts", account_id, "grants")["data"]
    session.out.table(
        {"data": data},
        ("id", "status", "amount", "left", "created", "expires", "memo"),
        [
            (str(g["id"]), g["status"], g["amount"], g["left"], g["created_at"], g["expires_at"], g["memo"])
            for g in data
        ],
        empty=f"No grants. Next: serve-app accounts credit {account_id} AMOUNT --grant",
    )


def take_back(
    session: Session,
    account_id: AccountId,
    grant: Annotated[int, typer.Argument(metavar="GRANT_ID", min=1, help="Number as `accounts grants` shows it.")],
    memo: Annotated[str, typer.Option(metavar="TEXT", help="Which mistake this rights; kept with the entry.")],
    idempotency_key: IdempotencyKey = None,
) -> None:
    """Take all that is left of a grant that was a mistake. What was spent of it stays spent."""
    if not memo.strip():
        raise usage_error("--memo is empty: say which mistake this rights")
    key = idempotency_key or fresh_key()
    path = "accounts", account_id, "grants", str(grant), "take-back"
    show_account(session, session.client.post(*path, body={"memo": memo}, idempotency_key=key))
