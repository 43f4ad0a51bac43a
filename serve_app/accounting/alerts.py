"""Alerts of accounts, and the notices that they create.

Watching alerts only reads the ledger. A change of an alert's state takes the ledger's writer lock, and is made only if
the state is still the one that the watching process saw. Two processes that watch the same alert therefore create only
one notice.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import alerts, notices
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import accounts, usage_daily
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, check_page, equals, is_text
from serve_app.contracts.errors import Conflict, InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.money import MAX_BALANCE
from serve_app.contracts.notices import (
    KINDS,
    MAX_A_DAY,
    MAX_ALERTS,
    Alarm,
    Alert,
    CreateAlert,
    ListAlerts,
    ListNotices,
    Notice,
    RaiseAlarm,
    RecordAttempt,
    RemoveAlert,
    WatchAlerts,
    is_email,
    is_webhook,
)
from serve_app.contracts.periods import period_at
from serve_app.contracts.units import DAY_S

BATCH: Final = 200
LOW: Final = "low"
UNUSUAL: Final = 3  # a day's spending is unusual from this multiple of the daily mean of the DAYS_BEFORE days before
DAYS_BEFORE: Final = 7
ENOUGH: Final = f"not sent: limit of {MAX_A_DAY} alert notices per account and UTC day reached"
_SAME = ("account_id", "kind", "threshold", "target")


@writes(CreateAlert)
def create_alert(transaction: Transaction, wanted: CreateAlert, now: float) -> Alert:
    connection = transaction.connection
    read_account(connection, wanted.account_id)
    if wanted.kind not in KINDS:
        raise InvalidValue(f"kind {wanted.kind!r}: give one of {', '.join(KINDS)}")
    if type(wanted.threshold) is not int or not 0 < wanted.threshold <= MAX_BALANCE:
        raise InvalidValue("the amount must be more than 0")
    if not _is_target(wanted.target):
        raise InvalidValue(f"{wanted.target!r}: use an e-mail address, or the https address of a webhook")
    if wanted.alert_id is not None:
        check_name(wanted.alert_id, "an alert's id")
        earlier = connection.execute(select(alerts).where(alerts.c.id == wanted.alert_id)).one_or_none()
        if earlier is not None:
            if any(getattr(earlier, name) != getattr(wanted, name) for name in _SAME):
                raise Conflict(f"{wanted.alert_id} already belongs to a different alert")
            return _alert(earlier)
    if len(list_alerts(connection, ListAlerts(wanted.account_id), now)) >= MAX_ALERTS:
        raise Conflict(f"an account has at most {MAX_ALERTS} alerts: remove one")
    row = {
        "id": wanted.alert_id or new_id("alert_"),
        "account_id": wanted.account_id,
        "kind": wanted.kind,
        "target": wanted.target,
    }
    more = {"threshold": wanted.threshold, "secret": wanted.secret, "state": "", "created_at": now}
    connection.execute(insert(alerts).values(**row, **more))
    detail = {"kind": wanted.kind, "threshold": wanted.threshold, "target": wanted.target}
    write_audit(transaction, wanted.audit, "create_alert", wanted.account_id, detail, now, subject=row["id"])
    return _alert(connection.execute(select(alerts).where(alerts.c.id == row["id"])).one())


@reads(ListAlerts)
def list_alerts(connection: Connection, wanted: ListAlerts, _now: float) -> list[Alert]:
    read_account(connection, wanted.account_id)
    query = select(alerts).where(alerts.c.account_id == wanted.account_id).order_by(alerts.c.created_at, alerts.c.id)
    return [_alert(row) for row in connection.execute(query)]


@writes(RemoveAlert)
def remove_alert(transaction: Transaction, wanted: RemoveAlert, now: float) -> None:
    mine = (equals(alerts.c.id, wanted.alert_id), equals(alerts.c.account_id, wanted.account_id))
    if transaction.connection.execute(delete(alerts).where(*mine)).rowcount:
        audit, account_id = wanted.audit, wanted.account_id
        write_audit(transaction, audit, "remove_alert", account_id, {}, now, subject=wanted.alert_id)


@reads(WatchAlerts)
def watch_alerts(connection: Connection, wanted: WatchAlerts, now: float) -> tuple[list[Alarm], str | None]:
    query = select(alerts).where(alerts.c.id > wanted.after).order_by(alerts.c.id).limit(BATCH)
    found = connection.execute(query).all()
    alarms = []
    for row in found:
        state, value = _state(connection, row, now)
        if state != row.state:
            alarms.append(Alarm(row.id, row.state, state, value))
    return alarms, found[-1].id if len(found) == BATCH else None


@writes(RaiseAlarm)
def raise_alarm(transaction: Transaction, wanted: RaiseAlarm, now: float) -> bool:
    connection, alarm = transaction.connection, wanted.alarm
    alert = connection.execute(select(alerts).where(alerts.c.id == alarm.alert_id)).one_or_none()
    if alert is None or alert.state != alarm.before:
        return False
    connection.execute(update(alerts).where(alerts.c.id == alert.id).values(state=alarm.state))
    if alarm.state:
        names = ("account_id", "kind", "threshold", "target", "secret")
        row = {name: getattr(alert, name) for name in names} | {"id": new_id("notice_"), "value": alarm.value}
        made = _made_today(connection, alert.account_id, now)
        if made <= MAX_A_DAY:
            sending = {"next_at": None, "error": ENOUGH} if made == MAX_A_DAY else {"next_at": now, "error": ""}
            connection.execute(insert(notices).values(**row, **sending, created_at=now, attempts=0))
    return True


@reads(ListNotices)
def list_notices(connection: Connection, wanted: ListNotices, now: float) -> list[Notice]:
    query = select(notices, accounts.c.name, accounts.c.currency).join(accounts).limit(check_page(wanted.limit))
    if wanted.account_id is None:
        place = func.row_number().over(partition_by=notices.c.account_id, order_by=(notices.c.next_at, notices.c.id))
        due = select(notices.c.id, place.label("place")).where(notices.c.next_at <= now).subquery()
        query = query.join(due, due.c.id == notices.c.id).order_by(due.c.place, notices.c.next_at, notices.c.id)
    else:
        query = query.where(equals(notices.c.account_id, wanted.account_id))
        query = query.order_by(notices.c.created_at.desc(), notices.c.id)
    return [
        Notice(
            row.id, row.account_id, row.name, row.currency, row.kind, row.threshold, row.value, row.target,
            row.created_at, row.attempts, row.next_at, row.delivered_at, row.error, row.secret, row.detail,
        )
        for row in connection.execute(query)
    ]  # fmt: skip


@writes(RecordAttempt)
def record_attempt(transaction: Transaction, wanted: RecordAttempt, now: float) -> None:
    delivered = {} if wanted.error else {"delivered_at": now}
    # A receiver's error may contain NUL. PostgreSQL would reject this update, and the notice would stay due forever.
    error = "".join(one if one.isprintable() else " " for one in wanted.error[:300])
    changed = {"attempts": notices.c.attempts + 1, "error": error, "next_at": wanted.next_at}
    mine = equals(notices.c.id, wanted.notice_id)
    transaction.connection.execute(update(notices).where(mine).values(**changed, **delivered))


def _is_target(target: str) -> bool:
    if not is_text(target, 500):
        return False
    if is_webhook(target):
        return " " not in target and not target.endswith("://")
    return is_email(target)


def _made_today(connection: Connection, account_id: str, now: float) -> int:
    """Counts today's notices of alerts. Notices of paused recharging have a separate limit (`pause_recharge`)."""
    has, day = notices.c, period_at("day", now)
    mine = (has.account_id == account_id, has.created_at >= day.begins, has.detail == "")
    return int(connection.execute(select(func.count()).select_from(notices).where(*mine)).scalar_one())


