"""The playground: its parameters, prices and code are those of the API."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.chat_request import ChatRequest
from serve_app.api.doors import DOORS
from serve_app.console import parameters
from serve_app.console.static_files import FOLDER
from serve_app.contracts.calls import Unavailable
from serve_app.contracts.money import Price
from serve_app.contracts.served import Offer

from .conftest import House


def test_every_field_of_a_chat_request_can_be_set_or_is_left_out_on_purpose() -> None:
    fields = {declared.alias or name for name, declared in ChatRequest.model_fields.items()}
    in_panel = {one.name for group in parameters.panel().values() for one in group}
    assert in_panel | parameters.ELSEWHERE | parameters.LEFT_OUT == fields
    assert not in_panel & (parameters.ELSEWHERE | parameters.LEFT_OUT)


def test_the_panel_has_the_ranges_and_descriptions_of_the_api(house: House) -> None:
    by_name = {one.name: one for group in parameters.panel().values() for one in group}
    temperature = by_name["temperature"]
    assert (temperature.kind, temperature.low, temperature.high, temperature.default) == ("number", 0, 2, "1")
    assert (by_name["top_k"].kind, by_name["ignore_eos"].kind, by_name["logit_bias"].kind) == (
        "integer",
        "boolean",
        "object",
    )
    page = house.member().get(f"/console/accounts/{house.account_id}/playground").text
    for name in by_name:
        assert f'data-parameter="{name}"' in page


def test_models_are_offered_with_their_prices_and_without_them_while_the_gateway_is_away(house: House) -> None:
    async def offers() -> list[Offer]:
        return [Offer("svc-chat", 8192, 4096, Price(270, 70, 1100), {"code": 0.0})]

    async def away() -> list[Offer]:
        raise Unavailable("the gateway restarts")

    path, browser = f"/console/accounts/{house.account_id}/playground", house.member()
    expected = {"input": "0.27", "cached": "0.07", "output": "1.10", "context": 8192, "temperatures": {"code": 0.0}}
    for found, shown in ((offers, {"svc-chat": expected}), (away, {}), (None, {})):
        house.console.offers = found
        data = re.search(r'id="offers">(.*?)</script>', browser.get(path).text)
        assert data is not None
        assert json.loads(data[1]) == shown


def test_code_is_offered_for_every_endpoint_that_is_served(house: House) -> None:
    page = house.member().get(f"/console/accounts/{house.account_id}/playground").text
    offered = re.search(r'<select class="form-select" id="format">(.*?)</select>', page)
    assert offered is not None
    assert set(re.findall('value="([^"]+)"', offered[1])) == {door.path for door in DOORS}


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"what": "it\'s"}'}}
CHAT: dict[str, Any] = {
    "model": "svc-chat",
    "messages": [
        {"role": "system", "content": "It's brief."},
        {"role": "user", "content": 'Say "hi"\n'},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        {"role": "assistant", "content": "Found."},
        {"role": "user", "content": "Thanks"},
    ],
    "temperature": 0.5,
    "max_tokens": 64,
}
SAMPLED = {"top_p": 0.9, "seed": 3, "stop": ["x"], "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.1}


def run_node(folder: Path, program: str) -> Any:
    """Runs a program beside the playground's scripts. Returns the JSON that it prints."""
    for script in FOLDER.glob("playground*.js"):
        (folder / script.name).write_text(script.read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "program.js").write_text(program)
    ran = subprocess.run(["node", "program.js"], cwd=folder, check=True, capture_output=True, timeout=60)
    return json.loads(ran.stdout)


