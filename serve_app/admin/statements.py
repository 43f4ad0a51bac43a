"""Endpoint for an account's monthly statement, with its details for invoices. It requires the operator key."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from serve_app.admin.accounts import ONE
from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.usage import TokenSums
from serve_app.admin.values import Instant, Money, Reply
from serve_app.api import errors
from serve_app.contracts import commands
from serve_app.contracts.billing import ReadBillingDetails
from serve_app.contracts.money import format_amount
from serve_app.contracts.periods import month_named

endpoint = Endpoints("Operator: Accounts", "operatorKey")


class StatementMovement(Reply):
    """Money credited, or debited for a reason other than usage."""

    id: int = Field(description="Number of the journal entry.")
    kind: Literal["top_up", "grant", "correction", "expiry"]
    amount: Money
    created_at: Instant
    memo: str


class StatementUsage(TokenSums):
    """Usage of one model."""

    model: str


class InvoiceDetails(Reply):
    """The account's details for invoices. Empty: not given."""

    company: str
    address: str = Field(description="Lines of the postal address.")
    tax_id: str
    email: str


class AccountStatement(Reply):
    """A month of an account. The opening balance plus the movements minus the charged usage is the closing balance."""

    account_id: str
    name: str
    currency: str
    month: str = Field(pattern="^[0-9]{4}-[0-9]{2}$", description="In UTC.")
    final: bool = Field(description="false: the month is not over.")
    opening: Money
    movements: list[StatementMovement]
    usage: list[StatementUsage]
    closing: Money
    details: InvoiceDetails


@endpoint("GET", f"{ONE}/statements/{{month}}", "Show an account's statement of a month", recorded="read_statement")
async def show_statement(admin: AdminServices, account_id: str, month: str) -> AccountStatement:
    try:
        month_named(month)
    except ValueError as error:
        raise errors.not_found(f"there is no such month: {error}") from None
    account = await admin.run(commands.GetAccount(account_id))
    found = await admin.run(commands.ShowStatement(account_id, month))
    return AccountStatement(
        account_id=account_id,
        name=account.name,
        currency=account.currency,
        month=found.month.name,
        final=admin.now() >= found.month.ends,
        opening=format_amount(found.opening),
        movements=[StatementMovement.from_fields(one, id=one.entry_id) for one in found.movements],
        usage=[
            StatementUsage.from_fields(row, total_tokens=row.prompt_tokens + row.completion_tokens)
            for row in found.usage
        ],
        closing=format_amount(found.closing),
        details=InvoiceDetails.from_fields(await admin.run(ReadBillingDetails(account_id))),
    )
