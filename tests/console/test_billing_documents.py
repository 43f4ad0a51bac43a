"""Statements and invoices as PDF have the ledger's amounts; details on them are the payers' to change."""

from __future__ import annotations

import re
import zlib
from decimal import Decimal

import pytest

from serve_app.contracts.billing import BillingDetails, ReadBillingDetails, Seller, SetBillingDetails
from serve_app.contracts.books import Statement
from serve_app.contracts.commands import ListAudit, ShowStatement
from serve_app.contracts.money import format_amount, places_of
from serve_app.contracts.units import DAY_S
from serve_app.storage.pdf_documents import amount
from tests.accounting.books import Books, settlement

from .conftest import House, submit

SHOWN = re.compile(rb"\((.*?)(?<!\\)\) Tj", re.DOTALL)
AMOUNT = re.compile(r"–?[\d,]+\.\d+")
SELLER = Seller("Nordlicht GmbH", "Hafenstraße 12\n20457 Hamburg", "DE123", "billing@nordlicht.example")
DETAILS = {"company": "Ångström AB", "address": "Storgatan 5\r\n\r\n111 22  Stockholm", "tax_id": "SE55", "email": ""}


def text_of(pdf: bytes) -> str:
    """Returns the texts of all pages, one a line."""
    found = []
    for length, start in ((int(one[1]), one.end()) for one in re.finditer(rb"/Length (\d+)\n>>\nstream\r?\n", pdf)):
        try:
            content = zlib.decompress(pdf[start : start + length])
        except zlib.error:
            continue
        found += [re.sub(rb"\\(.)", rb"\1", one).decode("windows-1252") for one in SHOWN.findall(content)]
    return "\n".join(found).replace(" of \n", " of ")


def amounts_after(lines: list[str], title: str) -> list[str]:
    """The amounts of the table with this title, down its columns of money."""
    begins = next((index for index, line in enumerate(lines) if line == title), len(lines))
    found = []
    for line in lines[begins + 1 :]:
        if line.startswith(("Payments and credits", "Usage by model", "This is a statement")):
            break
        found += [line] if AMOUNT.fullmatch(line) else []
    return found


def number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("–", "-"))


@pytest.fixture
def account(house: House) -> str:
    """The account has a payment of 5, and two months with usage and a grant."""
    house.console.seller = SELLER
    key = Books.of(house.ledger, house.account_id, "").new_key()
    for number in range(3):
        house.clock.now += 11 * DAY_S
        times = {"started_at": house.clock.now - 2, "finished_at": house.clock.now - 1}
        house.ledger.settle([settlement(f"r{number}", house.account_id, key.key_id, **times)])
    house.ledger.credit(house.account_id, 1_234_567_890_123, "grant", memo="a (welcome) credit")
    return f"/console/accounts/{house.account_id}"


def months(house: House) -> list[str]:
    """The months of the account's statements, newest first, as the page lists them."""
    page = house.member("x@example.org").get(f"/console/accounts/{house.account_id}/billing").text
    return re.findall(r"/statements/(\d{4}-\d\d)\.pdf", page)


def statement(house: House, month: str) -> Statement:
    return house.ledger.run(ShowStatement(house.account_id, month))


