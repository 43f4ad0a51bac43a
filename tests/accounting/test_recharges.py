"""An account has one open attempt, and the payments of a month stay within its cap, however many processes watch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.accounting import recharge_attempts, recharges
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import AccountNotFound, Conflict, InvalidValue
from serve_app.contracts.notices import CreateAlert, ListNotices
from serve_app.contracts.payments import Paid, ReturnPayment
from serve_app.contracts.people import AcceptInvitation, InvitePerson, SuspendPerson
from serve_app.contracts.periods import period_at
from serve_app.contracts.recharges import (
    AGAIN_S,
    BETWEEN_S,
    ORDER_S,
    AskMethod,
    Attempt,
    BeginRecharge,
    ClaimAttempt,
    ListDueAttempts,
    Recharge,
    RecordOutcome,
    ResumeRecharge,
    SaveMethod,
    SetRecharge,
    ShowRecharge,
    StopRecharge,
    WatchRecharges,
)

from .backups import back_up, restored
from .books import NOON, Books, Clock, Ledger

STRIPE = Audit("stripe")


def turn_on(books: Books, threshold: int = 10, amount: int = 25, cap: int = 100, account_id: str = "") -> None:
    run, account_id = books.ledger.run, account_id or books.account_id
    run(SetRecharge(account_id, threshold, amount, cap))
    setup_id = run(AskMethod(account_id)).setup_id
    assert setup_id is not None
    assert run(SaveMethod(account_id, setup_id, "stripe", "cus_1", "pm_1", STRIPE)) is None


def begin(books: Books) -> Attempt | None:
    return books.ledger.run(BeginRecharge(books.account_id, "stripe", Audit("recharge")))


def begun(books: Books) -> Attempt:
    attempt = begin(books)
    assert attempt is not None
    return attempt


def end(books: Books, attempt: Attempt, state: Any, error: str = "") -> None:
    books.ledger.run(RecordOutcome(attempt.attempt_id, state, error, Audit("recharge")))


def low(books: Books, provider: str = "stripe") -> list[str]:
    found, after = books.ledger.run(WatchRecharges(provider))
    assert after is None
    return found


def shown(books: Books) -> tuple[Recharge, list[Attempt]]:
    recharge, attempts = books.ledger.run(ShowRecharge(books.account_id))
    assert recharge is not None
    return recharge, attempts


def test_only_what_is_low_on_and_active_is_recharged(timed: Books, clock: Clock) -> None:
    assert (low(timed), begin(timed)) == ([], None)
    timed.ledger.run(SetRecharge(timed.account_id, 10, 25, 100))
    assert (low(timed), begin(timed)) == ([], None)
    turn_on(timed)
    assert low(timed) == [timed.account_id]
    assert (low(timed, "other"), timed.ledger.run(BeginRecharge(timed.account_id, "other"))) == ([], None)
    timed.ledger.credit(timed.account_id, 11)
    assert (low(timed), begin(timed)) == ([], None)
    timed.ledger.correct(timed.account_id, -1, memo="at the threshold")
    assert low(timed) == [timed.account_id]
    timed.ledger.credit(timed.account_id, 5, "grant", expires_at=NOON + 60)
    assert (low(timed), begin(timed)) == ([], None)
    clock.now += 60
    assert low(timed) == [timed.account_id]
    timed.ledger.set_active(timed.account_id, False)
    assert (low(timed), begin(timed)) == ([], None)
    timed.ledger.set_active(timed.account_id, True)
    timed.ledger.run(StopRecharge(timed.account_id))
    assert (low(timed), begin(timed)) == ([], None)


def test_an_attempt_is_frozen_as_it_began_and_is_the_only_open_one(timed: Books, clock: Clock) -> None:
    turn_on(timed)
    attempt = begun(timed)
    assert (attempt.amount, attempt.currency, attempt.customer, attempt.method) == (25, "USD", "cus_1", "pm_1")
    assert (attempt.period, attempt.state, attempt.next_at) == ("2026-06", "open", NOON + AGAIN_S[0])
    assert (low(timed), begin(timed)) == ([], None)
    timed.ledger.run(SetRecharge(timed.account_id, 20, 30, 90))
    clock.now += 10 * BETWEEN_S
    assert (low(timed), begin(timed), shown(timed)[1]) == ([], None, [attempt])
    [begun_record, *_] = [one for one in timed.ledger.audit_log() if one.action == "begin_recharge"]
    assert (begun_record.actor, begun_record.subject, begun_record.detail) == (
        "recharge", attempt.attempt_id, {"amount": 25},
    )  # fmt: skip


def test_processes_that_begin_together_begin_once(timed: Books, url: str) -> None:
    turn_on(timed)
    ledgers = [Ledger(url, now=lambda: NOON) for _ in range(4)]
    wanted = BeginRecharge(timed.account_id, "stripe")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ledger: ledger.run(wanted), ledgers))
    for ledger in ledgers:
        ledger.close()
    [attempt] = [one for one in found if one is not None]
    assert shown(timed)[1] == [attempt]


def test_the_tables_take_no_second_open_attempt(timed: Books, url: str) -> None:
    turn_on(timed)
    begun(timed)
    engine = sa.create_engine(url)
    copied = "account_id, amount, currency, provider, customer, method, created_at, period, state, error, tries"
    again = f"INSERT INTO recharge_attempts (id, {copied}) SELECT 'another', {copied} FROM recharge_attempts"
    with pytest.raises(sa.exc.IntegrityError), engine.begin() as connection:
        connection.execute(sa.text(again))
    engine.dispose()


def test_a_month_stays_within_its_cap_with_what_is_not_known_and_without_what_failed(
    timed: Books, clock: Clock
) -> None:
    turn_on(timed, threshold=1000, amount=40, cap=100)
    first = begun(timed)
    end(timed, first, "open", "no answer")
    assert shown(timed)[0].counted == 40
    end(timed, first, "failed", "refused")
    timed.ledger.run(ResumeRecharge(timed.account_id))
    assert shown(timed)[0].counted == 0
    for _ in range(2):
        clock.now += BETWEEN_S
        end(timed, begun(timed), "succeeded")
    clock.now += BETWEEN_S
    assert (low(timed), begin(timed), shown(timed)[0].counted) == ([], None, 80)
    timed.ledger.run(SetRecharge(timed.account_id, 1000, 20, 100))
    last = begun(timed)  # what is left of the cap, and its outcome is not known
    clock.now += 10 * BETWEEN_S
    timed.ledger.run(SetRecharge(timed.account_id, 1000, 20, 119))
    assert (begin(timed), shown(timed)[0].counted) == (None, 100)
    end(timed, last, "failed", "refused")
    end(timed, last, "succeeded")  # it came late, and counts
    timed.ledger.run(ResumeRecharge(timed.account_id))
    clock.now += BETWEEN_S
    assert (low(timed), begin(timed), shown(timed)[0].counted) == ([], None, 100)
    timed.ledger.run(SetRecharge(timed.account_id, 1000, 20, 120))
    assert low(timed) == [timed.account_id]
    begun(timed)


def test_an_attempt_counts_to_the_month_in_which_it_began(timed: Books, clock: Clock) -> None:
    july = period_at("month", NOON).ends
    turn_on(timed, threshold=1000, amount=60, cap=100)
    clock.now = july - 1
    attempt = begun(timed)
    clock.now = july + BETWEEN_S
    end(timed, attempt, "succeeded")
    assert (attempt.period, shown(timed)[0].counted) == ("2026-06", 0)
    clock.now += BETWEEN_S
    assert begun(timed).period == "2026-07"
    assert shown(timed)[0].counted == 60


def test_the_next_attempt_waits(timed: Books, clock: Clock) -> None:
    turn_on(timed, threshold=1000)
    end(timed, begun(timed), "succeeded")
    clock.now += BETWEEN_S - 1
    assert (low(timed), begin(timed)) == ([], None)
    clock.now += 1
    assert low(timed) == [timed.account_id]
    begun(timed)


def test_an_open_attempt_is_looked_at_by_one_process_at_growing_intervals(timed: Books, clock: Clock) -> None:
    run, due = timed.ledger.run, ListDueAttempts("stripe")
    turn_on(timed)
    attempt = begun(timed)
    assert run(due) == []
    for tries, wait in enumerate([*AGAIN_S[1:], AGAIN_S[-1]], 1):
        assert attempt.next_at is not None
        clock.now = attempt.next_at
        assert (run(due), run(ListDueAttempts("other"))) == ([attempt], [])
        claim = run(ClaimAttempt(attempt.attempt_id, tries))
        assert run(ClaimAttempt(attempt.attempt_id, tries)) is None
        assert claim is not None
        assert (claim.refusal, run(due)) == ("", [])
        attempt = claim.attempt
        assert attempt.next_at == clock.now + wait
    end(timed, attempt, "succeeded")
    clock.now += AGAIN_S[-1]
    assert (run(due), run(ClaimAttempt(attempt.attempt_id, attempt.tries))) == ([], None)
    assert run(ClaimAttempt("recharge_none", 1)) is None


@pytest.mark.parametrize("why", ["off", "refund", "suspended", "replaced", "late", ""])
def test_a_payment_that_is_not_wanted_any_more_is_not_ordered(timed: Books, clock: Clock, why: str) -> None:
    run = timed.ledger.run
    turn_on(timed)
    attempt = begun(timed)
    if why == "off":
        assert run(StopRecharge(timed.account_id)) == "pm_1"
    elif why == "suspended":
        timed.ledger.set_active(timed.account_id, False)
    elif why == "replaced":
        setup_id = run(AskMethod(timed.account_id)).setup_id or ""
        assert run(SaveMethod(timed.account_id, setup_id, "stripe", "cus_1", "pm_2", STRIPE)) == "pm_1"
    elif why == "refund":
        timed.ledger.credit(timed.account_id, 5, idempotency_key="stripe p1")
        run(ReturnPayment(timed.account_id, 5, "stripe r1", "stripe p1", STRIPE))
    clock.now += ORDER_S if why == "late" else ORDER_S - 1
    claim = run(ClaimAttempt(attempt.attempt_id, 1))
    assert claim is not None
    assert bool(claim.refusal) == bool(why)


def test_a_success_stands_and_a_failure_comes_once(timed: Books, clock: Clock) -> None:
    turn_on(timed)
    attempt = begun(timed)
    end(timed, attempt, "open", "no answer")
    assert [one.error for one in shown(timed)[1]] == ["no answer"]
    end(timed, attempt, "failed", "refused")
    before = timed.ledger.audit_log()
    for state in ("failed", "open"):
        end(timed, attempt, state, "again")
    assert (timed.ledger.audit_log(), shown(timed)[0].reason) == (before, "refused")
    for state in ("succeeded", "failed", "open", "succeeded"):
        end(timed, attempt, state)
    assert [(one.state, one.error, one.next_at) for one in shown(timed)[1]] == [("succeeded", "", None)]
    assert len(timed.ledger.audit_log()) == len(before) + 1
    timed.ledger.run(RecordOutcome("recharge_none", "succeeded", ""))
    with pytest.raises(InvalidValue):
        end(timed, attempt, "other")


def person(books: Books, email: str, role: Any) -> None:
    books.ledger.run(InvitePerson(books.account_id, email, role, f"digest of {email}", NOON + 3600))
    books.ledger.run(AcceptInvitation(f"digest of {email}", "Ada", "hash"))


def test_a_pause_is_told_to_those_who_pay_and_where_low_balances_are(timed: Books) -> None:
    run = timed.ledger.run
    for email, role in (("o@a.example", "owner"), ("b@a.example", "billing"), ("m@a.example", "member")):
        person(timed, email, role)
    person(timed, "gone@a.example", "billing")
    run(SuspendPerson("gone@a.example", True))
    for kind, target in (("balance", "https://a.example/"), ("balance", "o@a.example"), ("day", "day@a.example")):
        run(CreateAlert(timed.account_id, kind, 1, target, "secret" if "://" in target else ""))
    turn_on(timed)
    end(timed, begun(timed), "failed", "refused")
    told = run(ListNotices(timed.account_id))
    assert {(one.target, one.secret) for one in told} == {
        ("o@a.example", ""), ("b@a.example", ""), ("https://a.example/", "secret"),
    }  # fmt: skip
    assert {(one.kind, one.value, one.threshold, one.detail) for one in told} == {("balance", 0, 10, "refused")}


def test_pauses_are_told_no_more_than_so_often_in_a_day(
    timed: Books, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder could have them sent to any address, with a card that is refused."""
    monkeypatch.setattr(recharges, "MAX_A_DAY", 5)
    turn_on(timed)
    timed.ledger.run(CreateAlert(timed.account_id, "balance", 1, "stranger@example.org", ""))
    day = period_at("day", clock.now)
    for _ in range(7):
        end(timed, begun(timed), "failed", "Your card was declined.")
        timed.ledger.run(ResumeRecharge(timed.account_id))
        clock.now += BETWEEN_S
    assert period_at("day", clock.now) == day
    assert len(timed.ledger.run(ListNotices(timed.account_id))) == 5


