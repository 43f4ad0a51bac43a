"""What an account wants to be told, and what it was told. Amounts are nano-units, times Unix seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from serve_app.contracts.books import Audit
from serve_app.contracts.commands import Command

#: What an alert watches, with what makes it fire.
KINDS: Final = {
    "balance": "the balance is below it",
    "day": "a day's spending reaches it",
    "month": "a month's spending reaches it",
    "unusual": "a day's spending reaches it, and three times the mean of the seven days before",
}
MAX_ALERTS: Final = 20  # of an account
MAX_A_DAY: Final = 50  # notices of an account's alerts in a day of UTC
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#: What browsers accept as an e-mail address, without `=?`: a mail program may read that as another, encoded address.
_EMAIL = re.compile(rf"(?!.*=\?)[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]+@{_LABEL}(?:\.{_LABEL})*")


def is_webhook(target: str) -> bool:
    """Whether a target is the address of a webhook. All others get e-mail."""
    return target.partition("://")[0].lower() in ("https", "http")


def is_email(text: str) -> bool:
    return _EMAIL.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Alert:
    """`state` is why it has fired last: a day, a month, or "low"; empty when it may fire again."""

    alert_id: str
    account_id: str
    kind: str
    threshold: int
    target: str  # an e-mail address, or the address of a webhook
    state: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alert whose state is to change from `before` to `state`; it fires unless that is empty."""

    alert_id: str
    before: str
    state: str
    value: int  # the balance or spending that was found


@dataclass(frozen=True, slots=True)
class Notice:
    """One firing, and how telling it went. `next_at` is None when it is delivered or given up."""

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
    secret: str = field(default="", repr=False)  # what a webhook's messages are signed with
    detail: str = ""  # why recharging is paused; empty in a notice of an alert


@dataclass(frozen=True, slots=True)
class CreateAlert(Command[Alert]):
    """With an `alert_id`, a repetition returns the first alert. Raises AccountNotFound, InvalidValue, and Conflict
    when the account has its most, or the id stands for something else.
    """

    account_id: str
    kind: str
    threshold: int
    target: str
    secret: str = field(repr=False)
    audit: Audit | None = None
    alert_id: str | None = None  # of `key_format.new_id`, or as hard to guess; None: a new one


@dataclass(frozen=True, slots=True)
class ListAlerts(Command[list[Alert]]):
    """Of an account, oldest first. Raises AccountNotFound."""

    account_id: str


@dataclass(frozen=True, slots=True)
class RemoveAlert(Command[None]):
    """What it has told stays. Harmless to repeat."""

    account_id: str
    alert_id: str
    audit: Audit | None = None


@dataclass(frozen=True, slots=True)
class WatchAlerts(Command[tuple[list[Alarm], str | None]]):
    """Looks at up to 200 alerts after an id: those whose state is to change, and where to go on, None at the end."""

    after: str = ""


@dataclass(frozen=True, slots=True)
class RaiseAlarm(Command[bool]):
    """Changes the alert's state, unless somebody else has, and makes the notice. Whether it changed the state.

    After `MAX_A_DAY` notices one more is made that is not sent and says why, then none until the next day.
    """

    alarm: Alarm


@dataclass(frozen=True, slots=True)
class ListNotices(Command[list[Notice]]):
    """The latest of an account first; without an account, those that are due: each account's oldest, then each one's
    second, and so on, so that one with many does not keep the others waiting.
    """

    account_id: str | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class RecordAttempt(Command[None]):
    """How telling went: an empty error is delivered. `next_at` is when to try again, None never."""

    notice_id: str
    error: str
    next_at: float | None
