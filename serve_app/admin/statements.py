"""Endpoint for an account's monthly statement, with its details for invoices. It requires the operator key."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from serve_app.admin.accounts import ONE
from serve_app.admin.endpoint import AdminServices, Endpoints
from serve_app.admin.usage import TokenSums
from serve_app.admin.values import AccountId, AccountName, Currency, Instant, ModelId, Money, Reply
from serve_app.api import errors
from serve_app.contracts import commands
from serve_app.contracts.billing import ReadBillingDetails
from serve_app.contracts.money import format_amount
from serve_app.contracts.periods import month_named

endpoint = Endpoints("Operator: Accounts", "operatorKey")


class StatementMovement(Reply):
    """Money credited, or debited for a reason other than usage."""

    id: int = Field(description="Number of the journal entry.", examples=[1042])
    kind: Literal["top_up", "grant", "correction", "expiry"]
    amount: Money = Field(description="Negative: a debit.", examples=["10.00"])
    created_at: Instant
    memo: str = Field(examples=["Invoice 2026-118"])


class StatementUsage(TokenSums):
    """Usage of one model."""

    model: ModelId


class InvoiceDetails(Reply):
    """The account's details for invoices. Empty: not given."""

    company: str = Field(examples=["Northwind Traders Ltd"])
    address: str = Field(description="Lines of the postal address.", examples=["1 Harbor Street\nPortland, OR 97201"])
    tax_id: str = Field(examples=["12-3456789"])
    email: str = Field(examples=["billing@northwind.example"])


class AccountStatement(Reply):
    """A month of an account. The opening balance plus the movements minus the charged usage is the closing balance."""

    account_id: AccountId
    name: AccountName
    currency: Currency
    month: str = Field(pattern="^[0-9]{4}-[0-9]{2}$", description="In UTC.", examples=["2026-11"])
    final: bool = Field(description="false: the month is not over.", examples=[False])
    opening: Money = Field(description="Balance at the start of the month.", examples=["3.34224"])
    movements: list[StatementMovement]
    usage: list[StatementUsage] = Field(description="One row for each model with requests.")
    closing: Money = Field(description="Balance at the end of the month, or now if the month is not over.")
    details: InvoiceDetails


@endpoint(
    "GET",
    f"{ONE}/statements/{{month}}",
    "Show an account's statement of a month",
    success="The statement of the month.",
    recorded="read_statement",
)
async def show_statement(admin: AdminServices, account_id: str, month: str) -> AccountStatement:
    """Archived months have a statement as well. The audit log records the call."""
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
