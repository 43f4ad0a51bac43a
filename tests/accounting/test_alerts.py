"""An alert fires once each time its condition becomes true, also when two processes watch."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.accounting import alerts, recharges
from serve_app.accounting.alerts import ENOUGH
from serve_app.contracts.books import Audit
from serve_app.contracts.errors import AccountNotFound, Conflict, InvalidValue
from serve_app.contracts.money import MAX_BALANCE
from serve_app.contracts.notices import (
    KINDS,
    MAX_ALERTS,
    Alarm,
    CreateAlert,
    ListAlerts,
    ListNotices,
    Notice,
    RaiseAlarm,
    RecordAttempt,
    RemoveAlert,
    WatchAlerts,
)
from serve_app.contracts.recharges import AskMethod, BeginRecharge, RecordOutcome, SaveMethod, SetRecharge

from .books import COST, NOON, Books, Clock

DAY = 86400.0
MAX_A_DAY = 5


@pytest.fixture
def few_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MAX_A_DAY", MAX_A_DAY)
    monkeypatch.setattr(recharges, "MAX_A_DAY", MAX_A_DAY)


def alert(books: Books, kind: str, threshold: int, **changed: Any) -> str:
    fields = {"target": "ada@example.org", "secret": "", **changed}
    return books.ledger.run(CreateAlert(books.account_id, kind, threshold, **fields)).alert_id


def watch(books: Books) -> list[tuple[str, int]]:
    """One turn of a watcher: kind and value of the notices that it made."""
    run = books.ledger.run
    before = {notice.notice_id for notice in run(ListNotices(books.account_id))}
    alarms, after = run(WatchAlerts())
    assert after is None
    for alarm in alarms:
        assert run(RaiseAlarm(alarm))
        assert not run(RaiseAlarm(alarm)), "a second watcher made it too"
    made = [notice for notice in run(ListNotices(books.account_id)) if notice.notice_id not in before]
    return [(notice.kind, notice.value) for notice in made]


def fire(books: Books, count: int) -> None:
    """Makes that many notices, as somebody does who removes alerts and creates them anew."""
    for _ in range(count):
        made = alert(books, "balance", MAX_BALANCE)
        assert books.ledger.run(RaiseAlarm(Alarm(made, "", "low", 0)))
        books.ledger.run(RemoveAlert(books.account_id, made))


def due(books: Books, limit: int = 100) -> list[Notice]:
    return books.ledger.run(ListNotices(limit=limit))


def use(books: Books, clock: Clock, *names: str, at: float | None = None) -> None:
    at = clock.now if at is None else at
    books.ledger.settle([books.settlement(name, started_at=at - 1, finished_at=at) for name in names])


def test_a_low_balance_is_told_once_and_again_after_it_was_topped_up(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 100)
    alert(timed, "balance", 60)
    assert watch(timed) == []
    use(timed, clock, "r1")
    assert watch(timed) == [("balance", 100 - COST)]
    use(timed, clock, "r2")
    assert watch(timed) == []
    timed.ledger.credit(timed.account_id, 52)
    assert watch(timed) == []
    use(timed, clock, "r3")
    assert watch(timed) == [("balance", 152 - 3 * COST)]


def test_money_that_has_expired_is_not_counted(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 100, kind="grant", expires_at=NOON + 10)
    alert(timed, "balance", 60)
    assert watch(timed) == []
    clock.now = NOON + 11
    assert watch(timed) == [("balance", 0)]


@pytest.mark.parametrize(("kind", "later"), [("day", DAY), ("month", 30 * DAY)])
def test_spending_is_told_once_in_each_period(timed: Books, clock: Clock, kind: str, later: float) -> None:
    timed.ledger.credit(timed.account_id, 10_000)
    alert(timed, kind, 2 * COST)
    use(timed, clock, "yesterday", at=NOON - DAY)
    use(timed, clock, "r1")
    assert watch(timed) == []
    use(timed, clock, "r2")
    assert watch(timed) == [(kind, 2 * COST)]
    use(timed, clock, "r3")
    assert watch(timed) == []
    clock.now = NOON + later
    assert watch(timed) == []
    use(timed, clock, "r4", "r5", "r6")
    assert watch(timed) == [(kind, 3 * COST)]


def test_unusual_is_three_times_the_mean_of_the_week_before(timed: Books, clock: Clock) -> None:
    timed.ledger.credit(timed.account_id, 10_000)
    alert(timed, "unusual", COST)
    for day in range(1, 8):
        use(timed, clock, f"before {day}", f"and {day}", at=NOON - day * DAY)
    use(timed, clock, *(f"today {number}" for number in range(5)))
    assert watch(timed) == []
    use(timed, clock, "today 5")
    assert watch(timed) == [("unusual", 6 * COST)]
    assert watch(timed) == []


def test_notices_are_due_until_they_are_delivered_or_given_up(timed: Books, clock: Clock) -> None:
    run = timed.ledger.run
    for kind in ("balance", "day"):
        alert(timed, kind, 1)
    timed.ledger.credit(timed.account_id, 100)
    use(timed, clock, "r1")
    assert watch(timed) == [("day", COST)]
    [notice] = run(ListNotices())
    assert (notice.next_at, notice.attempts, notice.delivered_at) == (NOON, 0, None)
    run(RecordAttempt(notice.notice_id, "no answer", NOON + 5))
    assert run(ListNotices()) == []
    clock.now = NOON + 5
    assert [one.error for one in run(ListNotices())] == ["no answer"]
    run(RecordAttempt(notice.notice_id, "", None))
    assert run(ListNotices()) == []
    [notice] = run(ListNotices(timed.account_id))
    assert (notice.attempts, notice.delivered_at, notice.error) == (2, NOON + 5, "")


def test_an_account_with_many_notices_keeps_no_other_waiting(timed: Books, clock: Clock) -> None:
    fire(timed, 5)
    clock.now += 1
    others = [Books(timed.ledger, name=name) for name in ("Ben", "Cleo")]
    for other in others:
        fire(other, 2)
    everyone = [timed.account_id, *sorted(other.account_id for other in others)]
    listed = [one.account_id for one in due(timed)]
    assert [listed[0], *sorted(listed[1:3])] == [listed[3], *sorted(listed[4:6])] == everyone
    assert listed[6:] == [timed.account_id] * 3
    assert {one.account_id for one in due(timed, limit=3)} == set(everyone)


@pytest.mark.usefixtures("few_a_day")
def test_an_account_has_not_more_than_its_most_notices_in_a_day(timed: Books, clock: Clock) -> None:
    other = Books(timed.ledger, name="Ben")
    clock.now = NOON + 0.4 * DAY
    fire(timed, MAX_A_DAY + 5)
    assert len(due(timed)) == MAX_A_DAY
    told = timed.ledger.run(ListNotices(timed.account_id))
    [last] = [one for one in told if one.next_at is None]
    assert len(told) == MAX_A_DAY + 1
    assert (last.error, last.delivered_at) == (ENOUGH, None)
    fire(other, 1)
    clock.now = NOON + 0.5 * DAY  # midnight
    fire(timed, 1)
    assert len(due(timed)) == MAX_A_DAY + 2


@pytest.mark.usefixtures("few_a_day")
def test_that_recharging_is_paused_is_told_beyond_the_most_of_a_day(timed: Books) -> None:
    run, account_id = timed.ledger.run, timed.account_id
    alert(timed, "balance", 1)
    run(SetRecharge(account_id, 10, 25, 100))
    setup_id = run(AskMethod(account_id)).setup_id or ""
    run(SaveMethod(account_id, setup_id, "stripe", "cus_1", "pm_1", Audit("stripe")))
    fire(timed, MAX_A_DAY + 1)
    attempt = run(BeginRecharge(account_id, "stripe", Audit("recharge")))
    assert attempt is not None
    run(RecordOutcome(attempt.attempt_id, "failed", "refused", Audit("recharge")))
    assert [one.detail for one in due(timed) if one.detail] == ["refused"]
    assert len(due(timed)) == MAX_A_DAY + 1


def test_what_a_receiver_has_said_is_kept_as_text(timed: Books) -> None:
    fire(timed, 1)
    [notice] = due(timed)
    timed.ledger.run(RecordAttempt(notice.notice_id, "550\0 \ud800no\r\n", None))
    [notice] = timed.ledger.run(ListNotices(timed.account_id))
    assert (notice.attempts, notice.next_at, notice.error.split()) == (1, None, ["550", "no"])


def test_an_alert_is_of_its_account_and_leaves_what_it_told(timed: Books, clock: Clock) -> None:
    run, other = timed.ledger.run, timed.ledger.create_account("Bob").account_id
    made = alert(timed, "balance", 60)
    assert watch(timed) == [("balance", 0)]
    run(RemoveAlert(other, made))
    assert [one.alert_id for one in run(ListAlerts(timed.account_id))] == [made]
    assert run(ListAlerts(other)) == run(ListNotices(other)) == []
    run(RemoveAlert(timed.account_id, made))
    run(RemoveAlert(timed.account_id, made))
    assert run(ListAlerts(timed.account_id)) == []
    assert [notice.value for notice in run(ListNotices(timed.account_id))] == [0]
    assert run(RaiseAlarm(Alarm(made, "low", "", 1))) is False


def test_watching_goes_on_where_a_look_ended(timed: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "BATCH", 8)
    for _ in range(9):
        alert(timed, "balance", 1)
    first, after = timed.ledger.run(WatchAlerts())
    assert (len(first), after) == (8, first[-1].alert_id)
    second, after = timed.ledger.run(WatchAlerts(after))
    assert (len(second), after) == (1, None)
    assert len({alarm.alert_id for alarm in first + second}) == 9


NO_ALERTS: list[dict[str, Any]] = [
    {"kind": "other"}, {"threshold": 0}, {"threshold": -1}, {"threshold": 1.5}, {"target": ""}, {"target": "ada"},
    {"target": "ftp://example.org/"}, {"target": "https://"}, {"target": "a b@example.org"}, {"target": "a@b\n"},
    {"target": "a@["}, {"target": "x://y@z"}, {"target": "(" * 400 + "@b.c"}, {"target": "a@b@c"},
    {"target": "a@-b.c"}, {"target": "a,b@example.org"}, {"target": None},
    {"target": "=?utf-8?q?a=2Cb?=@example.org"},
]  # fmt: skip


def test_what_is_no_alert_is_refused(timed: Books) -> None:
    for changed in NO_ALERTS:
        fields = {"kind": "balance", "threshold": 1, "target": "ada@example.org", "secret": "", **changed}
        with pytest.raises(InvalidValue):
            timed.ledger.run(CreateAlert(timed.account_id, **fields))


def test_browsers_addresses_and_those_of_webhooks_are_targets(timed: Books) -> None:
    targets = [
        "ada@localhost", "o'neil+a=b@mail.example.org", "https://example.org/hook?to=a@b", "HTTPS://example.org/",
        "http://[::1]/",
    ]  # fmt: skip
    for target in targets:
        alert(timed, "day", 1, target=target)
    assert {made.target for made in timed.ledger.run(ListAlerts(timed.account_id))} == set(targets)


def test_an_account_has_not_more_than_its_most(timed: Books) -> None:
    for _ in range(MAX_ALERTS):
        alert(timed, next(iter(KINDS)), 1)
    with pytest.raises(Conflict):
        alert(timed, "day", 1)
    with pytest.raises(AccountNotFound):
        timed.ledger.run(CreateAlert("acct_none", "day", 1, "ada@example.org", ""))