def test_a_statement_as_a_file_has_every_amount_of_the_ledger(house: House, account: str) -> None:
    browser = house.member()
    names = months(house)
    assert len(names) == 2
    for month in names:
        answer = browser.get(f"{account}/statements/{month}.pdf")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/pdf")
        assert answer.headers["content-disposition"] == f'attachment; filename="statement-{month}.pdf"'
        assert answer.headers["cache-control"] == "no-store"
        lines, found = text_of(answer.content).splitlines(), statement(house, month)
        summary, moves, usage = (
            amounts_after(lines, title) for title in ("Summary", "Payments and credits", "Usage by model")
        )
        charged = [row.charged for row in found.usage]
        for shown, wanted in ((moves, [one.amount for one in found.movements]), (usage, [*charged, sum(charged)])):
            places = places_of(wanted)  # one number of decimal places in each column
            assert shown == [amount(nano, places) for nano in wanted]
            assert [number(text) for text in shown] == [Decimal(format_amount(nano)) for nano in wanted]
        assert sum(number(text) for text in summary[:-1]) == number(summary[-1])
        assert number(summary[-1]) == round(Decimal(found.closing) / 10**9, len(summary[-1].partition(".")[2]))
        note = " ".join(lines)
        for name, nano in (("opening balance", found.opening), ("balance", found.closing)):
            exact = amount(nano)
            assert exact in summary or re.search(rf"{name}[a-z ]* {re.escape(exact)} USD", note), name
        assert "This is a statement, not an invoice" in note
        assert [one in note for one in ("The month is not over", "Balance so far")] == [month == names[0]] * 2
        assert {"Nordlicht GmbH", "20457 Hamburg", "Tax ID: DE123", house.account_id} <= set(lines)
        assert "Page 1 of 1" in "\n".join(lines)
    assert "1,234.567890123" in text_of(browser.get(f"{account}/statements/{names[0]}.pdf").content)


def test_the_file_of_a_closed_month_has_the_same_bytes_each_time(house: House, account: str) -> None:
    browser, path = house.member(), f"{account}/statements/{months(house)[-1]}.pdf"
    first = browser.get(path).content
    house.clock.now += 86
    assert browser.get(path).content == first


def test_a_long_statement_has_numbered_pages(house: House, account: str) -> None:
    for number in range(80):
        house.ledger.credit(house.account_id, number + 1, memo=f"payment {number}")
    found = text_of(house.member().get(f"{account}/statements/{months(house)[0]}.pdf").content)
    pages = re.search(r"Page 1 of (\d+)", found)
    assert pages is not None
    assert int(pages[1]) > 2
    for page in range(1, int(pages[1]) + 1):
        assert f"Page {page} of {pages[1]}" in found
    assert "Payment: payment 79" in found


def test_each_payment_has_an_invoice_and_nothing_else_has(house: House, account: str) -> None:
    browser = house.member()
    billing = browser.get(f"{account}/billing").text
    [path] = re.findall(r'href="(/console/accounts/[^"]+/invoices/\d+\.pdf)"', billing)
    first = browser.get(path)
    assert (first.status_code, first.headers["content-type"]) == (200, "application/pdf")
    assert browser.get(path).content == first.content
    lines = text_of(first.content).splitlines()
    assert lines.count("5.00") == 3  # the line, the total, paid
    assert "0.00" in lines
    number = re.search(r"(\d+)\.pdf", path)
    assert number is not None
    assert any(re.fullmatch(rf"Invoice \d{{4}}-{int(number[1]):06}", line) for line in lines)
    for other in range(1, 8):
        if other != int(number[1]):
            assert browser.get(f"{account}/invoices/{other}.pdf").status_code == 404
    for wrong in ("0", "-1", "1e3", "x", "9" * 40):
        assert browser.get(f"{account}/invoices/{wrong}.pdf").status_code == 404


def test_no_account_gets_an_invoice_of_another(house: House, account: str) -> None:
    other = house.ledger.create_account("Bob's").account_id
    house.ledger.credit(other, 7)
    browser = house.member()
    numbers = range(1, 12)
    found = [number for number in numbers if browser.get(f"{account}/invoices/{number}.pdf").status_code == 200]
    assert len(found) == 1
    assert browser.get(f"/console/accounts/{other}/invoices/{found[0]}.pdf").status_code == 403


