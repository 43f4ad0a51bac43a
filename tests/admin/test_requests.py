"""Tests of a request's record: the ledger's row joined with the log's lines, for every way in which one can end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from serve_app.admin.request_story import tell
from serve_app.contracts import key_format as keys
from serve_app.contracts.accounting_shards import AccountingShards
from serve_app.contracts.generation import Delta, Finished, FinishReason, Started
from serve_app.gateway.observer import log_line
from serve_app.model.orphans import Orphans, Seen, orphan_line
from serve_app.storage.request_log import Found, find_lines
from tests.gateway.connections import Call
from tests.gateway.world import World, says, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PRICE = "0.000016"  # of 10 tokens and 2


@pytest.fixture
def log(world: World, tmp_path: Path) -> Path:
    """The file that the gateway searches; `keep` writes the requests that have ended."""
    folder = tmp_path / "logs"
    folder.mkdir()
    world.admin.find_lines = partial(find_lines, folder)
    return folder / "gateway-1.jsonl"


def keep(log: Path, world: World, *more: dict[str, Any]) -> None:
    lines = [*(log_line(record) for record in world.records), *more]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


async def show(admin: httpx.AsyncClient, request_id: str, **params: str) -> Any:
    answer = await admin.get(f"/admin/requests/{quote(request_id, safe='')}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def settle_for_a_dead_gateway(
    world: World, request_id: str, produced: Finished, seen: Seen | None = None
) -> list[dict[str, Any]]:
    """Settles a request like the last one, as a replica does after its gateway has died. Returns its log lines."""
    lines: list[dict[str, Any]] = []
    ledger = AccountingShards(world.accountings)
    orphans = Orphans(ledger.settle, settled=lambda one, seen: lines.append(orphan_line(one, seen, "replica-a")))
    call = replace(world.backends.calls[-1], request_id=request_id)
    orphans.settle_later(call, produced, 1_790_000_000.5, seen)
    await orphans.drain()
    return lines


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_served_request_is_found_by_each_of_its_ids(
    world: World, admin: httpx.AsyncClient, log: Path, prefix: str
) -> None:
    world.backends.play([Started(10, 4, "fp", "replica-7"), *says("Hello", " world")[1:]])
    sends = {"x-request-id": "mine/1 of 2", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    request_id = (await Call(world, sends=sends).done()).json["id"]
    keep(log, world)
    stories = [await show(admin, one) for one in (request_id, "mine/1 of 2", TRACE)]
    assert stories[0] == stories[1] == stories[2]
    story = stories[0]
    summary = story["summary"]
    expected = {
        "request_id": request_id,
        "client_request_id": "mine/1 of 2",
        "door": "/chat/completions",
        "trace_id": TRACE,
        "account_id": world.account_id,
        "key_id": world.ledger.list_keys(world.account_id)[0].key_id,
        "model": "svc-chat",
        "backend": "fake",
        "replica": "replica-7",
        "status": 200,
        "code": None,
        "outcome": "completed",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "price": PRICE,
        "note": "Served.",
    }
    assert {name: summary[name] for name in expected} == expected
    assert all(ms is not None for ms in summary["timings"].values())
    assert summary["waited_for"].endswith(f"of {summary['timings']['total_ms']:,.0f} ms")
    assert (story["ledger"]["request_id"], story["ledger"]["charged"]) == (request_id, PRICE)
    assert (story["log_complete"], story["others"]) == (True, [])
    assert (await admin.get(f"{prefix}/admin/requests/{request_id}")).json() == story


async def test_prompt_and_reply_are_shown_where_they_are_asked_for(
    world: World, admin: httpx.AsyncClient, log: Path
) -> None:
    world.settings.logged_texts.append(world.account_id)
    await Call(world).done()
    keep(log, world)
    request_id = world.records[0].request_id
    for params, has_texts in (({}, False), ({"texts": "false"}, False), ({"texts": "true"}, True)):
        [line] = (await show(admin, request_id, **params))["log"]
        assert line["request_id"] == request_id
        assert ("messages" in line, "reply" in line) == (has_texts, has_texts)
    assert line["reply"] == "Hello world"


async def test_a_read_is_on_the_audit_log_of_its_account(world: World, admin: httpx.AsyncClient, log: Path) -> None:
    await Call(world).done()
    keep(log, world)
    await show(admin, world.records[0].trace.trace_id, texts="true")
    assert (await admin.get("/admin/requests/unknown")).status_code == 404
    [record] = world.ledger.audit_log()
    assert (record.action, record.subject) == ("read_request", world.records[0].request_id)
    assert (record.account_id, record.detail) == (world.account_id, {"texts": True})


async def refused(world: World, status: int) -> Call:
    key, fields = world.key, {}
    if status == 401:
        key = keys.new_key()
    elif status == 402:
        _, key = world.new_account(credit=0)
    elif status == 422:
        fields = {"model": "svc-chta"}
    else:
        own = keys.new_key()
        world.ledger.create_key(world.account_id, "own", keys.digest(own), keys.hint(own), rpm=1)
        assert (await Call(world, own).done()).status == 200
        key = own
    return await Call(world, key, sends={"x-request-id": "mine"}, **fields).done()


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "invalid_api_key"), (402, "insufficient_balance"), (422, "model_not_found"), (429, "requests")],
)
async def test_a_refused_request_is_only_in_the_log(
    world: World, admin: httpx.AsyncClient, log: Path, status: int, code: str
) -> None:
    assert (await refused(world, status)).status == status
    keep(log, world)
    story = await show(admin, "mine")
    summary = story["summary"]
    assert story["ledger"] is None
    assert (summary["status"], summary["code"], summary["outcome"]) == (status, code, None)
    assert summary["note"] == f"Refused: {status} {code}."
    assert (summary["prompt_tokens"], summary["price"]) == (0, "0.00")
    assert summary["model"] == (None if status in (401, 422) else "svc-chat")
    assert summary["account_id"] == (None if status == 401 else world.records[-1].account_id)
    # A limit is the limiter's; a wrong key is known without it.
    assert (summary["waited_for"] or "").startswith("the limiter's decision" if status in (402, 429) else "")


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_cancelled_request_says_whether_it_is_billed(
    world: World, admin: httpx.AsyncClient, log: Path, tokens: int
) -> None:
    produced = [Started(10, 0), Delta("a", 1), Delta("b", 2)] if tokens else []
    [script] = world.backends.play([*produced, asyncio.Event()])
    call = Call(world, stream=True)
    await until(lambda: script.calls)
    if tokens:
        await call.until('"b"')
    call.hang_up()
    await call.done()
    await until(lambda: world.records)
    keep(log, world)
    summary = (await show(admin, world.records[0].request_id))["summary"]
    assert (summary["status"], summary["outcome"], summary["completion_tokens"]) == (499, "cancelled", tokens)
    assert summary["price"] == (PRICE if tokens else "0.00")
    assert summary["note"] == f"The client disconnected; {'what was produced is' if tokens else 'nothing is'} billed."


async def test_a_failed_request_is_not_billed(world: World, admin: httpx.AsyncClient, log: Path) -> None:
    world.backends.play([Started(10, 0), Delta("a", 1), RuntimeError("the replica died")])
    await Call(world).done()
    await until(lambda: world.records)
    keep(log, world)
    summary = (await show(admin, world.records[0].request_id))["summary"]
    assert (summary["status"], summary["outcome"], summary["price"]) == (500, "failed", "0.00")
    assert summary["note"] == "The service failed: 500 server_error; nothing is billed."


async def test_a_stored_reply_is_no_second_bill(world: World, admin: httpx.AsyncClient, log: Path) -> None:
    first = await Call(world, sends={"idempotency-key": "k"}).done()
    again = await Call(world, sends={"idempotency-key": "k"}).done()
    assert again.json == first.json
    keep(log, world)
    story = await show(admin, world.records[1].request_id)
    assert story["ledger"] is None
    assert story["summary"]["note"] == "Answered with the stored reply of an earlier request; nothing is billed."


async def test_a_request_whose_gateway_died_is_told_from_the_replicas_line(
    world: World, admin: httpx.AsyncClient, log: Path
) -> None:
    await Call(world).done()
    request_id = f"chatcmpl-{TRACE}"
    produced = Finished(FinishReason.ABORT, 10, 0, 2)
    lines = await settle_for_a_dead_gateway(world, request_id, produced)
    keep(log, world, *lines)
    story = await show(admin, request_id)
    summary = story["summary"]
    assert story["log"] == lines
    assert story["ledger"]["outcome"] == "cancelled"
    assert (summary["status"], summary["outcome"], summary["completion_tokens"]) == (None, "cancelled", 2)
    assert (summary["price"], summary["backend"], summary["trace_id"]) == (PRICE, "fake", TRACE)
    assert summary["time"] == "2026-09-21T14:13:20.500Z"
    assert summary["timings"]["total_ms"] > 0
    assert summary["waited_for"] is None
    assert summary["note"] == "Its gateway died; a replica settled what was produced."
    assert await show(admin, TRACE) == story  # the trace id of a request whose client sent none


async def test_the_replica_of_a_dead_gateway_tells_trace_and_times(
    world: World, admin: httpx.AsyncClient, log: Path
) -> None:
    """Covers a client with its own traceparent: the request's id does not name its trace."""
    await Call(world).done()
    world.records.clear()
    client_trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    seen = Seen("smollm2-replica-7", client_trace, queue_s=0.5, prefill_s=0.0125, decode_s=2.0)
    cut = Finished(FinishReason.ABORT, 10, 0, 2)
    keep(log, world, *await settle_for_a_dead_gateway(world, f"chatcmpl-{TRACE}", cut, seen))
    story = await show(admin, client_trace)
    summary, timings = story["summary"], story["summary"]["timings"]
    assert (summary["request_id"], summary["trace_id"]) == (f"chatcmpl-{TRACE}", client_trace)
    assert (summary["replica"], summary["outcome"]) == ("smollm2-replica-7", "cancelled")
    assert (timings["queue_ms"], timings["prefill_ms"], timings["decode_ms"]) == (500.0, 12.5, 2000.0)
    assert (timings["admit_ms"], timings["settle_ms"]) == (None, None)
    assert summary["waited_for"].startswith("the other tokens of the reply (decode), 2,000 ms")