def test_an_attempt_not_known_for_a_day_stays_open_and_pauses_recharging(timed: Books, clock: Clock) -> None:
    person(timed, "o@a.example", "owner")
    turn_on(timed)
    attempt = begun(timed)
    clock.now += ORDER_S - 1
    end(timed, attempt, "open", "no answer")
    assert (shown(timed)[0].state, timed.ledger.run(ListNotices(timed.account_id))) == ("on", [])
    clock.now += 1
    for _ in range(2):
        end(timed, attempt, "open", "no answer")
    assert (shown(timed)[0].state, shown(timed)[0].counted) == ("paused", 25)
    assert "outcome was unknown for a day" in shown(timed)[0].reason
    assert [one.target for one in timed.ledger.run(ListNotices(timed.account_id))] == ["o@a.example"]
    end(timed, attempt, "succeeded")  # it was known late
    assert [one.state for one in shown(timed)[1]] == ["succeeded"]


def test_a_success_that_the_ledger_does_not_know_counts_to_the_month_in_which_it_began(
    timed: Books, clock: Clock
) -> None:
    """A ledger from a backup has lost the attempts that began after it."""
    paid = Paid(timed.account_id, 60, "USD", "pi_1", "recharge_lost", NOON)
    wanted = RecordOutcome("recharge_lost", "succeeded", "", STRIPE, paid, "stripe")
    timed.ledger.run(wanted)  # before there are settings, too
    turn_on(timed, threshold=1000, amount=60, cap=100)
    before = timed.ledger.audit_log()
    timed.ledger.run(wanted)
    assert timed.ledger.audit_log() == before
    [attempt] = shown(timed)[1]
    assert (attempt.amount, attempt.period, attempt.state, attempt.provider) == (60, "2026-06", "succeeded", "stripe")
    assert (low(timed), begin(timed), shown(timed)[0].counted) == ([], None, 60)
    clock.now = period_at("month", NOON).ends
    assert low(timed) == [timed.account_id]
    # An attempt of the same account that is there stays as it began.
    known = begun(timed)
    paid = Paid(timed.account_id, 61, "USD", "pi_2", known.attempt_id, NOON)
    timed.ledger.run(RecordOutcome(known.attempt_id, "succeeded", "", STRIPE, paid, "stripe"))
    assert (shown(timed)[1][0].amount, shown(timed)[0].counted) == (60, 60)


