"""The fields of the chat format from the body to the replica, and its events as the reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.contracts.generation import (
    Delta,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    Rejected,
    Rejection,
    Started,
    TokenLogprob,
)
from serve_app.gateway.backends import Catalogue
from serve_app.settings import GatewaySettings
from tests.gateway.connections import Call, post
from tests.gateway.world import FULL_SETTINGS, World, price, says, settled

# logit_bias


async def test_a_logit_bias_reaches_the_replica(world: World) -> None:
    assert (await Call(world, logit_bias={"5": -100, "7": 1.5}).done()).status == 200
    assert world.backends.calls[0].sampling.logit_bias == ((5, -100.0), (7, 1.5))


async def test_a_refusal_of_the_replica_is_422_names_the_field_and_costs_nothing(world: World) -> None:
    world.backends.play([Rejected(Rejection.INVALID, message="no such tokens", param="logit_bias")])
    for stream in (False, True):
        call = await Call(world, logit_bias={"999999": 1}, stream=stream).done()
        assert call.status == 422
        error = call.json["error"]
        assert (error["param"], error["code"]) == ("logit_bias", "invalid_parameter")
    await settled(world, requests=0, spent=0)


# Limits, stop tokens, template and allowed functions


async def test_more_output_than_the_model_has_counts_as_the_models_limit(world: World) -> None:
    assert (await Call(world, max_tokens=32_000, n=2).done()).status == 200
    assert (await Call(world, max_tokens=None, n=2).done()).status == 200
    above, without = world.backends.calls
    assert above.sampling.max_tokens == without.sampling.max_tokens == world.settings.models["svc-chat"].max_output
    assert above.credit == without.credit


async def test_further_fields_reach_the_replica(world: World) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    fields = {
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": tools,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}},
        "messages": [{"role": "assistant", "content": "So"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert (await Call(world, **fields).done()).status == 200
    [call] = world.backends.calls
    assert (call.sampling.stop_token_ids, call.sampling.include_stop_str_in_output) == ((5,), True)
    assert (call.reasoning_effort, call.template_variables) == ("low", {"enable_thinking": False})
    assert (call.functions, call.function, call.tool_choice) == (("g",), None, "required")
    assert call.callable_tools == (tools[1],)
    assert call.continue_final


async def test_a_variable_that_the_template_lacks_is_422_and_costs_nothing(world: World) -> None:
    world.backends.play([Rejected(Rejection.INVALID, message="no variable x", param="chat_template_kwargs")])
    call = await Call(world, chat_template_kwargs={"x": 1}).done()
    assert (call.status, call.json["error"]["param"]) == (422, "chat_template_kwargs")
    await settled(world, requests=0, spent=0)


# Aliases


def with_aliases(*aliases: str) -> Catalogue:
    models = {**FULL_SETTINGS["models"]}
    models["svc-chat"] = {**models["svc-chat"], "aliases": list(aliases)}
    return Catalogue(GatewaySettings.model_validate({**FULL_SETTINGS, "models": models}))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {"prompt": "Hi", "max_tokens": 10**6}),
        ("/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10**6}),
        ("/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/responses", {"input": "Hi", "max_output_tokens": 10**6}),
        ("/responses/input_tokens", {"input": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
async def test_an_alias_stands_for_its_identifier_in_every_format(
    world: World, path: str, body: dict[str, Any]
) -> None:
    world.services.catalogue = with_aliases("gpt-4o")
    call = await Call(world, path=path, body={"model": "gpt-4o", **body}).done()
    assert (call.status, call.json.get("model", "svc-chat")) == (200, "svc-chat")
    assert {call.bill.model for call in world.backends.calls} <= {"svc-chat"}


async def test_an_alias_is_answered_billed_and_logged_as_its_identifier(world: World) -> None:
    world.services.catalogue = with_aliases("gpt-4o", "claude-*")
    for alias in ("gpt-4o", "claude-sonnet"):
        call = await Call(world, model=alias).done()
        assert (call.status, call.json["model"]) == (200, "svc-chat")
    assert {call.bill.model for call in world.backends.calls} == {"svc-chat"}
    assert (await Call(world, model="gpt-4o", stream=True).done()).events[0]["model"] == "svc-chat"


# logprobs

HEL = TokenLogprob(1, "Hel", b"Hel", -0.5, (TokenLogprob(1, "Hel", b"Hel", -0.5), TokenLogprob(9, "\n", b"\n", -1.5)))
LO = TokenLogprob(2, "lo", b"lo", -0.25, (TokenLogprob(2, "lo", b"lo", -0.25), TokenLogprob(9, "\n", b"\n", -2.0)))
TELLS = [Started(7, 0), Delta("Hel", 1, (HEL,)), Delta("lo", 2, (LO,)), Finished(FinishReason.STOP, 7, 0, 2)]


def entry(token: TokenLogprob) -> dict[str, Any]:
    told: dict[str, Any] = {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}
    return told


@pytest.mark.parametrize(
    ("fields", "asked"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
async def test_the_replica_receives_the_number_of_log_probabilities(
    world: World, fields: dict[str, Any], asked: int | None
) -> None:
    call = await Call(world, **fields).done()
    assert world.backends.calls[0].sampling.logprobs == asked
    expected = {"content": [], "refusal": None} if asked is not None else None
    assert call.json["choices"][0]["logprobs"] == expected


async def test_a_complete_reply_has_the_tokens_of_all_its_deltas(world: World) -> None:
    world.backends.play(TELLS)
    call = await Call(world, logprobs=True, top_logprobs=2).done()
    [choice] = call.json["choices"]
    assert choice["logprobs"] == {
        "content": [{**entry(token), "top_logprobs": [entry(other) for other in token.top]} for token in (HEL, LO)],
        "refusal": None,
    }
    await settled(world, requests=1, spent=price(7, 2))


def framed(body: bytes, usage: bytes, *choices: bytes) -> list[bytes]:
    """The frames of a stream with these choices, one a chunk, and with this usage at its end."""
    first = json.loads(body[len("data: ") : body.index(b"\n")])
    head = b'data: {"id":"%s","object":"chat.completion.chunk","created":%d,"model":"svc-chat",' % (
        first["id"].encode(),
        first["created"],
    )
    head += b'"system_fingerprint":"fp_fake","choices":['
    chunks = [head + choice + b'],"usage":null}' for choice in choices]
    return [*chunks, head + b'],"usage":' + usage + b"}", b"data: [DONE]", b""]


async def test_the_exact_bytes_of_a_stream_with_log_probabilities(world: World) -> None:
    world.backends.play(TELLS)
    body = await post(world, stream=True, logprobs=True, top_logprobs=2, stream_options={"include_usage": True})
    newline = b'{"token":"\\n","logprob":%s,"bytes":[10]}'
    hel, lo = (
        b'{"token":"Hel","logprob":-0.5,"bytes":[72,101,108]',
        b'{"token":"lo","logprob":-0.25,"bytes":[108,111]',
    )
    told = b'"logprobs":{"content":[%s],"refusal":null},"finish_reason":null}'
    assert body.split(b"\n\n") == framed(
        body,
        b'{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":0},'
        b'"prompt_cache_hit_tokens":0,"prompt_cache_miss_tokens":7,'
        b'"completion_tokens_details":{"reasoning_tokens":0}}',
        b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
        b'{"index":0,"delta":{"content":"Hel"},'
        + told % (hel + b',"top_logprobs":[' + hel + b"}," + newline % b"-1.5" + b"]}"),
        b'{"index":0,"delta":{"content":"lo"},'
        + told % (lo + b',"top_logprobs":[' + lo + b"}," + newline % b"-2.0" + b"]}"),
        b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}',
    )


# response_format

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def schema_format(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(GrammarKind.JSON_OBJECT)),
        (schema_format(), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), strict=False)),
        ({"type": "json_object", "schema": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), strict=True)),
        (schema_format(strict=None), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), strict=False)),
        (schema_format(strict=False), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), strict=False)),
        (schema_format(strict=True), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), strict=True)),
    ],
)
async def test_the_replica_receives_the_grammar_of_the_reply(world: World, given: Any, grammar: Grammar | None) -> None:
    assert (await Call(world, response_format=given).done()).status == 200
    assert world.backends.calls[0].sampling.grammar == grammar


async def test_a_replica_receives_the_grammar_of_a_choice(world: World) -> None:
    assert (await Call(world, guided_choice=["yes", "n.o"]).done()).status == 200
    assert world.backends.calls[0].sampling.grammar == Grammar(GrammarKind.REGEX, r"yes|n\.o")


async def test_a_schema_that_cannot_be_enforced_is_422_names_the_feature_and_costs_nothing(world: World) -> None:
    message = "response_format: unsupported keywords in the JSON schema: not."
    world.backends.play([Rejected(Rejection.INVALID, message=message, param="response_format")])
    call = await Call(world, response_format=schema_format(strict=True), stream=True).done()
    error = call.json["error"]
    assert (call.status, error["param"], error["message"]) == (422, "response_format", message)
    await settled(world, requests=0, spent=0)


async def test_json_that_is_cut_by_length_says_so(world: World) -> None:
    world.backends.play(says('{"a":', reason=FinishReason.LENGTH))
    call = await Call(world, response_format={"type": "json_object"}).done()
    assert call.json["choices"][0]["finish_reason"] == "length"