async def test_the_ledger_decides_about_tokens_and_price(world: World, admin: httpx.AsyncClient, log: Path) -> None:
    await Call(world).done()
    record = world.records.pop()
    late = log_line(record) | {"request_id": "chatcmpl-first"}  # the gateway's settlement came second
    other = Finished(FinishReason.ABORT, 10, 0, 1)
    keep(log, world, late, *await settle_for_a_dead_gateway(world, "chatcmpl-first", other))
    story = await show(admin, record.client_request_id)
    summary = story["summary"]
    assert [line["completion_tokens"] for line in story["log"]] == [1, 2]
    assert (summary["completion_tokens"], summary["price"], summary["status"]) == (1, "0.000013", 200)
    assert summary["note"] == "Served. A replica settled it before its gateway did."


@pytest.mark.parametrize("complete", [True, False])
async def test_a_request_without_lines_is_told_from_the_ledger_alone(
    world: World, admin: httpx.AsyncClient, complete: bool
) -> None:
    world.admin.find_lines = lambda _: Found([], is_complete=complete)
    request_id = (await Call(world).done()).json["id"]
    for asked in (request_id, request_id.removeprefix("chatcmpl-")):
        story = await show(admin, asked)
        summary = story["summary"]
        assert (story["log"], story["log_complete"]) == ([], complete)
        assert (summary["request_id"], summary["outcome"], summary["price"]) == (request_id, "completed", PRICE)
        assert (summary["status"], summary["time"]) == (None, story["ledger"]["started_at"])
        assert summary["note"].startswith("Found only in the ledger: ")
        assert ("node" in summary["note"]) is complete