def test_a_setup_is_used_once_and_not_after_it_was_turned_off(timed: Books) -> None:
    run, account_id = timed.ledger.run, timed.account_id
    with pytest.raises(Conflict):
        run(AskMethod(account_id))
    run(SetRecharge(account_id, 10, 25, 100))
    with pytest.raises(Conflict):
        run(ResumeRecharge(account_id))
    first = run(AskMethod(account_id)).setup_id or ""
    assert run(AskMethod(account_id)).setup_id == first
    save = SaveMethod(account_id, first, "stripe", "cus_1", "pm_1", STRIPE)
    assert run(SaveMethod(account_id, "setup_other", "stripe", "cus_1", "pm_0", STRIPE)) == "pm_0"
    assert run(save) is None
    assert run(save) is None
    assert (run(StopRecharge(account_id)), run(StopRecharge(account_id))) == ("pm_1", None)
    assert run(save) == "pm_1"
    second = run(AskMethod(account_id)).setup_id
    assert second != first
    assert run(save) == "pm_1"
    assert shown(timed)[0].state == "off"
    assert run(SaveMethod("acct_of_another_service", first, "stripe", "cus_1", "pm_1", STRIPE)) is None
    with pytest.raises(InvalidValue):
        run(SaveMethod(account_id, first, "stripe", "", "pm_1", STRIPE))


