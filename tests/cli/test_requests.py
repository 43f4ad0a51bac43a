"""`requests show`: a request's story from the service, and from logs that were collected here."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.gateway.observer import log_line
from serve_app.storage.request_log import find_lines
from tests.gateway.connections import chat_body
from tests.gateway.world import World, until

from .conftest import Run
from .real_service import RealService

PRICE = "0.000016"  # of 10 tokens and 2
TRACE = "0af7651916cd43dd8448eb211c80319c"
SENT = {"x-request-id": "mine/1", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def chat(real: RealService) -> Callable[..., dict[str, Any]]:
    """Sends a request and returns its line in the log, texts included; it is in no file yet."""
    real.world.settings.logged_texts.append(real.world.account_id)

    def chat(**fields: Any) -> dict[str, Any]:
        world = real.world
        before = len(world.records)
        headers = {"authorization": f"Bearer {world.key}", **SENT}
        httpx.post(f"{real.url}/chat/completions", json=chat_body(**fields), headers=headers)

        async def ended() -> None:
            await until(lambda: len(world.records) > before)

        asyncio.run_coroutine_threadsafe(ended(), real.loop).result(60)
        line: dict[str, Any] = json.loads(json.dumps(log_line(world.records[-1])))
        return line

    return chat


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gateway.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def searches(world: World, folder: Path) -> None:
    """The gateway's own log lies there."""
    world.admin.find_lines = partial(find_lines, folder)


def shown(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ *(.+?) {2,}(.*)$", text, re.MULTILINE))


def test_a_served_request_is_told_on_one_page(
    real: RealService, run: Run, chat: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    line = chat()
    searches(real.world, write(tmp_path / "logs", line))
    story = shown(run("requests", "show", "mine/1").out)
    expected = {
        "what became of it": "Served.",
        "request": line["request_id"],
        "x-request-id": "mine/1",
        "trace": TRACE,
        "status": "200",
        "outcome": "completed stop",
        "account": real.world.account_id,
        "model": "svc-chat",
        "backend": "fake",
        "prompt tokens": "10 (0 cached)",
        "completion tokens": "2",
        "price": PRICE,
        "total": f"{line['total_ms']:,.1f} ms",
    }
    assert {name: story[name] for name in expected} == expected
    assert re.fullmatch(
        r".+ \((admit|queue|prefill|decode|settle)\), [\d,]+ ms of [\d,]+ ms", story["waited longest for"]
    )
    for phase in ("admit", "queue", "prefill", "decode", "settle"):
        assert story[phase].startswith(f"{line[f'{phase}_ms']:,.1f} ")
    assert "messages" not in story


def test_json_has_the_ledger_and_the_lines(
    real: RealService, run: Run, chat: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    line = chat()
    searches(real.world, write(tmp_path / "logs", line))
    story = run("requests", "show", line["request_id"], "--json").json
    assert set(story) == {"summary", "ledger", "log", "log_complete", "others", "trace_url"}
    assert story["ledger"]["charged"] == story["summary"]["price"] == PRICE
    assert story["trace_url"] is None
    assert "reply" not in story["log"][0]
    assert run("requests", "show", line["request_id"], "--texts", "--json").json["log"] == [line]
    texts = shown(run("requests", "show", line["request_id"], "--texts").out)
    assert texts["reply"] == "Hello world"
    assert json.loads(texts["messages"]) == line["messages"]


def test_a_refused_request_is_told(
    real: RealService, run: Run, chat: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    searches(real.world, write(tmp_path / "logs", chat(model="svc-chta")))
    story = shown(run("requests", "show", TRACE).out)
    assert story["what became of it"] == "Refused: 422 model_not_found."
    assert (story["status"], story["outcome"], story["replica"]) == ("422 model_not_found", "–", "–")
    assert "part" not in story


def test_an_unknown_request_is_an_error(real: RealService, run: Run, tmp_path: Path) -> None:
    for more in ([], ["--logs", write(tmp_path / "collected")]):
        unknown = run("requests", "show", "chatcmpl-1", *more)
        assert unknown.code == 1
        assert "chatcmpl-1" in unknown.error_line


@pytest.mark.parametrize("asked", ["request_id", "client_request_id", "trace_id"])
def test_logs_that_were_collected_tell_what_the_service_does_not_know(
    real: RealService, run: Run, chat: Callable[..., dict[str, Any]], tmp_path: Path, asked: str
) -> None:
    line = chat()
    alone = run("requests", "show", line["request_id"]).out
    assert shown(alone)["what became of it"].startswith("Found only in the ledger")
    folder = write(tmp_path / "collected" / "node-1", line, {**line, "request_id": "chatcmpl-0", "trace_id": "0" * 32})
    story = run("requests", "show", line[asked], "--logs", folder.parent, "--json").json
    assert story["summary"]["note"] == "Served."
    assert story["ledger"]["request_id"] == story["summary"]["request_id"] == line["request_id"]
    assert [one["request_id"] for one in story["log"]] == [line["request_id"]]
    assert "reply" not in story["log"][0]
    assert story["others"] == (["chatcmpl-0"] if asked == "client_request_id" else [])


def test_lines_that_both_have_are_shown_once(
    real: RealService, run: Run, chat: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    line = chat()
    searches(real.world, write(tmp_path / "logs", line))
    orphan = {name: line[name] for name in ("time", "request_id", "outcome", "price")} | {"event": "settled"}
    write(tmp_path / "collected", line, orphan)
    story = run("requests", "show", "mine/1", "--logs", tmp_path / "collected", "--json").json
    assert [one["event"] for one in story["log"]] == ["request", "settled"]
    assert story["summary"]["note"] == "Served. A replica settled it before its gateway did."


def test_a_refused_request_of_another_node_is_told_from_its_log(
    real: RealService, run: Run, chat: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    line = chat(model="svc-chta")
    folder = write(tmp_path / "collected", line)
    for asked in ("mine/1", line["request_id"]):
        story = run("requests", "show", asked, "--logs", folder, "--json").json
        assert (story["ledger"], story["summary"]["note"]) == (None, "Refused: 422 model_not_found.")


def test_the_page_of_the_trace_is_named(
    real: RealService, run: Run, chat: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = chat()
    searches(real.world, write(tmp_path / "logs", line))
    page = 'https://grafana.example.com/explore?left={"query":"{trace_id}"}'
    url = page.replace("{trace_id}", TRACE)
    asked = ("requests", "show", line["request_id"])
    assert shown(run(*asked, "--traces", page).out)["trace page"] == url
    monkeypatch.setenv("SERVE_APP_TRACES", page)
    assert run(*asked, "--json").json["trace_url"] == url


@pytest.mark.parametrize("options", [["--traces", "https://traces.example.com"], ["--logs", "nowhere"], []])
def test_a_wrong_command_line_is_refused(run: Run, options: list[str]) -> None:
    asked = ["chatcmpl-1"] if options else []
    assert run("requests", "show", *asked, *options).code == 2


def test_help_ends_with_examples(run: Run) -> None:
    out = run("requests", "show", "--help").out
    assert "serve-app requests show" in out.partition("Examples:")[2]
