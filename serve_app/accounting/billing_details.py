"""An account's details for invoices, and its payments."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Select, func, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import billing_details
from serve_app.accounting.database import Transaction
from serve_app.accounting.journal import EntryKind, topped_up
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import journal_entries, postings
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import equals, is_text
from serve_app.contracts.billing import (
    MAX_ADDRESS_LINES,
    MAX_PAYMENTS,
    BillingDetails,
    FindPayment,
    ListPayments,
    ReadBillingDetails,
    SetBillingDetails,
)
from serve_app.contracts.books import Movement
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.notices import is_email

_NAMES = [field.name for field in fields(BillingDetails)]
_LONGEST = {"company": 200, "tax_id": 40, "email": 200}
_LINE = 100  # maximum characters per line of an address


@reads(ReadBillingDetails)
def read_billing_details(connection: Connection, wanted: ReadBillingDetails, _now: float) -> BillingDetails:
    read_account(connection, wanted.account_id)
    stored = select(billing_details).where(equals(billing_details.c.account_id, wanted.account_id))
    row = connection.execute(stored).one_or_none()
    return BillingDetails() if row is None else BillingDetails(**{name: row._mapping[name] for name in _NAMES})


@writes(SetBillingDetails)
def set_billing_details(transaction: Transaction, wanted: SetBillingDetails, now: float) -> BillingDetails:
    connection, account_id = transaction.connection, wanted.account_id
    before = read_billing_details(connection, ReadBillingDetails(account_id), now)
    details = _checked(wanted.details)
    new = {name: getattr(details, name) for name in _NAMES}
    if details == before:
        return details
    of_account = billing_details.c.account_id == account_id
    if not connection.execute(update(billing_details).where(of_account).values(new)).rowcount:
        connection.execute(insert(billing_details).values(account_id=account_id, **new))
    # The values are personal data and the audit log is never deleted, so it gets only the names of the changed fields.
    changed = [name for name in _NAMES if getattr(before, name) != new[name]]
    write_audit(transaction, wanted.audit, "set_billing_details", account_id, {"changed": changed}, now)
    return details


@reads(ListPayments)
def list_payments(connection: Connection, wanted: ListPayments, _now: float) -> list[Movement]:
    read_account(connection, wanted.account_id)
    newest = _payments(wanted.account_id).order_by(journal_entries.c.id.desc()).limit(MAX_PAYMENTS)
    return [_movement(row) for row in connection.execute(newest)]


@reads(FindPayment)
def find_payment(connection: Connection, wanted: FindPayment, _now: float) -> Movement | None:
    read_account(connection, wanted.account_id)
    row = connection.execute(_payments(wanted.account_id).where(journal_entries.c.id == wanted.entry_id)).one_or_none()
    return None if row is None else _movement(row)


def _payments(account_id: str) -> Select[tuple[int, float, str, int]]:
    entry, posting = journal_entries.c, postings.c
    return (
        select(entry.id, entry.created_at, entry.memo, func.sum(posting.amount).label("amount"))
        .select_from(journal_entries.join(postings, posting.entry_id == entry.id))
        .where(
            entry.account_id == account_id,
            entry.kind == EntryKind.TOP_UP.value,
            entry.kind != EntryKind.CHARGE.value,  # chooses the index without charges
            posting.ledger_account == topped_up(account_id),
        )
        .group_by(entry.id, entry.created_at, entry.memo)
    )


def _movement(row: Any) -> Movement:
    return Movement(row.id, EntryKind.TOP_UP.value, int(row.amount), row.created_at, row.memo)


def _checked(given: BillingDetails) -> BillingDetails:
    for name, longest in _LONGEST.items():
        value = getattr(given, name).strip()
        if value and not is_text(value, longest):
            raise InvalidValue(f"the {_NAMED.get(name, name)} has at most {longest} printable characters")
    email = given.email.strip()
    if email and not is_email(email):
        raise InvalidValue(f"{email!r} is not an e-mail address")
    lines = [" ".join(line.split()) for line in given.address.splitlines() if line.strip()]
    if len(lines) > MAX_ADDRESS_LINES or not all(is_text(line, _LINE) for line in lines):
        raise InvalidValue(f"the address has at most {MAX_ADDRESS_LINES} lines of {_LINE} printable characters")
    return BillingDetails(given.company.strip(), "\n".join(lines), given.tax_id.strip(), email)


_NAMED = {"company": "company name", "tax_id": "tax ID", "email": "e-mail address"}