@needs_node
@pytest.mark.parametrize(
    "more",
    [
        {},
        SAMPLED | {"logprobs": True, "top_logprobs": 3, "ignore_eos": True, "stop_token_ids": [7]},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "top_k": 5},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "object"}}}},
        {"guided_choice": ["yes", "no"], "reasoning_effort": "low", "chat_template_kwargs": {"a": None}},
    ],
    ids=["plain", "sampled", "tools", "schema", "choice"],
)
def test_the_code_of_each_endpoint_is_a_request_that_the_endpoint_accepts(tmp_path: Path, more: dict[str, Any]) -> None:
    """The request of curl, and the keywords of Python are the same one."""
    paths = [door.path for door in DOORS]
    program = f"""
        import {{ codeOf }} from "./playground-code.js";
        const code = (path) => [path, codeOf(path, {json.dumps(CHAT | more)}, "https://api.example.org")];
        console.log(JSON.stringify(Object.fromEntries({json.dumps(paths)}.map(code))));
    """
    codes = run_node(tmp_path, program)
    served = {"svc-chat": (32768, 4096)}
    for door in DOORS:
        words = shlex.split(codes[door.path]["curl"])
        assert words[1] == f"https://api.example.org/v1{door.path}"
        body = json.loads(words[words.index("-d") + 1])
        request = door.parse(json.dumps(body).encode(), served, 10**6, 10**5)
        assert request.model == "svc-chat"
        assert (request.temperature, request.max_tokens) == (0.5, 64)
        python = codes[door.path]["python"]
        call = next(one for one in ast.walk(ast.parse(python)) if isinstance(one, ast.Call) and len(one.keywords) > 2)
        keywords = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        assert keywords.pop("extra_body", {}) | keywords == body


@needs_node
def test_turns_without_a_reply_are_no_history_and_a_text_after_calls_answers_each(tmp_path: Path) -> None:
    calls = [CALL, CALL | {"id": "call_2"}]
    turns = [
        {"text": "Hi", "reply": "Hello", "counts": True},
        {"text": "lost", "reply": "", "counts": False, "failed": True},
        {"text": "Find it", "reply": "", "toolCalls": calls, "counts": True},
        {"text": "42"},
    ]
    program = f"""
        import {{ Talk }} from "./playground-talk.js";
        const talk = new Talk(null, "USD");
        talk.turns = {json.dumps(turns)};
        console.log(JSON.stringify([talk.messages(), talk.openCalls.map((call) => call.id)]));
    """
    messages, open_calls = run_node(tmp_path, program)
    assert messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Find it"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        {"role": "tool", "tool_call_id": "call_2", "content": "42"},
    ]
    assert open_calls == ["call_1", "call_2"]


@needs_node
def test_a_shared_conversation_is_in_the_part_of_the_link_that_is_not_sent(tmp_path: Path) -> None:
    state = {"fields": {"system": "Grüße 🙂"}, "talks": [[{"text": "a secret", "reply": "b" * 5000}], []]}
    program = f"""
        globalThis.location = {{ origin: "https://api.example.org", pathname: "/console/playground" }};
        const {{ linkTo, shared }} = await import("./playground-store.js");
        const link = await linkTo({json.dumps(state)});
        const broken = [await shared(""), await shared("#shared=%"), await shared("#shared=AAAA")];
        console.log(JSON.stringify([link, await shared(new URL(link).hash), broken]));
    """
    link, found, broken = run_node(tmp_path, program)
    assert link.partition("#")[0] == "https://api.example.org/console/playground"
    assert len(link) < 500
    assert found == state
    assert broken == [None, None, None]


@needs_node
def test_requests_sent_at_once_share_one_key_that_is_replaced_once(tmp_path: Path) -> None:
    """Each new key revokes the one before it, as the console does."""
    program = """
        import { Api } from "./playground-api.js";
        let made = 0, valid = null, reachable = true;
        const refused = [];
        globalThis.fetch = async (path, options) => {
          if (path === "/playground/key") {
            if (!reachable) return { ok: false, status: 403 };
            valid = `key ${++made}`;
            const key = valid;
            return { ok: true, json: async () => ({ key }) };
          }
          const ok = options.headers.authorization === `Bearer ${valid}`;
          if (!ok) refused.push(options.headers.authorization);
          return { ok, status: ok ? 200 : 401, json: async () => null };
        };
        const api = new Api("/playground", "csrf");
        const columns = () => Promise.all([api.call("/v1/a"), api.call("/v1/b")]);
        await columns();
        const first = [made, refused.length];
        valid = "that of another tab";
        await columns();
        const second = [made, refused.length];
        valid = "that of another tab", reachable = false;
        const problem = await api.call("/v1/a").catch((error) => error.message);
        reachable = true;
        await columns();
        console.log(JSON.stringify([first, second, problem, made]));
    """
    first, second, problem, made = run_node(tmp_path, program)
    assert first == [1, 0]
    assert second == [2, 2]
    assert problem == "This page is out of date. Reload it to continue."
    assert made == 3
