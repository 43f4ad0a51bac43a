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

from serve_app.console.payments import EARLY_S
from serve_app.contracts.commands import AddCredit

from .conftest import House, balance, send, submit, words
from .stripe_stand_in import HOOK, SECRET, StandIn, event


def paid(house: House, cents: int = 2500, reference: str = "pi_1", **changed: Any) -> str:
    session = {
        "id": "cs_1", "object": "checkout.session", "mode": "payment", "client_reference_id": house.account_id,
        "metadata": {"account_id": house.account_id}, "amount_total": cents, "currency": "usd",
        "payment_status": "paid", "payment_intent": reference, **changed,
    }  # fmt: skip
    return event("checkout.session.completed", session)


def refunded(house: House, total: int, before: int = 0, *, age_s: float = 0.0, **changed: Any) -> str:
    charge = {
        "id": "ch_1", "object": "charge", "amount_refunded": total, "metadata": {"account_id": house.account_id},
        "payment_intent": "pi_1", **changed,
    }  # fmt: skip
    return event("charge.refunded", charge, age_s=age_s, previous_attributes={"amount_refunded": before})


def disputed(
    cents: int = 2500, what: str = "created", status: str = "needs_response", *, age_s: float = 0.0, **changed: Any
) -> str:
    dispute = {
        "id": "dp_1", "object": "dispute", "amount": cents, "currency": "usd", "payment_intent": "pi_1",
        "status": status, "balance_transactions": [], **changed,
    }  # fmt: skip
    return event(f"charge.dispute.{what}", dispute, age_s=age_s)


def of_another_product(api: StandIn, metadata: dict[str, str] | None = None) -> str:
    """A payment of the same Stripe account that was not begun here."""
    api.payments["pi_link"] = {"id": "pi_link", "object": "payment_intent", "metadata": metadata or {}}
    return "pi_link"


def test_a_payment_is_begun_at_stripe_and_booked_once_it_is_reported(house: House, api: StandIn) -> None:
    path = f"/console/accounts/{house.account_id}/billing"
    browser = house.member(role="billing")
    assert "form-action 'self' https://checkout.stripe.com" in browser.get(path).headers["content-security-policy"]
    answer = submit(browser, path, path, amount="25")
    assert (answer.status_code, answer.headers["location"]) == (303, "https://checkout.stripe.com/c/cs_1")
    [asked] = api.asked
    assert asked["line_items[0][price_data][unit_amount]"] == ["2500"]
    assert asked["line_items[0][price_data][currency]"] == ["usd"]
    assert asked["metadata[account_id]"] == asked["payment_intent_data[metadata][account_id]"] == [house.account_id]
    assert asked["success_url"][0].endswith(path)
    assert balance(house) == "5.00"
    for _ in range(3):
        assert send(house, paid(house)).status_code == 200
    assert balance(house) == "30.00"
    assert send(house, paid(house, reference="pi_2")).status_code == 200
    assert balance(house) == "55.00"
    assert house.ledger.audit_log()[0].actor == "stripe"
    assert "Stripe pi_1" in words(browser.get(path).text)


def test_an_amount_that_can_not_be_paid_is_refused(house: House, api: StandIn) -> None:
    browser, path = house.member(), f"/console/accounts/{house.account_id}/billing"
    for amount in ("", "0", "0.49", "10000.01", "1.001", "-5", "many"):
        assert submit(browser, path, path, amount=amount).status_code == 422, amount
    assert api.asked == []


def test_without_stripe_the_page_says_so_and_reports_go_nowhere(house: House, api: StandIn) -> None:
    path = f"/console/accounts/{house.account_id}/billing"
    api.status = 500
    answer = submit(house.member(), path, path, amount="25")
    assert (answer.status_code, "Stripe can&#39;t take this now" in answer.text) == (422, True)
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
    assert send(house, disputed()).status_code == 503
    assert balance(house) == "30.00"
    api.status = 200
    for _ in range(2):
        assert send(house, disputed()).status_code == 200
    assert balance(house) == "5.00"
    assert not house.ledger.get_account(house.account_id).active
    assert house.ledger.check().ok


@pytest.mark.parametrize("first", ["created", "funds_withdrawn"])
def test_both_reports_of_a_chargeback_take_its_money_once(house: House, api: StandIn, first: str) -> None:
    send(house, paid(house))
    for what in (first, "created", "funds_withdrawn"):
        assert send(house, disputed(what=what)).status_code == 200
    assert (balance(house), house.ledger.get_account(house.account_id).active) == ("5.00", False)


