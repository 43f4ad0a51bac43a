"""Operators' notes about accounts, and their announcements to customers, which the console calls notices."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, insert, or_, select, update

from serve_app.accounting.audit_log import write_audit
from serve_app.accounting.console_tables import account_notes, announcements
from serve_app.accounting.database import Transaction
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.snapshots import read_account
from serve_app.accounting.validation import check_name, check_page, equals
from serve_app.contracts.errors import InvalidValue
from serve_app.contracts.key_format import new_id
from serve_app.contracts.operators import (
    LEVELS,
    AddNote,
    Announcement,
    EndAnnouncement,
    ListAnnouncements,
    ListNotes,
    Note,
    PublishAnnouncement,
)

LONGEST = 1000  # characters of a note or an announcement


@writes(AddNote)
def add_note(transaction: Transaction, wanted: AddNote, now: float) -> Note:
    connection = transaction.connection
    read_account(connection, wanted.account_id)
    text = " ".join(wanted.text.split())
    check_name(text, "a note", longest=LONGEST)
    note_id, row = _row_id("note_", wanted.once), {"account_id": wanted.account_id, "text": text}
    known = select(account_notes).where(equals(account_notes.c.id, note_id))
    if connection.execute(known).one_or_none() is None:
        row |= {"author": wanted.audit.actor}
        connection.execute(insert(account_notes).values(id=note_id, created_at=now, **row))
        write_audit(transaction, wanted.audit, "add_note", wanted.account_id, {}, now, subject=note_id)
    return _note(connection.execute(known).one())


@reads(ListNotes)
def list_notes(connection: Connection, wanted: ListNotes, _now: float) -> list[Note]:
    query = select(account_notes).where(equals(account_notes.c.account_id, wanted.account_id))
    query = query.order_by(account_notes.c.created_at.desc(), account_notes.c.id).limit(check_page(wanted.limit))
    return [_note(row) for row in connection.execute(query)]


@writes(PublishAnnouncement)
def publish_announcement(transaction: Transaction, wanted: PublishAnnouncement, now: float) -> Announcement:
    connection = transaction.connection
    if wanted.account_id:
        read_account(connection, wanted.account_id)
    text = " ".join(wanted.text.split())
    check_name(text, "a notice", longest=LONGEST)
    if wanted.level not in LEVELS:
        raise InvalidValue(f"level {wanted.level!r}: use one of {', '.join(LEVELS)}")
    starts_at = now if wanted.starts_at is None else wanted.starts_at
    if wanted.ends_at is not None and wanted.ends_at <= max(now, starts_at):
        raise InvalidValue("the notice must end after it begins, and not in the past")
    announcement_id = _row_id("notice_", wanted.once)
    known = select(announcements).where(equals(announcements.c.id, announcement_id))
    if connection.execute(known).one_or_none() is None:
        row = {"text": text, "level": wanted.level, "account_id": wanted.account_id, "author": wanted.audit.actor}
        times = {"starts_at": starts_at, "ends_at": wanted.ends_at}
        connection.execute(insert(announcements).values(id=announcement_id, **row, **times))
        detail = {"text": text, "level": wanted.level, **times}
        write_audit(
            transaction, wanted.audit, "publish_notice", wanted.account_id, detail, now, subject=announcement_id
        )
    return _announcement(connection.execute(known).one())


@writes(EndAnnouncement)
def end_announcement(transaction: Transaction, wanted: EndAnnouncement, now: float) -> None:
    connection = transaction.connection
    known = select(announcements).where(equals(announcements.c.id, wanted.announcement_id))
    row = connection.execute(known).one_or_none()
    if row is None:
        raise InvalidValue(f"no notice {wanted.announcement_id!r}")
    if row.ends_at is None or row.ends_at > now:
        connection.execute(update(announcements).where(announcements.c.id == row.id).values(ends_at=now))
        write_audit(transaction, wanted.audit, "end_notice", row.account_id, {"text": row.text}, now, subject=row.id)


@reads(ListAnnouncements)
def list_announcements(connection: Connection, wanted: ListAnnouncements, now: float) -> list[Announcement]:
    query = select(announcements).order_by(announcements.c.starts_at.desc(), announcements.c.id)
    if not wanted.ended:
        query = query.where(or_(announcements.c.ends_at.is_(None), announcements.c.ends_at > now))
    return [_announcement(row) for row in connection.execute(query.limit(check_page(wanted.limit)))]


def _row_id(prefix: str, idempotency_key: str) -> str:
    if not idempotency_key:
        return new_id(prefix)
    check_name(idempotency_key, "an idempotency key", longest=100)
    return f"{prefix}once_{idempotency_key}"


def _note(row: Row[Any]) -> Note:
    return Note(row.id, row.account_id, row.text, row.author, row.created_at)


def _announcement(row: Row[Any]) -> Announcement:
    return Announcement(row.id, row.text, row.level, row.account_id, row.starts_at, row.ends_at, row.author)