def test_settings_that_make_no_sense_are_refused(timed: Books) -> None:
    wrong: list[Any] = [(-1, 25, 100), (0, 0, 100), (0, 25, 24), (0, 25.0, 100), (10**17 + 1, 25, 100)]
    for amounts in [*wrong, (0, 25, 10**17 + 1)]:
        with pytest.raises(InvalidValue):
            timed.ledger.run(SetRecharge(timed.account_id, *amounts))
    with pytest.raises(AccountNotFound):
        timed.ledger.run(SetRecharge("acct_none", 0, 25, 100))


def test_all_accounts_are_watched_in_their_pages(timed: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recharge_attempts, "BATCH", 3)
    made = [timed.ledger.create_account("Bob").account_id for _ in range(5)]
    for account_id in made:
        turn_on(timed, account_id=account_id)
    first, after = timed.ledger.run(WatchRecharges("stripe"))
    assert (len(first), after) == (3, first[-1])
    second, last = timed.ledger.run(WatchRecharges("stripe", after or ""))
    assert (sorted([*first, *second]), last) == (sorted(made), None)


def test_after_a_restore_recharging_waits_for_a_day(
    timed: Books, clock: Clock, url: str, new_url: Callable[..., str], file: Any, postgres_programs: None
) -> None:
    """Covers payments made after the backup: the restored ledger lacks them until their reports arrive again."""
    turn_on(timed)
    attempt = begun(timed)
    back_up(url, file)
    new = new_url()
    assert restored(file, new).differences == ()
    with Ledger(new, now=clock) as ledger:
        again = Books.of(ledger, timed.account_id, timed.key_id)
        assert shown(again)[1] == [attempt]
        end(again, attempt, "succeeded")
        clock.now += 86400 - 1
        assert (low(again), begin(again)) == ([], None)
        clock.now += 1
        begun(again)