def test_details_are_saved_and_printed(house: House, account: str) -> None:
    browser, page = house.member(role="billing"), f"{account}/billing/details"
    assert submit(browser, page, page, **DETAILS).headers["location"] == f"{account}/billing"
    details = house.ledger.run(ReadBillingDetails(house.account_id))
    assert details == BillingDetails("Ångström AB", "Storgatan 5\n111 22 Stockholm", "SE55", "")
    for shown in (browser.get(page).text, browser.get(f"{account}/billing").text):
        assert "Ångström AB" in shown
        assert "SE55" in shown
    printed = text_of(browser.get(f"{account}/statements/{months(house)[0]}.pdf").content).splitlines()
    assert {"Ångström AB", "Storgatan 5", "111 22 Stockholm", "Tax ID: SE55"} <= set(printed)
    [record] = [one for one in house.ledger.run(ListAudit(house.account_id)) if one.action == "set_billing_details"]
    assert record.detail == {"changed": ["company", "address", "tax_id"]}
    assert "Ångström" not in str(record)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("email", "nobody", "is not an e-mail address"),
        ("address", "line\n" * 7, "at most 6 lines"),
        ("company", "x" * 201, "at most 200 printable characters"),
        ("tax_id", "a\tb", "at most 40 printable characters"),
    ],
)
def test_wrong_details_are_refused_in_place_and_keep_what_was_typed(
    house: House, account: str, field: str, value: str, says: str
) -> None:
    browser, page = house.member(), f"{account}/billing/details"
    answer = submit(browser, page, page, **{"company": "Kept Ltd", field: value})
    assert answer.status_code == 422
    assert says in answer.text
    assert "Kept Ltd" in answer.text or field == "company"
    assert house.ledger.run(ReadBillingDetails(house.account_id)) == BillingDetails()


def test_letters_that_the_font_lacks_do_not_break_a_document(house: House, account: str) -> None:
    house.ledger.run(SetBillingDetails(house.account_id, BillingDetails(company="研究 Łódź €")))
    printed = text_of(house.member().get(f"{account}/statements/{months(house)[0]}.pdf").content)
    assert "?? ?ód? €" in printed


def test_the_forecast_is_the_spending_so_far_and_the_last_days_pace(house: House) -> None:
    house.ledger.credit(house.account_id, 10**12)
    key = Books.of(house.ledger, house.account_id, "").new_key()
    browser, page = house.member(), f"/console/accounts/{house.account_id}/billing"
    assert "first full day" in browser.get(page).text
    house.clock.now += 9 * DAY_S
    browser = house.member("eve@example.org")
    assert "nothing was spent in the last 7 full days" in browser.get(page).text
    at = {"started_at": house.clock.now - DAY_S, "finished_at": house.clock.now - DAY_S}
    tokens = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 10**9}
    made = settlement("r1", house.account_id, key.key_id, **at, **tokens)
    house.ledger.settle([made])
    spent = statement(house, months(house)[0])
    left = (spent.month.ends - house.clock.now) / DAY_S
    shown = re.search(r'>Forecast<.*?title="([\d.]+) ', browser.get(page).text, re.DOTALL)
    assert shown is not None
    assert "average of the last 7 full days" in browser.get(page).text
    assert float(shown[1]) == pytest.approx((made.cost + made.cost / 7 * left) / 10**9, abs=1e-6)


def test_the_billing_page_has_what_each_month_cost_and_the_latest_transactions(house: House, account: str) -> None:
    for count in range(1, 8):
        house.ledger.credit(house.account_id, count * 10**9, memo=f"payment {count}")
    page, names = house.member().get(f"{account}/billing").text, months(house)
    for month in names:
        charged = sum(row.charged for row in statement(house, month).usage)
        row = re.search(rf"<tr>(?:(?!</tr>).)*/statements/{month}\.pdf\"", page, re.DOTALL)
        assert row is not None
        assert f'title="{format_amount(charged)}"' in row[0]
    shown = re.search(r'aria-label="Transactions in.*?</section>', page, re.DOTALL)
    assert shown is not None
    found = statement(house, names[0])
    assert shown[0].count("<tr>") == 1 + 5  # the head, and the latest
    assert f"All {len(found.movements) + len(found.usage)} transactions" in shown[0]
    assert "payment 7" in shown[0]
    assert "payment 1" not in shown[0]
