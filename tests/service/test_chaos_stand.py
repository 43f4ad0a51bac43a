"""The chaos stand itself: a seed repeats a run, and each kind of fault in the books is found."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.service.chaos.books import Account, Books, Row, problems
from tests.service.chaos.load import Ask, Tally, Usage, ask_once
from tests.service.chaos.schedule import KINDS, plan
from tests.service.chaos.stand import process_title

pytestmark = [pytest.mark.slow, pytest.mark.long]


def row(number: int, **changes: Any) -> Row:
    return replace(Row(f"r{number}", "a", 10, 2, 5, 100, 0, "completed"), **changes)


def usage(number: int, **changes: Any) -> Usage:
    return replace(Usage(f"r{number}", "a", 10, 2, 5), **changes)


ACCOUNT = Account("a", credited=1000, balance=800, held=0, open_requests=0, sent=2)
SOUND = Books([usage(1), usage(2)], [row(1), row(2)], [ACCOUNT], [])


def test_sound_books_have_no_problem() -> None:
    assert problems(SOUND) == []
    # The run whose replica was lost, and the one that made the reply.
    lost = row(1, charged=0, outcome="failed")
    again = row(1, request_id="r1-2")
    assert problems(replace(SOUND, received=[usage(1, request_id="r1-2")], rows=[lost, again, row(2)])) == []
    # A client that hung up received no usage, but what was produced is still billed.
    assert problems(replace(SOUND, received=[usage(1)], rows=[row(1), row(2, outcome="cancelled")])) == []


@pytest.mark.parametrize(
    ("books", "names"),
    [
        (replace(SOUND, received=[usage(1), usage(3)]), "does not have it"),
        (replace(SOUND, received=[usage(1, completion_tokens=6)]), "the ledger has"),
        (replace(SOUND, received=[usage(1, account_id="b")]), "the ledger has"),
        (replace(SOUND, rows=[row(1), row(2, outcome="failed")]), "the ledger has"),
        (replace(SOUND, received=[usage(1)], rows=[row(1), row(1)]), "more than once"),
        (replace(SOUND, received=[usage(1), usage(1)]), "answered twice"),
        (replace(SOUND, accounts=[replace(ACCOUNT, sent=1)]), "made 1"),
        (replace(SOUND, accounts=[replace(ACCOUNT, balance=801)]), "has 801"),
        (replace(SOUND, accounts=[replace(ACCOUNT, credited=100, balance=-100)]), "negative"),
        (replace(SOUND, accounts=[replace(ACCOUNT, held=1)]), "still holds"),
        (replace(SOUND, accounts=[replace(ACCOUNT, open_requests=1)]), "still holds"),
        (replace(SOUND, check=["an entry is off"]), "off"),
        (
            replace(SOUND, rows=[*SOUND.rows, row(1, request_id="r1-2")], accounts=[replace(ACCOUNT, balance=700)]),
            "2 runs of request r1 are charged",
        ),
    ],
)
def test_each_kind_of_fault_is_found(books: Books, names: str) -> None:
    found = problems(books)
    assert len(found) == 1
    assert names in found[0]


def test_a_seed_gives_the_same_kills_again_and_every_kind_comes_equally_often() -> None:
    kills = plan(1, 300)
    assert kills == plan(1, 300) != plan(2, 300)
    assert [kill.at_s for kill in kills] == sorted(kill.at_s for kill in kills)
    assert 0 < kills[0].at_s < kills[-1].at_s < 300
    counts = Counter(kill.kind for kill in kills)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(kills) > 50
    assert any(one.at_s == other.at_s for one, other in itertools.pairwise(kills))
    assert {kill.kind for kill in plan(1, 300, ["limiter"])} == {"limiter"}


def test_only_the_replicas_of_a_kind_are_killed() -> None:
    limiter = process_title("limiter", "stub")
    for name in ("Limiter", "Limiter.ask", "limiter-0", "Limiter-12:ask", "Limiter_2 x", "Limiter1"):
        assert limiter.match(f"ray::ServeReplica:gateway:{name}"), name
    for name in ("gateway:Gateway", "stub:Limiter", "gateway:LimiterProxy", "gateway:Accounting"):
        assert not limiter.match(f"ray::ServeReplica:{name}"), name
    assert not limiter.match("grep ray::ServeReplica:gateway:Limiter")
    assert process_title("model", "stub").match("ray::ServeReplica:stub:Model")
    assert not process_title("model", "stub").match("ray::ServeReplica:smollm2:Model")


REPLY = {
    "id": "r1",
    "usage": {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}},
}
EVENTS = [{"id": "r1", "choices": [{}], "usage": None}, {**REPLY, "choices": []}]
CUSTOMER: Any = SimpleNamespace(id="a", key="sk")


def stream(*events: dict[str, Any], done: bool = True) -> httpx.Response:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")
    return httpx.Response(200, text=text)


@pytest.mark.parametrize(
    ("ask", "answer", "served", "counted", "received"),
    [
        (Ask(False, 3, 5, None), httpx.Response(200, json=REPLY), True, "200", [usage(1)]),
        (Ask(True, 3, 5, None), stream(*EVENTS), True, "200", [usage(1)]),
        # The usage was received, so it counts although the stream broke.
        (Ask(True, 3, 5, None), stream(*EVENTS, done=False), False, "a stream without its end", [usage(1)]),
        (Ask(True, 3, 5, 1), stream(EVENTS[0], EVENTS[0], EVENTS[1]), True, "hung up", []),
        (Ask(True, 3, 5, None), stream(EVENTS[0], {"error": {"type": "x"}}), False, "error event x", []),
        (Ask(True, 3, 5, None), httpx.Response(503, text="<html>"), False, "503 of the load balancer", []),
    ],
)
async def test_a_client_notes_what_it_received(
    ask: Ask, answer: httpx.Response, served: bool, counted: str, received: list[Usage]
) -> None:
    tally = Tally()
    transport = httpx.MockTransport(lambda _: answer)
    async with httpx.AsyncClient(base_url="http://x", transport=transport) as http:
        assert await ask_once(http, CUSTOMER, ask, tally) is served
    assert dict(tally.answers) == {counted: 1}
    assert tally.received == received
    assert tally.sent["a"] == 1
    assert tally.wrong == []


async def test_replies_that_no_client_may_get_are_kept() -> None:
    error = {"error": {"message": "the key is unknown", "type": "authentication_error"}}
    tally = Tally()
    unasked = httpx.Response(401, json=error, headers={"x-request-id": "1"})
    impatient = httpx.Response(503, json=error, headers={"x-request-id": "1"})
    for answer in (unasked, impatient):
        transport = httpx.MockTransport(lambda _, answer=answer: answer)
        async with httpx.AsyncClient(base_url="http://x", transport=transport) as http:
            await ask_once(http, CUSTOMER, Ask(False, 3, 5, None), tally)
    assert len(tally.wrong) == 2
