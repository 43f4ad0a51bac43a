"""A low balance is paid once, in any order of answers, reports, deaths and watchers; what fails pauses and is told.

Stripe's API is a stand-in, reports are signed as Stripe signs them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from serve_app.console.notifier import document
from serve_app.console.recharger import Recharger
from serve_app.contracts.commands import AddCredit, Command, SetActive
from serve_app.contracts.notices import CreateAlert, ListNotices
from serve_app.contracts.recharges import (
    AGAIN_S,
    BETWEEN_S,
    AskMethod,
    RecordOutcome,
    SetRecharge,
    ShowRecharge,
)
from tests.accounting.books import NOON

from .conftest import House, balance, send, submit, words
from .recharging import UNIT, path, recharger, saved, shown, states, succeeded, turn, turn_on
from .stripe_stand_in import StandIn, event


def test_a_card_is_saved_at_stripe_and_turns_recharging_on(house: House, api: StandIn) -> None:
    browser, page = house.member(role="billing"), path(house)
    assert "Automatic recharge is off" in browser.get(page).text
    fields = {"threshold": "10", "amount": "25", "monthly_cap": "100"}
    for _ in range(2):  # somebody comes back, and begins again
        answer = submit(browser, page, f"{page}/recharge", **fields)
        assert (answer.status_code, answer.headers["location"]) == (303, "https://checkout.stripe.com/c/cs_1")
    first, again = api.asked
    assert first == again
    assert (first["mode"], first["customer_creation"]) == (["setup"], ["always"])
    assert first["client_reference_id"] == first["metadata[account_id]"] == [house.account_id]
    setup_id = first["metadata[setup_id]"][0]
    assert (shown(house)[0].state, shown(house)[0].setup_id) == ("off", setup_id)
    turn(house)
    assert api.payments == {}
    assert send(house, saved(house, setup_id)).status_code == 200
    recharge, _ = shown(house)
    assert (recharge.state, recharge.customer, recharge.method) == ("on", "cus_1", "pm_1")
    before = house.ledger.audit_log()
    assert send(house, saved(house, setup_id)).status_code == 200
    assert (house.ledger.audit_log(), api.detached) == (before, [])
    assert [(one.actor, one.action) for one in before[:3]] == [
        ("stripe", "recharge_on"),
        ("ada@example.org", "ask_payment_method"),
        ("ada@example.org", "set_recharge"),
    ]
    assert "Automatic recharge is on" in browser.get(page).text
    assert submit(browser, page, f"{page}/recharge", **fields | {"amount": "30"}).headers["location"] == page
    assert shown(house)[0].amount == 30 * UNIT
    # Another card is saved for the same customer, and replaces the first one.
    assert submit(browser, page, f"{page}/recharge/method").status_code == 303
    assert api.asked[-1]["customer"] == ["cus_1"]
    setup_id = api.asked[-1]["metadata[setup_id]"][0]
    assert send(house, saved(house, setup_id, setup_intent="seti_2")).status_code == 200
    assert (shown(house)[0].method, api.detached) == ("pm_2", ["pm_1"])


@pytest.mark.parametrize("order", ["answer", "answer report report", "mute report", "mute report report", "mute"])
def test_a_recharge_is_credited_once_whatever_comes_first(house: House, api: StandIn, order: str) -> None:
    turn_on(house)
    api.is_mute = "mute" in order
    turn(house)
    for _ in range(order.count("report")):
        assert send(house, succeeded(api)).status_code == 200
    api.is_mute = False
    for _ in range(3):
        house.clock.now += AGAIN_S[-1]
        turn(house)
    assert (balance(house), len(api.payments), states(house)) == ("30.00", 1, ["succeeded"])
    [payment] = api.payments.values()
    assert (payment["amount"], payment["customer"], payment["payment_method"]) == (2500, "cus_1", "pm_1")
    assert house.ledger.check().ok
    page = house.member().get(path(house)).text
    assert "Payment" in page
    assert "Stripe pi_1" in words(page)


def test_the_report_of_a_checkout_and_of_its_payment_are_one_payment(house: House, api: StandIn) -> None:
    of = {"account_id": house.account_id}
    payment = {
        "id": "pi_9", "object": "payment_intent", "amount_received": 2500, "currency": "usd", "metadata": of,
        "created": int(NOON),
    }  # fmt: skip
    session = {
        "id": "cs_1", "object": "checkout.session", "mode": "payment", "metadata": of, "amount_total": 2500,
        "currency": "usd", "payment_status": "paid", "payment_intent": "pi_9",
    }  # fmt: skip
    assert send(house, event("payment_intent.succeeded", payment)).status_code == 200
    assert balance(house) == "5.00"
    assert send(house, event("checkout.session.completed", session)).status_code == 200
    # Nor does a payment count twice that were both.
    both = payment | {"metadata": of | {"attempt_id": "recharge_1"}}
    assert send(house, event("payment_intent.succeeded", both)).status_code == 200
    assert balance(house) == "30.00"


class Killed(Exception):
    pass


class DyingPort:
    """The ledger, until a command of this kind is sent."""

    def __init__(self, house: House, last: type[Command[Any]]) -> None:
        self.books, self.last = house.console.books, last

    async def run(self, command: Command[Any]) -> Any:
        if isinstance(command, self.last):
            raise Killed
        return await self.books.run(command)


@pytest.mark.parametrize("last", [AddCredit, RecordOutcome])
def test_a_process_killed_after_the_order_makes_no_second_payment(
    house: House, api: StandIn, last: type[Command[Any]]
) -> None:
    turn_on(house)
    assert house.console.payments is not None
    dying = Recharger(DyingPort(house, last), house.console.payments)
    with pytest.raises(Killed):
        asyncio.run(dying.turn())
    assert (len(api.payments), states(house)) == (1, ["open"])
    turn(house)  # it has just been restarted
    api.keys.clear()  # only the look for the payment is left
    for _ in range(3):
        house.clock.now += AGAIN_S[0]
        turn(house)
    assert (len(api.payments), states(house), balance(house)) == (1, ["succeeded"], "30.00")


def test_two_watchers_make_one_attempt(house: House, api: StandIn) -> None:
    turn_on(house)

    async def both() -> None:
        await asyncio.gather(*(recharger(house).turn() for _ in range(4)))

    asyncio.run(both())
    assert (len(api.payments), states(house), balance(house)) == (1, ["succeeded"], "30.00")
    api.is_mute = True
    house.ledger.run(SetRecharge(house.account_id, 50 * UNIT, 25 * UNIT, 100 * UNIT))
    house.clock.now += BETWEEN_S
    asyncio.run(both())
    house.clock.now += AGAIN_S[0]
    api.is_mute = False
    asyncio.run(both())
    assert (len(api.payments), states(house), balance(house)) == (2, ["succeeded"] * 2, "55.00")


def test_payments_wait_for_each_other_and_end_at_the_months_cap(house: House, api: StandIn) -> None:
    turn_on(house, threshold=1000, amount=25, cap=60)
    browser = house.member()
    for _ in range(3):
        turn(house)
    assert len(api.payments) == 1
    assert "The next payment is possible" in browser.get(path(house)).text
    for _ in range(5):
        house.clock.now += BETWEEN_S
        turn(house)
    assert (len(api.payments), balance(house)) == (2, "55.00")
    page = words(browser.get(path(house)).text)
    assert "Charged this month: $50.00 of at most $60.00 ." in page
    assert "waits until next month" in page


@pytest.mark.parametrize("code", ["card_declined", "authentication_required"])
def test_a_refused_card_pauses_and_is_shown_and_told(house: House, api: StandIn, code: str) -> None:
    house.member("ada@example.org")
    browser = house.member("bill@example.org", "billing")
    house.member("mia@example.org", "member")
    house.ledger.run(CreateAlert(house.account_id, "balance", UNIT, "https://example.org/hook", "whsec_1"))
    turn_on(house)
    api.card = code
    for _ in range(3):
        turn(house)
        house.clock.now += AGAIN_S[-1]
    recharge, [attempt] = shown(house)
    assert (len(api.payments), attempt.state, recharge.state, balance(house)) == (1, "failed", "paused", "5.00")
    page = browser.get(path(house)).text
    assert f"Automatic recharge is paused: Your card was refused: {code}." in page
    notices = house.ledger.run(ListNotices(house.account_id))
    assert {one.target for one in notices} == {"ada@example.org", "bill@example.org", "https://example.org/hook"}
    for one in notices:
        told = document(one)
        assert (told["type"], f"Your card was refused: {code}. Resume" in str(told["data"])) == (
            "recharge.paused",
            True,
        )
    assert "Recharging is paused" in browser.get(f"/console/accounts/{house.account_id}/alerts").text
    api.card = "succeeded"
    turn(house)
    assert len(api.payments) == 1
    assert submit(browser, path(house), f"{path(house)}/recharge/resume").status_code == 303
    turn(house)
    assert (balance(house), states(house)) == ("30.00", ["succeeded", "failed"])
    assert house.ledger.audit_log()[0].actor == "stripe"
    assert "resume_recharge" in {one.action for one in house.ledger.audit_log() if one.actor == "bill@example.org"}


def test_turned_off_nothing_is_paid_and_the_card_is_gone(house: House, api: StandIn) -> None:
    turn_on(house)
    browser = house.member()
    api.status = 500
    turn(house)
    assert states(house) == ["open"]
    api.status = 200
    assert submit(browser, path(house), f"{path(house)}/recharge/off").status_code == 303
    assert (shown(house)[0].state, shown(house)[0].method, api.detached) == ("off", None, ["pm_1"])
    for _ in range(3):
        house.clock.now += AGAIN_S[-1]
        turn(house)
    assert (api.payments, states(house), balance(house)) == ({}, ["failed"], "5.00")
    # It begins anew with a customer of its own, should Stripe not know the first one any more.
    assert submit(browser, path(house), f"{path(house)}/recharge/method").status_code == 303
    assert "customer" not in api.asked[-1]
    # What was about to be saved when it was turned off does not turn it on again.
    setup_id = house.ledger.run(AskMethod(house.account_id)).setup_id
    assert submit(browser, path(house), f"{path(house)}/recharge/off").status_code == 303
    assert send(house, saved(house, setup_id, setup_intent="seti_2")).status_code == 200
    assert (shown(house)[0].state, api.detached) == ("off", ["pm_1", "pm_2"])
    assert house.ledger.run(ListNotices(house.account_id)) == []


def test_a_card_that_stripe_keeps_is_no_longer_used(house: House, api: StandIn, caplog: Any) -> None:
    turn_on(house)
    api.status = 500
    assert submit(house.member(), path(house), f"{path(house)}/recharge/off").status_code == 303
    assert shown(house)[0].method is None
    assert "stripe keeps the payment method pm_1" in caplog.text


def test_changed_settings_do_not_change_an_open_attempt(house: House, api: StandIn) -> None:
    turn_on(house)
    api.status = 500
    turn(house)
    house.ledger.run(SetRecharge(house.account_id, 20 * UNIT, 40 * UNIT, 200 * UNIT))
    api.status = 200
    api.keys.clear()
    house.clock.now += AGAIN_S[0]
    turn(house)
    [payment] = api.payments.values()
    assert (payment["amount"], balance(house)) == (2500, "30.00")


def test_a_replaced_card_pays_no_open_attempt_and_is_not_paused_by_it(house: House, api: StandIn) -> None:
    turn_on(house)
    api.status = 500
    turn(house)
    api.status = 200
    api.keys.clear()
    setup_id = house.ledger.run(AskMethod(house.account_id)).setup_id
    assert send(house, saved(house, setup_id, setup_intent="seti_2")).status_code == 200
    for _ in range(2):
        house.clock.now += AGAIN_S[0]
        turn(house)
    [payment] = api.payments.values()
    assert (payment["payment_method"], states(house)) == ("pm_2", ["succeeded", "failed"])


def test_a_suspended_account_is_not_recharged(house: House, api: StandIn) -> None:
    turn_on(house)
    api.status = 500
    turn(house)  # one attempt is open when it is suspended
    api.status = 200
    house.ledger.run(SetActive(house.account_id, False))
    for _ in range(3):
        house.clock.now += AGAIN_S[-1]
        turn(house)
    assert (api.payments, states(house), shown(house)[0].state) == ({}, ["failed"], "on")
    house.ledger.run(SetActive(house.account_id, True))
    turn(house)
    assert balance(house) == "30.00"


def test_a_chargeback_turns_recharging_off_and_a_refund_pauses_it(house: House, api: StandIn) -> None:
    house.member()
    turn_on(house)
    turn(house)
    of = {"account_id": house.account_id}
    charge = {"id": "ch_1", "object": "charge", "amount_refunded": 2500, "metadata": of, "payment_intent": "pi_1"}
    for _ in range(2):
        assert send(house, event("charge.refunded", charge, previous_attributes={"amount_refunded": 0})).is_success
    house.clock.now += BETWEEN_S
    turn(house)
    assert (shown(house)[0].state, balance(house), len(api.payments)) == ("paused", "5.00", 1)
    assert shown(house)[0].reason == "A payment was refunded."
    assert len(house.ledger.run(ListNotices(house.account_id))) == 1
    dispute = {
        "id": "dp_1", "object": "dispute", "amount": 2500, "payment_intent": "pi_1", "status": "needs_response",
    }  # fmt: skip
    assert send(house, event("charge.dispute.created", dispute)).is_success
    assert (shown(house)[0].state, shown(house)[0].method, api.detached) == ("off", None, ["pm_1"])
    # The same chargeback again says nothing about what was turned on after it.
    house.ledger.run(SetActive(house.account_id, True))
    house.ledger.credit(house.account_id, 50 * UNIT)
    setup_id = house.ledger.run(AskMethod(house.account_id)).setup_id
    assert send(house, saved(house, setup_id, setup_intent="seti_2")).is_success
    assert send(house, event("charge.dispute.created", dispute)).is_success
    assert (shown(house)[0].state, shown(house)[0].method, api.detached) == ("on", "pm_2", ["pm_1"])


def test_reports_that_are_forged_old_or_of_nobody_change_nothing(house: House, api: StandIn) -> None:
    run = house.ledger.run
    run(SetRecharge(house.account_id, 10 * UNIT, 25 * UNIT, 100 * UNIT))
    setup_id = run(AskMethod(house.account_id)).setup_id
    before = house.ledger.audit_log()
    of = {"account_id": house.account_id, "attempt_id": "recharge_1"}
    payment = {
        "id": "pi_1", "object": "payment_intent", "amount_received": 2500, "currency": "usd", "metadata": of,
        "created": int(NOON),
    }  # fmt: skip
    for body in (saved(house, setup_id), event("payment_intent.succeeded", payment)):
        assert send(house, body, secret="whsec_another").status_code == 400
        assert send(house, body, at=time.time() - 400).status_code == 400
    for refused in (
        saved(house, None),
        saved(house, setup_id, customer=None),
        event("payment_intent.succeeded", payment | {"currency": "eur"}),
        event("payment_intent.succeeded", {"metadata": of}),
    ):
        assert send(house, refused).status_code == 400
    for harmless in (
        saved(house, "setup_another"),
        saved(house, setup_id, metadata={}),
        saved(house, setup_id, metadata={"account_id": "acct_of_another_service", "setup_id": setup_id}),
        event("payment_intent.succeeded", payment | {"metadata": None}),
        event("payment_intent.succeeded", payment | {"metadata": {"attempt_id": "of another product"}}),
        event("payment_intent.succeeded", payment | {"metadata": of | {"account_id": "acct_none"}}),
    ):
        assert send(house, harmless).status_code == 200
    api.status = 500
    assert send(house, saved(house, setup_id)).status_code == 503
    assert (shown(house)[0].state, balance(house), house.ledger.audit_log()) == ("off", "5.00", before)


WRONG: list[dict[str, str]] = [
    {"amount": "0.49"}, {"amount": "10000.01", "monthly_cap": "20000"}, {"amount": "1.001"}, {"amount": "-5"},
    {"amount": ""}, {"threshold": "-1"}, {"threshold": "x"}, {"monthly_cap": "24.99"}, {"monthly_cap": ""},
]  # fmt: skip


def test_settings_that_can_not_be_paid_are_refused(house: House, api: StandIn) -> None:
    browser, usual = house.member(), {"threshold": "0", "amount": "25", "monthly_cap": "100"}
    for changed in WRONG:
        answer = submit(browser, path(house), f"{path(house)}/recharge", **usual | changed)
        assert answer.status_code == 422, changed
    assert (api.asked, house.ledger.run(ShowRecharge(house.account_id))[0]) == ([], None)


def test_without_a_provider_there_is_nothing_to_turn_on(house: House, api: StandIn) -> None:
    browser, page = house.member(), path(house)
    api.status = 500
    fields = {"threshold": "0", "amount": "25", "monthly_cap": "100"}
    assert submit(browser, page, f"{page}/recharge", **fields).status_code == 422
    assert submit(browser, page, f"{page}/recharge/resume").status_code == 422
    house.console.payments = None
    assert "recharge" not in browser.get(page).text
    assert submit(browser, "/console/profile", f"{page}/recharge", **fields).status_code == 404
