"""Describes what happened to a request, from its ledger row and its log lines. The ledger is authoritative for money.

The command line also uses this, for logs that were collected on the operator's machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, Field, ValidationError

from serve_app.admin.values import AccountId, BackendName, Count, KeyId, ModelId, Money, Reply, RequestId
from serve_app.api.doors import DOORS, door_of
from serve_app.contracts import metrics
from serve_app.contracts.books import Outcome
from serve_app.storage.request_log import PHASES, TEXTS, Line

_ID_PREFIXES: Final = tuple(door.id_prefix for door in DOORS)
_TRACE_ID: Final = re.compile("[0-9a-f]{32}")

_GATEWAY_DIED: Final = "Its gateway died; a replica settled what was produced."
_ONLY_LEDGER: Final = "Found only in the ledger: its log lines are on another node or were removed."
_SEARCH_ENDED: Final = "Found only in the ledger: the search in the log ended before it had read all files."
_NOT_IN_LEDGER: Final = (
    " Not in the ledger: it waits in a spool, is stuck (`serve-app ledger stuck`), or its month is archived."
)
_REPLICA_FIRST: Final = " A replica settled it before its gateway did."

_Text = Annotated[str, Field(pattern="^[ -~]{0,200}$")]


class _LogLine(BaseModel):
    """The fields that are read from a log line. Lines in a different format are ignored."""

    event: str
    request_id: _Text
    time: AwareDatetime
    client_request_id: _Text | None = None
    trace_id: _Text | None = None
    account: _Text | None = None
    key: _Text | None = None
    model: str | None = None
    backend: str | None = None
    replica: str | None = None
    status: int | None = None
    code: str | None = None
    outcome: Outcome | None = None
    finish_reason: str | None = None
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    price: Money = "0.00"
    admit_ms: float | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    settle_ms: float | None = None
    first_token_ms: float | None = None
    total_ms: float | None = None


_Ms = Annotated[float | None, Field(ge=0)]


class RequestTimings(Reply):
    """Durations in milliseconds; null: the phase was not reached, or its duration is not known."""

    admit_ms: _Ms = Field(description="Time for the limiter's decision.", examples=[2.0])
    queue_ms: _Ms = Field(description="Time in the replica's queue.", examples=[8.0])
    prefill_ms: _Ms = Field(description="Prefill, up to the first token.", examples=[230.0])
    decode_ms: _Ms = Field(description="Generation of the remaining tokens.", examples=[1600.0])
    settle_ms: _Ms = Field(description="Time until the usage was durable.", examples=[12.0])
    first_token_ms: _Ms = Field(description="Time from the request's arrival to the first token.", examples=[240.0])
    total_ms: _Ms = Field(description="Time from the request's arrival to its end.", examples=[1852.0])


class RequestSummary(Reply):
    """A summary of a request. Tokens and price come from the ledger if it has them."""

    request_id: RequestId
    door: str | None = Field(
        description="Path of the endpoint, such as `/chat/completions`; null: unknown.", examples=["/chat/completions"]
    )
    client_request_id: str | None = Field(
        description="The client's `x-request-id`; null: none.", examples=["order-4711"]
    )
    trace_id: str | None = Field(description="null: unknown.", examples=["5d41402abc4b2a76b9719d911017c592"])
    time: str = Field(
        description="Arrival time in UTC.",
        json_schema_extra={"format": "date-time"},
        examples=["2026-11-30T12:00:00.000Z"],
    )
    account_id: AccountId | None = Field(description="null: unknown.")
    key_id: KeyId | None = Field(description="null: unknown.")
    model: ModelId | None = Field(description="null: the request was refused before its model was known.")
    backend: BackendName | None = Field(description="null: the request was refused before its backend was known.")
    replica: str | None = Field(description="null: unknown.", examples=["k3v9qd2x"])
    status: int | None = Field(
        description="HTTP status of the answer; 499: the client hung up; null: unknown.", examples=[200]
    )
    code: str | None = Field(description="Error code; null: no error.", examples=[None])
    outcome: Literal["completed", "cancelled", "failed"] | None = Field(
        description="Outcome as settled; null: not settled."
    )
    finish_reason: str | None = Field(description="As in the reply; null: unknown.", examples=["stop"])
    prompt_tokens: Count = Field(examples=[1200])
    cached_tokens: Count = Field(description="Cached part of `prompt_tokens`.", examples=[200])
    completion_tokens: Count = Field(examples=[340])
    price: Money = Field(description="The amount charged, in the account's currency.", examples=["0.000658"])
    timings: RequestTimings
    waited_for: str | None = Field(
        description="Longest phase of the request; null: no phase is known.",
        examples=["the other tokens of the reply (decode), 1,600 ms of 1,852 ms"],
    )
    note: str = Field(description="What happened to the request.", examples=["Served."])


def request_ids(asked: str, lines: Iterable[Line]) -> list[str]:
    """Returns the ids of the requests in these lines: an exact match first, then the newest first."""
    found = {line.request_id: line.time for line in _read(lines)}
    return sorted(found, key=lambda one: (one == asked, found[one]), reverse=True)


def possible_ids(asked: str) -> tuple[str, ...]:
    """Returns the ids that a request with this trace id may have, one per door. Other ids are returned unchanged."""
    return tuple(prefix + asked for prefix in _ID_PREFIXES) if _TRACE_ID.fullmatch(asked) else (asked,)


def tell(
    request_id: str, billed: Mapping[str, Any] | None, log: Iterable[Line], *, searched_all: bool = True
) -> RequestSummary:
    """Summarises a request. `billed` is its ledger row as the API returns it.

    At least one of `billed` and the log must have the request.
    """
    lines = [line for line in _read(log) if line.request_id == request_id]
    ended = next((line for line in reversed(lines) if line.event == "request"), None)
    settled = next((line for line in reversed(lines) if line.event != "request"), None)
    row = None if billed is None else _from_row(billed)
    known = ended or settled or row
    assert known is not None
    books = row or known
    if ended is not None:
        note = _note(ended, books.price)
    elif settled is not None:
        note = _GATEWAY_DIED
    else:
        note = _ONLY_LEDGER if searched_all else _SEARCH_ENDED
    if row is None and known.outcome is not None:
        note += _NOT_IN_LEDGER
    elif ended is not None and settled is not None:
        note += _REPLICA_FIRST
    timings = RequestTimings(**{name: getattr(known, name) for name in RequestTimings.model_fields})
    door = door_of(request_id)
    digits = request_id if door is None else request_id.removeprefix(door.id_prefix)
    return RequestSummary(
        request_id=request_id,
        door=None if door is None else door.path,
        client_request_id=known.client_request_id or None,
        # If the client sent no trace, the request's own digits are its trace id.
        trace_id=known.trace_id or (digits if _TRACE_ID.fullmatch(digits) else None),
        time=known.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        account_id=books.account,
        key_id=books.key,
        model=_served(books.model),
        backend=_served(books.backend),
        replica=known.replica,
        status=known.status,
        code=known.code,
        outcome=None if books.outcome is None else books.outcome.value,
        finish_reason=known.finish_reason,
        prompt_tokens=books.prompt_tokens,
        cached_tokens=books.cached_tokens,
        completion_tokens=books.completion_tokens,
        price=books.price,
        timings=timings,
        waited_for=_waited_for(timings),
        note=note,
    )


def without_texts(lines: Sequence[Line]) -> list[Line]:
    return [{name: value for name, value in line.items() if name not in TEXTS} for line in lines]


def _read(lines: Iterable[Line]) -> list[_LogLine]:
    found = []
    for line in lines:
        try:
            found.append(_LogLine.model_validate(line))
        except ValidationError:
            continue
    return found


def _from_row(row: Mapping[str, Any]) -> _LogLine:
    """Converts a ledger row to the form of a log line."""
    line = _LogLine.model_validate(
        {**row, "event": "", "time": row["started_at"], "account": row["account_id"], "key": row["key_id"]}
        | {"price": row["charged"]}
    )
    took = datetime.fromisoformat(row["finished_at"]) - line.time
    line.total_ms = max(0.0, round(took.total_seconds() * 1000, 3))
    return line


def _note(line: _LogLine, price: str) -> str:
    answer = " ".join(str(part) for part in (line.status, line.code) if part)
    bill = "what was produced is billed" if Decimal(price) else "nothing is billed"
    match line.outcome:
        case Outcome.COMPLETED if line.status == 200:
            return "Served."
        case Outcome.COMPLETED:
            return "The service completed and billed the reply. The client disconnected before it had all of it."
        case Outcome.CANCELLED if line.code == "server_error":
            return f"The service failed after it had sent text: {answer}; {bill}."
        case Outcome.CANCELLED:
            return f"The client disconnected; {bill}."
        case Outcome.FAILED:
            return f"The service failed: {answer}; nothing is billed."
    if line.status == 200:
        return "Answered with the stored reply of an earlier request; nothing is billed."
    if line.status == 499:
        return f"The client disconnected before a model received the request; {bill}."
    return f"The service failed: {answer}; {bill}." if line.status == 500 else f"Refused: {answer}."


def _waited_for(timings: RequestTimings) -> str | None:
    taken = {phase: ms for phase in PHASES if (ms := getattr(timings, f"{phase}_ms")) is not None}
    if not taken:
        return None
    longest = max(taken, key=lambda phase: taken[phase])
    return f"{PHASES[longest]} ({longest}), {taken[longest]:,.0f} ms" + (
        "" if timings.total_ms is None else f" of {timings.total_ms:,.0f} ms"
    )


def _served(name: str | None) -> str | None:
    return None if name == metrics.NONE else name
