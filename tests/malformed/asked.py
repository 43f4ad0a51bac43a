"""Sends rows and cases to a server, and reports the responses that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.malformed.documents import GOOD
from tests.malformed.row import Row
from tests.malformed.transport import Case, good, head
from tests.malformed.wire import Answer, Closed, Wire

WAIT_S = 60.0


@dataclass(frozen=True)
class Server:
    """A server's port, its key and its timeout of bodies. With `is_balanced`, HAProxy is in front."""

    port: int
    key: str
    body_timeout_s: float
    is_balanced: bool = False

    def serves(self) -> bool:
        """Returns whether a valid request on a new connection gets its reply."""
        with Wire(self.port, WAIT_S) as wire:
            wire.send(good(self.key))
            return wire.answer().status == 200


def wrong_rows(server: Server, rows: Iterable[Row]) -> list[str]:
    """The problems of the responses to these rows, one line each. All requests use one connection."""
    wrong = []
    with Wire(server.port, WAIT_S) as wire:
        for row in rows:
            raw = row.raw
            wire.send(head(server.key, f"content-length: {len(raw)}", "content-type: application/json") + raw)
            answer = wire.answer()
            found = wrong_answer(answer, row.status)
            if answer.error is not None and row.status != 200:
                told = (answer.error["code"], answer.error["param"])
                if told != (row.expected_code, row.param):
                    found.append(f"told {told}")
                found += [f"without {words!r}" for words in row.says if words not in answer.error["message"]]
            if found:
                wrong.append(f"{row.name}: {', '.join(found)}: {answer.body[:200]!r}")
    return wrong


def wrong_cases(server: Server, cases: Iterable[Case]) -> list[str]:
    """The problems of the responses to these cases. Each has its own connection; a valid request follows."""
    wrong = []
    for case in cases:
        found = _wrong_case(server, case)
        if not server.serves():
            found.append("the next request was not served")
        if found:
            wrong.append(f"{case.name}: {', '.join(found)}")
    return wrong


def _wrong_case(server: Server, case: Case) -> list[str]:
    expected = case.balanced if server.is_balanced else case.alone
    with Wire(server.port, server.body_timeout_s + WAIT_S) as wire:
        for piece in case.pieces:
            wire.send(piece)
        if case.ends:
            wire.end()
        try:
            answer = wire.answer(case.method)
        except Closed:
            return [] if expected == "closed" else [f"closed instead of {expected}"]
        found = wrong_answer(answer, expected)
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
    with Wire(server.port, WAIT_S) as wire:
        wire.send(head(server.key, f"content-length: {len(body)}"))
        for byte in body:
            wire.send(bytes([byte]))
            pause()
            if wire.has_answer():
                return wire.answer()
    raise AssertionError("a body came byte for byte, and no response came")