@pytest.mark.parametrize("status", ["warning_needs_response", "prevented"])
def test_a_dispute_that_moves_no_money_changes_nothing(house: House, api: StandIn, status: str) -> None:
    send(house, paid(house))
    before = house.ledger.audit_log()
    assert send(house, disputed(status=status)).status_code == 200
    assert (balance(house), house.ledger.audit_log()) == ("30.00", before)
    # An inquiry that becomes a chargeback is reported by the withdrawal alone.
    assert send(house, disputed(what="funds_withdrawn")).status_code == 200
    assert (balance(house), house.ledger.get_account(house.account_id).active) == ("5.00", False)


def test_a_chargeback_that_was_won_is_given_back_once_and_the_account_stays_suspended(
    house: House, api: StandIn
) -> None:
    send(house, paid(house))
    won = disputed(what="funds_reinstated", status="won")
    assert send(house, won).status_code == 503  # before its withdrawal
    send(house, disputed(what="funds_withdrawn"))
    for _ in range(2):
        assert send(house, won).status_code == 200
    assert send(house, disputed(what="funds_withdrawn")).status_code == 200
    assert (balance(house), house.ledger.get_account(house.account_id).active) == ("30.00", False)
    assert house.ledger.check().ok
    house.ledger.set_active(house.account_id, True)
    page = house.member().get(f"/console/accounts/{house.account_id}/billing").text
    assert "reinstatement stripe dp_1 reinstated" in page


def test_of_a_lost_dispute_what_had_been_refunded_before_is_given_back(house: House, api: StandIn) -> None:
    send(house, paid(house))
    send(house, paid(house, reference="pi_2"))
    send(house, refunded(house, 1000))
    send(house, disputed(what="funds_withdrawn"))  # of all, though 10 were refunded
    assert balance(house) == "20.00"
    moved = [{"amount": -2500, "currency": "usd"}, {"amount": 1000, "currency": "usd"}]
    lost = disputed(what="funds_reinstated", status="lost", balance_transactions=moved)
    assert send(house, lost).status_code == 200
    assert balance(house) == "30.00"


def test_a_return_before_its_payment_is_taken_once_stripe_has_repeated_it(house: House, api: StandIn) -> None:
    before = house.ledger.audit_log()
    for early in (refunded(house, 2500), disputed(), disputed(what="funds_withdrawn")):
        assert send(house, early).status_code == 503
    assert (balance(house), house.ledger.audit_log()) == ("5.00", before)
    assert send(house, paid(house)).status_code == 200
    assert send(house, refunded(house, 2500)).status_code == 200
    assert balance(house) == "5.00"


