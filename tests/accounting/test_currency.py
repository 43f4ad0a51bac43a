"""A ledger has one currency: nothing is charged, credited or opened in another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.contracts.books import Refusal, Settled, SettlementRejected
from serve_app.contracts.errors import OtherCurrency
from serve_app.settings import GatewayArgs

from .books import Books, Ledger


def test_the_first_currency_stays(url: str) -> None:
    Ledger(url, currency="EUR").close()
    Ledger(url, currency="EUR").close()
    with pytest.raises(OtherCurrency, match=r"kept in EUR and args\.currency is USD: set it back"):
        Ledger(url, currency="USD")
    with Ledger(url, currency="EUR") as ledger:
        assert ledger.create_account("Ada", "EUR").currency == "EUR"
        with pytest.raises(OtherCurrency, match="the new account is in USD, and this ledger is kept in EUR"):
            ledger.create_account("Bob", "USD")


def test_a_ledger_has_the_currency_of_its_first_account(url: str) -> None:
    with Ledger(url) as ledger:
        ledger.create_account("Ada", "USD")
    with pytest.raises(OtherCurrency, match="kept in USD"):
        Ledger(url, currency="EUR")
    Ledger(url, currency="USD").close()


def test_accounts_of_another_currency_are_neither_charged_nor_credited_nor_served(url: str) -> None:
    with Ledger(url) as before:  # as releases did that let the setting change
        ours = Books(before)
        euro = before.create_account("Eve", "EUR").account_id
        before.credit(euro, 1000, "grant")
        theirs = Books.of(before, euro, "")
        theirs.key_id = theirs.new_key().key_id
        before.settle([theirs.settlement("early")])
    with Ledger(url, currency="USD") as ledger:
        ours, theirs = Books.of(ledger, ours.account_id, ours.key_id), Books.of(ledger, euro, theirs.key_id)
        settled, rejected, again = ledger.settle(
            [ours.settlement("r1"), theirs.settlement("r2"), theirs.settlement("early")]
        )
        assert isinstance(settled, Settled)
        assert isinstance(rejected, SettlementRejected)
        assert (rejected.refusal, rejected.request_id) == (Refusal.OTHER_CURRENCY, "r2")
        assert isinstance(again, Settled)
        assert again.duplicate
        for refused in (lambda: ledger.credit(euro, 5), lambda: ledger.correct(euro, -5, "typo")):
            with pytest.raises(OtherCurrency, match="is in EUR, and this ledger is kept in USD"):
                refused()
        active = {account.account_id: account.active for account in ledger.changes(0).accounts}
        assert active == {ours.account_id: True, euro: False}
        (grant,) = ledger.grants(euro)
        ledger.take_back(euro, grant.grant_id, "moved to an account in USD")
        assert ledger.check().ok


@pytest.mark.slow  # it imports Ray
def test_accounting_starts_on_a_ledger_of_its_own_currency_only(sqlite_template: Path, tmp_path: Path) -> None:
    from deployments.accounting import Accounting

    url = f"sqlite:///{shutil.copy(sqlite_template, tmp_path / 'ledger.db')}"
    Ledger(url, currency="EUR").close()
    with pytest.raises(OtherCurrency, match="kept in EUR"):
        Accounting.func_or_class.__init__(
            SimpleNamespace(), GatewayArgs(home=tmp_path, database_url=url, currency="USD"), 0
        )
