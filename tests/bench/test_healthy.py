"""Ordinary traffic is the same for a seed, and its statuses are those that a client sees."""

from __future__ import annotations

from random import Random

import httpx
import pytest

from bench.healthy.traffic import Keys, Traffic

KEYS = Keys("sk-roomy", "sk-narrow")


def traffic() -> Traffic:
    return Traffic("http://service", KEYS, 1)


def conversations(seed: int) -> list[tuple[str, str]]:
    rng = Random(seed)
    return [(key, repr(body)) for _ in range(50) for key, body in traffic().conversation(rng)]


def test_the_same_seed_sends_the_same_requests_and_another_one_others() -> None:
    assert conversations(1) == conversations(1) != conversations(2)


def test_it_has_streams_whole_replies_tools_limits_and_mistakes() -> None:
    rng = Random(1)
    sent = [pair for _ in range(200) for pair in traffic().conversation(rng)]
    assert {body["stream"] for _, body in sent} == {True, False}
    assert {key for key, _ in sent} == {"sk-roomy", "sk-narrow"}
    assert any("tools" in body for _, body in sent)
    assert any(body["model"] == "no-such-model" for _, body in sent)
    assert any(len(body["messages"]) > 3 for _, body in sent), "conversations go on"


@pytest.mark.parametrize(
    ("status", "text", "hangs_up", "seen"),
    [
        (200, 'data: {"choices": []}\n\ndata: [DONE]\n\n', False, 200),
        (200, 'data: {"choices": []}\n\ndata: {"error": {}}\n\n', False, 500),
        (200, 'data: {"choices": []}\n\ndata: [DONE]\n\n', True, 499),
        (429, '{"error": {}}', True, 429),
        (503, '{"error": {}}', False, 503),
    ],
)
async def test_a_status_is_that_which_its_client_sees(status: int, text: str, hangs_up: bool, seen: int) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    async with httpx.AsyncClient(base_url="http://service", transport=transport) as http:
        assert await traffic().ask(http, "sk-roomy", {"stream": True}, hangs_up=hangs_up) == seen


async def test_a_connection_that_fails_is_no_reply() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with httpx.AsyncClient(base_url="http://service", transport=httpx.MockTransport(refuse)) as http:
        assert await traffic().ask(http, "sk-roomy", {"stream": True}, hangs_up=False) == 0
