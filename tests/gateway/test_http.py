"""The chat endpoint and the other endpoints over HTTP: what arrives, in which order, in which form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any

import httpx
import pytest

from serve_app.api.chat_door import ChatDoor
from serve_app.api.door import Door
from serve_app.api.doors import DOORS, TOKEN_DOORS
from serve_app.api.token_door import TokenDoor
from serve_app.contracts import key_format as keys
from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.gateway.reply_endpoint import ReplyEndpoint
from tests.gateway.connections import Call, chat_body, http_request, served
from tests.gateway.world import NANO, OPERATOR, World, price, says, until

# Streams


async def test_a_stream_is_made_of_role_content_finish_usage_and_done(world: World) -> None:
    world.backends.play(says("Hel", "lo", prompt=7))
    call = await Call(world, stream=True, stream_options={"include_usage": True}).done()
    assert call.headers["content-type"].startswith("text/event-stream")
    assert call.headers["cache-control"] == "no-cache"
    assert call.headers["x-accel-buffering"] == "no"
    *chunks, usage = call.events
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {},
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 9
    assert call.data[-1] == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in call.events}) == 1


async def test_an_empty_reply_still_has_its_role(world: World) -> None:
    world.backends.play([Started(7, 0), Finished(FinishReason.STOP, 7, 0, 0)])
    call = await Call(world, stream=True).done()
    assert call.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert call.data[-1] == "[DONE]"


async def test_headers_wait_for_the_first_event(world: World) -> None:
    queued = asyncio.Event()
    world.backends.play([queued, *says("x")])
    call = Call(world, stream=True)
    await until(lambda: world.backends.running)
    assert call.status == 0
    queued.set()
    assert (await call.done()).status == 200


async def test_a_stream_that_waits_is_kept_alive_with_whole_comment_frames(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(keep_alive_s=0.01)
    prefill = asyncio.Event()
    world.backends.play([Started(10, 0), prefill, Delta("x", 1), Finished(FinishReason.STOP, 10, 0, 1)])
    call = Call(world, stream=True)
    await call.until(": keep-alive\n\n: keep-alive\n\n")
    prefill.set()
    await call.done()
    frames = call.body.decode().split("\n\n")
    assert all(frame.startswith(("data: ", ": keep-alive")) for frame in frames if frame)
    assert call.text == "x"


async def test_a_request_that_is_queued_and_then_refused_has_its_own_status(
    make_world: Callable[..., Any], let_pass: Callable[[float], None]
) -> None:
    world: World = await make_world(queue_timeout_s=600.0, keep_alive_s=0.01)
    world.backends.play([asyncio.Event()])
    call = Call(world, stream=True)
    await until(lambda: world.backends.running)
    let_pass(1000.0)
    await call.done()
    assert call.status == 503
    assert b"keep-alive" not in call.body


# Bodies and keys


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_400_with_and_without_a_length(
    make_world: Callable[..., Any], chunked: bool
) -> None:
    world: World = await make_world(max_body_bytes=2048)
    body = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 3000}])).encode()
    if chunked:
        request = http_request(world, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), "transfer-encoding: chunked")
    else:
        request = http_request(world, body, f"content-length: {len(body)}")
    async with served(world) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        status = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
    assert b" 400 " in status
    assert not world.backends.calls


async def test_a_raised_body_limit_is_in_force(make_world: Callable[..., Any]) -> None:
    world: World = await make_world(max_body_bytes=6 * 2**20)
    call = await Call(world, messages=[{"role": "user", "content": " " * (5 * 2**20)}]).done()
    assert call.status == 200, call.body[:300]


async def test_a_client_that_is_gone_in_the_middle_of_its_body_is_no_server_error(world: World) -> None:
    async with served(world) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_request(world, b'{"model"', "content-length: 500"))
        await writer.drain()
        writer.close()
        await until(lambda: world.metrics.requests)
    assert world.metrics.requests == [("none", 499)]


async def test_a_wrong_key_is_reported_before_a_wrong_body(world: World, http: httpx.AsyncClient) -> None:
    for key, status in ((keys.new_key(), 401), (world.key, 400)):
        answer = await http.post("/chat/completions", content=b"{", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status


async def test_real_connections_that_break_free_the_slot_and_pay_for_what_was_produced(world: World) -> None:
    _, key = world.new_account(credit=NANO, concurrency=1)
    [script] = world.backends.play([Started(10, 0), Delta("a", 1), asyncio.Event()])
    body = json.dumps(chat_body(stream=True)).encode()
    async with served(world) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_request(world, body, f"content-length: {len(body)}", key=key))
        await asyncio.wait_for(reader.readuntil(b'"a"'), 60)
        writer.transport.abort()
        await asyncio.wait_for(script.closed.wait(), 60)
        await until(lambda: world.is_idle)


async def test_a_slow_reader_gets_everything_and_delays_no_other_request(world: World) -> None:
    pieces = ["x" * 20_000] * 100
    world.backends.play(says(*pieces), says("quick"))
    body = json.dumps(chat_body(stream=True)).encode()
    async with served(world) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        writer.write(http_request(world, body, f"content-length: {len(body)}", "connection: close"))
        await asyncio.wait_for(reader.readline(), 60)
        assert (await Call(world).done()).status == 200
        received = 0
        while chunk := await reader.read(2**16):
            received += chunk.count(b"x")
        writer.close()
    assert received >= 100 * 20_000
    await until(lambda: world.is_idle and world.recorded == 2)
    assert world.spent == price(10, 100) + price(10, 1)


# Around the chat endpoint


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_key_opens_the_users_endpoints(world: World, http: httpx.AsyncClient, prefix: str) -> None:
    await Call(world).done()
    http.headers["authorization"] = f"Bearer {world.key}"
    models = (await http.get(f"{prefix}/models")).json()["data"]
    assert {model["id"] for model in models} == {"svc-chat", "svc-coder"}
    assert (await http.get(f"{prefix}/models/svc-chat")).json()["context_length"] == 32768
    assert (await http.get(f"{prefix}/models/gpt-9")).status_code == 404
    [funds] = (await http.get(f"{prefix}/user/balance")).json()["balance_infos"]
    assert funds["total_balance"] == "0.999984"
    for query in ("", "?group_by=model", "?from=2020-01-01&to=2100-01-01&group_by=day,key"):
        rows = (await http.get(f"{prefix}/user/usage{query}")).json()["data"]
        assert sum(row["completion_tokens"] for row in rows) == 2
    for query in ("?group_by=account", "?from=yesterday"):
        assert (await http.get(f"{prefix}/user/usage{query}")).status_code == 422


async def test_without_a_valid_key_the_users_endpoints_are_401(http: httpx.AsyncClient) -> None:
    paths = ("/models", "/models/svc-chat", "/user/balance", "/user/usage")
    for path, header in product(paths, (None, "Basic abc", f"Bearer {keys.new_key()}")):
        answer = await http.get(path, headers={"authorization": header} if header else {})
        assert answer.status_code == 401, (path, header)
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"


UNKNOWN = [
    ("GET", "/nothing", 404), ("POST", "/v1/v1/models", 404), ("GET", "/models/", 404), ("GET", "/redoc", 404),
    ("POST", "/chat/completions/", 404), ("GET", "/docs/", 404), ("GET", "/chat/completions", 405),
    ("DELETE", "/models", 405), ("OPTIONS", "/chat/completions", 405), ("HEAD", "/models", 405),
    ("TRACE", "/health", 405), ("BREW", "/coffee", 404),
]  # fmt: skip


async def test_unknown_routes_and_methods_answer_json(http: httpx.AsyncClient) -> None:
    for method, path, status in UNKNOWN:
        answer = await http.request(method, path)
        assert answer.status_code == status, (method, path)
        assert answer.headers["content-type"] == "application/json"
        if method != "HEAD":
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert ("allow" in answer.headers) == (status == 405)
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("door", [*DOORS, *TOKEN_DOORS], ids=lambda door: door.path)
async def test_a_doors_path_is_no_other_routes_whatever_the_method(
    http: httpx.AsyncClient, door: Door | TokenDoor, prefix: str
) -> None:
    """`/responses/{response_id}` has GET and DELETE."""
    for method in ("GET", "DELETE", "OPTIONS", "PUT"):
        answer = await http.request(method, prefix + door.path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST"), method


async def test_errors_at_a_door_have_its_format(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("stray")

    monkeypatch.setattr(ChatDoor, "error_body", lambda _, error: {"own": error.code})
    for prefix in ("", "/v1"):
        assert (await http.get(f"{prefix}/chat/completions")).json() == {"own": "method_not_allowed"}
        assert (await http.post(f"{prefix}/chat/completions")).json() == {"own": "invalid_api_key"}
    monkeypatch.setattr(ReplyEndpoint, "__call__", fails)
    answer = await http.post("/v1/chat/completions")
    assert (answer.status_code, answer.json()) == (500, {"own": "server_error"})
    assert (await http.get("/nothing")).json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "/v1/v1/chat/completions",
            "use POST /v1/chat/completions. Check the base URL: it must end with the host, or with a single /v1",
        ),
        ("/chat/completions/chat/completions", "use POST /v1/chat/completions. Check the base URL: it must end with"),
        ("/chat/completions/", "use POST /v1/chat/completions."),
        (
            "/openai/v1/chat/completions",
            "use POST /v1/chat/completions. Check the base URL: it must end with the host, or with a single /v1",
        ),
        ("/v1/chat/completion", "use POST /v1/chat/completions."),
        ("/v1/v1/models", "use GET /v1/models. Check the base URL: it must end with the host, or with a single /v1"),
        ("/v1/nothing/like/it", ", ".join(f"POST /v1{door.path}" for door in DOORS) + ", GET /v1/models."),
        ("/", "POST /v1/chat/completions"),
        ("/v1/embeddings", "the models of this service only write text. Send this request to a service for embeddings"),
        ("/v1/" + "x" * 5000, "GET /v1/models."),
    ],
)
async def test_a_path_that_does_not_exist_gets_the_nearest_ones(http: httpx.AsyncClient, path: str, told: str) -> None:
    answer = await http.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert told in answer.json()["error"]["message"]


async def test_the_request_id_is_kept_when_it_is_printable(http: httpx.AsyncClient) -> None:
    kept = await http.get("/health", headers={"x-request-id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    made = await http.get("/health", headers={"x-request-id": "x" * 200})
    assert made.headers["x-request-id"].startswith("req_")


async def test_ready_means_that_every_identifier_has_a_backend_that_can_reply(
    world: World, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/ready")).json()["status"] == "ready"
    world.backends.report = {}
    assert (await http.get("/ready")).status_code == 503
    world.backends.report = None
    answer = await http.get("/ready")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
    assert (await http.get("/health")).status_code == 200


async def test_an_adapter_is_asked_for_at_its_application_and_billed_under_its_own_name(
    make_world: Callable[..., Awaitable[World]],
) -> None:
    model = {"backends": {"fake:law": 100}, "price": {"input": "1", "cached_input": "0.5", "output": "3"}}
    world = await make_world(models={"svc-law": model})
    transport = httpx.ASGITransport(world.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.get("/ready")).json()["backends"] == ["fake:law"]
        reply = await Call(world, model="svc-law").done()
        assert reply.status == 200
        assert world.backends.calls[0].bill.backend == "fake:law"
        assert [row.backend for row in world.ledger.export_usage().rows] == ["fake:law"]
        operator = {"authorization": f"Bearer {OPERATOR}"}
        [shown] = (await http.get("/admin/models", headers=operator)).json()["data"]
        state = {"status": "RUNNING", "replicas": 1, "healthy": True, "ejected": False}
        assert shown["backends"] == [{"name": "fake:law", "weight": 100, "share": 1.0, **state}]


async def test_a_stray_fault_is_500_in_the_form_of_the_api(world: World, http: httpx.AsyncClient) -> None:
    world.admin.status = None  # type: ignore[assignment]
    answer = await http.get("/ready")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "Traceback" not in answer.text
    assert answer.headers["x-request-id"]
