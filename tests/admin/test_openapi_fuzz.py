"""The service answers random requests as its OpenAPI document says: schemathesis against a gateway on a real port.

Ledger, admission and HTTP are real, the model is scripted. Each request comes from an address of its own, so that wrong
keys are not slowed down. A field of a reply that the document does not declare is a fault.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import schemathesis
from jsonschema import Draft202012Validator
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import AcceptedNegativeData
from schemathesis.engine import from_schema
from schemathesis.engine.events import NonFatalError, ScenarioFinished
from schemathesis.openapi.checks import RejectedPositiveData
from schemathesis.transport import requests as transport

from serve_app.contracts.key_format import MANAGEMENT, digest, hint, new_key
from serve_app.contracts.management import CreateManagementKey
from tests.gateway.any_reply import any_reply
from tests.gateway.connections import served
from tests.gateway.world import NANO, OPERATOR, World, taking

ADDRESSES = itertools.count()
CHUNKS = {"/chat/completions": "ChatCompletionChunk", "/completions": "CompletionChunk"}
BODIES = (
    *("ChatCompletionRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest"),
    *("CountTokensRequest", "TokenizeRequest", "DetokenizeRequest"),
)
EVENTS = ("ChatCompletionEvent", "CompletionEvent", "MessageEvent", "ResponseEventData")
PLENTY = {"rpm": 10**9, "tpm": 10**12, "concurrency": 1000}


@dataclass
class Found:
    """The results of one run."""

    cases: Counter[str] = field(default_factory=Counter)  # by operation
    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)  # media types of answers
    faults: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.cases.values())

    def report(self) -> str:
        return f"{self.statuses} {self.cases}\n\n" + "\n\n".join(self.faults)


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with replies that have only the fields that it declares."""
    schemas = document["components"]["schemas"]
    told_apart = {*EVENTS, *(name for body in BODIES for name in reached(schemas, body, set()))}
    for name, schema in schemas.items():
        if name not in told_apart and "properties" in schema:
            schema["additionalProperties"] = False
    return document


def reached(schemas: dict[str, Any], name: str, seen: set[str]) -> set[str]:
    """A schema and all that it refers to."""
    if name not in seen:
        seen.add(name)
        for other in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schemas[name])):
            reached(schemas, other, seen)
    return seen


@pytest.fixture(autouse=True)
def other_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """urllib3-future, which comes with grafana-client, has no such pools of connections as are counted here."""
    monkeypatch.setattr(transport, "_count_opened_connections", lambda session: 0)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Each request has its own address."""
    case.headers["x-forwarded-for"] = str(ipaddress.IPv4Address(2**24 + next(ADDRESSES)))


def media_type(response: Any) -> str:
    told: str = response.headers["content-type"][0]
    return told.partition(";")[0]


@schemathesis.check
def promises_of_every_answer(ctx: Any, response: Any, case: Any) -> None:
    """JSON or a file or a stream, never HTML; a 422 that no schema can express is described in the document."""
    kind = media_type(response)
    if kind == "application/json":
        json.loads(response.content)
    else:
        assert response.status_code == 200
        assert kind in ("text/event-stream", "text/csv")
    if kind == "text/event-stream":
        assert not response.stream_cut_short
        STREAMS[case.operation.path](response.content, case)


def check_chat_stream(raw: bytes, case: Any) -> None:
    """Frames, order and schema of the chunks."""
    document = case.operation.schema.raw_schema
    chunk = {"$ref": f"#/components/schemas/{CHUNKS[case.operation.path]}", "components": document["components"]}
    frames = raw.decode().split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]
    for one in chunks:
        Draft202012Validator(chunk).validate(one)
    assert len({(one["id"], one["created"]) for one in chunks}) == 1
    options = (case.body.get("stream_options") or {}) if isinstance(case.body, dict) else {}
    asked = bool(options.get("include_usage"))
    if not options.get("continuous_usage_stats"):
        told = [one.get("usage", "absent") for one in chunks[:-1]]
        assert told == [None if asked else "absent"] * (len(chunks) - 1)
        assert bool(chunks[-1].get("usage")) is (asked or case.operation.path == "/chat/completions")


def check_messages_stream(raw: bytes, case: Any) -> None:
    """Schema and ends of the events."""
    document = case.operation.schema.raw_schema
    data = document["components"]["schemas"]["MessageEvent"]["properties"]["data"]
    validator = Draft202012Validator({**data["contentSchema"], "components": document["components"]})
    events = [json.loads(line.removeprefix("data: ")) for line in raw.decode().split("\n") if line[:6] == "data: "]
    for event in events:
        validator.validate(event)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")


def check_responses_stream(raw: bytes, case: Any) -> None:
    """Frames, order and schema of the events, and of the response in the last one."""
    document = case.operation.schema.raw_schema
    response = {"$ref": "#/components/schemas/Response", "components": document["components"]}
    frames = raw.decode().split("\n\n")
    assert frames.pop() == ""
    events = [json.loads(frame.split("\ndata: ")[1]) for frame in frames if not frame.startswith(":")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events:
        if "response" in event:
            Draft202012Validator(response).validate(event["response"])
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"


STREAMS = {
    "/chat/completions": check_chat_stream,
    "/completions": check_chat_stream,
    "/messages": check_messages_stream,
    "/responses": check_responses_stream,
}
"""The check of a stream, by the door's path."""


