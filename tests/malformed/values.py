"""Right types with values that are out of range, in conflict or too many: each is 422 and names the field."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.malformed.row import USER, Row, sent, valid, with_text

HUGE = 10**400

# field, below, above, what else must be there
_RANGES: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("temperature", -0.01, 2.01, {}),
    ("top_p", 0, 1.01, {}),
    ("max_tokens", 0, None, {}),
    ("max_completion_tokens", 0, None, {"max_tokens": None}),
    ("n", 0, 9, {}),
    ("seed", -(2**63) - 1, 2**63, {}),
    ("frequency_penalty", -2.01, 2.01, {}),
    ("presence_penalty", -2.01, 2.01, {}),
    ("top_logprobs", -1, 21, {"logprobs": True}),
    ("top_k", -2, 1_000_001, {}),
    ("min_p", -0.01, 1.01, {}),
    ("repetition_penalty", 0.0099, 10.01, {}),
    ("min_tokens", -1, 4097, {}),
]
_NUMBERS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "min_p", "repetition_penalty")


def _tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def _said(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _format(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, **more}}


_CALL = {"id": "c", "type": "retrieval", "function": {"name": "f", "arguments": "{}"}}
_CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}


def _allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_tool(name) for name in names]}}


_VALUES: list[tuple[str, dict[str, Any], str, str]] = [
    ("no message", {"messages": []}, "messages", "at least one"),
    ("an empty role", {"messages": [_said("")]}, "messages[0].role", "must be one of"),
    ("a role in capitals", {"messages": [_said("User")]}, "messages[0].role", '"User"'),
    ("an unknown role", {"messages": [USER, _said("function")]}, "messages[1].role", '"function"'),
    ("an image", {"messages": [_said("user", [{"type": "image_url", "image_url": {"url": "x"}}])]},
     "messages[0].content[0].type", "only text"),
    ("audio after text", {"messages": [_said("user", [{"type": "text", "text": "a"}, {"type": "input_audio"}])]},
     "messages[0].content[1].type", "only text"),
    ("a call of another type", {"messages": [_said("assistant", None, tool_calls=[_CALL])]},
     "messages[0].tool_calls[0].type", "function"),
    ("a custom call", {"messages": [_said("assistant", None, tool_calls=[_CUSTOM])]},
     "messages[0].tool_calls[0].type", '"custom"'),
    ("calls with too many values in their arguments", {"messages": [USER, _said("assistant", None, tool_calls=[
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 60_000 + "[]]"}}] * 2)]},
     "messages", "more than 100000 values"),
    ("prefix on a user's message", {"messages": [_said("user", prefix=True)]}, "messages[0].prefix", "assistant"),
    ("prefix before the end", {"messages": [_said("assistant", prefix=True), USER]}, "messages[0].prefix", "last"),
    ("stream_options without a stream", {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ("two limits of the output", {"max_completion_tokens": 2}, "max_completion_tokens", "equal"),
    ("more at least than at most", {"min_tokens": 2}, "min_tokens", "max_tokens"),
    ("an empty stop", {"stop": ""}, "stop", "empty"),
    ("an empty stop among others", {"stop": ["a", ""]}, "stop", "empty"),
    ("17 stops", {"stop": list("abcdefghijklmnopq")}, "stop", "at most 16"),
    ("50,000 stops", {"stop": ["a"] * 50_000}, "stop", "at most 16"),
    ("a bias for a word", {"logit_bias": {"hello": 1}}, "logit_bias", "token ids"),
    ("a bias for nothing", {"logit_bias": {"": 1}}, "logit_bias", "token ids"),
    ("a bias for a negative id", {"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ("a bias for an id with a zero in front", {"logit_bias": {"007": 1}}, "logit_bias", "token ids"),
    ("a bias for an id in other digits", {"logit_bias": {"\u0665": 1}}, "logit_bias", "token ids"),
    ("a bias for an id of 400 digits", {"logit_bias": {str(HUGE): 1}}, "logit_bias", "token ids"),
    ("a bias above 100", {"logit_bias": {"5": 100.5}}, "logit_bias.5", "100"),
    ("a bias below -100", {"logit_bias": {"5": -101}}, "logit_bias.5", "100"),
    ("a huge bias", {"logit_bias": {"5": HUGE}}, "logit_bias.5", "100"),
    ("top_logprobs without logprobs", {"top_logprobs": 1}, "top_logprobs", "logprobs"),
    ("an unknown format", {"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ("an empty format", {"response_format": {"type": ""}}, "response_format.type", "json_object"),
    ("a schema with an empty name", {"response_format": _format(name="")}, "response_format.json_schema.name", "1 to"),
    ("a schema with a blank in its name", {"response_format": _format(name="a b")},
     "response_format.json_schema.name", '"a b"'),
    ("a schema with a long name", {"response_format": _format(name="a" * 65)},
     "response_format.json_schema.name", "64"),
    ("200 tools", {"tools": [_tool(f"f{n}") for n in range(200)]}, "tools", "at most 128"),
    ("5,000 tools", {"tools": [_tool()] * 5_000}, "tools", "at most 128"),
    ("a tool of another type", {"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
    ("a tool without a name", {"tools": [_tool("")]}, "tools[0].function.name", "1 to 64"),
    ("a tool with a dot in its name", {"tools": [_tool("a.b")]}, "tools[0].function.name", '"a.b"'),
    ("a tool with a line end in its name", {"tools": [_tool("f\n")]}, "tools[0].function.name", "1 to 64"),
    ("a tool with an accent in its name", {"tools": [_tool("caf\xe9")]}, "tools[0].function.name", "1 to 64"),
    ("a tool with a long name", {"tools": [_tool("a" * 10_000)]}, "tools[0].function.name", "64"),
    ("a tool twice", {"tools": [_tool(), _tool()]}, "tools[1].function.name", "twice"),
    ("an unknown choice", {"tools": [_tool()], "tool_choice": "any"}, "tool_choice", '"any"'),
    ("a list of no allowed tools", {"tools": [_tool()], "tool_choice": _allowed()},
     "tool_choice.allowed_tools.tools", "1 to 128"),
    ("another tool allowed", {"tools": [_tool()], "tool_choice": _allowed("f", "g")},
     "tool_choice.allowed_tools.tools[1].function.name", '"g"'),
    ("allowed tools in an unknown mode", {"tools": [_tool()], "tool_choice": _allowed("f", mode="none")},
     "tool_choice.allowed_tools.mode", '"none"'),
    ("an allowed tool of another type", {"tools": [_tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools":
     {"mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]}}},
     "tool_choice.allowed_tools.tools[0].type", '"mcp"'),
    ("65 stop tokens", {"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
    ("a negative stop token", {"stop_token_ids": [5, -1]}, "stop_token_ids[1]", "from 0"),
    ("a huge stop token", {"stop_token_ids": [HUGE]}, "stop_token_ids[0]", "from 0"),
    ("a user's message to continue", {"continue_final_message": True}, "continue_final_message", "assistant's"),
    ("a message to continue after a new turn",
     {"messages": [_said("assistant")], "continue_final_message": True, "add_generation_prompt": True},
     "add_generation_prompt", "false"),
    ("no turn to reply in", {"add_generation_prompt": False}, "add_generation_prompt", "Leave it out"),
    ("an unknown effort", {"reasoning_effort": "extreme"}, "reasoning_effort", "minimal, low"),
    ("17 variables of the template", {"chat_template_kwargs": dict.fromkeys("abcdefghijklmnopq", 1)},
     "chat_template_kwargs", "at most 16"),
    ("a large variable of the template", {"chat_template_kwargs": {"a": "x" * 8192}}, "chat_template_kwargs", "8192"),
    ("a custom choice", {"tools": [_tool()], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
     "tool_choice.type", '"custom"'),
    ("a choice as an object", {"tools": [_tool()], "tool_choice": {"type": "any"}}, "tool_choice.type", "as a string"),
    ("a custom tool", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "function"),
    ("an empty choice", {"tools": [_tool()], "tool_choice": ""}, "tool_choice", "required"),
    ("a tool required of none", {"tool_choice": "required"}, "tool_choice", "tools"),
    ("a tool required of an empty list", {"tools": [], "tool_choice": "required"}, "tool_choice", "tools"),
    ("another tool named", {"tools": [_tool()], "tool_choice": _tool("g")}, "tool_choice.function.name", '"g"'),
    ("a tool named of none", {"tool_choice": _tool("g")}, "tool_choice.function.name", '"g"'),
    ("a choice of another type", {"tools": [_tool()], "tool_choice": {"type": "x", "function": {"name": "f"}}},
     "tool_choice.type", "function"),
]  # fmt: skip


def _no_model(name: str, model: str) -> Row:
    return Row(name, sent(valid(model=model)), 422, "model", ("svc-chat", "svc-coder"), "model_not_found")


def rows() -> Iterator[Row]:
    """Numbers at both ends of their range and far beyond, then all other rules."""
    for field, below, above, more in _RANGES:
        for value in (below, -HUGE) if above is None else (below, above, -HUGE, HUGE):
            name = f"{field}: {value if abs(value) < HUGE else 'far ' + ('below' if value < 0 else 'above')}"
            yield Row(name, sent(valid(**{**more, field: value})), 422, field, ("must be",))
    for field in ("max_tokens", "max_completion_tokens"):
        for number in (4097, 32000, HUGE):  # counts as the model's limit
            yield Row(
                f"{field} above the limit: {len(str(number))} digits",
                sent(valid(**{"max_tokens": None, field: number})),
                200,
            )
    for field in _NUMBERS:
        for number in ("1e400", "-1e400"):
            yield Row(f"{field}: {number}", with_text(f'"{field}": {number}'), 422, field, ("must be",))
    yield Row("logit_bias: 1e400", with_text('"logit_bias": {"5": 1e400}'), 422, "logit_bias.5", ("100",))
    yield Row("top_p: 1e-400", with_text('"top_p": 1e-400'), 422, "top_p", ("above 0",))
    for name, more, param, says in _VALUES:
        yield Row(name, sent(valid(**more)), 422, param, (says,))
    yield _no_model("an unknown model", "gpt-9")
    yield _no_model("an empty model", "")
    yield _no_model("a model of 1 MB", "x" * 10**6)
    yield _no_model("a model with NUL in it", "svc-chat\0")
    yield _no_model("a model with a blank after it", "svc-chat ")
    too_long = ("This model's maximum context length is 32768 tokens", "messages are more than 32768 tokens")
    for name, messages in (
        ("20,000 messages", [USER] * 20_000),
        ("90,000 numbers for messages", [3] * 90_000),
        ("no content 20,000 times", [_said("user", "")] * 20_000),
        ("33,000 parts of nothing", [_said("user", [{"type": "text", "text": ""}] * 33_000)]),
    ):
        crowd = partial(sent, valid(messages=messages))
        yield Row(name, crowd, 422, "messages", too_long, "context_length_exceeded")
    for name, text in (("words", "the quick brown fox " * 200_000), ("one letter", "a" * 4_000_000)):
        prompt = partial(sent, valid(messages=[_said("user", text)]))
        yield Row(f"4 MB of {name}", prompt, 422, "messages", too_long, "context_length_exceeded", by_model=True)
    outside = "outside this model's vocabulary"
    biased = sent(valid(logit_bias={"9999999": 1}))
    yield Row("a bias for an id beyond the vocabulary", biased, 422, "logit_bias", (outside,), by_model=True)
    for count in (1025, 90_000):
        biased = partial(sent, valid(logit_bias={str(n): 1 for n in range(count)}))
        yield Row(f"a bias for {count} ids", biased, 422, "logit_bias", ("at most 1024",))
    yield Row("a bias for 1024 ids", sent(valid(logit_bias={str(n): 1 for n in range(1024)})), 200)
    yield Row("stops of 250,000 characters", partial(sent, valid(stop=["x" * 250_000] * 15)), 200)