def test_a_return_of_a_payment_that_was_credited_by_hand_is_left_to_an_operator(
    house: House, api: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """Stripe would repeat the report for days, and then disable the address."""
    house.ledger.credit(house.account_id, 25 * 10**9)
    late = {"age_s": EARLY_S + 1}
    for _ in range(2):
        assert send(house, refunded(house, 2500)).status_code == 503, "the payment's report may still come"
        assert send(house, refunded(house, 2500, **late)).status_code == 200
    assert balance(house) == "30.00"
    assert house.ledger.get_account(house.account_id).active
    [record] = [one for one in house.ledger.audit_log() if one.action == "return_unmatched"]
    assert (record.subject, record.actor) == ("stripe ch_1 refunded 2500", "stripe")
    assert record.detail == {"amount": 25 * 10**9, "kind": "refund", "reverses": "stripe pi_1"}
    assert "Correct the balance by hand" in caplog.text
    for _ in range(2):
        assert send(house, disputed(**late)).status_code == 200
    assert (balance(house), house.ledger.get_account(house.account_id).active) == ("30.00", False)
    assert [one.action for one in house.ledger.audit_log()].count("return_unmatched") == 2
    assert house.ledger.check().ok


def test_a_credit_by_hand_under_the_payments_reference_is_the_payment(house: House, api: StandIn) -> None:
    command = AddCredit(house.account_id, 25 * 10**9, idempotency_key="stripe pi_1", memo="by hand")
    house.ledger.run(command)
    assert send(house, paid(house)).status_code == 200
    assert balance(house) == "30.00"
    assert send(house, refunded(house, 2500)).status_code == 200
    assert balance(house) == "5.00"


def test_a_withdrawal_after_a_reinstatement_is_taken_and_given_back_like_the_first(house: House, api: StandIn) -> None:
    send(house, paid(house))
    moved: list[dict[str, Any]] = []
    again = []
    for _ in range(2):
        moved = [*moved, {"amount": -2500, "currency": "usd"}]
        again.append(disputed(what="funds_withdrawn", balance_transactions=moved))
        assert send(house, again[-1]).status_code == 200
        assert balance(house) == "5.00"
        moved = [*moved, {"amount": 2500, "currency": "usd"}]
        again.append(disputed(what="funds_reinstated", status="won", balance_transactions=moved))
        assert send(house, again[-1]).status_code == 200
        assert balance(house) == "30.00"
    for report in (*again, disputed()):
        assert send(house, report).status_code == 200
    assert balance(house) == "30.00", "each is booked once, in whatever order it is repeated"
    assert house.ledger.check().ok


def test_a_second_withdrawal_that_its_report_does_not_list_yet_is_taken(house: House, api: StandIn) -> None:
    send(house, paid(house))
    moved = [{"amount": amount, "currency": "usd"} for amount in (-2500, 2500)]
    send(house, disputed(what="funds_withdrawn", balance_transactions=moved[:1]))
    send(house, disputed(what="funds_reinstated", status="won", balance_transactions=moved))
    assert balance(house) == "30.00"
    assert send(house, disputed(what="funds_withdrawn", balance_transactions=moved)).status_code == 200
    assert balance(house) == "5.00"


def test_a_payment_that_was_not_begun_here_credits_no_account(house: House, api: StandIn) -> None:
    """Whoever opens a Payment Link of the same Stripe account can set its `client_reference_id`."""
    before, link = house.ledger.audit_log(), of_another_product(api)
    for foreign in (
        paid(house, reference=link, metadata={}),
        paid(house, reference=link, metadata=None, payment_link="plink_1"),
        paid(house, reference=link, metadata={"order": "17"}),
        paid(house, metadata={"account_id": "acct_of_another_service"}),
        paid(house, mode="subscription", payment_intent=None),
        paid(house, mode="subscription"),
        paid(house, payment_intent=None, amount_total=0),
        paid(house, payment_intent=None, metadata={}),
        refunded(house, 2500, metadata={}),
        refunded(house, 2500, metadata=None),
        refunded(house, 2500, metadata={"account_id": "acct_of_another_service"}),
        refunded(house, 2500, payment_intent=None),
        disputed(payment_intent=link),
        disputed(payment_intent=None),
        disputed(what="funds_reinstated", status="won", payment_intent=link),
        event("charge.refunded", {}),
    ):
        assert send(house, foreign).status_code == 200, foreign
    of_another_product(api, {"account_id": "acct_of_another_service"})
    assert send(house, disputed(payment_intent=link)).status_code == 200
    assert (balance(house), house.ledger.audit_log()) == ("5.00", before)


def test_a_checkout_of_an_earlier_release_is_known_by_its_payment(house: House, api: StandIn) -> None:
    assert send(house, paid(house, metadata={})).status_code == 200
    assert balance(house) == "30.00"


def test_what_stripe_says_of_the_operators_settings_is_logged_and_not_shown(
    house: House, api: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"/console/accounts/{house.account_id}/billing"
    api.status, api.error = 401, {"type": "invalid_request_error", "message": "Invalid API Key provided: sk_live_***9"}
    answer = submit(house.member(), path, path, amount="25")
    assert (answer.status_code, "sk_live" in answer.text, "sk_live" in caplog.text) == (422, False, True)


def test_a_report_that_is_forged_old_or_of_another_currency_changes_nothing(house: House, api: StandIn) -> None:
    body, before = paid(house), house.ledger.audit_log()
    assert send(house, body, secret="whsec_another").status_code == 400
    assert send(house, body, at=time.time() - 400).status_code == 400
    assert house.browser().post(HOOK, content=body).status_code == 400
    signature = WebhookSignature.generate_signature_header(body, SECRET)
    changed = body.replace("2500", "9900")
    assert house.browser().post(HOOK, content=changed, headers={"stripe-signature": signature}).status_code == 400
    assert send(house, paid(house, currency="eur")).status_code == 400
    assert send(house, paid(house, amount_total=None)).status_code == 400
    assert send(house, "x" * 70_000).status_code == 413
    for harmless in (
        paid(house, payment_status="unpaid"),
        event("customer.created", {"id": "cus_1", "object": "customer"}),
    ):
        assert send(house, harmless).status_code == 200
    assert (balance(house), house.ledger.audit_log()) == ("5.00", before)


@pytest.mark.slow
def test_the_console_without_payments_does_not_load_stripe() -> None:
    script = "import serve_app.console.app, serve_app.console.recharger, sys; sys.exit('stripe' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
