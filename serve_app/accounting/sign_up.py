"""Sign-up: a person opens an account without an invitation. The sum of starting credits within 24 hours is capped."""

from __future__ import annotations

from sqlalchemy import func, select

from serve_app.accounting.accounts import open_account
from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import pending_credits
from serve_app.accounting.currency import read_currency
from serve_app.accounting.database import Transaction
from serve_app.accounting.operators import ask_credit
from serve_app.accounting.people import add_member, add_person, checked_email, read_person
from serve_app.accounting.registry import writes
from serve_app.contracts.books import Audit
from serve_app.contracts.commands import OpenAccount
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.operators import AskCredit
from serve_app.contracts.people import Person
from serve_app.contracts.sign_in import SIGN_UP, SignUp
from serve_app.contracts.units import DAY_S


@writes(SignUp)
def sign_up(transaction: Transaction, wanted: SignUp, now: float) -> Person:
    connection, email = transaction.connection, checked_email(wanted.email)
    audit = Audit(email, address=wanted.address)
    if not wanted.password:
        raise InvalidValue("a password is required")
    user_id = add_person(connection, email, wanted.name, wanted.password, now)
    currency = read_currency(connection) or "USD"
    account = open_account(transaction, OpenAccount(wanted.account_name, currency, audit=audit), now)
    add_member(connection, user_id, account.account_id, "owner")
    of_day = (pending_credits.c.asked_by == SIGN_UP, pending_credits.c.asked_at > now - DAY_S)
    given = select(func.coalesce(func.sum(pending_credits.c.amount), 0)).where(*of_day)
    is_given = connection.execute(given).scalar_one() + wanted.credit <= wanted.credit_cap
    credit = wanted.credit if is_given else 0
    write_audit(transaction, audit, "sign_up", account.account_id, {"amount": credit}, now, subject=user_id)
    if credit:
        audit, memo = Audit(SIGN_UP), "starting credit"
        asked = AskCredit(account.account_id, credit, "grant", memo, audit, alone=wanted.credit_cap, once=user_id)
        ask_credit(transaction, asked, now)
    return read_person(connection, user_id)