def _state(connection: Connection, alert: Row[Any], now: float) -> tuple[str, int]:
    """Returns the alert's next state, and the value that determines it."""
    if alert.kind == "balance":
        value = read_account(connection, alert.account_id).available(now)
        return (LOW if value < alert.threshold else ""), value
    if alert.kind == "month":
        month = period_at("month", now).name
        return _reached(alert, month, _spent(connection, alert.account_id, f"{month}-01", f"{month}-31"))
    today = period_at("day", now).name
    value = _spent(connection, alert.account_id, today, today)
    if alert.kind == "unusual" and value >= alert.threshold:
        first, last = (period_at("day", now - days * DAY_S).name for days in (DAYS_BEFORE, 1))
        before = _spent(connection, alert.account_id, first, last)
        if value * DAYS_BEFORE < UNUSUAL * before:
            return alert.state, value
    return _reached(alert, today, value)


def _reached(alert: Row[Any], period: str, value: int) -> tuple[str, int]:
    """Returns the next state and the value. The alert fires when its state changes, so at most once per period."""
    return (period if value >= alert.threshold else alert.state), value


def _spent(connection: Connection, account_id: str, first: str, last: str) -> int:
    daily = usage_daily.c
    in_days = (daily.account_id == account_id, daily.day >= first, daily.day <= last)
    return int(connection.execute(select(func.coalesce(func.sum(daily.charged), 0)).where(*in_days)).scalar_one())


def _alert(row: Row[Any]) -> Alert:
    return Alert(row.id, row.account_id, row.kind, row.threshold, row.target, row.state, row.created_at)