def fuzz(world: World, port: int, account: str, key_id: str, *, cases: int, phases: list[str], seed: int) -> Found:
    """Runs schemathesis; `cases` for each operation in the phase that draws at random."""
    base = f"http://127.0.0.1:{port}/v1"
    management = new_key(MANAGEMENT)
    managed, _ = world.new_account(credit=NANO)
    world.ledger.run(CreateManagementKey(managed, "robot", digest(management), hint(management)))
    for number in range(20):
        key = new_key()
        world.ledger.create_key(managed, f"key {number}", digest(key), hint(key))
    managed_keys = itertools.cycle([one.key_id for one in world.ledger.list_keys(managed)])
    config = SchemathesisConfig.from_dict(
        {
            "base-url": base,
            "seed": seed,
            "continue-on-failure": True,
            "request-timeout": 120,
            "max-stream-events": 10**6,  # by default, schemathesis hangs up after 20
            "auth": {
                "openapi": {
                    "apiKey": {"bearer": world.key},
                    "managementKey": {"bearer": management},
                    "operatorKey": {"bearer": OPERATOR},
                }
            },
            "generation": {
                "max-examples": cases,
                "deterministic": True,
                "database": "none",
                "with-security-parameters": False,  # wrong keys are sent by a check of its own
            },
            "phases": {name: {"enabled": name in phases} for name in ("examples", "coverage", "fuzzing", "stateful")},
            # The rules that no schema can express answer 422; so does a change that the ledger refuses.
            "checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "404", "409", "422"]}},
        }
    )
    schema = schemathesis.openapi.from_url(
        f"{base}/admin/openapi.json", config=config, headers={"authorization": f"Bearer {OPERATOR}"}
    )
    closed(schema.raw_schema)
    turns, chats = itertools.count(), itertools.count()

    @schema.hook
    def map_path_parameters(context: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
        """Every second request names an object that exists."""
        real = {"account_id": account, "key_id": key_id, "id": "svc-chat", "grant_id": "1", "month": "2026-11"}
        if context.operation.path.startswith("/account/"):
            real["key_id"] = next(managed_keys)
        if next(turns) % 2:
            path_parameters = {name: real.get(name, value) for name, value in (path_parameters or {}).items()}
        if (path_parameters or {}).get("account_id") in (managed, world.account_id):
            path_parameters |= {"account_id": account}  # an id from an earlier answer: these must not be suspended
        return path_parameters

    @schema.hook
    def map_body(context: Any, body: Any) -> Any:
        """Every second reply is streamed, unless that corrects a value that is wrong on purpose."""
        is_chat = context.operation.path in STREAMS and isinstance(body, dict)
        if is_chat and body.get("stream") in (None, False) and not body.get("stream_options") and next(chats) % 2:
            body = {**body, "stream": True}
        return body

    @schema.hook
    def filter_failure(context: Any, failure: Any, case: Any, response: Any) -> bool:
        """An integer is written without a decimal point, which no schema can express; empty groups are ignored."""
        if isinstance(failure, RejectedPositiveData) and b"integer" in response.content:
            return False
        if isinstance(failure, RejectedPositiveData) and case.operation.path.startswith("/messages"):
            return False  # its rules that no schema can express answer 400 (test_openapi_doors.py)
        if not isinstance(failure, AcceptedNegativeData):
            return True
        if media_type(response) == "text/event-stream" and "`idempotency-key`" in failure.message:
            return False  # streams ignore any key
        groups = (case.query or {}).get("group_by")
        names = groups.split(",") if isinstance(groups, str) else groups
        return not isinstance(names, list) or "" not in names

    found = Found()
    for event in from_schema(schema).execute():
        if isinstance(event, NonFatalError):
            found.faults.append(f"{event.label}: {event.info.format()}")
        if isinstance(event, ScenarioFinished):
            for id, interaction in event.recorder.interactions.items():
                found.cases[event.recorder.label] += 1
                if interaction.response is not None:
                    found.statuses[interaction.response.status_code] += 1
                    found.kinds[media_type(interaction.response)] += 1
                for check in event.recorder.checks.get(id, ()):
                    if check.failure_info is not None:
                        failure = check.failure_info.failure
                        found.faults.append(
                            f"{event.phase} {event.recorder.label}: {check.name}: {failure.title}: {failure.message}\n"
                            f"{check.failure_info.code_sample}"
                        )
    return found


async def run(make_world: Callable[..., Any], *, cases: int, phases: list[str], seed: int = 7) -> Found:
    world: World = await make_world(trusted_proxies=1)
    world.backends.generate = taking(any_reply)  # type: ignore[method-assign]
    world.account_id, world.key = world.new_account(credit=10**8 * NANO, **PLENTY)
    account, _ = world.new_account(credit=NANO)
    [key] = world.ledger.list_keys(account)
    async with served(world) as port:
        return await asyncio.to_thread(fuzz, world, port, account, key.key_id, cases=cases, phases=phases, seed=seed)


@pytest.mark.parametrize(("cases", "least"), [(1, 50), pytest.param(4, 120, marks=pytest.mark.slow)])
async def test_random_requests_are_answered_as_the_document_says(
    make_world: Callable[..., Any], cases: int, least: int
) -> None:
    found = await run(make_world, cases=cases, phases=["examples", "fuzzing"])
    assert not found.faults, found.report()
    assert found.total > least


@pytest.mark.slow
@pytest.mark.long
async def test_thousands_of_requests_are_answered_as_the_document_says(make_world: Callable[..., Any]) -> None:
    found = await run(make_world, cases=80, phases=["examples", "coverage", "fuzzing"])
    assert not found.faults, found.report()
    assert found.total > 3000
    # Both valid and invalid requests were sent.
    assert {200, 201, 400, 401, 404, 405, 422} <= set(found.statuses) <= {200, 201, 400, 401, 404, 405, 409, 422}
    assert found.kinds["text/event-stream"] > 10
    assert found.kinds["text/csv"] > 5
    # Keys to delete are drawn from earlier answers too, and those run out.
    few = found.cases.pop("DELETE /account/keys/{key_id}")
    assert few > 10
    assert min(found.cases.values()) > 20
