"""`accounts statement` against the service: the amounts are the ledger's, and the file is the console's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from serve_app.contracts.billing import BillingDetails, ReadBillingDetails, Seller, SetBillingDetails
from serve_app.contracts.commands import GetAccount, ShowStatement
from serve_app.contracts.money import format_amount
from serve_app.contracts.periods import period_at
from serve_app.storage.pdf_documents import Customer, statement_pdf
from tests.accounting.books import Books

from .conftest import Run
from .fake_service import FakeService
from .real_service import RealService

CONFIG = """
applications:
  - {name: gateway, import_path: "deployments.apps:gateway"}
  - name: console
    import_path: deployments.apps:console
    args: {seller: {name: Nordlicht GmbH, address: "Hafenstr. 12\\n20457 Hamburg", tax_id: DE1}}
"""


@pytest.fixture
def books(real: RealService) -> Books:
    books = Books(real.world.ledger, top_up=12_345_678_901)
    now = time.time()
    books.ledger.settle([books.settlement(f"r{n}", started_at=now - 2, finished_at=now - 1) for n in range(3)])
    books.ledger.correct(books.account_id, -1_000_000_001, "booked twice")
    return books


def test_a_statement_has_the_amounts_of_the_ledger(run: Run, books: Books) -> None:
    month = period_at("month", time.time()).name
    found = books.ledger.run(ShowStatement(books.account_id, month))
    shown = run("accounts", "statement", books.account_id, month)
    rows = [line.split() for line in shown.out.splitlines()]
    assert rows[1] == ["balance", "at", "the", "beginning", format_amount(found.opening)]
    assert any(row[:2] == ["payment", "12.345678901"] for row in rows)
    assert any(row[:2] == ["correction", "-1.000000001"] for row in rows)
    assert any(row[:4] == ["usage", "of", "svc-chat", "-0.000000138"] for row in rows)
    assert any(row[-1:] == [format_amount(found.closing)] for row in rows)
    assert shown.out.endswith("The month is not over.\n")
    document = run("accounts", "statement", books.account_id, month, "--json").json
    assert document["closing"] == format_amount(found.closing)
    assert sum(row["requests"] for row in document["usage"]) == 3


def test_a_statement_as_a_file_is_the_consoles(run: Run, books: Books, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    details = BillingDetails("Ada Ltd", "1 High Street", "GB1", "ada@example.org")
    books.ledger.run(SetBillingDetails(books.account_id, details))
    month = period_at("month", period_at("month", time.time()).begins - 1)
    made = run("accounts", "statement", books.account_id, month.name, "--pdf", "s.pdf", "--json")
    assert made.json == {"file": "s.pdf", "month": month.name, "account_id": books.account_id}
    run_ = books.ledger.run
    account = run_(GetAccount(books.account_id))
    customer = Customer(
        account.account_id, account.name, account.currency, run_(ReadBillingDetails(account.account_id))
    )
    seller = Seller("Nordlicht GmbH", "Hafenstr. 12\n20457 Hamburg", "DE1")
    found = run_(ShowStatement(books.account_id, month.name))
    assert (tmp_path / "s.pdf").read_bytes() == statement_pdf(seller, customer, found, time.time())


def test_wrong_months_and_files_are_refused(service: FakeService, run: Run, tmp_path: Path) -> None:
    assert "must be a month like 2026-10" in run("accounts", "statement", "acct_1", "2026-13").error_line
    missing = run("accounts", "statement", "acct_1", "2026-10", "--pdf", "s.pdf")
    assert "config.yaml: there is no such file" in missing.error_line
    assert service.requests == []
    assert list(tmp_path.iterdir()) == []
