"""`serve-app accounts statement`: shows an account's month, or writes it as PDF."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.accounts import app
from serve_app.cli.command import Session, command
from serve_app.cli.complete_file import complete_file
from serve_app.cli.completion import AccountId
from serve_app.cli.output import CommandError, UsageError, short_time

if TYPE_CHECKING:
    from serve_app.contracts.billing import Seller

KINDS = {"top_up": "payment", "grant": "credit given", "correction": "correction", "expiry": "expired credit"}


@command(
    app,
    "statement",
    examples=(
        "serve-app accounts statement ACCOUNT_ID 2026-10",
        "serve-app accounts statement ACCOUNT_ID 2026-10 --pdf statement.pdf",
    ),
)
def show_statement(
    session: Session,
    account_id: AccountId,
    month: Annotated[str, typer.Argument(metavar="MONTH", help="Month in UTC, such as 2026-10.")],
    pdf: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the statement to this file as PDF.")] = None,
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="Config file with the console's seller, for --pdf.")
    ] = Path("config.yaml"),
) -> None:
    """Show an account's balance, payments, credits and usage of a month, or write them as PDF."""
    if not re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])", month, re.ASCII):
        raise UsageError(f"MONTH {month}: must be a month like 2026-10")
    seller = None if pdf is None else _seller(config)
    found = session.client.api_get("accounts", account_id, "statements", month)
    if pdf is not None and seller is not None:
        _write(pdf, seller, found)
        session.out.record(
            {"file": str(pdf), "month": month, "account_id": account_id},
            [("saved to", pdf.absolute()), ("statement of", month), ("account", account_id)],
        )
        return
    rows = [("balance at the beginning", "", found["opening"])]
    rows += [
        (KINDS[one["kind"]], f"{short_time(one['created_at'])} {one['memo']}".strip(), one["amount"])
        for one in found["movements"]
    ]
    rows += [
        (
            f"usage of {row['model']}",
            f"{row['requests']:,} requests, {row['total_tokens']:,} tokens",
            f"-{row['charged']}",
        )
        for row in found["usage"]
    ]
    rows.append(("balance at the end" if found["final"] else "balance now", "", found["closing"]))
    footer = f"{found['name']}, {month} (UTC), in {found['currency']}."
    session.out.table(
        found,
        ("entry", "amount", "details"),
        [(entry, amount, details) for entry, details, amount in rows],
        empty="",
        footer=footer if found["final"] else f"{footer} The month is not over.",
    )


def _write(file: Path, seller: Seller, found: dict[str, Any]) -> None:
    from serve_app.contracts.billing import BillingDetails
    from serve_app.contracts.books import Movement, Statement, UsageRow
    from serve_app.contracts.money import parse_amount
    from serve_app.contracts.periods import month_named
    from serve_app.storage.pdf_documents import Customer, DocumentFontMissing, statement_pdf

    month = month_named(found["month"])
    counts = [one.name for one in fields(UsageRow) if one.name in found["usage"][0]] if found["usage"] else []
    statement = Statement(
        month,
        parse_amount(found["opening"], negative=True),
        tuple(
            Movement(
                one["id"],
                one["kind"],
                parse_amount(one["amount"], negative=True),
                datetime.fromisoformat(one["created_at"]).timestamp(),
                one["memo"],
            )
            for one in found["movements"]
        ),
        tuple(
            UsageRow(**{name: row[name] for name in counts} | {"charged": parse_amount(row["charged"])})
            for row in found["usage"]
        ),
        parse_amount(found["closing"], negative=True),
    )
    details = BillingDetails(**{one.name: found["details"][one.name] for one in fields(BillingDetails)})
    customer = Customer(found["account_id"], found["name"], found["currency"], details)
    now = month.ends if found["final"] else datetime.now().timestamp()
    try:
        content = statement_pdf(seller, customer, statement, now)
    except DocumentFontMissing as error:
        raise CommandError(str(error), code="font") from None
    with complete_file(file, "wb") as opened:
        opened.write(content)


def _seller(config: Path) -> Seller:
    """Returns the seller from the console's settings, or the default seller if the file has no console."""
    from serve_app.settings import ConsoleArgs, SettingsError, parse, read_config

    try:
        applications = read_config(config).get("applications") or []
        consoles = [one for one in applications if str(one.get("import_path")).endswith(":console")]
        args = parse(ConsoleArgs, consoles[0].get("args") or {} if consoles else {}, f"{config}: args")
    except SettingsError as error:
        raise CommandError(str(error), code="settings") from None
    return args.seller.issuer(args.brand)
