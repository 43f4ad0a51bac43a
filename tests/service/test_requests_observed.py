"""One request over the running service: its trace across processes, its log line, its story; and what none may hold."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.service.collector import Collector, Span
from tests.service.harness import FRANCE, HELD, Service, until

pytestmark = pytest.mark.service

MINUTE = 60 * 10**9  # in nanoseconds


def lines(service: Service) -> list[dict[str, Any]]:
    """Returns the log lines of all processes, as they are written."""
    texts = [path.read_text(encoding="utf-8") for path in (service.home / "logs").glob("*.jsonl*")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def line_of(service: Service, client_request_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        return next((one for one in lines(service) if one.get("client_request_id") == client_request_id), None)

    return until(look)


def test_a_trace_has_the_clients_parent_and_spans_of_both_processes(service: Service, collector: Collector) -> None:
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    account = service.account("traced")
    answer = service.http.post(
        "/chat/completions",
        headers={"authorization": f"Bearer {account.key}", "traceparent": f"00-{trace}-{parent}-01"},
        json={"model": "svc-chat", "messages": FRANCE, "max_tokens": 20},
    )
    assert answer.headers["x-trace-id"] == trace

    def complete() -> dict[str, Span] | None:
        spans = {span.name: span for span in collector.of_trace(trace)}
        return spans if len(spans) == 7 else None

    spans = until(complete)
    root = spans["POST /chat/completions"]
    assert root.parent_id == parent
    assert {spans[name].parent_id for name in ("admit", "generate", "settle")} == {root.span_id}
    assert {spans[name].parent_id for name in ("queue", "prefill", "decode")} == {spans["generate"].span_id}
    assert {span.process for span in spans.values()} == {"serve-app-gateway", "serve-app-model"}
    assert spans["queue"].process == "serve-app-model"
    usage = answer.json()["usage"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["gen_ai.response.id"] == answer.json()["id"]
    # In one unit and from one epoch.
    assert all(root.began - MINUTE <= span.began <= span.ended <= root.ended + MINUTE for span in spans.values())


def test_each_request_has_a_line_with_what_it_cost_and_how_long_its_parts_took(service: Service) -> None:
    account = service.account("logged", rpm=3)
    served = service.chat(account.key, max_tokens=5, request_id="observed-served")
    line = line_of(service, "observed-served")
    assert (line["request_id"], line["status"], line["account"]) == (served.json()["id"], 200, account.id)
    assert line["completion_tokens"] == served.json()["usage"]["completion_tokens"]
    assert line["replica"]
    view = account.settled(1)
    assert line["price"] == view["usage"]["charged"]
    assert all(line[f"{part}_ms"] >= 0 for part in ("admit", "queue", "prefill", "decode", "settle", "total"))
    refused = service.chat(account.key, model="moon", request_id="observed-refused")
    line = line_of(service, "observed-refused")
    assert (line["status"], line["code"]) == (refused.status_code, "model_not_found")
    assert line["account"] == account.id
    headers = {"authorization": f"Bearer {account.key}", "x-request-id": "observed-gone"}
    with service.hold() as hold:
        body = {"model": HELD, "messages": hold.messages, "stream": True, "max_tokens": 100}
        with service.http.stream("POST", "/chat/completions", json=body, headers=headers) as stream:
            next(stream.iter_lines())
        line = line_of(service, "observed-gone")
    assert (line["status"], line["outcome"]) == (499, "cancelled")


def test_one_command_tells_what_became_of_a_request(service: Service) -> None:
    account = service.account("story")
    served = service.chat(account.key, max_tokens=5, request_id="story-served")
    account.settled(1)
    line_of(service, "story-served")
    service.chat(account.key, model="moon", request_id="story-refused")
    line_of(service, "story-refused")
    for name in ("story-served", served.json()["id"], served.headers["x-trace-id"]):
        summary = service.cli("requests", "show", name)["summary"]
        assert (summary["request_id"], summary["status"]) == (served.json()["id"], 200)
        assert summary["completion_tokens"] == served.json()["usage"]["completion_tokens"]
        assert summary["trace_id"] == served.headers["x-trace-id"]
        assert summary["backend"] == "smollm2"
    refused = service.cli("requests", "show", "story-refused")["summary"]
    assert (refused["status"], refused["code"], refused["account_id"]) == (422, "model_not_found", account.id)


@pytest.mark.slow
def test_top_shows_what_the_service_does(service: Service) -> None:
    service.chat(service.first_key, max_tokens=5)
    frame = service.cli("top", "--once")
    assert {backend["name"] for backend in frame["backends"]} >= {"smollm2", "held"}
    assert all(backend["replicas"] >= 1 for backend in frame["backends"] if backend["name"] == "smollm2")


def test_no_log_trace_or_metric_holds_a_text_or_a_key(service: Service, collector: Collector) -> None:
    secret = f"canary{secrets.token_hex(8)}"
    account = service.account("canary")
    trace = secrets.token_hex(16)
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"Say {secret} and {secret}."}], "max_tokens": 30},
        {"messages": [{"role": "user", "content": secret}], "model": secret},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": FRANCE, "stop": [secret], "max_tokens": 5, "user": secret},
        {"messages": FRANCE, secret: 1, "max_tokens": 5},
        {"messages": FRANCE, "max_tokens": 5, "response_format": {"type": "json_schema", "json_schema": {secret: 1}}},
        {
            "messages": FRANCE,
            "max_tokens": 40,
            "tools": [{"type": "function", "function": {"name": secret, "parameters": {"type": "object"}}}],
            "tool_choice": "required",
        },
    ]
    for number, body in enumerate(bodies):
        service.http.post(
            "/chat/completions",
            headers={
                "authorization": f"Bearer {account.key}",
                "traceparent": f"00-{trace}-{secrets.token_hex(8)}-01",
                "x-request-id": f"canary-line-{number}",
            },
            json={"model": "svc-chat", **body},
        )
        service.http.post("/chat/completions", headers={"authorization": f"Bearer {secret}"}, json=body)
    for number in range(len(bodies)):
        line_of(service, f"canary-line-{number}")
    until(lambda: len({span.parent_id for span in collector.of_trace(trace)}) > len(bodies))
    needles = [secret.encode(), account.key.encode()]
    for path in log_files(service):
        text = path.read_bytes()
        assert not any(needle in text for needle in needles), path
    assert not any(needle in body for needle in needles for body in collector.bodies)
    metrics = service.http.get(service.metrics_url).content
    assert not any(needle in metrics for needle in needles)


def log_files(service: Service) -> list[Path]:
    """The service's own, and those of all its processes that Ray keeps."""
    logs = service.home / "logs"
    return [path for path in [*logs.glob("*.jsonl*"), *(logs / "ray").resolve().rglob("*")] if path.is_file()]
