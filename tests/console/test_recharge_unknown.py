"""A payment whose outcome is not known, or can't be booked, is made once at most, and is told to those who pay.

Stripe's API is a stand-in, reports are signed as Stripe signs them.
"""

from __future__ import annotations

import pytest

from serve_app.contracts.money import MAX_AMOUNT
from serve_app.contracts.notices import ListNotices
from serve_app.contracts.recharges import AGAIN_S, ORDER_S, RecordOutcome, ResumeRecharge
from tests.accounting.books import NOON

from .conftest import House, balance, operator, send, submit
from .recharging import UNIT, path, shown, states, succeeded, turn, turn_on
from .stripe_stand_in import StandIn, event


def test_a_payment_that_a_restored_ledger_does_not_know_is_credited_and_counts_to_its_months_cap(
    house: House, api: StandIn
) -> None:
    lost = {
        "id": "pi_10", "object": "payment_intent", "amount_received": 2500, "currency": "usd", "created": int(NOON),
        "metadata": {"account_id": house.account_id, "attempt_id": "recharge_lost"},
    }  # fmt: skip
    house.clock.now += 86400
    for _ in range(2):
        assert send(house, event("payment_intent.succeeded", lost)).status_code == 200
    assert balance(house) == "30.00"
    turn_on(house, threshold=1000, amount=25, cap=49)
    turn(house)
    assert (api.payments, states(house), shown(house)[0].counted) == ({}, ["succeeded"], 25 * UNIT)


def test_without_an_answer_an_order_is_repeated_for_less_than_a_day(house: House, api: StandIn) -> None:
    turn_on(house)
    began, api.status = house.clock.now, 500
    while house.clock.now < began + ORDER_S:
        turn(house)
        [attempt] = shown(house)[1]
        assert (attempt.state, attempt.error) == ("open", "There is no clear answer from Stripe yet.")
        assert (attempt.next_at is not None, shown(house)[0].state) == (True, "on")
        house.clock.now = attempt.next_at or 0
    turn(house)
    assert states(house) == ["open"]  # Stripe is still away: a payment may be there
    assert shown(house)[0].state == "paused"
    api.status = 200
    house.clock.now += AGAIN_S[-1]
    turn(house)
    recharge, [attempt] = shown(house)
    assert (api.payments, attempt.state, recharge.state) == ({}, "failed", "paused")
    assert attempt.error == "The payment could not be started within a day."
    assert len(api.keys) == 1


