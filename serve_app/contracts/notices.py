"""Alerts that an account configures, and the notices about them. Amounts are nano-units, times Unix seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command

#: Kinds of alerts, with the condition that triggers each.
KINDS: Final = {
    "balance": "the balance is below the threshold",
    "day": "a day's spending reaches the threshold",
    "month": "a month's spending reaches the threshold",
    "unusual": "a day's spending reaches the threshold and three times the mean of the seven days before",
}
MAX_ALERTS: Final = 20  # per account
MAX_A_DAY: Final = 50  # notices of an account's alerts per UTC day
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#: E-mail addresses as browsers accept them, but without `=?`, which a mail program may decode to another address.
_EMAIL = re.compile(rf"(?!.*=\?)[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]+@{_LABEL}(?:\.{_LABEL})*")


def is_webhook(target: str) -> bool:
    """Returns whether a target is the address of a webhook. All other targets are e-mail addresses."""
    return target.partition("://")[0].lower() in ("https", "http")


def is_email(text: str) -> bool:
    return _EMAIL.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. It fires when `state` changes to a value that is not empty.

    `state` is the last day ("2026-09-28") or month ("2026-09") whose spending reached the threshold. For a balance
    alert, it is "low" while the balance is below the threshold. Otherwise it is empty.
    """

    alert_id: str
    account_id: str
    kind: str
    threshold: int
    target: str  # an e-mail address, or the address of a webhook
    state: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """A pending change of an alert's state from `before` to `state`. The alert fires unless `state` is empty."""

    alert_id: str
    before: str
    state: str
    value: int  # the balance or spending found


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about a fired alert or paused recharging. `next_at` is None once it is delivered or given up."""

    notice_id: str
    account_id: str
    account_name: str
    currency: str
    kind: str
    threshold: int
    value: int
    target: str
    created_at: float
    attempts: int
    next_at: float | None
    delivered_at: float | None
    error: str
    secret: str = field(default="", repr=False)  # signs a webhook's messages
    detail: str = ""  # reason why recharging is paused; empty in a notice of an alert


@dataclass(frozen=True, slots=True)
class CreateAlert(Command[Alert]):
    """Creates an alert. A repetition with the same `alert_id` returns the first alert.

    Raises AccountNotFound, InvalidValue, and Conflict if the account has MAX_ALERTS or the id is used for something
    else.
    """

    account_id: str
    kind: str
    threshold: int
    target: str
    secret: str = field(repr=False)
    audit: Audit | None = None
    alert_id: str | None = None  # from `key_format.new_id`, or equally hard to guess; None: a new id


@dataclass(frozen=True, slots=True)
class ListAlerts(Command[list[Alert]]):
    """Returns the alerts of an account, oldest first. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class RemoveAlert(Command[None]):
    """Removes an alert; its notices stay. Harmless to repeat."""

    account_id: str
    alert_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class WatchAlerts(Command[tuple[list[Alarm], str | None]]):
    """Checks up to 200 alerts after an id. Returns due state changes, and the id to continue from, None at the end."""

    after: str = ""


@dataclass(frozen=True, slots=True)
class RaiseAlarm(Command[bool]):
    """Changes an alert's state, and creates a notice if it fires. Returns False if the state changed meanwhile.

    After MAX_A_DAY notices of an account in a UTC day, one more is created, which is not sent and states this limit.
    Then none is created until the next day.
    """

    alarm: Alarm


@dataclass(frozen=True, slots=True)
class ListNotices(Command[list[Notice]]):
    """Returns an account's notices, latest first. Without an account, returns the notices that are due.

    Due notices start with the oldest of each account, followed by the second oldest of each, and so on. An account with
    many notices therefore does not delay the others.
    """

    account_id: str | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class RecordAttempt(Command[None]):
    """Records a delivery attempt. `error` is empty if the notice was delivered.

    `next_at` is the time of the next attempt, or None if there is none.
    """

    notice_id: str
    error: str
    next_at: float | None
