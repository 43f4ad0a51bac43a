"""Responses that their accounts can read and continue until they expire.

A response is stored with the settlement of its request. A response that runs in the background is also stored when it
begins. Each account keeps its newest responses, up to a quota.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, delete, select, tuple_, update

from serve_app.accounting.database import Transaction
from serve_app.accounting.dialects import Upsert, insert_if_new
from serve_app.accounting.registry import reads, writes
from serve_app.accounting.schema import responses
from serve_app.accounting.validation import equals, is_text
from serve_app.contracts.books import RESPONSE_LOST_S, Settlement, StoredResponse
from serve_app.contracts.commands import (
    BeatResponses,
    BeginResponse,
    CancelResponse,
    DeleteResponse,
    EndResponse,
    FindResponse,
)
from serve_app.contracts.errors import InvalidValue

MAX_BODY = 8 * 2**20  # bytes
_YEAR_10000 = 253402300800.0

_RUNS = responses.c.beat_at.is_not(None)
_HAS_BODY = responses.c.body != b""  # false for a row that `delete_response` has kept without its body
# A stored response is replaced only while it is marked as running.
_ADD = Upsert(
    responses,
    lambda new: {name: new[name] for name in ("body", "expires_at", "beat_at")},
    where=lambda new: _RUNS,
)


def why_not_kept(response: StoredResponse) -> str | None:
    """Returns why a response cannot be kept, or None."""
    if not is_text(getattr(response, "response_id", None), 200):
        return "response_id: expected 1 to 200 printable characters"
    body, expires_at = getattr(response, "body", None), getattr(response, "expires_at", None)
    if not isinstance(body, bytes) or len(body) > MAX_BODY:
        return f"a body of at most {MAX_BODY} bytes was expected"
    if not isinstance(expires_at, int | float) or not 0 <= expires_at < _YEAR_10000:
        return f"expires_at {expires_at!r}: expected Unix seconds"
    return None


def _check(response: StoredResponse) -> None:
    if reason := why_not_kept(response):
        raise InvalidValue(reason)


def response_row(settlement: Settlement, response: StoredResponse, now: float) -> dict[str, Any]:
    return {"account_id": settlement.account_id, "created_at": now} | asdict(response) | {"beat_at": None}


def write_responses(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Stores one or more responses. Does not replace a stored response that has ended."""
    _ADD.run(connection, rows)


def kept_responses(settlements: Sequence[Settlement]) -> Iterator[tuple[str, int]]:
    """Yields account and size of each response that `settle` has stored."""
    for settlement in settlements:
        if settlement.response is not None and not why_not_kept(settlement.response):
            yield settlement.account_id, len(settlement.response.body)


def prune(connection: Connection, now: float, most: int) -> int:
    """Removes up to `most` expired responses. Returns their number."""
    mine = tuple_(responses.c.account_id, responses.c.response_id)
    old = select(responses.c.account_id, responses.c.response_id).where(responses.c.expires_at <= now)
    return connection.execute(delete(responses).where(mine.in_(old.limit(most)))).rowcount


@reads(FindResponse)
def find_response(connection: Connection, wanted: FindResponse, now: float) -> StoredResponse | None:
    query = select(responses).where(
        equals(responses.c.account_id, wanted.account_id),
        equals(responses.c.response_id, wanted.response_id),
        responses.c.expires_at > now,
        _HAS_BODY,
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else StoredResponse(row.response_id, bytes(row.body), row.expires_at, row.beat_at)


@writes(DeleteResponse)
def delete_response(transaction: Transaction, wanted: DeleteResponse, now: float) -> bool:
    """Deletes a response that has ended, or whose gateway has stopped sending heartbeats.

    In the second case, the row stays without its body. Otherwise the gateway could still store the response later.
    """
    its = (
        equals(responses.c.account_id, wanted.account_id),
        equals(responses.c.response_id, wanted.response_id),
        responses.c.expires_at > now,
        _HAS_BODY,
    )
    lost = responses.c.beat_at < now - RESPONSE_LOST_S
    connection = transaction.connection
    return (
        connection.execute(delete(responses).where(*its, ~_RUNS)).rowcount > 0
        or connection.execute(update(responses).where(*its, lost).values(body=b"", beat_at=None)).rowcount > 0
    )


@writes(BeginResponse)
def begin_response(transaction: Transaction, wanted: BeginResponse, now: float) -> None:
    _check(wanted.response)
    own = {"account_id": wanted.account_id, "created_at": now, "beat_at": now, "cancelled_at": None}
    insert_if_new(transaction.connection, responses, asdict(wanted.response) | own)


@writes(BeatResponses)
def beat_responses(transaction: Transaction, wanted: BeatResponses, now: float) -> tuple[tuple[str, str], ...]:
    mine = tuple_(responses.c.account_id, responses.c.response_id).in_(wanted.responses) & _RUNS
    transaction.connection.execute(update(responses).where(mine).values(beat_at=now))
    asked = select(responses.c.account_id, responses.c.response_id).where(mine, responses.c.cancelled_at.is_not(None))
    return tuple((row.account_id, row.response_id) for row in transaction.connection.execute(asked))


@writes(CancelResponse)
def cancel_response(transaction: Transaction, wanted: CancelResponse, now: float) -> StoredResponse | None:
    its = (
        equals(responses.c.account_id, wanted.account_id),
        equals(responses.c.response_id, wanted.response_id),
        _RUNS,
        responses.c.cancelled_at.is_(None),
    )
    transaction.connection.execute(update(responses).where(*its).values(cancelled_at=now))
    return find_response(transaction.connection, FindResponse(wanted.account_id, wanted.response_id), now)


@writes(EndResponse)
def end_response(transaction: Transaction, wanted: EndResponse, now: float) -> bool:
    ended = wanted.response
    _check(ended)
    its = (
        equals(responses.c.account_id, wanted.account_id),
        equals(responses.c.response_id, ended.response_id),
        _RUNS,
    )
    values = {"body": ended.body, "expires_at": ended.expires_at, "beat_at": None}
    return transaction.connection.execute(update(responses).where(*its).values(values)).rowcount > 0