@pytest.mark.parametrize("status", [400, 401, 403])
def test_an_operators_mistake_at_stripe_pauses_nobody_and_is_not_shown(
    house: House, api: StandIn, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    turn_on(house)
    api.status = status
    api.error = {"type": "invalid_request_error", "message": "No such account: acct_of_the_operator"}
    for _ in range(2):
        turn(house)
        house.clock.now += AGAIN_S[0]
    page = house.member().get(path(house)).text
    assert (states(house), shown(house)[0].state) == (["open"], "on")
    assert ("acct_of_the_operator" in page, "acct_of_the_operator" in caplog.text) == (False, True)
    api.status = 200
    api.keys.clear()
    house.clock.now += AGAIN_S[-1]
    turn(house)
    assert (len(api.payments), states(house), balance(house)) == (1, ["succeeded"], "30.00")


def test_of_a_payment_that_failed_only_what_concerns_the_card_is_shown(house: House, api: StandIn) -> None:
    turn_on(house)
    api.is_mute = True
    turn(house)
    api.is_mute = False
    error = {"type": "invalid_request_error", "message": "No such account: acct_of_the_operator"}
    api.payments["pi_1"].update(status="requires_payment_method", last_payment_error=error)
    house.clock.now += AGAIN_S[0]
    turn(house)
    assert [one.error for one in shown(house)[1]] == ["Stripe has the payment as requires_payment_method."]


def test_an_attempt_that_stripe_never_tells_of_is_told_to_the_owners_and_credited_when_it_comes(
    house: House, api: StandIn
) -> None:
    house.member("ada@example.org")
    turn_on(house)
    api.is_mute = True
    turn(house)
    api.is_mute, api.status = False, 500
    assert house.ledger.run(ListNotices(house.account_id)) == []
    house.clock.now += ORDER_S
    for _ in range(3):
        turn(house)
        house.clock.now += AGAIN_S[-1]
    assert (states(house), shown(house)[0].state, shown(house)[0].counted) == (["open"], "paused", 25 * UNIT)
    assert [one.target for one in house.ledger.run(ListNotices(house.account_id))] == ["ada@example.org"]
    api.status = 200
    assert send(house, succeeded(api)).status_code == 200
    assert (states(house), balance(house), len(api.payments)) == (["succeeded"], "30.00", 1)


def test_a_payment_that_can_not_be_credited_for_a_day_is_told_to_the_owners(house: House, api: StandIn) -> None:
    house.member("ada@example.org")
    turn_on(house)
    for amount in (*[MAX_AMOUNT] * 9, MAX_AMOUNT - 10 * UNIT):  # up to the most that an account can have
        house.ledger.credit(house.account_id, amount, "grant", expires_at=house.clock.now + 1)
    house.clock.now += 1  # nothing of it is left to spend, but the books have it for an hour
    turn(house)
    assert [one.error for one in shown(house)[1]] == ["The payment was made and can't be credited yet."]
    house.clock.now += ORDER_S
    turn(house)
    assert (states(house), shown(house)[0].state) == (["open"], "paused")
    assert len(house.ledger.run(ListNotices(house.account_id))) == 1


def test_a_payment_that_was_given_up_and_comes_is_credited(house: House, api: StandIn) -> None:
    turn_on(house)
    turn_after = house.clock.now + AGAIN_S[0]
    api.card = "processing"
    turn(house)
    house.clock.now = turn_after
    turn(house)
    assert (states(house), balance(house)) == (["open"], "5.00")
    [attempt] = shown(house)[1]
    assert attempt.error == "Stripe is still processing the payment."
    house.ledger.run(RecordOutcome(attempt.attempt_id, "failed", "given up"))
    api.settle()
    for _ in range(2):
        assert send(house, succeeded(api)).status_code == 200
    assert (states(house), balance(house)) == (["succeeded"], "30.00")


def test_an_operator_ends_an_attempt_that_stripe_never_tells_of(house: House, api: StandIn) -> None:
    turn_on(house)
    api.is_mute = True
    turn(house)
    api.is_mute, api.status = False, 401  # the account at Stripe was closed
    [attempt] = shown(house)[1]
    browser, page = operator(house, "finance", "fay@example.org"), f"/console/operator/accounts/{house.account_id}"
    end = f"{page}/attempts/{attempt.attempt_id}/end"
    assert attempt.attempt_id in browser.get(page).text
    assert f'action="{end}"' not in browser.get(page).text
    answer = submit(browser, page, end)
    assert (answer.status_code, "may still be paid" in answer.text, states(house)) == (422, True, ["open"])
    house.clock.now += ORDER_S
    turn(house)
    assert shown(house)[0].state == "paused"
    browser = operator(house, "finance", "gus@example.org")  # the other session has ended
    other = house.ledger.create_account("Other").account_id
    assert submit(browser, page, end.replace(house.account_id, other)).status_code == 422
    assert f'action="{end}"' in browser.get(page).text
    assert submit(browser, page, end).status_code == 303
    assert (states(house), shown(house)[0].counted) == (["failed"], 0)
    assert house.ledger.audit_log(house.account_id)[0].actor == "gus@example.org"
    assert submit(browser, page, end).status_code == 422
    house.ledger.run(ResumeRecharge(house.account_id))
    api.status = 200
    assert send(house, succeeded(api)).status_code == 200
    assert (states(house), balance(house)) == (["succeeded"], "30.00")