async def test_a_settlement_that_the_ledger_does_not_have_is_named(
    world: World, admin: httpx.AsyncClient, log: Path
) -> None:
    world.settlements.settle_timeout_s = 0.05
    world.accounting.wire_settle.down()
    request_id = (await Call(world).done()).json["id"]
    keep(log, world)
    summary = (await show(admin, request_id))["summary"]
    assert (summary["outcome"], summary["price"]) == ("completed", PRICE)
    assert summary["note"].startswith("Served. Not in the ledger: it waits in a spool")


async def test_of_several_requests_with_one_id_the_newest_is_shown_and_the_others_are_named(
    world: World, admin: httpx.AsyncClient, log: Path
) -> None:
    for number in range(3):
        await Call(world, sends={"x-request-id": "same", "traceparent": f"00-{TRACE}-{number + 1:016x}-00"}).done()
    keep(log, world)
    ids = [record.request_id for record in world.records]
    for asked in ("same", TRACE):
        story = await show(admin, asked)
        assert (story["summary"]["request_id"], story["others"]) == (ids[2], ids[1::-1])
        assert [line["request_id"] for line in story["log"]] == [ids[2]]


async def test_a_line_of_another_form_tells_nothing(world: World, admin: httpx.AsyncClient, log: Path) -> None:
    request_id = (await Call(world).done()).json["id"]
    keep(log, world, {"request_id": "r"}, {"request_id": request_id, "event": "request", "status": "soon"})
    assert (await show(admin, request_id))["summary"]["note"] == "Served."
    assert (await admin.get("/admin/requests/r")).status_code == 404


WRONG: list[tuple[str, int, str | None]] = [
    ("/unknown", 404, None),
    ("/" + "x" * 128, 404, None),
    ("/" + "x" * 129, 422, "request_id"),
    ("/", 422, "request_id"),
    ("/caf%C3%A9", 422, "request_id"),
    ("/a%00b", 422, "request_id"),
    ("/unknown?texts=yes", 422, "texts"),
]


async def test_what_is_no_request_is_refused(world: World, admin: httpx.AsyncClient, log: Path) -> None:
    for path, status, param in WRONG:
        answer = await admin.get(f"/admin/requests{path}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), path


async def test_a_search_that_waits_too_long_for_others_is_503(world: World, admin: httpx.AsyncClient) -> None:
    world.admin.patience_s = 0.0
    answer = await admin.get("/admin/requests/chatcmpl-1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded_error")


@pytest.mark.parametrize("phase", ["admit", "queue", "prefill", "decode", "settle"])
def test_the_longest_part_is_what_it_waited_for(phase: str) -> None:
    times = dict.fromkeys(("admit_ms", "queue_ms", "prefill_ms", "decode_ms", "settle_ms"), 1.0)
    line = {"event": "request", "request_id": "r", "time": "2026-11-01T08:00:00.000+00:00", "status": 200}
    waited_for = tell("r", None, [line | times | {f"{phase}_ms": 1234.4, "total_ms": 1300.0}]).waited_for
    assert waited_for is not None
    assert waited_for.endswith(f"({phase}), 1,234 ms of 1,300 ms")
