"""A ledger has one currency: no account is opened in another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.contracts.errors import OtherCurrency
from serve_app.settings import GatewayArgs

from .books import Ledger


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


@pytest.mark.slow  # it imports Ray
def test_accounting_starts_on_a_ledger_of_its_own_currency_only(sqlite_template: Path, tmp_path: Path) -> None:
    from deployments.accounting import Accounting

    url = f"sqlite:///{shutil.copy(sqlite_template, tmp_path / 'ledger.db')}"
    Ledger(url, currency="EUR").close()
    with pytest.raises(OtherCurrency, match="kept in EUR"):
        Accounting.func_or_class.__init__(
            SimpleNamespace(), GatewayArgs(home=tmp_path, database_url=url, currency="USD"), 0
        )
