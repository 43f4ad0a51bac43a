"""Payments are booked once, refunds take what is left, a chargeback suspends; nobody else's report is believed.

Reports are signed as Stripe signs them. Stripe's own API can't be had here: a stand-in answers.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from stripe import WebhookSignature

from .conftest import House, balance, send, submit
from .stripe_stand_in import HOOK, SECRET, StandIn, event


def paid(house: House, cents: int = 2500, reference: str = "pi_1", **changed: Any) -> str:
    session = {
        "id": "cs_1", "object": "checkout.session", "client_reference_id": house.account_id, "amount_total": cents,
        "currency": "usd", "payment_status": "paid", "payment_intent": reference, **changed,
    }  # fmt: skip
    return event("checkout.session.completed", session)


def refunded(house: House, total: int, before: int = 0) -> str:
    charge = {
        "id": "ch_1", "object": "charge", "amount_refunded": total, "metadata": {"account_id": house.account_id}
    }  # fmt: skip
    return event("charge.refunded", charge, previous_attributes={"amount_refunded": before})


def disputed(cents: int) -> str:
    dispute = {"id": "dp_1", "object": "dispute", "amount": cents, "payment_intent": "pi_1"}
    return event("charge.dispute.created", dispute)


def test_a_payment_is_begun_at_stripe_and_booked_once_it_is_reported(house: House, api: StandIn) -> None:
    path = f"/console/accounts/{house.account_id}/billing"
    browser = house.member(role="billing")
    assert "form-action 'self' https://checkout.stripe.com" in browser.get(path).headers["content-security-policy"]
    answer = submit(browser, path, path, amount="25")
    assert (answer.status_code, answer.headers["location"]) == (303, "https://checkout.stripe.com/c/cs_1")
    [asked] = api.asked
    assert asked["line_items[0][price_data][unit_amount]"] == ["2500"]
    assert asked["line_items[0][price_data][currency]"] == ["usd"]
    assert asked["client_reference_id"] == asked["payment_intent_data[metadata][account_id]"] == [house.account_id]
    assert asked["success_url"][0].endswith(path)
    assert balance(house) == "5.00"
    for _ in range(3):
        assert send(house, paid(house)).status_code == 200
    assert balance(house) == "30.00"
    assert send(house, paid(house, reference="pi_2")).status_code == 200
    assert balance(house) == "55.00"
    assert house.ledger.audit_log()[0].actor == "stripe"
    assert "stripe pi_1" in browser.get(path).text


@pytest.mark.parametrize("amount", ["", "0", "0.49", "10000.01", "1.001", "-5", "many"])
def test_an_amount_that_can_not_be_paid_is_refused(house: House, api: StandIn, amount: str) -> None:
    path = f"/console/accounts/{house.account_id}/billing"
    assert submit(house.member(), path, path, amount=amount).status_code == 422
    assert api.asked == []


def test_without_stripe_the_page_says_so_and_reports_go_nowhere(house: House, api: StandIn) -> None:
    path = f"/console/accounts/{house.account_id}/billing"
    api.status = 500
    answer = submit(house.member(), path, path, amount="25")
    assert (answer.status_code, "The payment can&#39;t begin" in answer.text) == (422, True)
    house.console.payments = None
    assert "Add funds" not in house.member("bob@example.org").get(path).text
    assert send(house, paid(house)).status_code == 404
    assert house.browser().post("/console/payments/other", content=b"").status_code == 404


def test_refunds_take_what_is_left_and_each_is_taken_once(house: House, api: StandIn) -> None:
    send(house, paid(house))
    for _ in range(2):
        assert send(house, refunded(house, 1000)).status_code == 200
    assert balance(house) == "20.00"
    assert send(house, refunded(house, 2500, before=1000)).status_code == 200
    assert balance(house) == "5.00"
    for _ in range(2):
        assert send(house, refunded(house, 4000, before=2500)).status_code == 200
    assert balance(house) == "0.00"
    lost = [one for one in house.ledger.audit_log() if one.action == "return_not_covered"]
    assert [one.detail["lost"] for one in lost] == [10 * 10**9]
    assert house.ledger.check().ok
    assert house.ledger.get_account(house.account_id).active


def test_a_chargeback_takes_the_money_and_suspends_the_account(house: House, api: StandIn) -> None:
    send(house, paid(house))
    api.status = 500
    assert send(house, disputed(2500)).status_code == 503
    assert balance(house) == "30.00"
    api.status = 200
    for _ in range(2):
        assert send(house, disputed(2500)).status_code == 200
    assert balance(house) == "5.00"
    assert not house.ledger.get_account(house.account_id).active
    assert house.ledger.check().ok


def test_a_report_that_is_forged_old_or_of_another_currency_changes_nothing(house: House, api: StandIn) -> None:
    body, before = paid(house), house.ledger.audit_log()
    assert send(house, body, secret="whsec_another").status_code == 400
    assert send(house, body, at=time.time() - 400).status_code == 400
    assert house.browser().post(HOOK, content=body).status_code == 400
    signature = WebhookSignature.generate_signature_header(body, SECRET)
    changed = body.replace("2500", "9900")
    assert house.browser().post(HOOK, content=changed, headers={"stripe-signature": signature}).status_code == 400
    assert send(house, paid(house, currency="eur")).status_code == 400
    assert send(house, paid(house, client_reference_id="acct_none")).status_code == 400
    assert send(house, event("charge.refunded", {})).status_code == 400
    assert send(house, "x" * 70_000).status_code == 413
    for harmless in (
        paid(house, payment_status="unpaid"),
        paid(house, client_reference_id=None),
        event("charge.refunded", {"id": "ch_2", "object": "charge", "amount_refunded": 1, "metadata": {}}),
        event("customer.created", {"id": "cus_1", "object": "customer"}),
    ):
        assert send(house, harmless).status_code == 200
    assert (balance(house), house.ledger.audit_log()) == ("5.00", before)


def test_the_console_without_payments_does_not_load_stripe() -> None:
    script = "import serve_app.console.app, serve_app.console.recharger, sys; sys.exit('stripe' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
