"""Malformed bodies and requests over a real port, alone and behind HAProxy: each answered, and the next one served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.connections import served
from tests.gateway.haproxy import balanced
from tests.gateway.world import PATIENT_S, World
from tests.malformed import SAMPLE
from tests.malformed.asked import Server, drips, wrong_cases, wrong_rows
from tests.malformed.transport import Case, cases, sample

BODY_TIMEOUT_S = 0.5  # where a body is not to be complete


@pytest.fixture
def body_timeout_s() -> float:
    return BODY_TIMEOUT_S


@pytest.fixture(params=[False, True], ids=["alone", "behind HAProxy"])
async def server(
    make_world: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest, body_timeout_s: float
) -> AsyncIterator[Server]:
    world: World = await make_world(body_timeout_s=body_timeout_s)
    async with served(world) as port:
        if not request.param:
            yield Server(port, world.key, body_timeout_s)
            return
        async with balanced(port, tmp_path) as front:
            yield Server(front, world.key, body_timeout_s, is_balanced=True)


async def test_malformed_bodies_are_refused_as_the_parser_says_and_the_next_request_is_served(world: World) -> None:
    async with served(world) as port:
        server = Server(port, world.key, world.settings.body_timeout_s)
        assert await asyncio.to_thread(wrong_rows, server, [row for row in SAMPLE if not row.by_model]) == []
        assert await asyncio.to_thread(server.serves)


def are_complete(all_cases: Iterable[Case]) -> list[Case]:
    """Without those whose timeout is waited for."""
    return [case for case in all_cases if case.alone != 408]


@pytest.mark.parametrize("body_timeout_s", [PATIENT_S])
async def test_each_malformed_request_is_answered_or_closed_and_the_next_one_is_served(server: Server) -> None:
    some = sample(server.key) if server.is_balanced else cases(server.key)
    assert await asyncio.to_thread(wrong_cases, server, are_complete(some)) == []


@pytest.mark.slow
@pytest.mark.parametrize("server", [True], indirect=True, ids=["behind HAProxy"])
@pytest.mark.parametrize("body_timeout_s", [PATIENT_S])
async def test_each_malformed_request_behind_haproxy_is_answered_or_closed(server: Server) -> None:
    assert await asyncio.to_thread(wrong_cases, server, are_complete(cases(server.key))) == []


async def test_a_body_that_is_not_complete_in_time_is_408_and_the_next_one_is_served(server: Server) -> None:
    late = [case for case in cases(server.key) if case.alone == 408]
    assert late
    assert await asyncio.to_thread(wrong_cases, server, late) == []


async def test_a_body_that_comes_byte_for_byte_is_408_however_steadily_it_comes(server: Server) -> None:
    loop = asyncio.get_running_loop()

    def pause() -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(BODY_TIMEOUT_S / 10), loop).result()

    answer = await asyncio.to_thread(drips, server, pause)
    assert answer.status == 408
    assert server.is_balanced or answer.headers["connection"] == "close"
    assert answer.error is not None
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "body_timeout")
    assert "0.5 s" in answer.error["message"]
    assert await asyncio.to_thread(server.serves)


ADMIN: list[tuple[str, bytes, int, str | None, str]] = [
    ("no JSON", b"{", 400, None, "too early"),
    ("a byte order mark", b'\xef\xbb\xbf{"name": "Ada"}', 400, None, "byte order mark"),
    ("broken UTF-8", b'{"name": "\xff"}', 400, None, "UTF-8"),
    ("a surrogate alone", b'{"name": "\\ud800"}', 400, None, "pairs"),
    ("NaN", b'{"name": "Ada", "rpm": NaN}', 400, None, "NaN"),
    ("deep nesting", b'{"name": ' + b"[" * 10_000, 400, None, "200 deep"),
    ("an array", b"[]", 400, None, "an array of 0"),
    ("a string", b'"Ada"', 400, None, "the string"),
    ("too long", b'{"name": "' + b"x" * 70_000 + b'"}', 400, None, "65536 bytes"),
    ("no name", b"{}", 400, "name", "required"),
    ("a number for a name", b'{"name": 5}', 400, "name", "string"),
    ("null for a name", b'{"name": null}', 400, "name", "string"),
    ("an unknown field", b'{"name": "Ada", "colour": 1}', 400, "colour", "not permitted"),
    ("a number for an amount", b'{"name": "Ada", "credit": 5}', 400, "credit", "string"),
    ("a text for a limit", b'{"name": "Ada", "rpm": "5"}', 400, "rpm", "integer"),
    ("a fraction for a limit", b'{"name": "Ada", "rpm": 5.0}', 400, "rpm", "integer"),
    ("true for a limit", b'{"name": "Ada", "rpm": true}', 400, "rpm", "integer"),
    ("an empty name", b'{"name": ""}', 422, "name", "at least 1"),
    ("a long name", b'{"name": "' + b"x" * 101 + b'"}', 422, "name", "at most 100"),
    ("a limit of nothing", b'{"name": "Ada", "rpm": 0}', 422, "rpm", "greater than"),
    ("a limit of 400 digits", b'{"name": "Ada", "rpm": 1' + b"0" * 400 + b"}", 422, "rpm", "less than"),
    ("an amount in words", b'{"name": "Ada", "credit": "five"}', 422, "credit", "credit"),
    ("an amount that is no number", b'{"name": "Ada", "credit": "NaN"}', 422, "credit", "credit"),
    ("an endless amount", b'{"name": "Ada", "credit": "Infinity"}', 422, "credit", "credit"),
    ("a huge amount", b'{"name": "Ada", "credit": "1e999999999"}', 422, "credit", "credit"),
    ("an unknown kind", b'{"name": "Ada", "credit": "5", "kind": "gift"}', 422, "kind", "grant"),
    ("a time that is none", b'{"name": "Ada", "credit": "5", "kind": "grant", "expires_at": "soon"}',
     422, "expires_at", "2026-11-30"),
]  # fmt: skip


async def test_bodies_of_operators_are_read_as_strictly(world: World, admin: httpx.AsyncClient) -> None:
    accounts = (await admin.get("/admin/accounts")).json()["data"]
    for name, body, status, param, says in ADMIN:
        answer = await admin.post("/admin/accounts", content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (name, answer.text)
        assert error["code"] == {400: "invalid_format", 422: "invalid_parameter"}[status], name
        assert says in error["message"], name
        assert len(error["message"]) < 500, name
        assert answer.headers["x-request-id"]
    assert (await admin.get("/admin/accounts")).json()["data"] == accounts
