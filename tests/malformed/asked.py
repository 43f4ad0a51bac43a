"""Sends the table and the cases to a server, and reports the responses that are wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.malformed.documents import GOOD
from tests.malformed.row import Row
from tests.malformed.transport import Case, good, head
from tests.malformed.wire import Answer, Closed, Wire

SOON_S = 1.0
SOON_FOR_50_MB_S = 10.0
TRIES = 3


@dataclass(frozen=True)
class Server:
    """Where to send, and the timeout of bodies there. With `is_balanced` HAProxy is in front."""

    port: int
    key: str
    body_timeout_s: float
    is_balanced: bool = False

    def serves(self) -> bool:
        """Whether a valid request on a new connection gets its reply."""
        with Wire(self.port, timeout_s=60) as wire:
            wire.send(good(self.key))
            return wire.answer().status == 200


def wrong_rows(server: Server, rows: Iterable[Row]) -> list[str]:
    """The problems of the responses to these rows, one line each. All requests use one connection."""
    wrong = []
    with Wire(server.port, timeout_s=30) as wire:
        for row in rows:
            answer, took = _ask(server, wire, row)
            found = wrong_answer(answer, row.status)
            if answer.error is not None and row.status != 200:
                told = (answer.error["code"], answer.error["param"])
                if told != (row.expected_code, row.param):
                    found.append(f"told {told}")
                found += [f"without {words!r}" for words in row.says if words not in answer.error["message"]]
            if took > _soon(row):
                found.append(f"after {took:.2f} s")
            if found:
                wrong.append(f"{row.name}: {', '.join(found)}: {answer.body[:200]!r}")
    return wrong


def _soon(row: Row) -> float:
    if row.status == 200:
        return 30.0  # the model needs this time
    return SOON_FOR_50_MB_S if row.name == "50 MB" else SOON_S


def _ask(server: Server, wire: Wire, row: Row) -> tuple[Answer, float]:
    """The answer and its time in seconds: the shortest of a few tries, because other load only adds to it."""
    raw = row.raw
    request = head(server.key, f"content-length: {len(raw)}", "content-type: application/json") + raw
    times = []
    for _ in range(TRIES):
        began = time.monotonic()
        wire.send(request)
        answer = wire.answer()
        times.append(time.monotonic() - began)
        if times[-1] <= _soon(row):
            break
    return answer, min(times)


def wrong_cases(server: Server, cases: Iterable[Case]) -> list[str]:
    """The problems of the responses to these cases. Each has its own connection; a valid request follows."""
    wrong = []
    for case in cases:
        for _ in range(TRIES):  # as above
            found = _wrong_case(server, case)
            if not any(words.startswith("after ") for words in found):
                break
        if not server.serves():
            found.append("the next request was not served")
        if found:
            wrong.append(f"{case.name}: {', '.join(found)}")
    return wrong


def _wrong_case(server: Server, case: Case) -> list[str]:
    expected = case.balanced if server.is_balanced else case.alone
    soon = SOON_FOR_50_MB_S if case.sized else SOON_S
    if expected == 408:
        soon += server.body_timeout_s
    with Wire(server.port, timeout_s=soon + 30) as wire:
        began = time.monotonic()
        for piece in case.pieces:
            wire.send(piece)
        if case.ends:
            wire.end()
        try:
            answer = wire.answer(case.method)
        except Closed:
            return [] if expected == "closed" else [f"closed instead of {expected}"]
        took = time.monotonic() - began
        found = wrong_answer(answer, expected)
        if took > soon and expected != 200:
            found.append(f"after {took:.2f} s")
        if case.usable:
            wire.send(good(server.key))
            if wire.answer().status != 200:
                found.append("the connection took no other request")
        return found


def wrong_answer(answer: Answer, expected: int | str) -> list[str]:
    """The problems of one response's status and form."""
    if isinstance(expected, str):
        return [] if expected == f"plain {answer.status}" else [f"{answer.status} instead of {expected}"]
    found = []
    if answer.status != expected:
        found.append(f"{answer.status} instead of {expected}")
    if answer.status >= 400:
        if answer.error is None:
            found.append("not in the form of the API")
        elif len(answer.error["message"]) < 10:
            found.append("no hint")
    if not answer.headers.get("x-request-id"):
        found.append("no x-request-id")
    return found


def drips(server: Server, pause: Callable[[], None]) -> Answer:
    """The answer to a body that comes byte for byte, with a pause before each, and never in time."""
    body = GOOD + b" " * 100_000
    with Wire(server.port, timeout_s=30) as wire:
        wire.send(head(server.key, f"content-length: {len(body)}"))
        for byte in body:
            wire.send(bytes([byte]))
            pause()
            if wire.has_answer(0):
                return wire.answer()
    raise AssertionError("a body came byte for byte, and nobody minded")
