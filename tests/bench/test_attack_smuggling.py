"""A smuggled request is found by its effect, its response, or a response that another client gets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.attack import smuggling, smuggling_cases
from bench.attack.smuggling import Seen, effects, verdict
from bench.attack.smuggling_cases import PREFIX, Case

REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"
HIDDEN = f"HTTP/1.1 201 Created\r\nx-request-id: {PREFIX}7\r\ncontent-length: 2\r\n\r\n{{}}".encode()
OWN = (("n-1", b"HTTP/1.1 200 OK\r\nx-request-id: n-1\r\n\r\n"),)
PLAIN = Case("plain", b"")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def problems(case: Case, reply: bytes, *, others: Any = OWN, effect: bool = False) -> list[str]:
    found: list[str] = verdict(7, case, Seen(reply, True, others, effect))["problems"]
    return found


@pytest.mark.parametrize("reply", [b"", REFUSED, CONTINUE + REFUSED], ids=["closed", "refused", "asked for the body"])
def test_one_response_or_none_is_as_it_must_be(reply: bytes) -> None:
    assert problems(PLAIN, reply) == []


@pytest.mark.parametrize(
    ("reply", "others", "effect"),
    [
        (REFUSED + REFUSED, OWN, False),
        (HIDDEN, OWN, False),
        (REFUSED, OWN, True),
        (REFUSED, (("n-1", HIDDEN),), False),
        (REFUSED, (("n-1", b""),), False),
        (REFUSED, (("n-1", OWN[0][1] + HIDDEN),), False),
        (REFUSED, (("n-2", OWN[0][1]),), False),
    ],
    ids=["two responses", "the hidden one's", "its effect", "at another", "none at another", "two there", "another's"],
)
def test_a_request_that_slips_through_is_found(reply: bytes, others: Any, effect: bool) -> None:
    assert problems(PLAIN, reply, others=others, effect=effect)


def test_an_honest_second_request_must_be_served() -> None:
    honest = Case("honest", b"", most=2, honest=True)
    assert problems(honest, REFUSED + HIDDEN, effect=True) == []
    assert problems(honest, REFUSED, effect=True)
    assert problems(honest, REFUSED + HIDDEN, effect=False)


def test_where_two_readings_are_correct_either_is_as_it_must_be() -> None:
    either = Case("either", b"", most=2, either=True)
    assert problems(either, REFUSED + HIDDEN, effect=True) == []
    assert problems(either, REFUSED) == []
    assert problems(either, REFUSED + HIDDEN + REFUSED)


def test_every_case_hides_a_request_of_its_own() -> None:
    cases = list(smuggling_cases.cases("operator"))
    assert len({case.name for case in cases}) == len(cases)
    for number, case in enumerate(cases):
        assert case.name == "a trailer that names a length" or f'"{PREFIX}{number}"'.encode() in case.data
    assert sum(case.honest for case in cases) == 1


def test_effects_are_read_from_the_names_of_accounts() -> None:
    assert effects(["ordinary-1", f"{PREFIX}3", f"{PREFIX}14", f"{PREFIX}x"]) == {3, 14}


@contextlib.asynccontextmanager
async def careless() -> AsyncIterator[int]:
    """A server that ignores bodies: whatever follows a head is the next request. It hangs up after two."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for _ in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                ids = [line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id:")]
                writer.write(b"\r\n".join([b"HTTP/1.1 200 OK", *ids, b"content-length: 0", b"", b""]))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_server_that_ignores_bodies_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smuggling, "SILENCE_S", 60.0)
    number, case = next(
        (number, case)
        for number, case in enumerate(smuggling_cases.cases("operator"))
        if case.name == "a body that is not read"
    )
    async with careless() as port:
        reply, closed = await smuggling.send(port, case)
    found = verdict(number, case, Seen(reply, closed, (), False))
    assert found["statuses"] == [200, 200]
    assert found["problems"]
